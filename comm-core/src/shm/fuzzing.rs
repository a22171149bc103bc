//! Rings in shared memory whose other end does what it likes, for fuzzing.

use std::sync::Arc;

pub use super::connect::fuzzing::*;

use super::exchange::{ShmLane, TransportState};
use super::layout::Layout;
use super::single_copy::{PeerMemory, SingleCopy, Token};
use super::sys::Segment;
use crate::control::RankResult;
use crate::deadline::Deadline;
use crate::fuzzing::header::some_header;
use crate::fuzzing::stream::Kept;
use crate::fuzzing::target::{Target, Verdict};
use crate::transport::{Incoming, Outgoing};
use crate::waiting::Waiting;

pub(crate) fn targets() -> Vec<Target> {
    let rings = Target::new("shm rings", shm_rings, seeds).inputs_per_case(8).memory(64 << 10, 1 << 10);
    let loans = Target::new("shm loans", shm_loans, lent_seeds).inputs_per_case(8).memory(2 << 20, 1 << 10);
    super::connect::fuzzing::targets().into_iter().chain([rings, loans]).collect()
}

const RING: usize = 4096;

/// Rank 0 of two exchanges messages on a lane, and rank 1 writes what it likes into the memory of both.
///
/// An input is a list of steps: a code, and what the code needs.
pub fn shm_rings(bytes: &[u8]) -> Verdict {
    exchanges(bytes, Err("not here".into()))
}

/// The same where messages that do not fit into the ring are lent; the memory that rank 1 lends is this process's.
pub fn shm_loans(bytes: &[u8]) -> Verdict {
    let own = Token::generate().expect("randomness");
    let peer = PeerMemory::probe(std::process::id(), &own.info());
    match peer {
        Ok(peer) => exchanges(bytes, Ok(SingleCopy { peers: vec![None, Some(peer)], _own: own })),
        Err(_) => Verdict::Rejected,
    }
}

fn exchanges(bytes: &[u8], single_copy: RankResult<SingleCopy>) -> Verdict {
    let layout = Layout::new(2, 1, RING).expect("a layout");
    let segment = || Arc::new(Segment::create(layout).expect("memory").0);
    let shared = TransportState {
        rank: 0,
        waiting: Waiting::Park,
        segments: vec![segment(), segment()],
        parks: vec![true, true],
        single_copy,
    };
    let mut lane = ShmLane::new(0, &shared);
    let mut input = Input(bytes);
    let mut accepted = false;
    while let Some(step) = input.byte() {
        // Of a peer's writes those into this rank's memory first.
        match step % 8 {
            0 => shared.segments[0].poke(layout.head(0, 0), u64::from(input.byte().unwrap_or(0)) * 64),
            1 => shared.segments[0].poke(layout.head(0, 0), input.number()),
            2 => shared.segments[0].poke(layout.state(0), input.number()),
            3 => {
                // Words of the ring's bytes, as many as are said and there.
                let start = usize::from(input.byte().unwrap_or(0)) % (RING / 64) * 64;
                for word in 0..usize::from(input.byte().unwrap_or(0)) {
                    let place = layout.data(0, 0) + (start + word * 8) % RING;
                    shared.segments[0].poke(place, input.number());
                }
            }
            4 => shared.segments[1].poke(layout.tail(0, 0), u64::from(input.byte().unwrap_or(0)) * 64),
            5 => shared.segments[1].poke(layout.tail(0, 0), input.number()),
            6 => {
                let payload = vec![step; usize::from(input.byte().unwrap_or(0)) * 64];
                let outgoing = Outgoing { peer: 1, header: some_header(payload.len() as u64), payload: &payload };
                if lane.exchange(&shared, &[outgoing], &mut [], now(), || Ok(())).is_err() {
                    break;
                }
            }
            _ => {
                let mut sink = Kept::lending(usize::from(step / 8) * 8);
                let incoming = Incoming { peer: 1, sink: &mut sink };
                if lane.exchange(&shared, &[], &mut [incoming], now(), || Ok(())).is_err() {
                    break;
                }
                let header = sink.header.expect("a message has a header");
                assert_eq!(sink.payload.len() as u64, header.payload_len);
                accepted = true;
            }
        }
    }
    accepted.into()
}

/// Nothing else comes while an exchange runs, so none waits.
fn now() -> Deadline {
    Deadline::after(std::time::Duration::ZERO)
}

struct Input<'a>(&'a [u8]);

impl Input<'_> {
    fn byte(&mut self) -> Option<u8> {
        let (byte, rest) = self.0.split_first()?;
        self.0 = rest;
        Some(*byte)
    }

    fn number(&mut self) -> u64 {
        match self.0.split_first_chunk() {
            Some((number, rest)) => {
                self.0 = rest;
                u64::from_le_bytes(*number)
            }
            None => 0,
        }
    }
}

/// Messages that a peer with good manners sends: an empty one, and some whose payload takes up more lines of the ring.
fn seeds() -> Vec<Vec<u8>> {
    let message = |line: u8, payload: usize| {
        let words = (64 + payload).div_ceil(8);
        let mut bytes = vec![3, line, words as u8];
        bytes.extend_from_slice(&some_header(payload as u64).encode());
        bytes.extend((0..words * 8 - 64).map(|index| index as u8));
        bytes
    };
    let one = |payload: usize| [&message(0, payload)[..], &[0, (64 + payload).div_ceil(64) as u8, 7]].concat();
    let two = [&message(0, 8)[..], &message(2, 100), &[0, 5, 7, 7 + 8 * 8]].concat();
    let both = [&[6, 3, 4, 4][..], &one(64), &[6, 2]].concat();
    vec![one(0), one(1), one(300), two, both]
}

/// Messages that a peer with good manners lends: two after each other.
fn lent_seeds() -> Vec<Vec<u8>> {
    static PAYLOAD: [u8; 2 * RING] = [9; 2 * RING];
    let message = |line: u8| {
        let mut bytes = vec![3, line, 10];
        bytes.extend_from_slice(&some_header(PAYLOAD.len() as u64).encode());
        bytes.extend_from_slice(&(PAYLOAD.as_ptr().addr() as u64).to_le_bytes());
        bytes.extend_from_slice(&1u64.to_le_bytes());
        bytes
    };
    let one = [&message(0)[..], &[0, 2, 7]].concat();
    let two = [&one[..], &message(2), &[0, 4, 7 + 8 * 8]].concat();
    vec![one, two]
}
