//! The stream of messages of a raw TCP connection, for fuzzing.

use std::io::{self, ErrorKind, Read, Write};

use comm_core::Header;
use comm_core::fuzzing::{Kept, Target, Verdict, cuttings, some_header};

use super::{CLOSE, Connection, INBOX, PartState};
use crate::fault::Fault;

pub(in crate::raw) fn targets() -> Vec<Target> {
    // Each of several cuttings is a connection with an inbox of its own.
    vec![Target::new("raw tcp messages", raw_messages, seeds).inputs_per_case(16).memory(4 * INBOX, 64)]
}

/// What came of a stream: the messages, as much of the last as is there, and how it ended.
type Outcome = (Vec<(Option<Header>, Vec<u8>)>, String);

/// A stream of headers and payloads, cut in several ways: received, and read to its end by a rank that wants nothing of it.
pub fn raw_messages(bytes: &[u8]) -> Verdict {
    let cuttings = cuttings(bytes);
    let mut outcomes = cuttings.iter().zip([0, 7, 64, 4 << 10]).map(|(ends, lends)| received(bytes, ends, lends));
    let first = outcomes.next().expect("there is a cutting");
    assert!(outcomes.all(|other| other == first), "the cutting shows");
    let mut ends = cuttings.iter().map(|ends| drained(bytes, ends));
    let drained = ends.next().expect("there is a cutting");
    assert!(ends.all(|other| other == drained), "the cutting shows");
    let (messages, _) = first;
    let is_whole = |(header, payload): &(Option<Header>, Vec<u8>)| {
        header.is_some_and(|header| header.payload_len == payload.len() as u64)
    };
    messages.first().is_some_and(is_whole).into()
}

fn received(bytes: &[u8], ends: &[usize], lends: usize) -> Outcome {
    let mut connection = Connection::new(Pieces { bytes, ends, at: 0, ready: true });
    let (mut messages, mut scratch) = (Vec::new(), [0; 96]);
    let mut calls = 0;
    loop {
        let mut sink = Kept::lending(lends);
        let state = loop {
            calls += 1;
            assert!(calls <= 2 * bytes.len() + 4 * ends.len() + 16, "no progress");
            match connection.receive(1, &mut sink, &mut scratch) {
                Ok(PartState::Ready | PartState::Blocked) => {}
                state => break state,
            }
        };
        if let Some(header) = sink.header {
            messages.push((Some(header), sink.payload));
        }
        if let Err(fault) = state {
            return (messages, describe(fault));
        }
    }
}

/// How reading to the end ended.
fn drained(bytes: &[u8], ends: &[usize]) -> Result<(), String> {
    let mut connection = Connection::new(Pieces { bytes, ends, at: 0, ready: true });
    let mut scratch = [0; 96];
    for _ in 0..2 * bytes.len() + 4 * ends.len() + 16 {
        match connection.drain(1, &mut scratch) {
            Ok(PartState::Done) => return Ok(()),
            Ok(_) => {}
            Err(fault) => return Err(describe(fault)),
        }
    }
    panic!("no progress");
}

fn describe(fault: Fault) -> String {
    match fault {
        Fault::Lost(detail) => detail,
        Fault::Other(error) => error.to_string(),
    }
}

/// A stream of which a piece comes at a time, and nothing between two.
struct Pieces<'a> {
    bytes: &'a [u8],
    ends: &'a [usize],
    at: usize,
    /// Whether the next piece is there.
    ready: bool,
}

impl Read for Pieces<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        while let Some((end, rest)) = self.ends.split_first() {
            if self.at < *end {
                break;
            }
            self.ends = rest;
            self.ready = false;
        }
        if !std::mem::replace(&mut self.ready, true) {
            return Err(ErrorKind::WouldBlock.into());
        }
        let end = self.ends.first().copied().unwrap_or(self.at);
        let count = buffer.len().min(end - self.at);
        buffer[..count].copy_from_slice(&self.bytes[self.at..self.at + count]);
        self.at += count;
        Ok(count)
    }
}

impl Write for Pieces<'_> {
    fn write(&mut self, _: &[u8]) -> io::Result<usize> {
        Err(ErrorKind::Unsupported.into())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

fn seeds() -> Vec<Vec<u8>> {
    let message = |payload: usize| {
        let payload: Vec<u8> = (0..payload).map(|index| index as u8).collect();
        [&some_header(payload.len() as u64).encode()[..], &payload].concat()
    };
    vec![message(0), message(5), [message(300), message(0), message(17)].concat(), [&message(9)[..], &CLOSE].concat()]
}
