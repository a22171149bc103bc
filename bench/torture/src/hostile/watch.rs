//! What the kernel says of the job's processes while they run: ports, memory, descriptors, threads, processor time.

use std::collections::HashSet;
use std::fs::{self, File};
use std::io::{BufRead, BufReader};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use serde::Serialize;

use super::rank::Task;

/// How often ports are looked for until the job has taken a step, and after.
const LOOK: (Duration, Duration) = (Duration::from_millis(2), Duration::from_millis(50));

/// How often memory, descriptors and threads are looked at.
const MEASURE: Duration = Duration::from_millis(25);

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Protocol {
    Tcp,
    Udp,
}

/// A port that a process of the job listens at or has bound.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Port {
    pub(super) rank: usize,
    pub(super) protocol: Protocol,
    pub(super) address: SocketAddr,
    #[serde(skip)]
    pub(super) since: Instant,
    /// When it was last seen open.
    #[serde(skip)]
    pub(super) until: Instant,
    /// Whether it was there when last looked for.
    pub(super) is_open: bool,
}

/// What one rank has used at most.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub(super) struct ResourcePeak {
    /// Peak of resident memory in bytes.
    pub(super) memory: u64,
    pub(super) descriptors: usize,
    pub(super) threads: usize,
    /// Seconds of processor time so far.
    pub(super) cpu: f64,
}

impl ResourcePeak {
    fn rise(&mut self, now: ResourcePeak) {
        self.memory = self.memory.max(now.memory);
        self.descriptors = self.descriptors.max(now.descriptors);
        self.threads = self.threads.max(now.threads);
        self.cpu = self.cpu.max(now.cpu);
    }
}

/// What has been seen so far.
#[derive(Clone, Debug, Default)]
pub(super) struct JobObservation {
    /// By rank, once they have started.
    pub(super) processes: Vec<Option<u32>>,
    pub(super) ports: Vec<Port>,
    /// By rank: over the whole run.
    pub(super) peak: Vec<ResourcePeak>,
    /// By rank: since the last [`Watch::begin`].
    pub(super) recent: Vec<ResourcePeak>,
    /// When the first step had been taken.
    pub(super) training_since: Option<Instant>,
}

/// A thread that looks at a job from outside.
pub(super) struct Watch {
    seen: Arc<Mutex<JobObservation>>,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Watch {
    /// Looks for the processes that leave their ids in `folder`.
    pub(super) fn start(folder: &Path, ranks: usize) -> std::io::Result<Self> {
        let seen = JobObservation {
            processes: vec![None; ranks],
            peak: vec![ResourcePeak::default(); ranks],
            recent: vec![ResourcePeak::default(); ranks],
            ..JobObservation::default()
        };
        let (seen, stop) = (Arc::new(Mutex::new(seen)), Arc::new(AtomicBool::new(false)));
        let sampler = JobSampler { seen: seen.clone(), stop: stop.clone(), folder: folder.to_path_buf() };
        let thread = thread::Builder::new().name("hostile-watch".into()).spawn(move || sampler.run())?;
        Ok(Watch { seen, stop, thread: Some(thread) })
    }

    pub(super) fn seen(&self) -> MutexGuard<'_, JobObservation> {
        self.seen.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Ports that are open now.
    pub(super) fn open(&self, protocol: Protocol) -> Vec<Port> {
        self.seen().ports.iter().filter(|port| port.is_open && port.protocol == protocol).cloned().collect()
    }

    /// The ports from which processes of the job connect to `address`.
    pub(super) fn dialling(&self, address: SocketAddr) -> Vec<u16> {
        let processes = self.seen().processes.clone();
        let inodes: HashSet<u64> = processes.into_iter().flatten().flat_map(socket_inodes).collect();
        let table = fs::read_to_string("/proc/net/tcp").unwrap_or_default();
        let connections = table.lines().skip(1).filter_map(parse_connection);
        connections
            .filter(|(_, remote, inode)| *remote == address && inodes.contains(inode))
            .map(|(local, ..)| local.port())
            .collect()
    }

    /// Looks at what the processes use now, between the times at which that is done anyhow.
    pub(super) fn measure(&self) {
        let mut seen = self.seen();
        let used = seen.processes.iter().map(|process| process.and_then(read_use)).collect();
        note_use(&mut seen, used);
    }

    /// Starts the peaks of [`JobObservation::recent`] anew, so that they are those of what is done next.
    pub(super) fn begin(&self) {
        let mut seen = self.seen();
        for process in seen.processes.clone().into_iter().flatten() {
            // The kernel forgets the peak of resident memory. Where it refuses, the peaks are those since the start.
            let _ = fs::write(format!("/proc/{process}/clear_refs"), b"5");
        }
        seen.recent.iter_mut().for_each(|peak| *peak = ResourcePeak::default());
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

struct JobSampler {
    seen: Arc<Mutex<JobObservation>>,
    stop: Arc<AtomicBool>,
    folder: PathBuf,
}

impl JobSampler {
    fn run(self) {
        let mut next_measure = Instant::now();
        while !self.stop.load(Ordering::Relaxed) {
            let (processes, is_training) = {
                let mut seen = self.seen();
                self.find_processes(&mut seen);
                (seen.processes.clone(), seen.training_since.is_some())
            };
            let ports: Vec<(usize, Vec<(Protocol, SocketAddr)>)> = find_ports(&processes);
            let now = Instant::now();
            let measured = (now >= next_measure).then(|| {
                next_measure = now + MEASURE;
                processes.iter().map(|process| process.and_then(read_use)).collect::<Vec<_>>()
            });
            let mut seen = self.seen();
            note_ports(&mut seen.ports, &ports, now);
            if let Some(used) = measured {
                note_use(&mut seen, used);
            }
            drop(seen);
            thread::sleep(if is_training { LOOK.1 } else { LOOK.0 });
        }
    }

    fn find_processes(&self, seen: &mut JobObservation) {
        for (rank, process) in seen.processes.iter_mut().enumerate() {
            if process.is_none() {
                *process =
                    fs::read_to_string(Task::process_file(&self.folder, rank)).ok().and_then(|text| text.parse().ok());
            }
        }
        if seen.training_since.is_none() && fs::metadata(Task::steps_file(&self.folder)).is_ok_and(|m| m.len() > 0) {
            seen.training_since = Some(Instant::now());
        }
    }

    fn seen(&self) -> MutexGuard<'_, JobObservation> {
        self.seen.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// What a process uses now, with the kernel's own peak of its memory; `None` once it is gone.
fn read_use(process: u32) -> Option<ResourcePeak> {
    let status = fs::read_to_string(format!("/proc/{process}/status")).ok()?;
    let field = |name: &str| -> Option<u64> {
        let line = status.lines().find(|line| line.starts_with(name))?;
        line.split_ascii_whitespace().nth(1)?.parse().ok()
    };
    let stat = fs::read_to_string(format!("/proc/{process}/stat")).ok()?;
    // After the name, which may hold anything, the 12th and 13th fields are the ticks in user and system mode.
    let times = stat.rsplit_once(')')?.1.split_ascii_whitespace();
    let ticks: u64 = times.skip(11).take(2).filter_map(|ticks| ticks.parse::<u64>().ok()).sum();
    Some(ResourcePeak {
        memory: field("VmHWM:")? * 1024,
        descriptors: fs::read_dir(format!("/proc/{process}/fd")).ok()?.count(),
        threads: usize::try_from(field("Threads:")?).ok()?,
        // Linux counts 100 ticks a second for programs, whatever the kernel's own clock.
        cpu: ticks as f64 / 100.0,
    })
}

/// The ports of each process: those sockets of the kernel's tables whose inodes are among its descriptors.
fn find_ports(processes: &[Option<u32>]) -> Vec<(usize, Vec<(Protocol, SocketAddr)>)> {
    let sockets: Vec<(Protocol, SocketAddr, u64)> = [
        (Protocol::Tcp, "/proc/net/tcp"),
        (Protocol::Tcp, "/proc/net/tcp6"),
        (Protocol::Udp, "/proc/net/udp"),
        (Protocol::Udp, "/proc/net/udp6"),
    ]
    .into_iter()
    .filter_map(|(protocol, path)| Some((protocol, File::open(path).ok()?)))
    .flat_map(|(protocol, table)| {
        // The first line names the columns. Listening sockets stand before thousands of connections, which are not read.
        let lines = BufReader::new(table).lines().map_while(Result::ok).skip(1);
        let found = lines.map(move |line| parse_socket(protocol, &line));
        found.take_while(move |found| protocol == Protocol::Udp || found.is_some()).flatten()
    })
    .collect();
    processes
        .iter()
        .enumerate()
        .filter_map(|(rank, process)| {
            let inodes = socket_inodes((*process)?);
            let own = sockets.iter().filter(|(_, _, inode)| inodes.contains(inode));
            Some((rank, own.map(|(protocol, address, _)| (*protocol, *address)).collect()))
        })
        .collect()
}

fn socket_inodes(process: u32) -> HashSet<u64> {
    let Ok(entries) = fs::read_dir(format!("/proc/{process}/fd")) else { return HashSet::new() };
    entries
        .flatten()
        .filter_map(|entry| {
            let target = fs::read_link(entry.path()).ok()?;
            target.to_str()?.strip_prefix("socket:[")?.strip_suffix(']')?.parse().ok()
        })
        .collect()
}

/// A line of the kernel's tables, for a listening TCP socket or a UDP socket without a fixed peer.
fn parse_socket(protocol: Protocol, line: &str) -> Option<(Protocol, SocketAddr, u64)> {
    let mut fields = line.split_ascii_whitespace().skip(1);
    let local = fields.next()?;
    let state = fields.nth(1)?;
    // Listening, or unconnected.
    if state != (if protocol == Protocol::Tcp { "0A" } else { "07" }) {
        return None;
    }
    let inode = fields.nth(5)?.parse().ok()?;
    Some((protocol, parse_address(local)?, inode))
}

/// A line of the kernel's tables: both addresses and the inode.
fn parse_connection(line: &str) -> Option<(SocketAddr, SocketAddr, u64)> {
    let mut fields = line.split_ascii_whitespace().skip(1);
    let (local, remote) = (parse_address(fields.next()?)?, parse_address(fields.next()?)?);
    Some((local, remote, fields.nth(6)?.parse().ok()?))
}

/// `0100007F:1F90`: each 32 bits of the address as this machine's processor would print them.
fn parse_address(text: &str) -> Option<SocketAddr> {
    let (ip, port) = text.split_once(':')?;
    let words: Vec<u32> = ip
        .as_bytes()
        .chunks(8)
        .map(|digits| u32::from_str_radix(std::str::from_utf8(digits).ok()?, 16).ok())
        .collect::<Option<_>>()?;
    let ip = match words[..] {
        [word] => IpAddr::V4(Ipv4Addr::from(word.to_ne_bytes())),
        [a, b, c, d] => {
            let mut bytes = [0; 16];
            bytes.chunks_mut(4).zip([a, b, c, d]).for_each(|(to, word)| to.copy_from_slice(&word.to_ne_bytes()));
            IpAddr::V6(Ipv6Addr::from(bytes))
        }
        _ => return None,
    };
    Some(SocketAddr::new(ip, u16::from_str_radix(port, 16).ok()?))
}

fn note_use(seen: &mut JobObservation, used: Vec<Option<ResourcePeak>>) {
    let JobObservation { peak, recent, .. } = seen;
    for (rank, used) in used.into_iter().enumerate() {
        let Some(used) = used else { continue };
        peak.get_mut(rank).into_iter().chain(recent.get_mut(rank)).for_each(|peak| peak.rise(used));
    }
}

fn note_ports(known: &mut Vec<Port>, found: &[(usize, Vec<(Protocol, SocketAddr)>)], now: Instant) {
    known.iter_mut().for_each(|port| port.is_open = false);
    for (rank, ports) in found {
        for (protocol, address) in ports {
            let same = |port: &&mut Port| (port.rank, port.protocol, port.address) == (*rank, *protocol, *address);
            match known.iter_mut().find(same) {
                Some(port) => (port.until, port.is_open) = (now, true),
                None => known.push(Port {
                    rank: *rank,
                    protocol: *protocol,
                    address: *address,
                    since: now,
                    until: now,
                    is_open: true,
                }),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::net::{TcpListener, UdpSocket};

    use super::*;

    #[test]
    fn the_ports_of_this_process_are_found_until_they_are_closed() {
        let (tcp, udp) = (TcpListener::bind("127.0.0.1:0").unwrap(), UdpSocket::bind("127.0.0.1:0").unwrap());
        let six = TcpListener::bind("[::1]:0").ok();
        let expected: Vec<_> = [(Protocol::Tcp, tcp.local_addr().unwrap()), (Protocol::Udp, udp.local_addr().unwrap())]
            .into_iter()
            .chain(six.as_ref().map(|six| (Protocol::Tcp, six.local_addr().unwrap())))
            .collect();
        let mine = || find_ports(&[Some(std::process::id())]).remove(0).1;
        let found = mine();
        assert!(expected.iter().all(|port| found.contains(port)), "{expected:?} {found:?}");
        drop((tcp, udp, six));
        let found = mine();
        assert!(expected.iter().all(|port| !found.contains(port)), "{found:?}");
    }

    #[test]
    fn a_connected_socket_is_no_port() {
        let line = "   1: 0100007F:A3B4 0100007F:1F90 01 00000000:00000000 00:00000000 00000000     0        0 77 1";
        assert_eq!(parse_socket(Protocol::Tcp, line), None);
        let (local, remote, inode) = parse_connection(line).unwrap();
        assert_eq!((local.port(), remote.port(), inode), (41908, 8080, 77));
        let line = line.replace(" 01 ", " 0A ");
        assert_eq!(parse_socket(Protocol::Tcp, &line), Some((Protocol::Tcp, "127.0.0.1:41908".parse().unwrap(), 77)));
    }

    #[test]
    fn this_process_uses_something() {
        let used = read_use(std::process::id()).unwrap();
        assert!(used.memory > 1 << 20 && used.descriptors >= 3 && used.threads >= 1);
    }
}
