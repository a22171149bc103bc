//! The least transport between processes: plain sockets on loopback, polled. It lets the suite's process runner be tested here,
//! with the control plane over TCP; it trusts whoever connects and measures nothing.

use std::io::{ErrorKind, Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

use comm_core::{Control, Deadline, Error, HEADER_LEN, Header, Incoming, Outgoing, Result, Transport};

/// One connection for every peer and lane.
pub(crate) struct Sockets {
    rank: usize,
    lanes: usize,
    /// By peer and lane; none to this rank itself. One exchange at a time uses those of a lane.
    streams: Vec<Vec<Option<TcpStream>>>,
    aborted: Mutex<Option<Error>>,
}

impl Sockets {
    pub(crate) fn connect(control: &Arc<dyn Control>, lanes: usize) -> Result<Self> {
        let io = |error| Error::io("connecting plain sockets", error);
        let (rank, ranks) = (control.rank(), control.world_size());
        let listener = TcpListener::bind("127.0.0.1:0").map_err(io)?;
        let port = listener.local_addr().map_err(io)?.port();
        let deadline = Deadline::after(Duration::from_secs(10));
        let ports = control.all_gather("plain sockets", &port.to_le_bytes(), deadline)?;
        let mut streams: Vec<Vec<Option<TcpStream>>> = (0..ranks).map(|_| (0..lanes).map(|_| None).collect()).collect();
        // Every rank dials those before it; the listener's backlog keeps the order free.
        for (peer, port) in ports.iter().enumerate().take(rank) {
            let port = u16::from_le_bytes([port[0], port[1]]);
            for (lane, slot) in streams[peer].iter_mut().enumerate() {
                let mut stream = TcpStream::connect(("127.0.0.1", port)).map_err(io)?;
                stream.write_all(&[rank as u8, lane as u8]).map_err(io)?;
                *slot = Some(stream);
            }
        }
        for _ in 0..(ranks - 1 - rank) * lanes {
            let (mut stream, _) = listener.accept().map_err(io)?;
            let mut hello = [0; 2];
            stream.read_exact(&mut hello).map_err(io)?;
            streams[usize::from(hello[0])][usize::from(hello[1])] = Some(stream);
        }
        for stream in streams.iter().flatten().flatten() {
            stream.set_nonblocking(true).and_then(|()| stream.set_nodelay(true)).map_err(io)?;
        }
        Ok(Sockets { rank, lanes, streams, aborted: Mutex::default() })
    }

    fn stream(&self, peer: usize, lane: usize) -> &TcpStream {
        self.streams[peer][lane].as_ref().unwrap()
    }

    fn aborted(&self) -> MutexGuard<'_, Option<Error>> {
        self.aborted.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// How much of a message is through: bytes of the header and of the payload.
#[derive(Clone)]
struct Progress {
    header: [u8; HEADER_LEN],
    done: usize,
    whole: usize,
}

impl Transport for Sockets {
    fn name(&self) -> &str {
        "sockets"
    }

    fn rank(&self) -> usize {
        self.rank
    }

    fn world_size(&self) -> usize {
        self.streams.len()
    }

    fn lanes(&self) -> usize {
        self.lanes
    }

    fn exchange(
        &self,
        lane: usize,
        outgoing: &[Outgoing<'_>],
        incoming: &mut [Incoming<'_>],
        deadline: Deadline,
    ) -> Result<()> {
        let begin = |message: &Outgoing<'_>| Progress {
            header: message.header.encode(),
            done: 0,
            whole: HEADER_LEN + message.payload.len(),
        };
        let mut sent: Vec<Progress> = outgoing.iter().map(begin).collect();
        let empty = Progress { header: [0; HEADER_LEN], done: 0, whole: HEADER_LEN };
        let mut received = vec![empty; incoming.len()];
        let mut piece = vec![0; 1 << 16];
        loop {
            if let Some(error) = self.aborted().clone() {
                return Err(error);
            }
            let mut moved = 0;
            for (message, at) in outgoing.iter().zip(&mut sent).filter(|(_, at)| at.done < at.whole) {
                let bytes = match at.done.checked_sub(HEADER_LEN) {
                    None => &at.header[at.done..],
                    Some(from) => &message.payload[from..],
                };
                let step = some(self.stream(message.peer, lane).write(bytes), message.peer)?;
                at.done += step;
                moved += step;
            }
            for (message, at) in incoming.iter_mut().zip(&mut received).filter(|(_, at)| at.done < at.whole) {
                let mut stream = self.stream(message.peer, lane);
                if at.done < HEADER_LEN {
                    let step = some(stream.read(&mut at.header[at.done..]), message.peer)?;
                    at.done += step;
                    moved += step;
                    if at.done == HEADER_LEN {
                        let header = Header::decode(&at.header, &format!("rank {}", message.peer))?;
                        message.sink.begin(&header)?;
                        at.whole += header.payload_len as usize;
                    }
                } else {
                    let most = piece.len().min(at.whole - at.done);
                    let step = some(stream.read(&mut piece[..most]), message.peer)?;
                    if step > 0 {
                        message.sink.piece(&piece[..step])?;
                    }
                    at.done += step;
                    moved += step;
                }
            }
            let waiting: Vec<usize> = outgoing
                .iter()
                .map(|message| message.peer)
                .zip(&sent)
                .chain(incoming.iter().map(|message| message.peer).zip(&received))
                .filter(|(_, at)| at.done < at.whole)
                .map(|(peer, _)| peer)
                .collect();
            if waiting.is_empty() {
                return Ok(());
            }
            if moved == 0 {
                if deadline.has_passed() {
                    let (rank, operation, waited) = (self.rank, "an exchange".into(), deadline.waited());
                    return Err(Error::Timeout { rank, operation, waited, waiting_for: waiting });
                }
                thread::sleep(Duration::from_micros(50));
            }
        }
    }

    fn abort(&self, error: &Error) {
        self.aborted().get_or_insert_with(|| error.clone());
    }

    fn close(&self, _deadline: Deadline) -> Result<()> {
        for stream in self.streams.iter().flatten().flatten() {
            // The peer may have closed first.
            let _ = stream.shutdown(Shutdown::Write);
        }
        Ok(())
    }
}

/// The bytes that went through now.
fn some(result: std::io::Result<usize>, peer: usize) -> Result<usize> {
    let lost = |detail: String| Error::PeerLost { rank: peer, operation: String::new(), detail };
    match result {
        Ok(0) => Err(lost("the connection was closed".into())),
        Ok(bytes) => Ok(bytes),
        Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => Ok(0),
        Err(error) => Err(lost(error.to_string())),
    }
}
