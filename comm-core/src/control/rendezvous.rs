//! How ranks find rank 0: listening, the address file, and dialling until rank 0 answers.

#[cfg(feature = "fuzzing")]
pub(crate) mod fuzzing;

use std::collections::HashSet;
use std::fs;
use std::io::{self, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::path::Path;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::thread;
use std::time::Duration;

use rustix::io::Errno;
use socket2::{Domain, Protocol, Socket, Type};

use super::auth::{self, Hello, Rejection, Session};
use super::missing::MissingRanks;
use crate::addresses::{check_address, check_own_socket_address, loopback, with_scope};
use crate::deadline::Deadline;
use crate::descriptors;
use crate::error::{Error, Result};
use crate::interfaces::{self, Bind};
use crate::job::{Address, Job};
use crate::small_file::read_small_file;

/// Pauses between attempts to dial grow from the first of these to the second.
const PAUSES: (Duration, Duration) = (Duration::from_millis(5), Duration::from_millis(200));

/// Longest wait for one connection attempt.
const ATTEMPT: Duration = Duration::from_secs(3);

/// Connections that may wait to be accepted; the kernel grants less where `net.core.somaxconn` says so. When it is full, a
/// dialler tries again after a second, so others must not fill it while rank 0 is busy with handshakes.
const BACKLOG: i32 = 4096;

/// Most bytes of an address file.
const MAX_ADDRESS_FILE: u64 = 256;

/// Rank 0's non-blocking listeners, on exactly the addresses that were asked for; at least one.
pub(super) fn listen(job: &Job, deadline: Deadline, missing_ranks: &mut MissingRanks<'_>) -> Result<Vec<TcpListener>> {
    let listeners = match &job.address {
        Address::File(path) => {
            remove_old(path)?;
            let listener = listen_on_loopback()?;
            let addr = listener.local_addr().map_err(|e| Error::io("asking for the port that was bound", e))?;
            publish(path, addr).map_err(|e| Error::io(format!("writing the address file {}", path.display()), e))?;
            vec![listener]
        }
        Address::Tcp { .. } => bind_all(job, &own_addresses(job, deadline, missing_ranks)?)?,
    };
    for listener in &listeners {
        listener.set_nonblocking(true).map_err(|e| Error::io("making the listener non-blocking", e))?;
    }
    Ok(listeners)
}

/// For the end of an operation's name: where rank 0 listens for the ranks of `address`, and what is wrong with that.
pub(super) fn where_it_listens(address: &Address, listeners: &[TcpListener]) -> String {
    let addrs: Vec<SocketAddr> = listeners.iter().filter_map(|listener| listener.local_addr().ok()).collect();
    let shown: Vec<String> = addrs.iter().map(SocketAddr::to_string).collect();
    let what =
        if shown == [address.to_string()] { String::new() } else { format!(", listening at {}", shown.join(", ")) };
    let is_local = addrs.iter().all(|addr| addr.ip().is_loopback());
    match address {
        Address::Tcp { host, .. } if is_local => {
            let why = match host.parse::<IpAddr>() {
                Ok(_) => String::new(),
                Err(_) => {
                    format!(": on this machine the name {host} has no other address of this machine (see /etc/hosts)")
                }
            };
            format!("{what} (ranks on other machines cannot reach that{why})")
        }
        _ => what,
    }
}

fn listen_on_loopback() -> Result<TcpListener> {
    let failed = |ip: IpAddr, e| Error::io(format!("listening on a free port of {ip}"), e);
    let ip = loopback();
    bind((ip, 0).into()).map_err(|e| failed(ip, e))
}

/// The addresses that the name of rank 0's machine has there. It may not have any for a while.
fn own_addresses(job: &Job, deadline: Deadline, missing_ranks: &mut MissingRanks<'_>) -> Result<Vec<SocketAddr>> {
    let mut look_up = AddressLookup::new(&job.address);
    let mut pause = PAUSES.0;
    loop {
        let why = match look_up.ask(missing_ranks.until(deadline)) {
            Ok(addrs) => return Ok(addrs),
            Err(DialError::Final(error)) => return Err(error),
            Err(DialError::Again(why)) => why,
        };
        let others: Vec<usize> = (1..job.world_size).collect();
        let operation = || format!("not yet listening at {}{}: {why}", job.address, by(job));
        missing_ranks.report_if_due(&others, operation);
        if !pause_before_next(&mut pause, deadline) {
            return Err(Error::timeout(job.rank, operation(), deadline, []));
        }
    }
}

/// Listens on those of `addrs` that are this machine's: on loopback only where there are no others, for a name that the machine gives
/// itself (Debian's 127.0.1.1) is no address for other machines.
fn bind_all(job: &Job, addrs: &[SocketAddr]) -> Result<Vec<TcpListener>> {
    let (mut bound, mut failures) = (Vec::new(), Vec::new());
    let (local, others): (Vec<SocketAddr>, Vec<SocketAddr>) =
        addrs.iter().copied().partition(|addr| addr.ip().is_loopback());
    for is_loopback in [false, true] {
        let tried = match is_loopback {
            false => others.clone(),
            true if job.network.across_hosts && !local.is_empty() && !is_ip(&job.address) => {
                instead_of_loopback(job, &local)?
            }
            true => local.clone(),
        };
        for addr in tried {
            match bind(addr) {
                Ok(listener) => {
                    // The kernel also lets one listen on the broadcast address of a network, which nobody can dial.
                    check_own_socket_address(addr)?;
                    bound.push(listener);
                }
                Err(e) => failures.push((addr, e)),
            }
            // Another listener would have another port.
            if addr.port() == 0 && !bound.is_empty() {
                break;
            }
        }
        if !bound.is_empty() {
            return Ok(bound);
        }
        // This machine's own address, whose port another process has: no rank would look for the job on loopback.
        if failures.iter().any(|(_, error)| error.kind() == io::ErrorKind::AddrInUse) {
            break;
        }
    }
    Err(cannot_listen(job, &failures))
}

/// Whether an address is given by its numbers: it means the same on every machine, and is not replaced.
fn is_ip(address: &Address) -> bool {
    matches!(address, Address::Tcp { host, .. } if host.parse::<IpAddr>().is_ok())
}

/// Where rank 0 of a job on several machines listens when all that its own name leads to here is `local`.
fn instead_of_loopback(job: &Job, local: &[SocketAddr]) -> Result<Vec<SocketAddr>> {
    let Some(port) = local.first().map(SocketAddr::port) else { return Ok(Vec::new()) };
    let shown: Vec<String> = local.iter().map(|addr| addr.ip().to_string()).collect();
    let mut found = match &job.network.bind {
        None => Vec::new(),
        Some(Bind::Address(ip)) => vec![with_scope(*ip)],
        Some(Bind::Interfaces(filter)) => filter.reachable(&interfaces::addresses()?),
    };
    found.iter_mut().for_each(|addr| addr.set_port(port));
    match found.is_empty() {
        false => Ok(found),
        true => Err(Error::Rendezvous(format!(
            "rank 0 cannot listen at {}{}: on this machine that is only {}, which ranks on other machines cannot reach; set COMM_IFNAME to \
             the interface that they can reach, for example eth0, or COMM_ADDR to an address of this machine",
            job.address,
            by(job),
            shown.join(", ")
        ))),
    }
}

/// For the end of an address: what says that ranks meet there.
fn by(job: &Job) -> String {
    if job.found.address.is_empty() { String::new() } else { format!(" (by {})", job.found.address) }
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
            "{} exists and is not an address file, so it is not overwritten; name a file that does not exist",
            path.display()
        ))),
        Ok(_) => fs::remove_file(path).map_err(failed),
    }
}

/// A connection to rank 0 that has passed the handshake.
pub(super) struct AuthenticatedStream {
    pub(super) stream: TcpStream,
    pub(super) addr: SocketAddr,
    pub(super) session: Session,
}

/// Dials rank 0, again and again until the deadline.
pub(super) fn dial(
    job: &Job,
    handshake: Duration,
    deadline: Deadline,
    missing_ranks: &mut MissingRanks<'_>,
) -> Result<AuthenticatedStream> {
    let hello = Hello::of(job);
    let mut look_up = AddressLookup::new(&job.address);
    let mut pause = PAUSES.0;
    loop {
        let tried = match attempt(job, &hello, look_up.ask(missing_ranks.until(deadline)), handshake, deadline) {
            Ok(dialled) => return Ok(dialled),
            Err(DialError::Final(error)) => return Err(error),
            Err(DialError::Again(tried)) => tried,
        };
        let operation = || format!("dialling rank 0 at {}{} (last attempt: {tried})", job.address, by(job));
        missing_ranks.report_if_due(&[0], operation);
        if !pause_before_next(&mut pause, deadline) {
            return Err(Error::timeout(job.rank, operation(), deadline, [0]));
        }
    }
}

/// Sleeps, longer each time; false when the deadline has passed by then.
fn pause_before_next(pause: &mut Duration, deadline: Deadline) -> bool {
    if deadline.remaining() <= *pause {
        thread::sleep(deadline.remaining());
        return false;
    }
    thread::sleep(*pause);
    *pause = (*pause * 2).min(PAUSES.1);
    true
}

enum DialError {
    /// Not now, and why.
    Again(String),
    /// It will not get better.
    Final(Error),
}

/// Tries every address. Who is no rank 0 at one of them settles nothing while rank 0 may be, or come, at another.
fn attempt(
    job: &Job,
    hello: &Hello,
    addrs: std::result::Result<Vec<SocketAddr>, DialError>,
    handshake: Duration,
    deadline: Deadline,
) -> std::result::Result<AuthenticatedStream, DialError> {
    let (mut tried, mut refusal, mut may_change) = (Vec::new(), None, false);
    for addr in addrs? {
        // A zero time-out is an error of its own.
        let time = deadline.at_most(ATTEMPT).remaining().max(Duration::from_millis(1));
        let stream = match TcpStream::connect_timeout(&addr, time) {
            Ok(stream) => stream,
            Err(e) if descriptors::ran_out(&e) => {
                return Err(DialError::Final(Error::io(format!("rank {}: dialling rank 0 at {addr}", job.rank), e)));
            }
            Err(e) => {
                may_change |= !is_out_of_reach(&e);
                tried.push(format!("{addr}: {e}"));
                continue;
            }
        };
        // While nothing listens there on a port of the ephemeral range, the kernel may connect a dialler to itself.
        if stream.local_addr().is_ok_and(|local| local == addr) {
            may_change = true;
            tried.push(format!("{addr}: nothing listens there"));
            continue;
        }
        // Small messages that a rank waits for.
        let _ = stream.set_nodelay(true);
        match auth::dial(&stream, &job.secret, hello, deadline.at_most(handshake), deadline) {
            Ok(session) => return Ok(AuthenticatedStream { stream, addr, session }),
            Err(why) => {
                tried.push(format!("{addr}: {why}"));
                match why {
                    Rejection::Io(_) | Rejection::Earlier => may_change = true,
                    why => _ = refusal.get_or_insert_with(|| refused(job, addr, &why)),
                }
            }
        }
    }
    match refusal {
        Some(error) if !may_change => Err(DialError::Final(error)),
        _ if tried.is_empty() => Err(DialError::Again("the name has no address".into())),
        _ => Err(DialError::Again(tried.join("; "))),
    }
}

/// Whether this machine has no way to the address at all: no network of its kind, say.
fn is_out_of_reach(error: &io::Error) -> bool {
    let unknown_family = Errno::from_io_error(error) == Some(Errno::AFNOSUPPORT);
    unknown_family || matches!(error.kind(), io::ErrorKind::NetworkUnreachable | io::ErrorKind::AddrNotAvailable)
}

fn refused(job: &Job, addr: SocketAddr, why: &Rejection) -> Error {
    let rank = job.rank;
    let secret = match job.found.secret.as_str() {
        "" => String::new(),
        by => format!(" (here that of {by})"),
    };
    Error::Rendezvous(match why {
        Rejection::WrongSecret => format!(
            "rank {rank}: the process that listens at {addr} does not know this job's secret{secret}; give all ranks the same \
             COMM_SECRET_FILE, or, if another job uses that address, set COMM_ADDR or COMM_PORT to a port of your own"
        ),
        why => format!(
            "rank {rank}: the process that listens at {addr} is not rank 0 of this job: {why}; set COMM_ADDR or COMM_PORT to a port that \
             no other program uses, and start the same program on all machines"
        ),
    })
}

/// Finds the addresses behind [`Address`], again at each call. A name is looked up in a thread of its own: the system's look-up has no
/// deadline, and may go on while this is asked again.
struct AddressLookup<'a> {
    address: &'a Address,
    under_way: Option<Receiver<io::Result<Vec<SocketAddr>>>>,
}

impl<'a> AddressLookup<'a> {
    fn new(address: &'a Address) -> Self {
        AddressLookup { address, under_way: None }
    }

    /// The addresses as they are now, those that other machines can reach first; waits no longer than `until`.
    fn ask(&mut self, until: Deadline) -> std::result::Result<Vec<SocketAddr>, DialError> {
        let (host, port) = match self.address {
            Address::File(path) => return read_address_file(path),
            Address::Tcp { host, port } => (host, *port),
        };
        if let Ok(ip) = host.parse::<IpAddr>() {
            check_address(ip).map_err(DialError::Final)?;
            return Ok(vec![SocketAddr::new(ip, port)]);
        }
        let answer = match self.under_way.take() {
            Some(answer) => answer,
            None => look_up(host.clone(), port).map_err(DialError::Final)?,
        };
        match answer.recv_timeout(until.remaining()) {
            Ok(Ok(mut addrs)) => {
                // A name may stand for what no text of an address may be: `0` for every interface.
                addrs.iter().try_for_each(|addr| check_address(addr.ip())).map_err(DialError::Final)?;
                let mut seen = HashSet::new();
                addrs.retain(|addr| seen.insert(*addr));
                addrs.sort_by_key(|addr| addr.ip().is_loopback());
                Ok(addrs)
            }
            // Names may appear late, for instance those of a cluster's pods.
            Ok(Err(e)) => Err(DialError::Again(format!("looking up {host}: {}", descriptors::explain(&e)))),
            Err(RecvTimeoutError::Timeout) => {
                self.under_way = Some(answer);
                Err(DialError::Again(format!(
                    "looking up {host}: no answer yet; the name servers are in /etc/resolv.conf"
                )))
            }
            Err(RecvTimeoutError::Disconnected) => Err(DialError::Again(format!("looking up {host}: no answer"))),
        }
    }
}

fn look_up(host: String, port: u16) -> Result<Receiver<io::Result<Vec<SocketAddr>>>> {
    let (tell, answer) = mpsc::sync_channel(1);
    let ask = move || {
        let found = (host.as_str(), port).to_socket_addrs().map(Iterator::collect);
        // Nobody may be waiting any more.
        let _ = tell.send(found);
    };
    let thread = thread::Builder::new().name("comm-look-up".into()).spawn(ask);
    thread.map_err(|e| Error::io("starting a thread to look up a name", e))?;
    Ok(answer)
}

fn read_address_file(path: &Path) -> std::result::Result<Vec<SocketAddr>, DialError> {
    let text = match read_small_file(path, MAX_ADDRESS_FILE, "the address file") {
        Ok(text) => text,
        Err(Error::Io { source, .. }) => {
            return Err(DialError::Again(format!("rank 0 has not written {}: {source}", path.display())));
        }
        Err(error) => return Err(DialError::Final(error)),
    };
    match str::from_utf8(&text).ok().and_then(|text| text.trim().parse::<SocketAddr>().ok()) {
        Some(addr) if addr.ip().is_loopback() => Ok(vec![addr]),
        _ => Err(DialError::Again(format!("{} does not hold an address of this machine", path.display()))),
    }
}

/// Writes `addr` into the file at `path` so that a reader never sees half of it.
fn publish(path: &Path, addr: SocketAddr) -> io::Result<()> {
    let directory = path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let mut file = tempfile::NamedTempFile::new_in(directory)?;
    writeln!(file, "{addr}")?;
    file.persist(path).map_err(|e| e.error)?;
    Ok(())
}

/// Why rank 0 can listen on none of the addresses.
fn cannot_listen(job: &Job, failures: &[(SocketAddr, io::Error)]) -> Error {
    let (address, by) = (&job.address, by(job));
    // That the right address is taken says more than that another one is not this machine's.
    let of_kind = |kind| failures.iter().find(move |(_, e): &&(_, io::Error)| e.kind() == kind);
    let Some((addr, error)) = of_kind(io::ErrorKind::AddrInUse).or(failures.first()) else {
        return Error::Rendezvous(format!("rank 0 cannot listen at {address}{by}: the name has no address"));
    };
    let hint = match error.kind() {
        io::ErrorKind::AddrInUse => {
            "another program already listens there, or an earlier job of this process that has not been dropped; end it, or set COMM_ADDR \
             or COMM_PORT to another port"
        }
        io::ErrorKind::AddrNotAvailable => {
            "this is not an address of this machine: rank 0 must run on the machine that COMM_ADDR or MASTER_ADDR names"
        }
        io::ErrorKind::PermissionDenied => "ports below 1024 are reserved: choose a higher one",
        _ => "set COMM_ADDR to an address of rank 0's machine and a free port",
    };
    let which = if addr.to_string() == address.to_string() { String::new() } else { format!(", which is {addr}") };
    Error::Rendezvous(format!("rank 0 cannot listen at {address}{by}{which}: {}; {hint}", descriptors::explain(error)))
}
