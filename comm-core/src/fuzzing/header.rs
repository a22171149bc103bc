//! The header of messages, for fuzzing.

use super::target::{Target, Verdict};
use crate::dtype::{DType, ReduceOp};
use crate::header::{HEADER_LEN, Header};
use crate::op::{Algorithm, OpKind};

pub(super) fn targets() -> Vec<Target> {
    vec![Target::new("message header", header, seeds)]
}

/// [`Header::decode`] on the first 64 bytes.
pub fn header(bytes: &[u8]) -> Verdict {
    let Some(bytes) = bytes.first_chunk::<HEADER_LEN>() else { return Verdict::Rejected };
    let Ok(header) = Header::decode(bytes, "a stranger") else { return Verdict::Rejected };
    assert_eq!(header.encode(), *bytes, "a header has one encoding");
    assert!(header.same_operation(&header));
    assert!(!header.to_string().is_empty());
    Verdict::Accepted
}

/// A header of a message with `payload_len` bytes, for seeds.
pub fn some_header(payload_len: u64) -> Header {
    Header {
        communicator: 7,
        sequence: 9,
        kind: OpKind::AllReduce,
        dtype: DType::Bf16,
        reduce: Some(ReduceOp::Mean),
        algorithm: Algorithm::Ring,
        root: 0,
        count: payload_len / 2,
        division: 0,
        step: 3,
        payload_len,
    }
}

fn seeds() -> Vec<Vec<u8>> {
    let header = some_header(20);
    let other = Header { reduce: None, kind: OpKind::Send, payload_len: u64::MAX, ..header };
    [header, other].iter().map(|header| header.encode().to_vec()).collect()
}
