//! The control plane's decoders, for fuzzing: frames, messages, and what messages do to a rank's state.

use std::cell::RefCell;
use std::net::{TcpListener, TcpStream};
use std::sync::Arc;
use std::time::Duration;

pub use super::auth::fuzzing::*;
pub use super::gather::fuzzing::*;
pub use super::rendezvous::fuzzing::*;

use super::MAX_BLOB;
use super::send_half::SendHalf;
use super::stall::{LaneActivity, StallReport};
use super::state::State;
use super::wire::{Blob, Failure, MAX_LABEL, MAX_PAYLOAD, Message, Opener, Sealer, Wait};
use crate::error::{Error, Notice};
use crate::fuzzing::stream::cuttings;
use crate::fuzzing::target::{Target, Verdict};
use crate::job::{Address, Job, Secret};

pub(crate) fn targets() -> Vec<Target> {
    vec![
        // A vector's elements may need no more than a byte each on the wire, a few dozen in memory, and twice that while it grows.
        Target::new("control message", control_message, message_seeds).memory(4 << 10, 512),
        Target::new("control frames", control_frames, frame_seeds).memory(8 << 10, 32),
        Target::new("control state", control_state, state_seeds).memory(32 << 20, 1 << 10).inputs_per_case(8),
    ]
    .into_iter()
    .chain(super::auth::fuzzing::targets())
    .chain(super::gather::fuzzing::targets())
    .chain(super::rendezvous::fuzzing::targets())
    .collect()
}

const KEY: [u8; 32] = [7; 32];
const SECRET: &[u8] = b"0123456789abcdef";

/// [`Message::decode`].
pub fn control_message(bytes: &[u8]) -> Verdict {
    let Ok(message) = Message::decode(bytes) else { return Verdict::Rejected };
    // Numbers may be written in more than one way, ours is the shortest: so the bytes may differ, but never get longer.
    let written = message.encode().expect("what came in one message fits into one");
    assert!(written.len() <= bytes.len(), "{} B became {}", bytes.len(), written.len());
    assert_eq!(Message::decode(&written).as_ref(), Ok(&message));
    assert!(!format!("{message:?}").is_empty());
    match message {
        Message::Report(failure) | Message::Failed(failure) => {
            let error = failure.into_error();
            assert!(!error.to_string().is_empty());
            // As it would be told on.
            Message::Failed(Failure::new(&error, 0)).encode().expect("texts are clipped");
        }
        Message::Stall(report) => assert!(!report.to_string().is_empty()),
        _ => {}
    }
    Verdict::Accepted
}

/// [`Opener`] on a stream of frames, cut in several ways.
pub fn control_frames(bytes: &[u8]) -> Verdict {
    let mut outcomes = cuttings(bytes).into_iter().map(|ends| {
        let mut opener = Opener::new(&KEY);
        let (mut found, mut start) = (Vec::new(), 0);
        for end in ends {
            opener.push(&bytes[start..end]);
            start = end;
            loop {
                match opener.next() {
                    Ok(Some(payload)) => found.push(payload),
                    Ok(None) => break,
                    Err(why) => return (found, Some(why)),
                }
            }
        }
        (found, None)
    });
    let first = outcomes.next().expect("there is a cutting");
    assert!(outcomes.all(|other| other == first), "the cutting shows");
    // Frames that were accepted are those that their sender made of the same payloads.
    let mut sealer = Sealer::new(&KEY);
    let mut again = Vec::new();
    first.0.iter().for_each(|payload| sealer.seal(payload, &mut again));
    assert!(bytes.starts_with(&again), "a frame has one encoding");
    (!first.0.is_empty()).into()
}

/// A rank's state under messages and calls of its own in any order, which must leave it with what it can tell others.
///
/// The first byte chooses rank and number of ranks, then come steps: a code, a rank, and what the code needs.
pub fn control_state(bytes: &[u8]) -> Verdict {
    let mut input = Input(bytes);
    let Some(first) = input.byte() else { return Verdict::Rejected };
    let world_size = 2 + usize::from(first >> 4) % 5;
    let rank = usize::from(first & 15) % world_size;
    let secret = Secret::new(SECRET).expect("long enough");
    let job = Job::new(rank, world_size, Address::File("/nowhere".into()), secret).expect("a rank of the job");
    let mut state = State::new(&job, vec![("seed".into(), "1".into())]);
    connect(&mut state, rank);
    let mut accepted = false;
    while let (Some(step), Some(peer)) = (input.byte(), input.byte()) {
        let peer = usize::from(peer) % world_size;
        let message = match step % 16 {
            0..=5 => Message::decode(input.counted()),
            6 => Ok(sized_gather(&mut input)),
            7 => {
                state.begin_gather("label", input.counted(), peer == 1);
                continue;
            }
            8 => {
                state.take_gathered(u64::from(input.byte().unwrap_or(0)));
                continue;
            }
            9 => {
                state.begin_leave();
                continue;
            }
            10 => {
                state.fail(&Error::invalid("enough"));
                continue;
            }
            11 => {
                state.check_stall(crate::clock::running() + Duration::from_secs(60));
                state.due_stall();
                continue;
            }
            12 => {
                let detail = "gone".into();
                state.on_lost(peer, &Error::PeerLost { rank: peer, operation: String::new(), detail });
                continue;
            }
            13 => {
                state.start_if_complete();
                continue;
            }
            14 => {
                state.late(Wait::Gather(u64::from(input.byte().unwrap_or(0))));
                continue;
            }
            _ => Ok(Message::Stalled(LaneActivity { members: vec![u32::MAX; sized(&mut input)], ..doing() })),
        };
        // What does not fit into a frame cannot come.
        let message = match message {
            Ok(message) if message.encode().is_ok() => message,
            Ok(_) => continue,
            Err(_) => break,
        };
        let peer = if rank == 0 { peer.max(1) } else { 0 };
        match state.on_message(peer, message) {
            Ok(()) => accepted = true,
            Err(why) => {
                state.on_nonsense(peer, &why);
                state.remove_send_half(peer);
            }
        }
    }
    if let Some(error) = state.failure() {
        assert!(!error.to_string().is_empty());
    }
    accepted.into()
}

/// Gives every rank that `state` talks to a connection, on which nobody reads: what it tells is encoded.
fn connect(state: &mut State, own: usize) {
    thread_local! {
        /// One for all inputs: each would leave a port behind.
        static SINK: RefCell<Option<(TcpStream, TcpStream)>> = const { RefCell::new(None) };
    }
    let stream = SINK.with_borrow_mut(|sink| {
        let (near, _) = sink.get_or_insert_with(|| {
            let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
            let near = TcpStream::connect(listener.local_addr().expect("a port")).expect("a connection");
            (near, listener.accept().expect("a connection").0)
        });
        near.try_clone().expect("a descriptor")
    });
    let send_half = Arc::new(SendHalf::new(stream, Sealer::new(&KEY)).expect("a socket"));
    for (rank, slot) in state.send_halves.iter_mut().enumerate() {
        if rank != own && (own == 0 || rank == 0) {
            *slot = Some(Arc::clone(&send_half));
        }
    }
}

/// The parts of an input.
struct Input<'a>(&'a [u8]);

impl<'a> Input<'a> {
    fn byte(&mut self) -> Option<u8> {
        let (byte, rest) = self.0.split_first()?;
        self.0 = rest;
        Some(*byte)
    }

    /// Bytes with their number before them, as many of them as are there.
    fn counted(&mut self) -> &'a [u8] {
        let length = usize::from(self.byte().unwrap_or(0)).min(self.0.len());
        let (bytes, rest) = self.0.split_at(length);
        self.0 = rest;
        bytes
    }
}

/// A length near a limit.
fn sized(input: &mut Input<'_>) -> usize {
    const SIZES: [usize; 8] =
        [0, 1, 1000, MAX_LABEL + 1, MAX_BLOB, MAX_BLOB + 1, MAX_PAYLOAD - 6, MAX_PAYLOAD / 5 - 40];
    // Long ones are rare, for they take time.
    match input.byte().unwrap_or(0) {
        code @ 248.. => SIZES[usize::from(code - 248)],
        code => usize::from(code % 4),
    }
}

fn sized_gather(input: &mut Input<'_>) -> Message {
    let sequence = u64::from(input.byte().unwrap_or(0));
    Message::Gather { sequence, label: "l".repeat(sized(input)), blob: Blob(vec![1; sized(input)]) }
}

fn doing() -> LaneActivity {
    LaneActivity {
        lane: 0,
        operation: "all-reduce".into(),
        communicator: 1,
        sequence: 2,
        kind: 1,
        pair: Some((0, 1)),
        members: vec![0, 1],
        is_running: true,
        since: Duration::from_secs(31),
    }
}

fn messages() -> Vec<Message> {
    let lost = Notice::PeerLost { rank: 1, operation: "all-reduce".into(), detail: "closed".into() };
    let late = Notice::Timeout {
        rank: 2,
        operation: "gathering".into(),
        waited: Duration::from_millis(1500),
        waiting_for: vec![0, 3],
    };
    let mismatch = Notice::Mismatch { rank: 0, ours: "a".into(), peer: 1, theirs: "b".into() };
    let not_finite = Notice::NotFinite { rank: 1, operation: "reduce".into(), index: 5, value: "NaN".into(), count: 2 };
    let report = StallReport {
        reported_by: 1,
        stalled: doing(),
        late: vec![0],
        more_late: 1,
        culprits: vec![0],
        on_another_lane: Some((0, LaneActivity { lane: 1, ..doing() })),
        doing: vec![(0, Some(vec![doing()])), (2, None)],
    };
    vec![
        Message::Join { config: vec![("seed".into(), "1".into()), ("lanes".into(), "2".into())] },
        Message::Refused { why: "no".into() },
        Message::Start { session: [3; 32] },
        Message::Heartbeat,
        Message::Gather { sequence: 0, label: "label".into(), blob: Blob(vec![1, 2, 3]) },
        Message::GatherAt0 { sequence: 1, label: "label".into(), blob: Blob(vec![1, 2, 3]) },
        Message::Gathered { sequence: 0, parts: vec![(0, Blob(vec![1])), (1, Blob(Vec::new()))] },
        Message::WhoIsLate(Wait::Gather(0)),
        Message::Late { wait: Wait::Start, ranks: vec![1, 2] },
        Message::Stalled(doing()),
        Message::StallQuery { number: 1 },
        Message::Doing { number: 1, doing: vec![doing()] },
        Message::Stall(report),
        Message::Report(Failure::Notice(lost)),
        Message::Report(Failure::Notice(mismatch)),
        Message::Failed(Failure::Notice(late)),
        Message::Failed(Failure::Notice(not_finite)),
        Message::Failed(Failure::Rendezvous("no".into())),
        Message::Leave,
        Message::AllLeft,
    ]
}

fn message_seeds() -> Vec<Vec<u8>> {
    messages().iter().map(|message| message.encode().expect("a short message")).collect()
}

fn frame_seeds() -> Vec<Vec<u8>> {
    let payloads = message_seeds();
    payloads
        .chunks(3)
        .map(|payloads| {
            let (mut sealer, mut bytes) = (Sealer::new(&KEY), Vec::new());
            payloads.iter().for_each(|payload| sealer.seal(payload, &mut bytes));
            bytes
        })
        .collect()
}

/// Ranks 0 and others, with every message and every step.
fn state_seeds() -> Vec<Vec<u8>> {
    let message = |bytes: &[u8]| [&[0, 1, bytes.len() as u8][..], bytes].concat();
    let all = messages();
    let (up, down): (Vec<&Message>, Vec<&Message>) = all.iter().partition(|message| is_up(message));
    let mut seeds: Vec<Vec<u8>> = [(0x00, up), (0x01, down)]
        .into_iter()
        .flat_map(|(first, messages)| {
            messages
                .chunks(4)
                .map(|some| {
                    let mut bytes = vec![first, 7, 0, 2, 1, 1];
                    bytes.extend(some.iter().flat_map(|some| message(&some.encode().expect("a short message"))));
                    bytes.extend([8, 0, 0, 9, 0, 10, 0, 11, 0, 14, 0, 0]);
                    bytes
                })
                .collect::<Vec<_>>()
        })
        .collect();
    // Long parts of a gathering, and a report about a great many ranks.
    seeds.push(vec![0x00, 6, 1, 0, 1, 252, 7, 0, 2, 1, 1, 8, 0, 0]);
    seeds.push(vec![0x00, 15, 1, 255, 11, 0, 13, 0, 12, 1]);
    seeds
}

fn is_up(message: &Message) -> bool {
    matches!(
        message,
        Message::Join { .. }
            | Message::Heartbeat
            | Message::Gather { .. }
            | Message::GatherAt0 { .. }
            | Message::WhoIsLate(_)
            | Message::Stalled(_)
            | Message::Doing { .. }
            | Message::Report(_)
            | Message::Leave
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Steps of rank 0 of two.
    fn rank_0(steps: &[u8]) -> Verdict {
        control_state(&[&[0x00][..], steps].concat())
    }

    #[test]
    fn a_stalled_operation_of_a_million_ranks_does_not_break_rank_0() {
        // Its report, which names the late ones again, would not fit into a frame.
        assert_eq!(rank_0(&[15, 1, 255, 11, 0]), Verdict::Accepted);
    }

    #[test]
    fn a_part_that_fits_into_a_message_but_not_into_the_answer_is_refused() {
        // Rank 1's part, as long as a frame allows, and rank 0's own.
        assert_eq!(rank_0(&[6, 1, 0, 0, 254, 7, 0, 1, 5]), Verdict::Rejected);
        assert_eq!(rank_0(&[6, 1, 0, 0, 252, 7, 0, 1, 5]), Verdict::Accepted);
        assert_eq!(rank_0(&[6, 1, 0, 251, 0, 7, 0, 1, 5]), Verdict::Rejected);
    }
}
