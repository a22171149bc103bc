//! What ranks and program say to each other, on a great many changed inputs: see `comm-core/tests/decoders.rs`.

use std::io::Write;
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::time::Duration;

use comm_core::fuzzing::{Target, Verdict, check};
use comm_core::{Algorithm, DType, Deadline};
use serde::Serialize;
use serde::de::DeserializeOwned;

use super::case::{Case, Operation, ResultPlacement};
use super::protocol::{Command, Connection, Hello, Measure, MeasureError, OpenedTransport, Reply};

#[test]
fn first_lines() {
    check(&Target::new("hello", lines::<Hello>, hellos).inputs_per_case(8)).unwrap();
}

#[test]
fn commands() {
    check(&Target::new("command", lines::<Command>, command_lines).inputs_per_case(8)).unwrap();
}

#[test]
fn replies() {
    check(&Target::new("reply", lines::<Reply>, reply_lines).inputs_per_case(8)).unwrap();
}

/// Lines of one kind, sent in one piece and in pieces of seven bytes.
fn lines<M: DeserializeOwned + Serialize>(bytes: &[u8]) -> Verdict {
    let whole = received::<M>(bytes, bytes.len().max(1));
    // A line's error says where in it, so that the cutting would show if it changed anything.
    assert_eq!(received::<M>(bytes, 7), whole, "the cutting shows");
    let (messages, _) = whole;
    for message in &messages {
        let again: M = serde_json::from_str(message).expect("what was written can be read");
        assert_eq!(serde_json::to_string(&again).expect("and written"), *message);
    }
    (!messages.is_empty()).into()
}

/// The messages, as they would be written, and how the stream ended.
fn received<M: DeserializeOwned + Serialize>(bytes: &[u8], size: usize) -> (Vec<String>, String) {
    let (mut near, far) = UnixStream::pair().expect("a pair of sockets");
    let mut connection = Connection::new(far);
    let mut messages = Vec::new();
    std::thread::scope(|scope| {
        scope.spawn(move || {
            for piece in bytes.chunks(size) {
                // The other end may have closed the connection.
                if near.write_all(piece).is_err() {
                    return;
                }
            }
            let _ = near.shutdown(Shutdown::Write);
        });
        let deadline = Deadline::after(Duration::from_secs(10));
        let end = loop {
            match connection.receive::<M>(Some(deadline)) {
                Ok(message) => messages.push(serde_json::to_string(&message).expect("a message can be written")),
                Err(error) => break error.to_string(),
            }
        };
        drop(connection);
        (messages, end)
    })
}

fn line(message: &impl Serialize) -> Vec<u8> {
    let mut line = serde_json::to_vec(message).expect("a message can be written");
    line.push(b'\n');
    line
}

fn hellos() -> Vec<Vec<u8>> {
    let opened = |name: &str, error: Option<&str>| OpenedTransport {
        name: name.into(),
        facts: vec![("lanes".into(), "2".into())],
        error: error.map(str::to_string),
    };
    vec![line(&Hello { rank: 1, members: vec![opened("tcp", None), opened("quic", Some("no"))] })]
}

fn command_lines() -> Vec<Vec<u8>> {
    let measure = Measure {
        member: "tcp".into(),
        case: Case::new(Operation::Broadcast, DType::F32, None, 1, 1024, 2),
        place: ResultPlacement::InPlace,
        algorithm: Some(Algorithm::ScatterAllGather),
        warmup: 1,
        iters: 20,
        check: true,
        seed: 7,
    };
    let (measure, quit) = (line(&Command::Measure(measure)), line(&Command::Quit));
    vec![measure.clone(), [measure, quit].concat()]
}

fn reply_lines() -> Vec<Vec<u8>> {
    let good = Reply { ns: 12, samples: vec![1, 2], cpu_ns: 3, wrong: Some(0), error: None };
    let bad = Reply { error: Some(MeasureError::Failed("no".into())), ..Reply::default() };
    vec![line(&good), [line(&bad), line(&good)].concat()]
}
