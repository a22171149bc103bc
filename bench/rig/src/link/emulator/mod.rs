//! A link with delay, jitter, loss and a queue between network namespaces, for kernels that have none of their own (`netem`).
//!
//! Each end is a TUN device in a namespace. A process of its own fetches the packets that kernels send there, decides about each by a
//! seed, keeps it for as long as the link would take, and hands it to the kernel at the other end. So real sockets, with their own
//! congestion control, meet the same link each time. It counts what it did and how late it was, so that results in which the emulator was
//! itself the bottleneck can be told from others ([`Counters::bottleneck`]).
//!
//! A kernel takes what it has put into a TUN device for sent. So a sender is not slowed down by its own device, as it is by the queue
//! of a network card, but by its congestion control alone, as on a link further on.

mod agenda;
mod commands;
mod counters;
mod device;
mod model;
mod process;
mod random;
mod relay;
mod spec;
mod sys;
#[cfg(test)]
mod tests;

use std::io::{BufRead, BufReader, ErrorKind, Read, Write};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, ChildStdin, Command as Program, Stdio};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::thread;
use std::time::{Duration, Instant};

use commands::Command;
pub(crate) use counters::{Counters, PipeCounters};
pub use process::{EmulateArgs, run_emulator};
pub(crate) use spec::{EmulatorSpec, EndSpec};
pub use spec::{Loss, PipeSpec};

/// What the process says when packets can flow.
const READY: &str = "ready";

/// Through it TUN devices are made.
const TUN: &str = "/dev/net/tun";

/// The name of its command.
const COMMAND: &str = "link-emulate";

/// How long it may take to set up one end, and to answer.
const PATIENCE: Duration = Duration::from_secs(10);

/// How long it may take to end once it is told to.
const EXIT_TIMEOUT: Duration = Duration::from_secs(1);

/// Most that is kept of what it complains about.
const MAX_COMPLAINT: u64 = 8 << 10;

/// Why no link can be emulated here, if so, for the user.
pub(crate) fn unavailable() -> Option<String> {
    let error = sys::open_tun().err()?;
    Some(format!("opening {TUN}: {error}{}", tun_hint(error.kind())))
}

/// What to do about an error with TUN devices.
fn tun_hint(kind: ErrorKind) -> &'static str {
    match kind {
        ErrorKind::NotFound => "; the kernel's module `tun` is missing, or a container hides /dev/net/tun",
        ErrorKind::PermissionDenied => {
            "; run it as root, or have root run `chmod 666 /dev/net/tun`, which is what most systems have"
        }
        _ => "",
    }
}

/// A running emulator. Dropping it ends it, and takes its devices away.
#[derive(Debug)]
pub(crate) struct Emulator {
    child: Child,
    input: Option<ChildStdin>,
    answers: Receiver<String>,
    complaint: Receiver<String>,
}

impl Emulator {
    /// Starts one by `program`, which is this one, in namespaces that are there already. It ends with the calling thread.
    ///
    /// # Errors
    /// What cannot be, or what is missing, for the user.
    pub(crate) fn start(program: &Path, spec: &EmulatorSpec) -> Result<Self, String> {
        spec.check()?;
        let text = serde_json::to_string(spec).map_err(|error| format!("the link has no text form: {error}"))?;
        let mut child = Program::new(program)
            .arg(COMMAND)
            .env("COMM_LAUNCHER_PID", std::process::id().to_string())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            // Ctrl-C is for the user's command, which then ends this one.
            .process_group(0)
            .spawn()
            .map_err(|error| format!("starting {}: {error}", program.display()))?;
        let (input, output, errors) = (child.stdin.take(), child.stdout.take(), child.stderr.take());
        let (answer, answers) = mpsc::channel();
        let (complain, complaint) = mpsc::channel();
        // Guarded from here on: an error below ends it.
        let mut emulator = Emulator { child, input, answers, complaint };
        let listening = thread::Builder::new().name("emulator".into()).spawn(move || {
            let lines = output.into_iter().flat_map(|output| BufReader::new(output).lines()).map_while(Result::ok);
            lines.take_while(|line| answer.send(line.clone()).is_ok()).for_each(drop);
        });
        let reading = thread::Builder::new().name("complaints".into()).spawn(move || {
            let mut text = Vec::new();
            let read = errors.map(|errors| errors.take(MAX_COMPLAINT).read_to_end(&mut text));
            drop((read, complain.send(String::from_utf8_lossy(&text).into_owned())));
        });
        listening.and(reading).map_err(|error| format!("starting a thread: {error}"))?;
        let patience = PATIENCE * u32::try_from(spec.ends.len()).unwrap_or(1);
        match emulator.ask(&text, "start", patience)? {
            said if said == READY => Ok(emulator),
            said => Err(format!("the link emulator printed {said:?} instead of {READY}")),
        }
    }

    /// Whether it has not ended.
    pub(crate) fn is_alive(&mut self) -> bool {
        matches!(self.child.try_wait(), Ok(None))
    }

    /// Its process number.
    pub(crate) fn process(&self) -> u32 {
        self.child.id()
    }

    /// What has happened since the start or the last reset.
    ///
    /// # Errors
    /// Why it does not say.
    pub(crate) fn counters(&mut self) -> Result<Counters, String> {
        let said = self.command(Command::Counters)?;
        serde_json::from_str(&said).map_err(|error| format!("the link emulator printed {said:?}: {error}"))
    }

    /// Sets all counters to 0 and begins its decisions from the seed again. Packets that are under way stay so.
    ///
    /// # Errors
    /// Why it did not.
    pub(crate) fn reset(&mut self) -> Result<(), String> {
        self.command(Command::Reset).map(drop)
    }

    fn command(&mut self, command: Command) -> Result<String, String> {
        self.ask(command.text(), command.text(), PATIENCE)
    }

    fn ask(&mut self, line: &str, what: &str, patience: Duration) -> Result<String, String> {
        let written = self.input.as_mut().is_some_and(|input| writeln!(input, "{line}").is_ok());
        let wait = if written { patience } else { Duration::ZERO };
        self.answers.recv_timeout(wait).map_err(|error| match error {
            RecvTimeoutError::Timeout if written => {
                format!(
                    "the link emulator (process {}) did not answer to `{what}` within {patience:?}",
                    self.child.id()
                )
            }
            _ => self.last_words(),
        })
    }

    /// Why it has ended.
    fn last_words(&mut self) -> String {
        let said = self.complaint.recv_timeout(EXIT_TIMEOUT).unwrap_or_default();
        match said.lines().map(str::trim).find(|line| !line.is_empty()) {
            Some(line) => format!("the link emulator ended: {}", line.strip_prefix("error: ").unwrap_or(line)),
            None => match self.ended(EXIT_TIMEOUT) {
                Some(status) => format!("the link emulator ended without a message ({status})"),
                None => "the link emulator closed its output without a message".into(),
            },
        }
    }

    fn ended(&mut self, patience: Duration) -> Option<std::process::ExitStatus> {
        let began = Instant::now();
        loop {
            match self.child.try_wait() {
                Ok(None) if began.elapsed() < patience => thread::sleep(Duration::from_millis(2)),
                Ok(status) => return status,
                Err(_) => return None,
            }
        }
    }
}

impl Drop for Emulator {
    fn drop(&mut self) {
        // The end of its input.
        self.input = None;
        if self.ended(EXIT_TIMEOUT).is_none() {
            // Either fails only where there is no such process any more.
            drop(self.child.kill());
            drop(self.child.wait());
        }
    }
}
