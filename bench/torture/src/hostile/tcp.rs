//! Strangers on TCP connections.

use std::io::{self, ErrorKind};
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use comm_core::control::{TcpControl, TcpOptions};
use comm_core::job::{Address, Job, Secret};
use comm_core::{Deadline, Error};
use socket2::SockRef;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpSocket, TcpStream};
use tokio::time::timeout;

use super::kinds::{Kind, ScriptStep};
use super::tally::{AttackOutcome, End};

/// How long the kernel may take to connect. On loopback only a full queue takes longer than a moment.
const CONNECT: Duration = Duration::from_millis(800);

/// How long a stranger waits for what the protocol says comes first.
const HEAR: Duration = Duration::from_millis(200);

/// How long a stranger waits to be disconnected. The job's own bound is 5 s.
pub(super) const PATIENCE: Duration = Duration::from_secs(8);

/// Plays a script at `address` and waits up to `patience` to be disconnected. It comes from the address `source`, if there is one.
pub(super) async fn play(
    address: SocketAddr,
    acts: &[ScriptStep],
    patience: Duration,
    source: Option<SocketAddr>,
) -> AttackOutcome {
    let mut stream = match timeout(CONNECT, connect(address, source)).await {
        Ok(Ok(stream)) => stream,
        Ok(Err(error)) if error.kind() == ErrorKind::ConnectionRefused => return AttackOutcome::default(),
        // A full queue, or no descriptor or port left on this side.
        Ok(Err(_)) | Err(_) => return AttackOutcome { end: End::NotConnected, ..AttackOutcome::default() },
    };
    // A connection that this side closes is reset, and leaves no trace that uses up this machine's ports.
    let _ = SockRef::from(&stream).set_linger(Some(Duration::ZERO));
    let since = Instant::now();
    let mut heard = Vec::new();
    let end = match timeout(patience, perform(&mut stream, acts, &mut heard)).await {
        Ok(Ok(end)) => end,
        // Reset by the job, while something was said to it.
        Ok(Err(_)) => End::Closed,
        Err(_) => End::StillThere,
    };
    let is_overdue = end == End::StillThere && patience >= PATIENCE;
    AttackOutcome { end, heard: heard.len(), lasted: since.elapsed(), is_overdue }
}

async fn connect(address: SocketAddr, source: Option<SocketAddr>) -> io::Result<TcpStream> {
    let Some(source) = source else { return TcpStream::connect(address).await };
    let socket = TcpSocket::new_v4()?;
    socket.set_reuseaddr(true)?;
    socket.bind(source)?;
    socket.connect(address).await
}

async fn perform(stream: &mut TcpStream, acts: &[ScriptStep], heard: &mut Vec<u8>) -> io::Result<End> {
    for act in acts {
        match act {
            ScriptStep::Say(bytes) => stream.write_all(bytes).await?,
            ScriptStep::Drip(bytes) => {
                for byte in bytes {
                    // Stops once it is disconnected.
                    if hear(stream, heard, Duration::from_millis(100)).await? {
                        return Ok(End::Closed);
                    }
                    stream.write_all(std::slice::from_ref(byte)).await?;
                }
            }
            ScriptStep::Hear(count) => {
                // A port of another protocol may wait to be spoken to.
                let end = Instant::now() + HEAR;
                while heard.len() < *count {
                    let left = end.saturating_duration_since(Instant::now());
                    match timeout(left, read(stream, heard)).await {
                        Ok(Ok(0)) => return Ok(End::Closed),
                        Ok(count) => _ = count?,
                        Err(_) => break,
                    }
                }
            }
            ScriptStep::Echo(count) => {
                let from = heard.len().saturating_sub(*count);
                stream.write_all(heard.get(from..).unwrap_or_default()).await?;
            }
            ScriptStep::Finish => stream.shutdown().await?,
            ScriptStep::Leave => return Ok(End::Left),
        }
    }
    while read(stream, heard).await? != 0 {}
    Ok(End::Closed)
}

/// Listens for `time`; whether the other side has closed.
async fn hear(stream: &mut TcpStream, heard: &mut Vec<u8>, time: Duration) -> io::Result<bool> {
    let end = Instant::now() + time;
    while let Some(left) = end.checked_duration_since(Instant::now()) {
        let Ok(count) = timeout(left, read(stream, heard)).await else { break };
        if count? == 0 {
            return Ok(true);
        }
    }
    Ok(false)
}

async fn read(stream: &mut TcpStream, heard: &mut Vec<u8>) -> io::Result<usize> {
    let mut buffer = [0; 4096];
    let count = stream.read(&mut buffer).await?;
    heard.extend_from_slice(buffer.get(..count).unwrap_or_default());
    Ok(count)
}

/// The control plane's own handshake, with the claim to be a rank that it is not. Blocks.
pub(super) fn shake_hands(kind: Kind, control: SocketAddr, job: &Job, patience: Duration) -> AttackOutcome {
    let since = Instant::now();
    let outcome = disguised(kind, control, job).and_then(|job| {
        TcpControl::connect_with(&job, &[], TcpOptions::default(), Deadline::after(patience)).map(drop)
    });
    let end = match outcome {
        Ok(()) => End::LetIn,
        Err(Error::Rendezvous(words)) => End::Refused(words),
        Err(Error::Timeout { operation, .. }) if operation.contains("refused") => End::NoPort,
        Err(Error::PeerLost { .. }) => End::Closed,
        Err(_) => End::Ignored,
    };
    AttackOutcome { end, lasted: since.elapsed(), ..AttackOutcome::default() }
}

fn disguised(kind: Kind, control: SocketAddr, job: &Job) -> Result<Job, Error> {
    let address = Address::Tcp { host: control.ip().to_string(), port: control.port() };
    let mut stranger = Job { rank: 1, address, ..job.clone() };
    match kind {
        Kind::OldEpoch => stranger.epoch = job.epoch.saturating_sub(1),
        Kind::OtherJob => stranger.id = "another".into(),
        Kind::Double => {}
        Kind::WorldSize => stranger.world_size = job.world_size + 1,
        _ => stranger.secret = Secret::random()?,
    }
    Ok(stranger)
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;
    use std::thread;

    use super::*;

    fn outcome(acts: &[ScriptStep], answer: impl FnOnce(std::net::TcpStream) + Send + 'static) -> AttackOutcome {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let job = thread::spawn(move || answer(listener.accept().unwrap().0));
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let outcome = runtime.block_on(play(address, acts, Duration::from_millis(400), None));
        job.join().unwrap();
        outcome
    }

    #[test]
    fn the_fates_are_told_apart() {
        use std::io::{Read, Write};
        let closed = outcome(&[ScriptStep::Say(b"hello".to_vec())], |mut stream| {
            let _ = stream.read(&mut [0; 5]);
        });
        assert_eq!((closed.end, closed.heard), (End::Closed, 0));
        let held = outcome(&[], |stream| {
            thread::sleep(Duration::from_millis(600));
            drop(stream);
        });
        assert_eq!(held.end, End::StillThere);
        assert_eq!(outcome(&[ScriptStep::Leave], drop).end, End::Left);
        let echoed = outcome(&[ScriptStep::Hear(4), ScriptStep::Echo(2)], |mut stream| {
            stream.write_all(b"abcd").unwrap();
            let mut back = [0; 2];
            stream.read_exact(&mut back).unwrap();
            assert_eq!(&back, b"cd");
        });
        assert_eq!((echoed.end, echoed.heard), (End::Closed, 4));
        let nobody = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        assert_eq!(runtime.block_on(play(nobody, &[], Duration::from_millis(100), None)).end, End::NoPort);
    }
}
