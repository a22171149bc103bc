//! How ranks find rank 0: listening, the address file, and dialling until someone is there.

#[cfg(feature = "fuzzing")]
pub(crate) mod fuzzing;

use std::fs;
use std::io::{self, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::path::Path;
use std::thread;
use std::time::Duration;

use socket2::{Domain, Protocol, Socket, Type};

use super::auth::{self, Hello, Rejection, Session};
use crate::deadline::Deadline;
use crate::error::{Error, Result};
use crate::job::{Address, Job, check_address, check_own_address, read_small_file};

/// Pauses between attempts to dial grow from the first of these to the second.
const PAUSES: (Duration, Duration) = (Duration::from_millis(5), Duration::from_millis(200));

/// Longest wait for one connection attempt.
const ATTEMPT: Duration = Duration::from_secs(3);

/// Connections that may wait to be accepted; the kernel grants less where `net.core.somaxconn` says so. When there is no room, a
/// dialler tries again after a second, so strangers must not fill it while the door is busy.
const BACKLOG: i32 = 4096;

/// Most bytes of an address file.
const MAX_ADDRESS_FILE: u64 = 256;

/// Rank 0's non-blocking listener, on exactly the address that was asked for.
pub(super) fn listen(address: &Address) -> Result<TcpListener> {
    let listener = match address {
        Address::File(path) => {
            remove_old(path)?;
            let listener = bind((Ipv4Addr::LOCALHOST, 0).into())
                .map_err(|e| Error::io("listening on a free port of 127.0.0.1", e))?;
            let addr = listener.local_addr().map_err(|e| Error::io("asking for the port that was bound", e))?;
            publish(path, addr).map_err(|e| Error::io(format!("writing the address file {}", path.display()), e))?;
            listener
        }
        Address::Tcp { host, port } => {
            let addrs = (host.as_str(), *port).to_socket_addrs().map_err(|e| cannot_listen(address, &e))?;
            let mut outcome = Err(cannot_listen(address, &io::Error::other("the name has no address")));
            for addr in addrs {
                // A name may stand for what no text of an address may be: `0` for every interface.
                check_address(addr.ip())?;
                outcome = bind(addr).map_err(|e| cannot_listen(address, &e));
                if outcome.is_ok() {
                    // The kernel also lets one listen on the broadcast address of a network, which nobody can dial.
                    check_own_address(addr.ip())?;
                    break;
                }
            }
            outcome?
        }
    };
    listener.set_nonblocking(true).map_err(|e| Error::io("making the listener non-blocking", e))?;
    Ok(listener)
}

fn bind(addr: SocketAddr) -> io::Result<TcpListener> {
    let socket = Socket::new(Domain::for_address(addr), Type::STREAM, Some(Protocol::TCP))?;
    // Connections of an earlier start that linger do not keep the port.
    socket.set_reuse_address(true)?;
    socket.bind(&addr.into())?;
    socket.listen(BACKLOG)?;
    Ok(socket.into())
}

/// Removes an address file that an earlier job has left: it would send the others astray.
fn remove_old(path: &Path) -> Result<()> {
    let failed = |e| Error::io(format!("removing the old address file {}", path.display()), e);
    match fs::symlink_metadata(path) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(()),
        Err(e) => Err(failed(e)),
        Ok(found) if !found.is_file() => Err(Error::invalid(format!(
            "{} is no address file but something else, and is left alone; name a file that does not exist yet",
            path.display()
        ))),
        Ok(_) => fs::remove_file(path).map_err(failed),
    }
}

/// A connection to rank 0 that has passed the handshake.
pub(super) struct Dialled {
    pub(super) stream: TcpStream,
    pub(super) addr: SocketAddr,
    pub(super) session: Session,
}

/// Dials rank 0, again and again until the deadline.
pub(super) fn dial(job: &Job, handshake: Duration, deadline: Deadline) -> Result<Dialled> {
    let hello = Hello::of(job);
    let mut pause = PAUSES.0;
    loop {
        let last = match attempt(job, &hello, handshake, deadline) {
            Ok(dialled) => return Ok(dialled),
            Err(Attempt::Final(error)) => return Err(error),
            Err(Attempt::Again(why)) => why,
        };
        if deadline.remaining() <= pause {
            thread::sleep(deadline.remaining());
            return Err(Error::Timeout {
                rank: job.rank,
                operation: format!("dialling rank 0 at {} (last attempt: {last})", job.address),
                waited: deadline.waited(),
                waiting_for: vec![0],
            });
        }
        thread::sleep(pause);
        pause = (pause * 2).min(PAUSES.1);
    }
}

enum Attempt {
    /// Not now, and why.
    Again(String),
    /// It will not get better.
    Final(Error),
}

fn attempt(job: &Job, hello: &Hello, handshake: Duration, deadline: Deadline) -> std::result::Result<Dialled, Attempt> {
    let mut why = format!("{} resolves to no address", job.address);
    for addr in resolve(&job.address)? {
        // A zero time-out is an error of its own.
        let time = deadline.at_most(ATTEMPT).remaining().max(Duration::from_millis(1));
        let stream = match TcpStream::connect_timeout(&addr, time) {
            Ok(stream) => stream,
            Err(e) => {
                why = format!("{addr}: {e}");
                continue;
            }
        };
        // While nobody listens on a port of the ephemeral range, the kernel may connect a dialler to itself.
        if stream.local_addr().is_ok_and(|local| local == addr) {
            why = format!("{addr}: nobody listens");
            continue;
        }
        // Small messages that somebody waits for.
        let _ = stream.set_nodelay(true);
        match auth::dial(&stream, &job.secret, hello, deadline.at_most(handshake), deadline) {
            Ok(session) => return Ok(Dialled { stream, addr, session }),
            Err(Rejection::Io(e)) => why = format!("{addr}: {e}"),
            Err(Rejection::Stranger) => {
                return Err(Attempt::Final(Error::Rendezvous(format!(
                    "rank {}: the process that listens at {addr} does not know this job's secret; give all ranks the same \
                     COMM_SECRET_FILE, or, if another job uses that address, set COMM_ADDR or COMM_PORT to a port of your own",
                    job.rank
                ))));
            }
            Err(why) => {
                return Err(Attempt::Final(Error::Rendezvous(format!(
                    "rank {}: the process that listens at {addr} is not this job's rank 0: {why}; set COMM_ADDR or COMM_PORT to \
                     a port that nothing else uses, and start the same program on all machines",
                    job.rank
                ))));
            }
        }
    }
    Err(Attempt::Again(why))
}

fn resolve(address: &Address) -> std::result::Result<Vec<SocketAddr>, Attempt> {
    match address {
        Address::Tcp { host, port } => match (host.as_str(), *port).to_socket_addrs() {
            Ok(addrs) => {
                let addrs: Vec<SocketAddr> = addrs.collect();
                addrs.iter().try_for_each(|addr| check_address(addr.ip())).map_err(Attempt::Final)?;
                Ok(addrs)
            }
            // Names may appear late, for instance those of a cluster's pods.
            Err(e) => Err(Attempt::Again(format!("looking up {host}: {e}"))),
        },
        Address::File(path) => {
            let text = match read_small_file(path, MAX_ADDRESS_FILE, "the address file") {
                Ok(text) => text,
                Err(Error::Io { source, .. }) => {
                    return Err(Attempt::Again(format!("rank 0 has not written {}: {source}", path.display())));
                }
                Err(error) => return Err(Attempt::Final(error)),
            };
            match str::from_utf8(&text).ok().and_then(|text| text.trim().parse::<SocketAddr>().ok()) {
                Some(addr) if addr.ip().is_loopback() => Ok(vec![addr]),
                _ => Err(Attempt::Again(format!("{} holds no address of this machine", path.display()))),
            }
        }
    }
}

/// Writes `addr` into the file at `path` so that nobody ever sees half of it.
fn publish(path: &Path, addr: SocketAddr) -> io::Result<()> {
    let directory = path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let mut file = tempfile::NamedTempFile::new_in(directory)?;
    writeln!(file, "{addr}")?;
    file.persist(path).map_err(|e| e.error)?;
    Ok(())
}

fn cannot_listen(address: &Address, error: &io::Error) -> Error {
    let hint = match error.kind() {
        io::ErrorKind::AddrInUse => {
            "another process listens there: end it, or set COMM_ADDR or COMM_PORT to another port"
        }
        io::ErrorKind::AddrNotAvailable => {
            "this is no address of this machine: rank 0 must run on the machine that COMM_ADDR or MASTER_ADDR names"
        }
        io::ErrorKind::PermissionDenied => "ports below 1024 are reserved: choose a higher one",
        _ => "set COMM_ADDR to an address of rank 0's machine and a free port",
    };
    Error::Rendezvous(format!("rank 0 cannot listen at {address}: {error}; {hint}"))
}
