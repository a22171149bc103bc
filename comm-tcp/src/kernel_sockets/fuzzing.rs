//! The kernel's answers about sockets, for fuzzing.

use comm_core::fuzzing::{Target, Verdict};

use super::{BY_FAMILY, ERROR, HEADER_LEN, parse};

const NUMBER: u32 = 7;

pub(crate) fn targets() -> Vec<Target> {
    vec![Target::new("kernel socket", kernel_socket, || {
        let answer = |kind: u16, rest: &[u8]| {
            let length = u32::try_from(HEADER_LEN + rest.len()).unwrap_or_default();
            let head = [&length.to_ne_bytes()[..], &kind.to_ne_bytes(), &[0; 2], &NUMBER.to_ne_bytes(), &[0; 4]];
            [&head.concat()[..], rest].concat()
        };
        vec![answer(BY_FAMILY, &[2, 3, 0, 0, 1, 2, 3, 4]), answer(ERROR, &(-libc::ENOENT).to_ne_bytes())]
    })]
}

/// An answer about one socket.
pub fn kernel_socket(bytes: &[u8]) -> Verdict {
    match parse(bytes, NUMBER) {
        Ok(_) => {
            assert!(bytes.len() > HEADER_LEN + 1, "an answer has a state or a code");
            Verdict::Accepted
        }
        Err(_) => Verdict::Rejected,
    }
}
