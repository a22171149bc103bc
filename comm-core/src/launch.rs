//! Starts one process a rank on this machine, and sees to it that all of them end.

use std::collections::VecDeque;
use std::ffi::OsString;
use std::fs;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{self, Receiver, Sender};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use signal_hook::SigId;
use signal_hook::consts::{SIGCHLD, SIGHUP, SIGINT, SIGKILL, SIGTERM};

use crate::deadline::Deadline;
use crate::error::{Error, Result};
use crate::job::{EXIT_ECHO, MAX_WORLD_SIZE, Secret, fill_random, hex, vars};
use crate::sys::{self, Waiter};

/// Signals that end the launcher, and so the ranks.
const ENDING: [i32; 3] = [SIGINT, SIGTERM, SIGHUP];

/// The signals by which a user ends a job: SIGINT, SIGTERM and SIGHUP, without those that this process was started to ignore (by `nohup`,
/// or by a script in the background).
pub fn ending_signals() -> Vec<i32> {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let ignored = status.lines().find_map(|line| u64::from_str_radix(line.strip_prefix("SigIgn:")?.trim(), 16).ok());
    ENDING.into_iter().filter(|signal| ignored.unwrap_or(0) >> (signal - 1) & 1 == 0).collect()
}

/// Longest line that is kept in one piece.
const MAX_LINE: usize = 64 << 10;

/// Most bytes that are kept of each captured stream; of a longer one the end.
const MAX_CAPTURED: usize = 16 << 20;

/// How long after a rank has exited with an error another one that a signal killed is still taken for the cause: the kernel
/// closes a dying process's connections some time before its parent can see that it is dead, and the others may be quicker.
const LATE_NEWS: Duration = Duration::from_millis(200);

/// How long output is still waited for when its process is gone.
const DRAIN: Duration = Duration::from_secs(1);

/// A job of processes on this machine, one a rank.
///
/// The ranks find each other through [`Job::from_env`](crate::Job::from_env): they get an address file in a directory that only
/// this user can enter and that is removed at the end, and a fresh secret that lies in the launcher's memory and on no disk:
/// their `COMM_SECRET_FILE` is a file below `/proc` that only processes of this user can open and that is gone when the launcher is,
/// however that ends.
///
/// A rank that fails because of another should exit with [`EXIT_ECHO`], so that
/// [the cause](LaunchOutcome::cause) is the other.
///
/// Each rank leads a process group of its own and reads nothing from the terminal: Ctrl-C reaches the launcher alone, which hands it
/// on to every rank, once. When a rank ends, whatever it has started and left in its group is killed; when the launcher
/// itself is killed, the kernel kills the ranks.
#[derive(Clone, Debug)]
pub struct Launch {
    /// The program.
    pub program: PathBuf,
    /// Its arguments.
    pub args: Vec<OsString>,
    /// Number of ranks.
    pub ranks: usize,
    /// Variables that the ranks get in addition to the launcher's own.
    pub env: Vec<(String, String)>,
    /// Where their output goes.
    pub output: Output,
    /// How long the others may go on after a rank has failed or the launcher got a signal, before they get SIGTERM, and then
    /// again before they get SIGKILL.
    pub grace: Duration,
    /// When to end the job if it has not ended by itself; `None` for never.
    pub timeout: Option<Duration>,
}

/// Where the output of ranks goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Output {
    /// Line by line to the launcher's own standard output and error, each line after `[rank 3] `.
    Prefixed,
    /// Rank 0's standard output is the launcher's, untouched. Everything else goes line by line, with a prefix, to standard error.
    RankZeroPlain,
    /// Into [`LaunchOutcome::captured`].
    Captured,
}

/// How a job ended.
#[derive(Clone, Debug)]
pub struct LaunchOutcome {
    /// The exit code of the rank that is the cause of the failure, 128 + n if signal n ended it, or 128 + n if the launcher got signal n; 0
    /// if all went well; 124 if the time was up.
    pub code: i32,
    /// What made the job fail, for people: the first rank that failed by itself, or was killed at about that time.
    pub cause: Option<String>,
    /// How each rank ended, as [`code`](LaunchOutcome::code).
    pub codes: Vec<i32>,
    /// Standard output and error of each rank, with [`Output::Captured`].
    pub captured: Vec<Captured>,
    /// The signal that the launcher got, if one ended the job: a caller that would go on should end too.
    pub interrupted_by: Option<i32>,
}

/// What a rank has written, at most its last 16 MiB a stream.
#[derive(Clone, Debug, Default)]
pub struct Captured {
    /// Standard output.
    pub stdout: String,
    /// Standard error.
    pub stderr: String,
}

impl Launch {
    /// `ranks` times `program`, without arguments, with prefixed output and 3 s of grace.
    pub fn new(program: impl Into<PathBuf>, ranks: usize) -> Self {
        Launch {
            program: program.into(),
            args: Vec::new(),
            ranks,
            env: Vec::new(),
            output: Output::Prefixed,
            grace: Duration::from_secs(3),
            timeout: None,
        }
    }

    /// Starts the ranks and returns when all have ended.
    ///
    /// SIGINT, SIGTERM and SIGHUP that come meanwhile are handed on; a second one kills. They keep being caught when this
    /// has returned, so the caller should end soon, or handle them itself.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for 0 ranks or too many, [`Error::Io`] when a process cannot be started, for instance because
    /// there is no such program. No process is left behind then either.
    pub fn run(&self) -> Result<LaunchOutcome> {
        if self.ranks == 0 || self.ranks > MAX_WORLD_SIZE {
            return Err(Error::invalid(format!(
                "cannot launch {} ranks; 1 to {MAX_WORLD_SIZE} are possible",
                self.ranks
            )));
        }
        // Before the first process, so that no signal finds some of them unguarded.
        let signals = Signals::catch()?;
        let meeting = MeetingPoint::create()?;
        let (streams, ends) = mpsc::channel();
        let mut running = Running { ranks: Vec::with_capacity(self.ranks) };
        let sinks: Vec<Sinks> = (0..self.ranks).map(|rank| Sinks::new(self.output, rank)).collect();
        let mut open_streams = 0;
        for (rank, sinks) in sinks.iter().enumerate() {
            let mut child = self.start(rank, &meeting)?;
            let pipes = (child.stdout.take(), child.stderr.take());
            // Guarded from here on: an error below kills it.
            running.ranks.push(Rank { child, status: None });
            if let Some(pipe) = pipes.0 {
                drain(pipe, sinks.stdout.clone(), streams.clone())?;
                open_streams += 1;
            }
            if let Some(pipe) = pipes.1 {
                drain(pipe, sinks.stderr.clone(), streams.clone())?;
                open_streams += 1;
            }
        }
        let Ending { code, cause, interrupted_by } = self.watch(&mut running, &signals)?;
        wait_for_output(&ends, open_streams);
        let codes = running.ranks.iter().map(|rank| rank.status.map_or(0, code_of)).collect();
        let captured = match self.output {
            Output::Captured => sinks.iter().map(Sinks::captured).collect(),
            _ => Vec::new(),
        };
        Ok(LaunchOutcome { code, cause, codes, captured, interrupted_by })
    }

    fn start(&self, rank: usize, meeting: &MeetingPoint) -> Result<Child> {
        let mut command = Command::new(&self.program);
        command
            .args(&self.args)
            .envs(self.env.iter().map(|(name, value)| (name, value)))
            // What a job of the caller's own may have left there.
            .env_remove(vars::SECRET)
            .env_remove(vars::INSECURE)
            .env(vars::RANK, rank.to_string())
            .env(vars::WORLD_SIZE, self.ranks.to_string())
            .env(vars::ADDR, {
                let mut address = OsString::from("file:");
                address.push(meeting.address_file());
                address
            })
            .env(vars::SECRET_FILE, meeting.secret_file())
            .env(vars::JOB_ID, &meeting.job_id)
            .env(vars::EPOCH, "0")
            .env(vars::LAUNCHER_PID, std::process::id().to_string())
            .stdin(Stdio::null())
            .stdout(if self.output == Output::RankZeroPlain && rank == 0 { Stdio::inherit() } else { Stdio::piped() })
            .stderr(Stdio::piped())
            .process_group(0);
        sys::die_with_this_process(&mut command);
        command.spawn().map_err(|e| Error::io(format!("starting rank {rank}: running {}", self.program.display()), e))
    }

    /// Waits until all ranks have ended, and ends them when one has failed, a signal has come or the time is up.
    fn watch(&self, running: &mut Running, signals: &Signals) -> Result<Ending> {
        let deadline = Deadline::after(self.timeout.unwrap_or(Duration::MAX));
        let mut outcome: Option<(i32, String)> = None;
        let mut interrupted_by = None;
        // What the outcome rests on, and since when, as long as another rank may still turn out to be the cause.
        let mut suspicion: Option<(Blame, Instant)> = None;
        // What happens next to ranks that go on, and when.
        let mut steps: VecDeque<(Instant, i32)> = VecDeque::new();
        loop {
            for (rank, status) in running.reap()? {
                let blame = Blame::of(status);
                let is_cause = match suspicion {
                    None => outcome.is_none(),
                    Some((other, since)) => blame.outweighs(other, since.elapsed()),
                };
                if is_cause {
                    if outcome.is_none() {
                        steps = self.steps();
                    }
                    outcome = Some((code_of(status), blame.describe(rank, status)));
                    suspicion = Some((blame, Instant::now()));
                }
            }
            if !running.any() {
                break;
            }
            for signal in signals.take() {
                interrupted_by.get_or_insert(signal);
                if outcome.is_none() {
                    steps = self.steps();
                    outcome = Some((128 + signal, format!("the launcher got {}", name_of(signal))));
                    running.signal(signal);
                } else {
                    // Someone is impatient.
                    running.signal(SIGKILL);
                }
                suspicion = None;
            }
            if outcome.is_none() && deadline.has_passed() {
                steps = self.steps();
                steps.iter_mut().for_each(|(at, _)| *at = at.checked_sub(self.grace).unwrap_or(*at));
                outcome = Some((124, format!("the job did not end within {:.1} s", deadline.waited().as_secs_f64())));
            }
            while let Some(&(at, signal)) = steps.front() {
                if Instant::now() < at {
                    break;
                }
                running.signal(signal);
                suspicion = None;
                steps.pop_front();
            }
            let next = steps.front().map_or(deadline.instant(), |(at, _)| *at);
            signals.wait(next.saturating_duration_since(Instant::now()))?;
        }
        let (code, cause) = outcome.map_or((0, None), |(code, cause)| (code, Some(cause)));
        Ok(Ending { code, cause, interrupted_by })
    }

    fn steps(&self) -> VecDeque<(Instant, i32)> {
        let now = Instant::now();
        [(now + self.grace, SIGTERM), (now + 2 * self.grace, SIGKILL)].into()
    }
}

/// Why and how a job ended.
struct Ending {
    code: i32,
    cause: Option<String>,
    interrupted_by: Option<i32>,
}

/// How much speaks for a rank that has failed being the cause of what the others say, least first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Blame {
    /// It says itself that it is not.
    Echo,
    /// It has exited.
    Exit,
    /// A signal has ended it.
    Signal,
}

impl Blame {
    fn of(status: ExitStatus) -> Self {
        match status.code() {
            None => Blame::Signal,
            Some(EXIT_ECHO) => Blame::Echo,
            Some(_) => Blame::Exit,
        }
    }

    /// Whether this, seen `later` than `other`, shows that `other` was not the cause. An echo never is one, if there is anything else.
    fn outweighs(self, other: Blame, later: Duration) -> bool {
        self > other && (other == Blame::Echo || later < LATE_NEWS)
    }

    fn describe(self, rank: usize, status: ExitStatus) -> String {
        match (self, status.signal()) {
            (_, Some(signal)) => format!("rank {rank} was killed by {}", name_of(signal)),
            (Blame::Echo, _) => format!("rank {rank} exited with code {EXIT_ECHO}, because of another rank"),
            _ => format!("rank {rank} exited with code {}", code_of(status)),
        }
    }
}

/// The processes. Dropping kills those that are left.
struct Running {
    ranks: Vec<Rank>,
}

struct Rank {
    child: Child,
    status: Option<ExitStatus>,
}

impl Running {
    fn any(&self) -> bool {
        self.ranks.iter().any(|rank| rank.status.is_none())
    }

    fn signal(&self, signal: i32) {
        self.ranks.iter().filter(|r| r.status.is_none()).for_each(|r| sys::signal_group(r.child.id(), signal));
    }

    /// Buries who has ended; those among them that failed.
    fn reap(&mut self) -> Result<Vec<(usize, ExitStatus)>> {
        let mut failed = Vec::new();
        for (number, rank) in self.ranks.iter_mut().enumerate() {
            let pid = rank.child.id();
            let what = || format!("waiting for rank {number} (process {pid})");
            if rank.status.is_some() || !sys::has_ended(pid).map_err(|e| Error::io(what(), e))? {
                continue;
            }
            // Its number is still its own, so this cannot hit anyone else.
            sys::signal_group(pid, SIGKILL);
            let status = rank.child.wait().map_err(|e| Error::io(what(), e))?;
            rank.status = Some(status);
            if !status.success() {
                failed.push((number, status));
            }
        }
        Ok(failed)
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        for rank in self.ranks.iter_mut().filter(|rank| rank.status.is_none()) {
            sys::signal_group(rank.child.id(), SIGKILL);
            // Just killed, so this does not take long; there is nobody to tell of an error.
            let _ = rank.child.wait();
        }
    }
}

/// The job's secret, and a directory with room for the address of rank 0, which is removed when this is dropped.
struct MeetingPoint {
    directory: tempfile::TempDir,
    /// In memory: a launcher that is killed leaves no secret behind.
    secret: fs::File,
    job_id: String,
}

impl MeetingPoint {
    fn create() -> Result<Self> {
        let directory = tempfile::Builder::new()
            .prefix("comm-")
            .permissions(fs::Permissions::from_mode(0o700))
            .tempdir()
            .map_err(|e| Error::io("making a directory for the address of rank 0", e))?;
        let mut id = [0; 8];
        fill_random(&mut id)?;
        let text = Secret::random()?;
        let secret = sys::memory_file(c"comm-secret")
            .and_then(|mut file| {
                file.set_permissions(fs::Permissions::from_mode(0o600))?;
                file.write_all(text.bytes())?;
                Ok(file)
            })
            .map_err(|e| Error::io("keeping the job's secret in a file in memory", e))?;
        Ok(MeetingPoint { directory, secret, job_id: hex(&id) })
    }

    /// Where the ranks find the secret while this process lives.
    fn secret_file(&self) -> PathBuf {
        format!("/proc/{}/fd/{}", std::process::id(), self.secret.as_raw_fd()).into()
    }

    fn address_file(&self) -> PathBuf {
        self.path().join("address")
    }

    fn path(&self) -> &Path {
        self.directory.path()
    }
}

/// Signals that have come, and a way to wait for the next.
struct Signals {
    counts: Vec<(i32, Arc<AtomicUsize>)>,
    woken: UnixStream,
    registered: Vec<SigId>,
}

impl Signals {
    fn catch() -> Result<Self> {
        let what = |e| Error::io("catching signals", e);
        let (waker, woken) = UnixStream::pair().map_err(what)?;
        woken.set_nonblocking(true).map_err(what)?;
        let mut signals = Signals { counts: Vec::new(), woken, registered: Vec::new() };
        let ending = ending_signals();
        for signal in ending.iter().copied() {
            let flag = Arc::new(AtomicUsize::new(0));
            signals.counts.push((signal, Arc::clone(&flag)));
            // Handlers run in the order of registration: counted first, then woken.
            signals.registered.push(signal_hook::flag::register_usize(signal, flag, 1).map_err(what)?);
        }
        for signal in ending.into_iter().chain([SIGCHLD]) {
            let waker = waker.try_clone().map_err(what)?;
            signals.registered.push(signal_hook::low_level::pipe::register(signal, waker).map_err(what)?);
        }
        Ok(signals)
    }

    /// Signals that have come since the last call.
    fn take(&self) -> Vec<i32> {
        self.counts.iter().filter(|(_, flag)| flag.swap(0, Ordering::AcqRel) != 0).map(|(signal, _)| *signal).collect()
    }

    /// Waits for a signal, at most `time`.
    fn wait(&self, time: Duration) -> Result<()> {
        let mut waiters = [Waiter::new(self.woken.as_fd(), false)];
        sys::poll(&mut waiters, time).map_err(|e| Error::io("waiting for processes", e))?;
        let mut bytes = [0; 64];
        while matches!((&self.woken).read(&mut bytes), Ok(n) if n == bytes.len()) {}
        Ok(())
    }
}

impl Drop for Signals {
    fn drop(&mut self) {
        for id in self.registered.drain(..) {
            signal_hook::low_level::unregister(id);
        }
    }
}

/// Where a rank's two streams go.
struct Sinks {
    stdout: LineSink,
    stderr: LineSink,
}

#[derive(Clone)]
enum LineSink {
    Stdout(String),
    Stderr(String),
    Memory(Arc<Mutex<VecDeque<u8>>>),
}

impl Sinks {
    fn new(output: Output, rank: usize) -> Self {
        let prefix = format!("[rank {rank}] ");
        match output {
            Output::Prefixed => Sinks { stdout: LineSink::Stdout(prefix.clone()), stderr: LineSink::Stderr(prefix) },
            Output::RankZeroPlain => {
                Sinks { stdout: LineSink::Stderr(prefix.clone()), stderr: LineSink::Stderr(prefix) }
            }
            Output::Captured => {
                Sinks { stdout: LineSink::Memory(Arc::default()), stderr: LineSink::Memory(Arc::default()) }
            }
        }
    }

    fn captured(&self) -> Captured {
        let text = |sink: &LineSink| match sink {
            LineSink::Memory(bytes) => {
                let mut bytes = bytes.lock().unwrap_or_else(PoisonError::into_inner);
                String::from_utf8_lossy(bytes.make_contiguous()).into_owned()
            }
            _ => String::new(),
        };
        Captured { stdout: text(&self.stdout), stderr: text(&self.stderr) }
    }
}

impl LineSink {
    /// Writes one line, with its end if it has one. A reader of the launcher's output who went away is no reason to stop a job.
    fn write(&self, line: &[u8]) {
        match self {
            LineSink::Stdout(prefix) => drop(io::stdout().write_all(&prefixed(prefix, line))),
            LineSink::Stderr(prefix) => drop(io::stderr().write_all(&prefixed(prefix, line))),
            LineSink::Memory(bytes) => {
                let mut bytes = bytes.lock().unwrap_or_else(PoisonError::into_inner);
                bytes.extend(line);
                let excess = bytes.len().saturating_sub(MAX_CAPTURED);
                bytes.drain(..excess);
            }
        }
    }
}

/// One whole line, so that one write brings it out unmixed with others.
fn prefixed(prefix: &str, line: &[u8]) -> Vec<u8> {
    let mut whole = Vec::with_capacity(prefix.len() + line.len() + 1);
    whole.extend_from_slice(prefix.as_bytes());
    whole.extend_from_slice(line);
    if !line.ends_with(b"\n") {
        whole.push(b'\n');
    }
    whole
}

/// Reads a rank's stream to its end in a thread of its own, and then says so.
fn drain(pipe: impl Read + Send + 'static, sink: LineSink, ended: Sender<()>) -> Result<()> {
    let read_lines = move || {
        let mut lines = BufReader::new(pipe);
        let mut line = Vec::new();
        loop {
            line.clear();
            match lines.by_ref().take(MAX_LINE as u64).read_until(b'\n', &mut line) {
                Ok(0) => break,
                Ok(_) => sink.write(&line),
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(_) => break,
            }
        }
        // Nobody may be interested any more.
        let _ = ended.send(());
    };
    let thread = thread::Builder::new().name("comm-output".into()).spawn(read_lines);
    thread.map(drop).map_err(|e| Error::io("starting a thread for a rank's output", e))
}

/// Waits until every stream is at its end; a process that has left its rank's group may hold one open for ever.
fn wait_for_output(ends: &Receiver<()>, streams: usize) {
    let deadline = Deadline::after(DRAIN);
    for _ in 0..streams {
        if ends.recv_timeout(deadline.remaining()).is_err() {
            break;
        }
    }
    let _ = io::stdout().flush();
}

fn code_of(status: ExitStatus) -> i32 {
    status.code().or_else(|| status.signal().map(|signal| 128 + signal)).unwrap_or(1)
}

fn name_of(signal: i32) -> String {
    match signal_hook::low_level::signal_name(signal) {
        Some(name) => format!("signal {signal} ({name})"),
        None => format!("signal {signal}"),
    }
}
