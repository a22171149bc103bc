//! Lines of the kernel's table of sockets, for fuzzing.

use comm_core::fuzzing::{Target, Verdict};

use super::parse;

pub(crate) fn targets() -> Vec<Target> {
    vec![Target::new("socket table", socket_table, || {
        let rest = "00000000:00000000 00:00000000 00000000     0        0 77 1 0000000000000000 20 4 30 10 -1";
        let line = |addresses: &str| format!("   1: {addresses} {rest}").into_bytes();
        let six = "00000000000000000000000001000000:B2D4 00000000000000000000000001000000:1F90 03";
        vec![line("0100007F:A3B4 0100007F:1F90 01"), line(six)]
    })]
}

/// A line of the table.
pub fn socket_table(bytes: &[u8]) -> Verdict {
    let Some(row) = std::str::from_utf8(bytes).ok().and_then(parse) else { return Verdict::Rejected };
    assert!(bytes.len() > 20 && !row.local.ip().to_string().is_empty());
    Verdict::Accepted
}
