//! The first bytes of a lane, for fuzzing.

use comm_core::fuzzing::{Target, Verdict};

use super::{greeting_of, read_greeting};

pub(crate) fn targets() -> Vec<Target> {
    vec![Target::new("quic lane", quic_lane, || vec![greeting_of(0, 1), greeting_of(3, 70_000)])]
}

/// The first bytes of a lane.
pub fn quic_lane(bytes: &[u8]) -> Verdict {
    let Some(first) = bytes.first_chunk() else { return Verdict::Rejected };
    let Ok((lane, rank)) = read_greeting(*first) else { return Verdict::Rejected };
    assert_eq!(greeting_of(lane, rank), first, "a greeting has one encoding");
    Verdict::Accepted
}
