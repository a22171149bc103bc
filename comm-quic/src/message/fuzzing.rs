//! The messages of a lane's stream, for fuzzing. Streams themselves are quinn's.

use bytes::Bytes;
use comm_core::Header;
use comm_core::fuzzing::{Kept, Target, Verdict, cuttings, some_header};

use super::Receiving;

pub(crate) fn targets() -> Vec<Target> {
    vec![Target::new("quic messages", quic_messages, seeds).memory(8 << 10, 64)]
}

/// A message, as much of it as came.
type Message = (Option<Header>, Vec<u8>);

/// A stream of headers and payloads, cut in several ways.
pub fn quic_messages(bytes: &[u8]) -> Verdict {
    let mut outcomes = cuttings(bytes).into_iter().map(|ends| received(bytes, &ends));
    let first = outcomes.next().expect("there is a cutting");
    assert!(outcomes.all(|other| other == first), "the cutting shows");
    let is_whole =
        |(header, payload): &Message| header.is_some_and(|header| header.payload_len == payload.len() as u64);
    first.0.first().is_some_and(is_whole).into()
}

fn received(bytes: &[u8], ends: &[usize]) -> (Vec<Message>, Option<String>) {
    let (mut messages, mut start) = (Vec::new(), 0);
    let mut sink = Kept::default();
    let mut receiving = Receiving::new(&mut sink);
    for end in ends {
        let mut piece = Bytes::copy_from_slice(&bytes[start..*end]);
        start = *end;
        while !piece.is_empty() {
            let before = piece.len();
            match receiving.take(&mut piece, "rank 1") {
                Ok(true) => {
                    messages.push((sink.header, std::mem::take(&mut sink.payload)));
                    sink = Kept::default();
                    receiving = Receiving::new(&mut sink);
                }
                Ok(false) => assert!(piece.is_empty(), "a message that is not complete takes all"),
                Err(error) => return (messages, Some(error.to_string())),
            }
            assert!(piece.len() < before, "no progress");
        }
    }
    messages.push((sink.header, sink.payload));
    (messages, None)
}

fn seeds() -> Vec<Vec<u8>> {
    let message = |payload: usize| {
        let payload: Vec<u8> = (0..payload).map(|index| index as u8).collect();
        [&some_header(payload.len() as u64).encode()[..], &payload].concat()
    };
    vec![message(0), message(5), [message(300), message(0), message(17)].concat()]
}
