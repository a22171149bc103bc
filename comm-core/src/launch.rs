//! Starts one process a rank on this machine, and sees to it that all of them end.

use std::collections::VecDeque;
use std::ffi::OsString;
use std::fs;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc::{self, Receiver, Sender};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use rustix::fs::MemfdFlags;
use signal_hook::SigId;
use signal_hook::consts::{SIGCHLD, SIGHUP, SIGINT, SIGKILL, SIGTERM};

use crate::deadline::Deadline;
use crate::error::{Error, Result};
use crate::folder::PrivateFolder;
use crate::hex;
use crate::job::{
    Address, EXIT_ECHO, EXIT_STOPPED, Job, MAX_WORLD_SIZE, Secret, fill_random, other_launchers_variables, vars,
};
use crate::printer::{self, DRAIN_TIMEOUT, Printer};
use crate::process::{self, STOP_SIGNALS, not_ignored};
use crate::sys::{self, Waiter};

/// Signals that end the launcher, and so the ranks.
const ENDING: [i32; 3] = [SIGINT, SIGTERM, SIGHUP];

/// The signals by which a user ends a job: SIGINT, SIGTERM and SIGHUP, without those that this process was started to ignore (by `nohup`,
/// or by a script in the background).
pub fn ending_signals() -> Vec<i32> {
    not_ignored(&ENDING)
}

/// Longest line that is kept in one piece.
const MAX_LINE: usize = 64 << 10;

/// Most bytes that are kept of each captured stream; of a longer one the end.
const MAX_CAPTURED: usize = 16 << 20;

/// How long after a rank has exited with an error another one that a signal killed is still taken for the cause: the kernel
/// closes a dying process's connections some time before its parent can see that it is dead, and the others may be quicker.
const BLAME_WINDOW: Duration = Duration::from_millis(200);

/// How long output is still waited for when all ranks have ended and nothing has come, and how long at most. The first also bounds the wait for
/// a reader that takes nothing once a signal has ended the job.
const DRAIN: Duration = Duration::from_secs(1);
const LONGEST_DRAIN: Duration = Duration::from_secs(10);

/// How often a signal is looked for meanwhile.
const GLANCE: Duration = Duration::from_millis(50);

/// How long the launcher sleeps at most, whatever it waits for.
const LOOK: Duration = Duration::from_secs(1);

/// A job of processes on this machine, one a rank.
///
/// The ranks find each other through [`Job::from_env`](crate::job::Job::from_env): they get an address file in a directory that only
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
    /// For ranks that save their state and leave at [`STOP_SIGNALS`] (see [`StopRequest`](crate::process::StopRequest)): those signals are
    /// handed on to them, and they have this time to leave instead of [`grace`](Launch::grace). More of these signals change nothing then.
    /// `None` for ranks that do not: SIGTERM ends the job as SIGINT does, and SIGUSR1 is not caught.
    pub stop: Option<Duration>,
    /// When to end the job if it has not ended by itself; `None` for never.
    pub timeout: Option<Duration>,
    /// How long, at the end, to wait for the reader of the launcher's own output while it takes nothing. As long as it goes on reading,
    /// however slowly, all of it is written.
    pub drain_timeout: Duration,
    /// For a process that is itself a rank of a job which another launcher has started: the one process that is started here has the same
    /// rank and number of ranks, by the same variables of that launcher, but meets the others at this job's address, under its id. The secret
    /// is that of the variables, too. `None` for a job of this launcher's own.
    pub in_place_of: Option<Job>,
}

/// Where the output of ranks goes. No rank ever waits for the reader of the launcher's: up to 16 MiB are kept for it, then the oldest lines are
/// left out, which is said in their place.
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
    /// if all went well; [`EXIT_STOPPED`] if all ranks saved and left; 124 if the time was up.
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
            stop: None,
            timeout: None,
            drain_timeout: DRAIN_TIMEOUT,
            in_place_of: None,
        }
    }

    /// Starts the ranks and returns when all have ended.
    ///
    /// SIGINT, SIGTERM and SIGHUP that come meanwhile are handed on; a second one kills. They keep being caught when this
    /// has returned, so the caller should end soon, or handle them itself. One that comes when the ranks have ended, and only their
    /// output is still waited for, ends that.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for 0 ranks or too many, or more than one [in the place of](Launch::in_place_of) a rank, [`Error::Io`] when a process cannot be started, for instance because
    /// there is no such program. No process is left behind then either.
    pub fn run(&self) -> Result<LaunchOutcome> {
        self.run_guarded(&Signals::catch(self.stop.is_some())?)
    }

    /// As [`run`](Launch::run), and starts the ranks again where the job has failed, as often as `again` gives the arguments for it. A signal
    /// that comes between two starts ends the second.
    ///
    /// # Errors
    /// Those of [`run`](Launch::run).
    pub fn run_again(
        &mut self,
        again: &mut dyn FnMut(&LaunchOutcome) -> Option<Vec<OsString>>,
    ) -> Result<LaunchOutcome> {
        let signals = Signals::catch(self.stop.is_some())?;
        loop {
            let outcome = self.run_guarded(&signals)?;
            if [0, EXIT_STOPPED].contains(&outcome.code) || outcome.interrupted_by.is_some() {
                return Ok(outcome);
            }
            match again(&outcome) {
                Some(args) => self.args = args,
                None => return Ok(outcome),
            }
        }
    }

    /// Starts the ranks and returns when all have ended, with the signals caught before the first process, so that none finds some of them
    /// unguarded.
    fn run_guarded(&self, signals: &Signals) -> Result<LaunchOutcome> {
        if self.ranks == 0 || self.ranks > MAX_WORLD_SIZE {
            return Err(Error::invalid(format!(
                "cannot launch {} ranks; 1 to {MAX_WORLD_SIZE} are possible",
                self.ranks
            )));
        }
        if self.in_place_of.is_some() && self.ranks != 1 {
            return Err(Error::invalid(format!("{} processes cannot take the place of one rank", self.ranks)));
        }
        process::prepare();
        let rendezvous = RendezvousFolder::create()?;
        let (streams, ends) = mpsc::channel();
        let moved = Arc::new(AtomicU64::new(0));
        let first = self.in_place_of.as_ref().map_or(0, |job| job.rank);
        let mut running = Running { first, ranks: Vec::with_capacity(self.ranks) };
        let sinks: Vec<Sinks> = (0..self.ranks).map(|rank| Sinks::new(self.output, first + rank)).collect();
        let mut open_streams = 0;
        for (rank, sinks) in sinks.iter().enumerate() {
            let mut child = self.start(first + rank, &rendezvous)?;
            let pipes = (child.stdout.take(), child.stderr.take());
            // Guarded from here on: an error below kills it.
            running.ranks.push(Rank { child, status: None, given_up: false });
            if let Some(pipe) = pipes.0 {
                drain(pipe, sinks.stdout.clone(), Arc::clone(&moved), streams.clone())?;
                open_streams += 1;
            }
            if let Some(pipe) = pipes.1 {
                drain(pipe, sinks.stderr.clone(), Arc::clone(&moved), streams.clone())?;
                open_streams += 1;
            }
        }
        let JobEnd { code, cause, interrupted_by } = self.watch(&mut running, signals)?;
        let mut again = None;
        let mut stop = || {
            again = again.or(signals.take().first().copied());
            again.is_some()
        };
        wait_for_output(&ends, open_streams, &moved, &mut stop);
        // After a signal the rest of the output is waited for only shortly, and not at all after a second one.
        let drain_timeout = if interrupted_by.is_some() { self.drain_timeout.min(DRAIN) } else { self.drain_timeout };
        for printer in [printer::stdout(), printer::stderr()] {
            printer.finish_unless(drain_timeout, &mut stop);
        }
        let interrupted_by = interrupted_by.or(again);
        let codes = running.ranks.iter().map(|rank| rank.status.map_or(0, code_of)).collect();
        let captured = match self.output {
            Output::Captured => sinks.iter().map(Sinks::captured).collect(),
            _ => Vec::new(),
        };
        Ok(LaunchOutcome { code, cause, codes, captured, interrupted_by })
    }

    fn start(&self, rank: usize, rendezvous: &RendezvousFolder) -> Result<Child> {
        let mut command = Command::new(&self.program);
        match &self.in_place_of {
            Some(job) => take_place(&mut command, job),
            None => self.set_job(&mut command, rank, rendezvous),
        }
        command
            .args(&self.args)
            .envs(self.env.iter().map(|(name, value)| (name, value)))
            .stdin(Stdio::null())
            .stdout(if self.output == Output::RankZeroPlain && rank == 0 { Stdio::inherit() } else { Stdio::piped() })
            .stderr(Stdio::piped())
            .process_group(0);
        sys::die_with_this_process(&mut command);
        // Its group is not the one in the terminal's foreground.
        sys::ignore_terminal_output_stops(&mut command);
        command.spawn().map_err(|e| Error::io(format!("starting rank {rank}: running {}", self.program.display()), e))
    }

    /// The variables of a rank of a job of this launcher's own.
    fn set_job(&self, command: &mut Command, rank: usize, rendezvous: &RendezvousFolder) {
        for name in other_launchers_variables() {
            command.env_remove(name);
        }
        command
            // What a job of the caller's own may have left there.
            .env_remove(vars::SECRET)
            .env_remove(vars::INSECURE)
            .env(vars::RANK, rank.to_string())
            .env(vars::WORLD_SIZE, self.ranks.to_string())
            .env(vars::ADDR, {
                let mut address = OsString::from("file:");
                address.push(rendezvous.address_file());
                address
            })
            .env(vars::SECRET_FILE, rendezvous.secret_file())
            .env(vars::JOB_ID, &rendezvous.job_id)
            .env(vars::EPOCH, "0")
            .env(vars::LAUNCHER_PID, std::process::id().to_string());
    }

    /// Waits until all ranks have ended, and ends them when one has failed, a signal has come or the time is up.
    fn watch(&self, running: &mut Running, signals: &Signals) -> Result<JobEnd> {
        let deadline = Deadline::after(self.timeout.unwrap_or(Duration::MAX));
        let mut end = Ending::default();
        loop {
            for (rank, status) in running.reap()? {
                end.failed(rank, status, self.grace);
            }
            if !running.any() {
                break;
            }
            for signal in signals.take() {
                match self.stop.filter(|_| STOP_SIGNALS.contains(&signal)) {
                    Some(time) => end.asked_to_leave(signal, time, running),
                    None => end.ended_by(signal, self.grace, running),
                }
            }
            if end.outcome.is_none() && deadline.has_passed() {
                end.steps = Steps::after(Duration::ZERO);
                let waited = deadline.waited().as_secs_f64();
                end.outcome = Some((124, format!("the job did not end within {waited:.1} s")));
            }
            if let Some(signal) = end.steps.due(self.grace) {
                end.give_up(signal, running);
            }
            // When all signals are sent, only the kernel can end a rank, however long that takes it: a signal says when.
            let next = match (end.outcome.is_none(), end.steps.remaining()) {
                (true, next) => Some(next.map_or(deadline.remaining(), |next| next.min(deadline.remaining()))),
                (false, next) => next,
            };
            signals.wait(next.map_or(LOOK, |next| next.min(LOOK)))?;
        }
        Ok(end.of(running, self.stop.is_some()))
    }
}

/// The variables of a process that is the rank that this one is, of a job with another address and id.
fn take_place(command: &mut Command, job: &Job) {
    let address = match &job.address {
        Address::File(path) => {
            let mut address = OsString::from("file:");
            address.push(path);
            address
        }
        tcp @ Address::Tcp { .. } => tcp.to_string().into(),
    };
    // Its launcher is this process, which the kernel sees to.
    command.env(vars::ADDR, address).env(vars::JOB_ID, &job.id).env_remove(vars::LAUNCHER_PID);
}

/// What is known of the end of a job that has not ended yet.
#[derive(Default)]
struct Ending {
    /// Exit code and cause.
    outcome: Option<(i32, String)>,
    /// The first signal.
    interrupted_by: Option<i32>,
    /// The signal by which ranks were asked to leave.
    leaving: Option<i32>,
    /// What the outcome rests on, and since when, as long as another rank may still turn out to be the cause.
    suspicion: Option<(Blame, Instant)>,
    /// Whether nothing but echoes speaks for the outcome.
    echoes_only: bool,
    /// What happens next to ranks that go on, and when.
    steps: Steps,
}

impl Ending {
    /// A rank has ended, and not well.
    fn failed(&mut self, rank: usize, status: ExitStatus, grace: Duration) {
        let blame = Blame::of(status);
        let is_cause = match self.suspicion {
            None => self.outcome.is_none(),
            Some((other, since)) => blame.outweighs(other, since.elapsed()),
        };
        if is_cause {
            if self.outcome.is_none() {
                self.steps = Steps::after(grace);
            }
            self.outcome = Some((code_of(status), blame.describe(rank, status)));
            self.suspicion = Some((blame, Instant::now()));
            self.echoes_only = blame == Blame::Echo;
        }
    }

    /// The launcher got a signal that asks ranks to leave, for which they have so much time. More of them change nothing.
    fn asked_to_leave(&mut self, signal: i32, time: Duration, running: &Running) {
        self.interrupted_by.get_or_insert(signal);
        if self.outcome.is_none() && self.leaving.is_none() {
            self.steps = Steps::after(time);
            self.leaving = Some(signal);
            running.signal(signal);
        }
    }

    /// The launcher got a signal that ends the job.
    fn ended_by(&mut self, signal: i32, grace: Duration, running: &Running) {
        self.interrupted_by.get_or_insert(signal);
        if self.outcome.is_none() {
            self.steps = Steps::after(grace);
            self.outcome = Some((128 + signal, format!("the launcher got {}", name_of(signal))));
            running.signal(signal);
        } else {
            // A second signal: do not wait any longer.
            running.signal(SIGKILL);
        }
        self.suspicion = None;
    }

    /// Ranks that go on get a signal that ends them.
    fn give_up(&mut self, signal: i32, running: &mut Running) {
        if let Some(asked) = self.leaving.filter(|_| self.outcome.is_none()) {
            self.outcome = Some((128 + asked, format!("not all ranks left when the launcher got {}", name_of(asked))));
        }
        running.signal(signal);
        running.give_up();
        self.suspicion = None;
    }

    /// When all ranks have ended. `may_leave` where they know how to.
    fn of(self, running: &Running, may_leave: bool) -> JobEnd {
        let Ending { mut outcome, interrupted_by, echoes_only, .. } = self;
        let by_stop = interrupted_by.is_none_or(|signal| STOP_SIGNALS.contains(&signal));
        if let Some(code) = running.all_stopped().filter(|_| may_leave && by_stop) {
            return JobEnd { code, cause: None, interrupted_by };
        }
        let given_up = running.given_up();
        if let Some((code, cause)) = outcome.as_mut().filter(|_| echoes_only && interrupted_by.is_none())
            && let Some((first, status)) = given_up.first()
        {
            *code = Some(code_of(*status)).filter(|code| *code != 0).unwrap_or(*code);
            *cause = match &given_up[1..] {
                [] => format!("rank {first} did not end by itself; {cause}"),
                more => {
                    let more: Vec<String> = more.iter().map(|(rank, _)| rank.to_string()).collect();
                    format!("ranks {first}, {} did not end by themselves; {cause}", more.join(", "))
                }
            };
        }
        let (code, cause) = outcome.map_or((0, None), |(code, cause)| (code, Some(cause)));
        JobEnd { code, cause, interrupted_by }
    }
}

/// The signals that end ranks which go on, each some time after the one before: a launcher that was itself stopped meanwhile does not send them
/// all at once.
#[derive(Default)]
struct Steps {
    next: Option<Deadline>,
    signals: VecDeque<i32>,
}

impl Steps {
    fn after(wait: Duration) -> Self {
        Steps { next: Some(Deadline::after(wait)), signals: [SIGTERM, SIGKILL].into() }
    }

    /// The signal whose time has come; the one after it comes `grace` from now.
    fn due(&mut self, grace: Duration) -> Option<i32> {
        self.next.filter(Deadline::has_passed)?;
        let signal = self.signals.pop_front();
        self.next = (!self.signals.is_empty()).then(|| Deadline::after(grace));
        signal
    }

    fn remaining(&self) -> Option<Duration> {
        self.next.map(|next| next.remaining())
    }
}

/// Why and how a job ended.
struct JobEnd {
    code: i32,
    cause: Option<String>,
    interrupted_by: Option<i32>,
}

/// How likely a failed rank is the cause of the other ranks' errors, least first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Blame {
    /// Its exit code says that it was asked to leave.
    Stopped,
    /// Its exit code says that it is not.
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
            Some(EXIT_STOPPED) => Blame::Stopped,
            Some(EXIT_ECHO) => Blame::Echo,
            Some(_) => Blame::Exit,
        }
    }

    /// Whether this, seen `later` than `other`, shows that `other` was not the cause. An echo never is one, if there is anything else, nor is
    /// who left when asked.
    fn outweighs(self, other: Blame, later: Duration) -> bool {
        self > other && (other <= Blame::Echo || later < BLAME_WINDOW)
    }

    fn describe(self, rank: usize, status: ExitStatus) -> String {
        match (self, status.signal()) {
            (_, Some(signal)) => format!("rank {rank} was killed by {}", name_of(signal)),
            (Blame::Echo, _) => format!("rank {rank} exited with code {EXIT_ECHO}, because another rank had failed"),
            _ => format!("rank {rank} exited with code {}", code_of(status)),
        }
    }
}

/// The processes. Dropping kills those that are left.
struct Running {
    /// The number of the first.
    first: usize,
    ranks: Vec<Rank>,
}

struct Rank {
    child: Child,
    status: Option<ExitStatus>,
    /// It did not end by itself and was killed.
    given_up: bool,
}

impl Running {
    fn any(&self) -> bool {
        self.ranks.iter().any(|rank| rank.status.is_none())
    }

    fn signal(&self, signal: i32) {
        self.ranks.iter().filter(|r| r.status.is_none()).for_each(|r| sys::signal_group(r.child.id(), signal));
    }

    /// Whether all ranks have ended well or left when asked, and the exit code that says so.
    fn all_stopped(&self) -> Option<i32> {
        let codes = self.ranks.iter().map(|rank| rank.status.map_or(1, code_of));
        let well = codes.clone().all(|code| [0, EXIT_STOPPED].contains(&code));
        well.then(|| codes.max().unwrap_or(0))
    }

    /// Notes which ranks have to be killed.
    fn give_up(&mut self) {
        self.ranks.iter_mut().filter(|r| r.status.is_none()).for_each(|r| r.given_up = true);
    }

    /// The ranks that had to be killed, and their exit statuses.
    fn given_up(&self) -> Vec<(usize, ExitStatus)> {
        let given_up = (self.first..).zip(&self.ranks).filter(|(_, rank)| rank.given_up);
        given_up.filter_map(|(number, rank)| Some((number, rank.status?))).collect()
    }

    /// Reaps the processes that have exited. Returns those that failed.
    fn reap(&mut self) -> Result<Vec<(usize, ExitStatus)>> {
        let mut failed = Vec::new();
        for (number, rank) in (self.first..).zip(&mut self.ranks) {
            let pid = rank.child.id();
            let what = || format!("waiting for rank {number} (process {pid})");
            if rank.status.is_some() || !sys::has_ended(pid).map_err(|e| Error::io(what(), e))? {
                continue;
            }
            // The process id has not been reused yet, so this cannot hit another process.
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

/// The job's secret, and a directory for the address file of rank 0, which is removed when this is dropped.
struct RendezvousFolder {
    directory: PrivateFolder,
    /// In memory: a launcher that is killed leaves no secret behind.
    secret: fs::File,
    job_id: String,
}

impl RendezvousFolder {
    fn create() -> Result<Self> {
        let directory = PrivateFolder::new("comm-launch-")
            .map_err(|e| Error::io("making a directory for the address of rank 0", e))?;
        let mut id = [0; 8];
        fill_random(&mut id)?;
        let text = Secret::random()?;
        let secret = sys::memory_file("comm-secret", MemfdFlags::empty())
            .and_then(|mut file| {
                file.set_permissions(fs::Permissions::from_mode(0o600))?;
                file.write_all(text.bytes())?;
                Ok(file)
            })
            .map_err(|e| Error::io("keeping the job's secret in a file in memory", e))?;
        Ok(RendezvousFolder { directory, secret, job_id: hex(&id) })
    }

    /// Where the ranks find the secret while this process lives.
    fn secret_file(&self) -> PathBuf {
        format!("/proc/{}/fd/{}", std::process::id(), self.secret.as_raw_fd()).into()
    }

    fn address_file(&self) -> PathBuf {
        self.directory.path().join("address")
    }
}

/// Signals that have come, and a way to wait for the next.
struct Signals {
    counts: Vec<(i32, Arc<AtomicUsize>)>,
    woken: UnixStream,
    registered: Vec<SigId>,
}

impl Signals {
    /// Catches those that end a job, and with `stop` also those that ask it to leave.
    fn catch(stop: bool) -> Result<Self> {
        let what = |e| Error::io("catching signals", e);
        let (waker, woken) = UnixStream::pair().map_err(what)?;
        woken.set_nonblocking(true).map_err(what)?;
        let mut signals = Signals { counts: Vec::new(), woken, registered: Vec::new() };
        let mut ending = ending_signals();
        if stop {
            ending.extend(not_ignored(&STOP_SIGNALS).into_iter().filter(|signal| !ENDING.contains(signal)));
        }
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
    Printer(&'static Printer, String),
    Memory(Arc<Mutex<VecDeque<u8>>>),
}

impl Sinks {
    fn new(output: Output, rank: usize) -> Self {
        let prefixed = |printer| LineSink::Printer(printer, format!("[rank {rank}] "));
        match output {
            Output::Prefixed => Sinks { stdout: prefixed(printer::stdout()), stderr: prefixed(printer::stderr()) },
            Output::RankZeroPlain => Sinks { stdout: prefixed(printer::stderr()), stderr: prefixed(printer::stderr()) },
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
    /// Takes one line, with its end if it has one, without waiting for whoever reads it.
    fn write(&self, line: &[u8]) {
        match self {
            LineSink::Printer(printer, prefix) => printer.print(prefixed(prefix, line)),
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

/// Reads a rank's stream to its end in a thread of its own, counts the lines, and says when it is at the end.
fn drain(pipe: impl Read + Send + 'static, sink: LineSink, moved: Arc<AtomicU64>, ended: Sender<()>) -> Result<()> {
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
            moved.fetch_add(1, Ordering::Relaxed);
        }
        // Nobody may be interested any more.
        let _ = ended.send(());
    };
    let thread = thread::Builder::new().name("comm-output".into()).spawn(read_lines);
    thread.map(drop).map_err(|e| Error::io("starting a thread for a rank's output", e))
}

/// Waits until every stream is at its end, as long as lines come and nothing tells it to `stop`; a process that has left its rank's group
/// may hold one open for ever.
fn wait_for_output(ends: &Receiver<()>, streams: usize, moved: &AtomicU64, stop: &mut dyn FnMut() -> bool) {
    let longest = Deadline::after(LONGEST_DRAIN);
    let mut quiet = longest.at_most(DRAIN);
    let mut open = streams;
    let mut before = moved.load(Ordering::Relaxed);
    while open > 0 && !stop() {
        if ends.recv_timeout(quiet.remaining().min(GLANCE)).is_ok() {
            open -= 1;
            continue;
        }
        let now = moved.load(Ordering::Relaxed);
        if now != before && !longest.has_passed() {
            quiet = longest.at_most(DRAIN);
        } else if quiet.has_passed() {
            break;
        }
        before = now;
    }
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_launcher_that_was_stopped_still_leaves_time_between_its_signals() {
        let grace = Duration::from_secs(60);
        let mut steps = Steps::after(Duration::ZERO);
        // However late it looks, one signal has come due, and the next has all its time.
        thread::sleep(Duration::from_millis(5));
        assert_eq!(steps.due(grace), Some(SIGTERM));
        assert_eq!(steps.due(grace), None);
        assert!(steps.remaining().is_some_and(|left| left > grace / 2));
    }

    #[test]
    fn when_all_signals_are_sent_there_is_nothing_to_wake_up_for() {
        let mut steps = Steps::after(Duration::ZERO);
        assert_eq!((steps.due(Duration::ZERO), steps.due(Duration::ZERO)), (Some(SIGTERM), Some(SIGKILL)));
        assert_eq!((steps.due(Duration::ZERO), steps.remaining()), (None, None));
        assert_eq!(Steps::default().remaining(), None);
    }

    #[test]
    fn who_ends_the_job_does_not_wait_for_output_that_goes_on() {
        let (moved, began) = (AtomicU64::new(0), std::time::Instant::now());
        // A process that has left its rank's group holds the stream open and prints.
        let (_open, ends) = mpsc::channel();
        let mut asked = 0;
        wait_for_output(&ends, 1, &moved, &mut || {
            moved.fetch_add(1, Ordering::Relaxed);
            asked += 1;
            asked == 5
        });
        assert_eq!(asked, 5);
        assert!(began.elapsed() < LONGEST_DRAIN / 2, "{:?}", began.elapsed());
    }
}
