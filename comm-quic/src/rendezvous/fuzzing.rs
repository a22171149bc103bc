//! What ranks tell each other before they connect and when they open a lane, for fuzzing.

use comm_core::fuzzing::{Target, Verdict};
use comm_core::place::Place;

use super::{Introduction, greeting_of, read_greeting};
use crate::protection::Protection;

pub(crate) fn targets() -> Vec<Target> {
    vec![
        Target::new("quic introduction", quic_introduction, seeds),
        Target::new("quic lane", quic_lane, || vec![greeting_of(0, 1), greeting_of(3, 70_000)]),
    ]
}

/// [`Introduction::decode`].
pub fn quic_introduction(bytes: &[u8]) -> Verdict {
    let Some(introduction) = Introduction::decode(bytes, Protection::Full) else { return Verdict::Rejected };
    assert_eq!(introduction.encode(), bytes, "an introduction has one encoding");
    Verdict::Accepted
}

/// The first bytes of a lane.
pub fn quic_lane(bytes: &[u8]) -> Verdict {
    let Some(first) = bytes.first_chunk() else { return Verdict::Rejected };
    let Ok((lane, rank)) = read_greeting(*first) else { return Verdict::Rejected };
    assert_eq!(greeting_of(lane, rank), first, "a greeting has one encoding");
    Verdict::Accepted
}

fn seeds() -> Vec<Vec<u8>> {
    let introduction = |address: &str| Introduction {
        address: address.parse().expect("an address"),
        place: Place::decode("00112233445566778899aabbccddeeff fe80::1").expect("a place"),
        fingerprint: [7; 32],
        lanes: 2,
        receive_buffer: 1 << 23,
        protection: Protection::Full,
    };
    ["127.0.0.1:4433", "[fe80::1%2]:65535"].iter().map(|address| introduction(address).encode()).collect()
}
