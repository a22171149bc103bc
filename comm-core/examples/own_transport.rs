//! A transport of one's own in about 100 lines, over sockets of the standard library, and the whole suite that it has to pass:
//!
//! ```text
//! cargo run -p comm-core --features conformance-main --example own_transport [-- --ranks=2,7]
//! ```
//!
//! It polls, and believes whoever connects: an example, and no more.

use std::io::{ErrorKind, Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::process::ExitCode;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use comm_core::conformance::{Suite, main_of};
use comm_core::control::ControlExt;
use comm_core::lanes::{Lanes, check_messages};
use comm_core::{
    Control, Deadline, Error, HEADER_LEN, Header, Incoming, Mesh, MeshOptions, Outgoing, Result, Transport,
};

fn main() -> ExitCode {
    main_of(vec![suite()])
}

pub(crate) fn suite() -> Suite {
    Suite::new("sockets", |control, lanes| {
        let transport = Sockets::connect(&*control, lanes)?;
        Ok(Arc::new(Mesh::new(transport, control, MeshOptions::default())?))
    })
    .with_transport(|rank, lanes| Ok(Arc::new(Sockets::connect(&*rank.control, lanes)?)))
}

/// One connection for every peer and lane.
pub(crate) struct Sockets {
    rank: usize,
    lanes: usize,
    /// By peer and lane; none to this rank itself.
    streams: Vec<Vec<Option<TcpStream>>>,
    /// What a lane has to remember from one exchange to the next: nothing but whether one has failed.
    states: Lanes<()>,
    aborted: Mutex<Option<Error>>,
}

impl Sockets {
    /// Connects every pair of ranks; ports travel over the control plane.
    pub(crate) fn connect(control: &dyn Control, lanes: usize) -> Result<Self> {
        let io = |error| Error::io("connecting plain sockets", error);
        let (rank, ranks) = (control.rank(), control.world_size());
        let listener = TcpListener::bind("127.0.0.1:0").map_err(io)?;
        let port = listener.local_addr().map_err(io)?.port();
        let ports = control.gather("ports", &port, Deadline::after(Duration::from_secs(10)))?;
        let mut streams: Vec<Vec<Option<TcpStream>>> = (0..ranks).map(|_| (0..lanes).map(|_| None).collect()).collect();
        for (peer, port) in ports.iter().enumerate().take(rank) {
            for (lane, slot) in streams[peer].iter_mut().enumerate() {
                let stream = slot.insert(TcpStream::connect(("127.0.0.1", *port)).map_err(io)?);
                stream.write_all(&[rank as u8, lane as u8]).map_err(io)?;
            }
        }
        for _ in 0..(ranks - 1 - rank) * lanes {
            let mut stream = listener.accept().map_err(io)?.0;
            let mut hello = [0; 2];
            stream.read_exact(&mut hello).map_err(io)?;
            streams[usize::from(hello[0])][usize::from(hello[1])] = Some(stream);
        }
        for stream in streams.iter().flatten().flatten() {
            stream.set_nonblocking(true).and_then(|()| stream.set_nodelay(true)).map_err(io)?;
        }
        let states = Lanes::new(vec![(); lanes]);
        Ok(Sockets { rank, lanes, streams, states, aborted: Mutex::default() })
    }

    /// Fails once the transport was aborted.
    fn check(&self) -> Result<()> {
        let aborted = self.aborted.lock().unwrap_or_else(PoisonError::into_inner);
        aborted.clone().map_or(Ok(()), Err)
    }

    fn stream(&self, peer: usize, lane: usize) -> Result<&TcpStream> {
        self.streams[peer][lane].as_ref().ok_or_else(|| Error::invalid("a message to oneself"))
    }
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

    fn exchange(&self, lane: usize, out: &[Outgoing<'_>], into: &mut [Incoming<'_>], deadline: Deadline) -> Result<()> {
        check_messages(self.rank, self.streams.len(), out, into)?;
        self.states.run(lane, |()| self.exchange_on(lane, out, into, deadline))
    }

    fn abort(&self, error: &Error) {
        self.aborted.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert_with(|| error.clone());
    }

    fn close(&self, deadline: Deadline) -> Result<()> {
        let close_handshake = |_: &mut [&mut ()]| {
            for stream in self.streams.iter().flatten().flatten() {
                // The peer may have closed first.
                let _ = stream.shutdown(Shutdown::Write);
            }
            Ok(())
        };
        self.states.close(self.rank, deadline, || self.check(), close_handshake)
    }
}

impl Sockets {
    fn exchange_on(
        &self,
        lane: usize,
        out: &[Outgoing<'_>],
        into: &mut [Incoming<'_>],
        deadline: Deadline,
    ) -> Result<()> {
        // For each message what is left: of a header and a payload to send, of a header to receive and of its payload.
        let mut sends: Vec<Vec<u8>> =
            out.iter().map(|message| [&message.header.encode(), message.payload].concat()).collect();
        let mut headers = vec![Vec::with_capacity(HEADER_LEN); into.len()];
        let mut payloads = vec![0; into.len()];
        let mut piece = vec![0; 1 << 16];
        loop {
            self.check()?;
            let (mut moved, mut waiting_for) = (0, Vec::new());
            for (message, left) in out.iter().zip(&mut sends).filter(|(_, left)| !left.is_empty()) {
                let sent = some(self.stream(message.peer, lane)?.write(left), message.peer)?;
                left.drain(..sent);
                moved += sent;
                waiting_for.extend((!left.is_empty()).then_some(message.peer));
            }
            for ((message, header), left) in into.iter_mut().zip(&mut headers).zip(&mut payloads) {
                let is_header = header.len() < HEADER_LEN;
                let most = if is_header { HEADER_LEN - header.len() } else { piece.len().min(*left) };
                if most == 0 {
                    continue;
                }
                let got = some(self.stream(message.peer, lane)?.read(&mut piece[..most]), message.peer)?;
                moved += got;
                if !is_header {
                    *left -= got;
                    (got > 0).then(|| message.sink.piece(&piece[..got])).transpose()?;
                } else {
                    header.extend_from_slice(&piece[..got]);
                    if let Some(bytes) = header.first_chunk() {
                        let header = Header::decode(bytes, &format!("rank {}", message.peer))?;
                        message.sink.begin(&header)?;
                        *left = header.payload_len as usize;
                    }
                }
                waiting_for.extend((header.len() < HEADER_LEN || *left > 0).then_some(message.peer));
            }
            if waiting_for.is_empty() {
                return Ok(());
            }
            if moved == 0 && deadline.has_passed() {
                return Err(Error::timeout(self.rank, "an exchange", deadline, waiting_for));
            }
            if moved == 0 {
                std::thread::sleep(Duration::from_micros(50));
            }
        }
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
