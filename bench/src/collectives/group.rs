//! Processes that run collectives together, from the side of the program that started them.

use std::fs;
use std::io;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::process::Child;
use std::thread::{self, JoinHandle};
use std::time::Duration;

use comm_core::Deadline;
use comm_core::launch::{Launch, LaunchOutcome, Output};
use isocomm::{Rung, TransportOptions};
use rig::outcome::{complaint, complaint_of_first};
use rig::rank;
use rig::sys::kill_group;
use tempfile::TempDir;

use super::launched::LaunchedRank;
use super::protocol::{Command, Connection, Hello, Measure, MeasureError, OpenedTransport, Reply};
use super::rank::Task;

/// How long ranks of ours may take to start and to connect all transports; libraries of the peers take seconds to load.
const START: Duration = Duration::from_secs(90);

/// How much longer than an operation may take an answer is waited for.
const GRACE: Duration = Duration::from_secs(5);

/// How often processes are looked after while they start or end.
const TICK: Duration = Duration::from_millis(5);

/// Ranks that wait for commands.
pub(crate) struct Group {
    name: String,
    ranks: Ranks,
    /// What can be measured on them.
    members: Vec<OpenedTransport>,
    processes: GroupProcesses,
    /// How long a command may take.
    timeout: Duration,
    /// Why nothing can be measured any more.
    dead: Option<String>,
    /// Holds the socket and the task, where this program has started the ranks.
    _folder: Option<TempDir>,
}

/// How ranks are asked.
enum Ranks {
    /// Over a socket each, by rank.
    Sockets(Vec<Connection>),
    /// Over the control plane of a job of which this process is one.
    Launched(Box<LaunchedRank>),
}

/// The processes behind a group.
enum GroupProcesses {
    /// Ours: the thread that looks after them.
    Launched(Option<JoinHandle<Result<LaunchOutcome, comm_core::Error>>>),
    /// Other programs, and the file that has what they complained about.
    Programs { children: Vec<Child>, complaints: PathBuf },
    /// A launcher's, which looks after them.
    OfLauncher,
}

/// What all ranks of a group together have measured.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Measured {
    /// Of all iterations, on the slowest rank.
    pub(crate) ns: u64,
    /// Of single iterations, each on the rank where it took longest.
    pub(crate) samples: Vec<u64>,
    /// Processor time, of all ranks together.
    pub(crate) cpu_ns: u64,
    /// Wrong elements, of all ranks together.
    pub(crate) wrong: Option<u64>,
}

/// The socket of a group, before its ranks run.
pub(crate) struct GroupListener {
    folder: TempDir,
    listener: UnixListener,
}

impl GroupListener {
    /// # Errors
    /// Why there can be none.
    pub(crate) fn new() -> Result<Self, String> {
        let folder = tempfile::Builder::new().prefix("bench-").permissions(fs::Permissions::from_mode(0o700)).tempdir();
        let folder = folder.map_err(|error| format!("no temporary folder: {error}"))?;
        let path = folder.path().join("socket");
        let listener = UnixListener::bind(&path).map_err(|error| format!("{}: {error}", path.display()))?;
        listener.set_nonblocking(true).map_err(|error| format!("{}: {error}", path.display()))?;
        Ok(GroupListener { folder, listener })
    }

    /// A folder that only this user can enter, removed with the group.
    pub(crate) fn folder(&self) -> &Path {
        self.folder.path()
    }

    /// Where the ranks connect.
    pub(crate) fn socket(&self) -> PathBuf {
        self.folder.path().join("socket")
    }

    /// The group of other programs' processes, each the leader of a process group, once all `ranks` have connected.
    ///
    /// # Errors
    /// Why they have not.
    pub(crate) fn programs(
        self,
        name: &str,
        children: Vec<Child>,
        complaints: PathBuf,
        ranks: usize,
        timeout: Duration,
    ) -> Result<Group, String> {
        self.gather(name, GroupProcesses::Programs { children, complaints }, ranks, timeout)
    }

    fn gather(self, name: &str, processes: GroupProcesses, ranks: usize, timeout: Duration) -> Result<Group, String> {
        let mut group = Group {
            name: name.to_string(),
            ranks: Ranks::Sockets(Vec::new()),
            members: Vec::new(),
            processes,
            timeout,
            dead: None,
            _folder: Some(self.folder),
        };
        let deadline = Deadline::after(START);
        let mut arrived: Vec<(Hello, Connection)> = Vec::new();
        while arrived.len() < ranks {
            match self.listener.accept() {
                Ok((stream, _)) => {
                    let blocking = stream.set_nonblocking(false);
                    let mut connection = Connection::new(stream);
                    let hello = blocking.and_then(|()| connection.receive::<Hello>(Some(deadline)));
                    let hello = hello.map_err(|error| format!("{name}: a rank's first line: {error}"))?;
                    if hello.rank >= ranks || arrived.iter().any(|(other, _)| other.rank == hello.rank) {
                        return Err(format!(
                            "{name}: rank {} of {ranks} connected twice, or does not exist",
                            hello.rank
                        ));
                    }
                    arrived.push((hello, connection));
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    if let Some(why) = group.processes.ended() {
                        return Err(why);
                    }
                    if deadline.has_passed() {
                        let seconds = deadline.waited().as_secs();
                        return Err(format!("only {} of {ranks} ranks were ready in {seconds} s", arrived.len()));
                    }
                    thread::sleep(TICK);
                }
                Err(error) => return Err(format!("{name}: accepting a rank's connection: {error}")),
            }
        }
        arrived.sort_by_key(|(hello, _)| hello.rank);
        let (hellos, connections): (Vec<Hello>, Vec<Connection>) = arrived.into_iter().unzip();
        group.members = on_all_ranks(hellos.into_iter().map(|hello| hello.members));
        group.ranks = Ranks::Sockets(connections);
        Ok(group)
    }
}

/// What there is to be measured: a transport is there if every rank has it.
fn on_all_ranks(of_ranks: impl Iterator<Item = Vec<OpenedTransport>>) -> Vec<OpenedTransport> {
    let both = |mut all: Vec<OpenedTransport>, theirs: Vec<OpenedTransport>| {
        for (member, theirs) in all.iter_mut().zip(theirs) {
            member.error = member.error.take().or(theirs.error);
        }
        all
    };
    of_ranks.reduce(both).unwrap_or_default()
}

impl Group {
    /// Starts `ranks` ranks that connect all of `transports`: processes, or the threads of one for `local` alone.
    ///
    /// # Errors
    /// Why they did not start.
    pub(crate) fn launch(
        name: &str,
        transports: &[Rung],
        (options, quic_congestion): (&TransportOptions, Option<&String>),
        ranks: usize,
    ) -> Result<Self, String> {
        let listener = GroupListener::new()?;
        let task = Task {
            socket: listener.socket(),
            transports: transports.to_vec(),
            options: options.clone(),
            quic_congestion: quic_congestion.cloned(),
            ranks,
        };
        let processes = if transports.iter().all(|kind| kind.is_threads()) { 1 } else { ranks };
        let mut launch = Launch::new(rank::this_program()?, processes);
        launch.args = rank::arguments(&task, listener.folder())?;
        launch.output = Output::Captured;
        let thread = thread::Builder::new()
            .name(format!("launch-{name}"))
            .spawn(move || launch.run())
            .map_err(|error| format!("starting a thread: {error}"))?;
        listener.gather(name, GroupProcesses::Launched(Some(thread)), ranks, options.timeout)
    }

    /// The ranks of a launcher's job, of which this process is rank 0.
    pub(crate) fn launched(rank: LaunchedRank, members: Vec<Vec<OpenedTransport>>, timeout: Duration) -> Self {
        Group {
            name: "the job".into(),
            ranks: Ranks::Launched(Box::new(rank)),
            members: on_all_ranks(members.into_iter()),
            processes: GroupProcesses::OfLauncher,
            timeout,
            dead: None,
            _folder: None,
        }
    }

    /// Transports or libraries of this group.
    pub(crate) fn members(&self) -> &[OpenedTransport] {
        &self.members
    }

    /// Has every rank do `request`, and puts together what they say.
    ///
    /// # Errors
    /// Why there is no figure. After the loss of a process the group says so for ever.
    pub(crate) fn measure(&mut self, request: &Measure) -> Result<Measured, MeasureError> {
        if let Some(why) = &self.dead {
            return Err(MeasureError::Failed(why.clone()));
        }
        let deadline = Deadline::after(self.timeout.saturating_add(GRACE));
        let command = Command::Measure(request.clone());
        match self.ranks.ask(&command, deadline) {
            Ok(replies) => combine(replies),
            Err(error) => {
                let why = self.why(&error, deadline, request);
                self.dead = Some(why.clone());
                // Whoever is left of ours reads the end of the connection and ends. Peers may poll in an operation for ever, and
                // would take the cores from those that are still measured.
                self.ranks = Ranks::Sockets(Vec::new());
                self.processes.kill_programs();
                Err(MeasureError::Failed(why))
            }
        }
    }

    /// Ends the ranks in an orderly way; those that do not want to are killed.
    pub(crate) fn finish(mut self) {
        let deadline = Deadline::after(GRACE);
        match self.ranks {
            Ranks::Sockets(ref mut connections) => {
                for connection in connections {
                    // One that is gone has ended already.
                    let _ = connection.send(&Command::Quit, deadline);
                }
            }
            Ranks::Launched(rank) => return rank.quit(),
        }
        while !deadline.has_passed() && !self.processes.is_over() {
            thread::sleep(TICK);
        }
    }

    fn why(&mut self, error: &io::Error, deadline: Deadline, request: &Measure) -> String {
        let what = format!("{} on {}", request.case.name(), request.member);
        if error.kind() == io::ErrorKind::TimedOut {
            let seconds = deadline.waited().as_secs_f64();
            return format!("{what} did not finish within {seconds:.1} s; give a longer --timeout");
        }
        if matches!(self.processes, GroupProcesses::OfLauncher) {
            return format!("{what}: {error}");
        }
        // The end of a connection comes a moment before the end of the process.
        let soon = Deadline::after(GRACE);
        while !soon.has_passed() {
            if let Some(why) = self.processes.ended() {
                return format!("{what}: {why}");
            }
            thread::sleep(TICK);
        }
        format!("{what}: the connection to a rank of {}: {error}", self.name)
    }
}

impl Ranks {
    /// Has all do `command`; what they say, by rank.
    fn ask(&mut self, command: &Command, deadline: Deadline) -> io::Result<Vec<Reply>> {
        match self {
            Ranks::Sockets(connections) => {
                connections.iter_mut().try_for_each(|connection| connection.send(command, deadline))?;
                connections.iter_mut().map(|connection| connection.receive(Some(deadline))).collect()
            }
            Ranks::Launched(rank) => rank.ask(command, deadline).map_err(|error| match error {
                comm_core::Error::Timeout { .. } => io::ErrorKind::TimedOut.into(),
                error => io::Error::other(error.to_string()),
            }),
        }
    }
}

impl GroupProcesses {
    /// Why processes have ended too early; `None` while all run.
    fn ended(&mut self) -> Option<String> {
        match self {
            GroupProcesses::Launched(thread) => {
                if !thread.as_ref().is_none_or(|thread| thread.is_finished()) {
                    return None;
                }
                Some(match thread.take().map(JoinHandle::join) {
                    Some(Ok(Ok(outcome))) => describe(&outcome),
                    Some(Ok(Err(error))) => error.to_string(),
                    Some(Err(_)) => "the thread that watches the ranks panicked".into(),
                    None => "the ranks have ended".into(),
                })
            }
            GroupProcesses::Programs { children, complaints } => {
                let status = children.iter_mut().find_map(|child| child.try_wait().ok().flatten())?;
                let said = fs::read(complaints).unwrap_or_default();
                let line = complaint(&String::from_utf8_lossy(&said)).unwrap_or_else(|| "it printed nothing".into());
                Some(format!("{line} ({status})"))
            }
            GroupProcesses::OfLauncher => None,
        }
    }

    fn is_over(&mut self) -> bool {
        match self {
            GroupProcesses::Launched(thread) => thread.as_ref().is_none_or(JoinHandle::is_finished),
            GroupProcesses::Programs { children, .. } => {
                children.iter_mut().all(|child| matches!(child.try_wait(), Ok(Some(_)) | Err(_)))
            }
            GroupProcesses::OfLauncher => true,
        }
    }
}

impl GroupProcesses {
    /// Ranks of ours die with this process.
    fn kill_programs(&mut self) {
        if let GroupProcesses::Programs { children, .. } = self {
            for child in children {
                if matches!(child.try_wait(), Ok(None)) {
                    kill_group(child.id());
                    let _ = child.wait();
                }
            }
        }
    }
}

impl Drop for GroupProcesses {
    fn drop(&mut self) {
        self.kill_programs();
    }
}

fn describe(outcome: &LaunchOutcome) -> String {
    let said = complaint_of_first(outcome);
    let cause = outcome.cause.clone().unwrap_or_else(|| "the ranks ended by themselves".into());
    match said {
        Some(said) => format!("{cause}: {said}"),
        None => cause,
    }
}

/// One result from those of all ranks.
fn combine(replies: Vec<Reply>) -> Result<Measured, MeasureError> {
    let errors = || replies.iter().filter_map(|reply| reply.error.clone());
    if let Some(error) = errors().find(|error| matches!(error, MeasureError::Failed(_))).or_else(|| errors().next()) {
        return Err(error);
    }
    let mut measured = Measured::default();
    for reply in replies {
        measured.ns = measured.ns.max(reply.ns);
        measured.cpu_ns += reply.cpu_ns;
        measured.wrong = match (measured.wrong, reply.wrong) {
            (Some(a), Some(b)) => Some(a.saturating_add(b)),
            (a, b) => a.or(b),
        };
        if measured.samples.is_empty() {
            measured.samples = reply.samples;
        } else {
            measured.samples.iter_mut().zip(reply.samples).for_each(|(ours, theirs)| *ours = theirs.max(*ours));
        }
    }
    Ok(measured)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_slowest_rank_counts_and_wrong_elements_add_up() {
        let reply =
            |ns, samples: &[u64], wrong| Reply { ns, samples: samples.to_vec(), cpu_ns: 10, wrong, error: None };
        let measured = combine(vec![reply(5, &[1, 4], Some(0)), reply(7, &[3, 2], Some(2))]).unwrap();
        assert_eq!(measured, Measured { ns: 7, samples: vec![3, 4], cpu_ns: 20, wrong: Some(2) });
        let unsupported = MeasureError::Unsupported("no".into());
        let failed = MeasureError::Failed("lost".into());
        let with = |error: &MeasureError| Reply { error: Some(error.clone()), ..reply(1, &[], None) };
        assert_eq!(combine(vec![with(&unsupported), with(&failed)]).unwrap_err(), failed);
        assert_eq!(combine(vec![with(&unsupported), reply(1, &[], None)]).unwrap_err(), unsupported);
    }
}
