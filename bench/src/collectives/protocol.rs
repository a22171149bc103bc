//! What the program and the ranks that it has started say to each other: lines of JSON over a Unix socket.
//!
//! Ranks of our own and of the peers (`bench/peers/rank.py`) speak the same. Whoever is not being measured sleeps in a read.

use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use comm_core::{Algorithm, Deadline};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::case::{Case, ResultPlacement};

/// A rank's first line.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Hello {
    pub(crate) rank: usize,
    /// What it can be measured on.
    pub(crate) members: Vec<OpenedTransport>,
}

/// One transport, or one library, as a rank has opened it.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct OpenedTransport {
    pub(crate) name: String,
    /// Its settings, as (name, value).
    pub(crate) facts: Vec<(String, String)>,
    /// Why it cannot be measured.
    pub(crate) error: Option<String>,
}

/// What a rank is told to do.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(tag = "command", rename_all = "kebab-case")]
pub(crate) enum Command {
    Measure(Measure),
    Quit,
}

/// Run a case so many times.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Measure {
    /// On which member.
    pub(crate) member: String,
    #[serde(flatten)]
    pub(crate) case: Case,
    pub(crate) place: ResultPlacement,
    /// Instead of the one that the library would choose.
    pub(crate) algorithm: Option<Algorithm>,
    /// Iterations before the clock starts.
    pub(crate) warmup: u64,
    /// Iterations under the clock.
    pub(crate) iters: u64,
    /// Whether to count wrong elements afterwards, on fresh data.
    pub(crate) check: bool,
    /// Of the data.
    pub(crate) seed: u64,
}

/// What a rank has measured.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct Reply {
    /// From the barrier before the first timed iteration to the end of the last.
    pub(crate) ns: u64,
    /// Of single iterations, where a rank takes their time: at most [`MAX_SAMPLES`], evenly spread.
    #[serde(default)]
    pub(crate) samples: Vec<u64>,
    /// Time that cores have spent on this rank's process meanwhile, on all its threads.
    pub(crate) cpu_ns: u64,
    /// Elements that came out wrong on this rank, if that was asked and the rank can tell.
    #[serde(default)]
    pub(crate) wrong: Option<u64>,
    /// Why there is nothing of the above.
    #[serde(default)]
    pub(crate) error: Option<MeasureError>,
}

/// Why there are no figures.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "kind", content = "why", rename_all = "kebab-case")]
pub(crate) enum MeasureError {
    /// This member does not have it; everything else goes on.
    Unsupported(String),
    /// It should have worked; the member is not used any more.
    Failed(String),
}

/// Most single iterations that a reply tells of.
pub(crate) const MAX_SAMPLES: u64 = 2048;

/// Longest line that is read.
const MAX_LINE: usize = 1 << 20;

/// One end of the socket.
pub(crate) struct Connection {
    stream: UnixStream,
    /// What was read beyond the last line.
    rest: Vec<u8>,
}

impl Connection {
    pub(crate) fn new(stream: UnixStream) -> Self {
        Connection { stream, rest: Vec::new() }
    }

    /// Sends one line.
    pub(crate) fn send(&mut self, message: &impl Serialize, deadline: Deadline) -> io::Result<()> {
        let mut line = serde_json::to_vec(message)?;
        line.push(b'\n');
        self.stream.set_write_timeout(Some(left(deadline)?))?;
        self.stream.write_all(&line)
    }

    /// Receives one line; waits for ever without a deadline, or until the other end is closed.
    pub(crate) fn receive<M: DeserializeOwned>(&mut self, deadline: Option<Deadline>) -> io::Result<M> {
        let mut searched = 0;
        loop {
            if let Some(end) = self.rest[searched..].iter().position(|byte| *byte == b'\n') {
                let line: Vec<u8> = self.rest.drain(..=searched + end).collect();
                return serde_json::from_slice(&line).map_err(|error| {
                    io::Error::new(io::ErrorKind::InvalidData, format!("a line that is not understood: {error}"))
                });
            }
            searched = self.rest.len();
            if searched > MAX_LINE {
                return Err(io::Error::new(io::ErrorKind::InvalidData, format!("a line of more than {MAX_LINE} B")));
            }
            self.stream.set_read_timeout(deadline.map(left).transpose()?)?;
            let mut bytes = [0; 16 << 10];
            match self.stream.read(&mut bytes) {
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(count) => self.rest.extend_from_slice(&bytes[..count]),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                // How a socket's own timeout shows.
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Err(io::ErrorKind::TimedOut.into()),
                Err(error) => return Err(error),
            }
        }
    }
}

/// What is left until the deadline, never zero, which would mean for ever.
fn left(deadline: Deadline) -> io::Result<Duration> {
    let left = deadline.remaining();
    if left.is_zero() { Err(io::ErrorKind::TimedOut.into()) } else { Ok(left.max(Duration::from_millis(1))) }
}

#[cfg(test)]
mod tests {
    use comm_core::DType;

    use super::super::case::Operation;
    use super::*;

    fn pair() -> (Connection, Connection) {
        let (a, b) = UnixStream::pair().unwrap();
        (Connection::new(a), Connection::new(b))
    }

    fn soon() -> Deadline {
        Deadline::after(Duration::from_secs(5))
    }

    #[test]
    fn commands_arrive_as_they_were_sent() {
        let (mut a, mut b) = pair();
        let measure = Measure {
            member: "tcp".into(),
            case: Case::new(Operation::Broadcast, DType::F32, None, 1, 1024, 2),
            place: ResultPlacement::InPlace,
            algorithm: Some(Algorithm::ScatterAllGather),
            warmup: 1,
            iters: 20,
            check: true,
            seed: u64::MAX >> 12,
        };
        a.send(&Command::Measure(measure.clone()), soon()).unwrap();
        a.send(&Command::Quit, soon()).unwrap();
        let Command::Measure(got) = b.receive(Some(soon())).unwrap() else { panic!("not the first") };
        assert_eq!((got.case, got.algorithm, got.iters), (measure.case, measure.algorithm, 20));
        assert_eq!(got.seed, measure.seed);
        assert!(matches!(b.receive(Some(soon())).unwrap(), Command::Quit));
    }

    #[test]
    fn silence_nonsense_and_endless_lines_are_errors() {
        let (mut a, mut b) = pair();
        let deadline = Deadline::after(Duration::from_millis(20));
        assert_eq!(b.receive::<Hello>(Some(deadline)).unwrap_err().kind(), io::ErrorKind::TimedOut);
        a.stream.write_all(b"{\"command\":\"dance\"}\n").unwrap();
        let error = b.receive::<Command>(Some(soon())).unwrap_err();
        assert!(error.to_string().contains("dance"), "{error}");
        let writer = std::thread::spawn(move || {
            let _ = a.stream.write_all(&vec![b'x'; 2 * MAX_LINE]);
        });
        let error = b.receive::<Command>(Some(soon())).unwrap_err();
        assert!(error.to_string().contains("more than"), "{error}");
        drop(b);
        writer.join().unwrap();
    }
}
