//! Processes of ranks, from the side of the program that started them.

use std::fs;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command as Program, ExitStatus, Stdio};
use std::sync::{Arc, Mutex, PoisonError, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use rig::signal::Signals;
use rig::sys::kill_group;
use tempfile::TempDir;

use super::protocol::{Command, Event};

/// Most that is kept of what a rank complains about.
const MAX_COMPLAINT: usize = 8 << 10;

/// How often a process that should end is looked at.
const TICK: Duration = Duration::from_millis(2);

/// How often a wait looks whether the user has interrupted.
const GLANCE: Duration = Duration::from_millis(100);

/// Processes that belong together. Dropping kills those that are left.
pub(crate) struct Group {
    program: PathBuf,
    folder: TempDir,
    members: Vec<Member>,
    /// What the ranks say, each with the number of the process.
    events: mpsc::Receiver<(usize, Event)>,
    sender: mpsc::Sender<(usize, Event)>,
    /// What has been said and not been asked for yet.
    heard: Vec<(usize, Event)>,
    /// One that comes ends all waits.
    signals: Signals,
}

struct Member {
    child: Child,
    input: Option<ChildStdin>,
    complaint: Arc<Mutex<String>>,
    status: Option<ExitStatus>,
}

/// A process of a group, by the order in which they were started.
pub(crate) type Number = usize;

impl Group {
    /// A group without processes. All its waits end when one of `signals` comes.
    ///
    /// # Errors
    /// Why there can be none.
    pub(crate) fn new(signals: Signals) -> Result<Self, String> {
        let folder = tempfile::Builder::new().prefix("chaos-").permissions(fs::Permissions::from_mode(0o700)).tempdir();
        let folder = folder.map_err(|error| format!("no temporary folder: {error}"))?;
        fs::create_dir(folder.path().join("tmp")).map_err(|error| format!("no temporary folder: {error}"))?;
        let program =
            std::env::current_exe().map_err(|error| format!("the path of this program is unknown: {error}"))?;
        let (sender, events) = mpsc::channel();
        Ok(Group { program, folder, members: Vec::new(), events, sender, heard: Vec::new(), signals })
    }

    /// A folder that only this user can enter.
    pub(crate) fn folder(&self) -> &Path {
        self.folder.path()
    }

    /// Starts one more. It ends with the calling thread.
    ///
    /// # Errors
    /// Why it cannot be started.
    pub(crate) fn start(&mut self) -> Result<Number, String> {
        let mut child = Program::new(&self.program)
            .arg("chaos-rank")
            .env("COMM_LAUNCHER_PID", std::process::id().to_string())
            // Printing one takes longer than anything that is measured here.
            .env("RUST_BACKTRACE", "0")
            .env("TMPDIR", self.folder.path().join("tmp"))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .process_group(0)
            .spawn()
            .map_err(|error| format!("starting {}: {error}", self.program.display()))?;
        let number = self.members.len();
        let (input, output, errors) = (child.stdin.take(), child.stdout.take(), child.stderr.take());
        let complaint = Arc::new(Mutex::new(String::new()));
        // Guarded from here on: an error below kills it.
        self.members.push(Member { child, input, complaint: complaint.clone(), status: None });
        let sender = self.sender.clone();
        let listening = thread::Builder::new().name("listener".into()).spawn(move || {
            for line in output.into_iter().flat_map(|output| BufReader::new(output).lines()).map_while(Result::ok) {
                match serde_json::from_str(&line) {
                    Ok(event) => drop(sender.send((number, event))),
                    Err(error) => note(&complaint, &format!("a line that is not understood ({error}): {line}\n")),
                }
            }
        });
        let complaint = self.members[number].complaint.clone();
        let reading = thread::Builder::new().name("complaints".into()).spawn(move || {
            let mut bytes = [0; 4096];
            let Some(mut errors) = errors else { return };
            while let Ok(count @ 1..) = errors.read(&mut bytes) {
                note(&complaint, &String::from_utf8_lossy(&bytes[..count]));
            }
        });
        listening.and(reading).map_err(|error| format!("starting a thread: {error}"))?;
        Ok(number)
    }

    /// Tells a process something; one that is gone is not told.
    pub(crate) fn tell(&mut self, number: Number, command: &Command) {
        let Some(input) = self.members.get_mut(number).and_then(|member| member.input.as_mut()) else { return };
        if let Ok(mut line) = serde_json::to_vec(command) {
            line.push(b'\n');
            // Whether it is there shows in what it says.
            let _ = input.write_all(&line);
        }
    }

    /// The first thing that was said for which `choose` gives something, waited for until `deadline`. Everything else is kept.
    pub(crate) fn hear<T>(
        &mut self,
        deadline: Instant,
        mut choose: impl FnMut(Number, &Event) -> Option<T>,
    ) -> Option<T> {
        let found = self.heard.iter().enumerate().find_map(|(at, (number, event))| Some((at, choose(*number, event)?)));
        if let Some((at, chosen)) = found {
            self.heard.remove(at);
            return Some(chosen);
        }
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            let Ok((number, event)) = self.events.recv_timeout(left.min(GLANCE)) else {
                if left <= GLANCE || self.is_interrupted() {
                    return None;
                }
                continue;
            };
            if let Some(chosen) = choose(number, &event) {
                return Some(chosen);
            }
            self.heard.push((number, event));
        }
    }

    /// The same once for each of `numbers`; who has not said it stays `None`.
    pub(crate) fn hear_each<T>(
        &mut self,
        numbers: &[Number],
        deadline: Instant,
        mut choose: impl FnMut(&Event) -> Option<T>,
    ) -> Vec<Option<T>> {
        let mut found: Vec<Option<T>> = numbers.iter().map(|_| None).collect();
        while found.iter().any(Option::is_none) {
            let next = self.hear(deadline, |number, event| {
                let at = numbers.iter().position(|wanted| *wanted == number)?;
                if found[at].is_some() { None } else { Some((at, choose(event)?)) }
            });
            let Some((at, value)) = next else { break };
            found[at] = Some(value);
        }
        found
    }

    /// Whether the user has interrupted.
    pub(crate) fn is_interrupted(&self) -> bool {
        self.signals.came()
    }

    /// Forgets what has been said.
    pub(crate) fn forget(&mut self) {
        self.heard.clear();
    }

    pub(crate) fn process_id(&self, number: Number) -> u32 {
        self.members[number].child.id()
    }

    /// How a process has ended, waited for until `deadline`.
    pub(crate) fn end_of(&mut self, number: Number, deadline: Instant) -> Option<ExitStatus> {
        let member = &mut self.members[number];
        loop {
            if member.status.is_none() {
                member.status = member.child.try_wait().unwrap_or_default();
            }
            if member.status.is_some() || Instant::now() >= deadline || self.signals.came() {
                return member.status;
            }
            thread::sleep(TICK);
        }
    }

    /// What a process has written to its standard error.
    pub(crate) fn complaint(&self, number: Number) -> String {
        self.members[number].complaint.lock().unwrap_or_else(PoisonError::into_inner).trim().to_string()
    }

    /// Kills a process and what it has started.
    pub(crate) fn kill(&mut self, number: Number) {
        let member = &mut self.members[number];
        if member.status.is_none() {
            kill_group(member.child.id());
            member.status = member.child.wait().ok();
        }
    }

    /// Files that ranks have left in their folder for temporary files, and addresses where they met.
    pub(crate) fn left_files(&self) -> Vec<String> {
        let mut found = Vec::new();
        list(self.folder.path(), &mut found).unwrap_or_default();
        found.retain(|name| name != "tmp");
        found
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        (0..self.members.len()).for_each(|number| self.kill(number));
    }
}

/// How a process has ended, for people.
pub(crate) fn describe(status: Option<ExitStatus>) -> String {
    match status.map(|status| (status.signal(), status.code())) {
        None => "still there".into(),
        Some((Some(signal), _)) => format!("signal {signal}"),
        Some((None, code)) => format!("code {}", code.unwrap_or(-1)),
    }
}

fn list(folder: &Path, found: &mut Vec<String>) -> io::Result<()> {
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        let name = entry.file_name().to_string_lossy().into_owned();
        if entry.file_type()?.is_dir() {
            list(&entry.path(), found)?;
        }
        found.push(name);
    }
    Ok(())
}

fn note(complaint: &Mutex<String>, text: &str) {
    let mut complaint = complaint.lock().unwrap_or_else(PoisonError::into_inner);
    if complaint.len() < MAX_COMPLAINT {
        complaint.push_str(text);
    }
}
