//! Ranks that are processes: this test program started again, with commands on its standard input and answers on its output.

#[cfg(feature = "fuzzing")]
pub(crate) mod fuzzing;

use std::io::{BufRead, BufReader, Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command as Program, ExitCode, Stdio};
use std::sync::Arc;
use std::sync::mpsc::{Sender, channel};
use std::thread;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::driver::{CaseOutcome, Command, Fleet, RankHandle, Reply, RunOptions, serve};
use super::{Case, cases};
use crate::communicator::Communicator;
use crate::control::{Control, TcpControl};
use crate::deadline::Deadline;
use crate::error::{Error, Result};
use crate::hex;
use crate::job::{Address, Job, Secret};

/// The argument that makes this program a rank. The suite's name follows.
pub(super) const WORKER: &str = "--conformance-worker";

/// Begins the lines that are answers; a backend may print others.
const MARK: &str = "conformance-reply ";

/// Longest line that is taken in one piece.
const MAX_LINE: u64 = 1 << 20;

/// A process that has lost its driver, or was told to end, has this long to do so.
const EXIT_TIMEOUT: Duration = Duration::from_secs(5);

/// Makes a communicator of a control plane and a number of lanes. Called once on every rank of a group.
pub(super) type Connect = dyn Fn(Arc<dyn Control>, usize) -> Result<Arc<dyn Communicator>> + Send + Sync;

/// How a rank finds the others of its group.
#[derive(Serialize, Deserialize)]
struct MemberSetup {
    rank: usize,
    world_size: usize,
    address_file: PathBuf,
    secret: String,
}

/// Runs `selected` on `ranks` processes; `places` are their places in [`cases`]. Outcomes come in the order of `selected`.
pub(super) fn run(
    suite: &str,
    ranks: usize,
    selected: &[Case],
    places: &[usize],
    options: RunOptions,
) -> Vec<CaseOutcome> {
    match start(suite, ranks, places, options) {
        Ok((fleet, folder)) => {
            let mut groups = 0;
            fleet.drive(selected, &mut || {
                groups += 1;
                setups(folder.path(), groups, ranks).map_err(|error| error.to_string())
            })
        }
        Err(error) => vec![CaseOutcome::Failed(error.to_string()); selected.len()],
    }
}

fn start(
    suite: &str,
    ranks: usize,
    places: &[usize],
    options: RunOptions,
) -> Result<(Fleet<MemberSetup>, tempfile::TempDir)> {
    let folder = tempfile::tempdir().map_err(|error| Error::io("a folder where ranks meet", error))?;
    let program = std::env::current_exe().map_err(|error| Error::io("the path of this program", error))?;
    let handles = (0..ranks).map(|rank| start_rank(&program, suite, rank, places)).collect::<Result<_>>()?;
    Ok((Fleet { ranks: handles, options }, folder))
}

/// Starts one rank.
fn start_rank(program: &Path, suite: &str, rank: usize, places: &[usize]) -> Result<RankHandle<MemberSetup>> {
    let mut child = Program::new(program)
        .args([WORKER, suite])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .map_err(|error| Error::io(format!("starting rank {rank}"), error))?;
    let (input, output) = (child.stdin.take(), child.stdout.take());
    let mut process = Process { child, input };
    let (sender, replies) = channel();
    if let Some(output) = output {
        thread::spawn(move || read_replies(BufReader::new(output), rank, &sender));
    }
    let places = places.to_vec();
    let tell = move |command: Command<MemberSetup>| {
        // The driver counts the selected cases, the process those of the whole table.
        let command = match command {
            Command::Run(index) => Command::Run(places[index]),
            other => other,
        };
        process.tell(&command)
    };
    Ok(RankHandle { tell: Box::new(tell), replies })
}

/// Hands on the answers among what a rank prints; everything else is the backend's own.
fn read_replies(mut output: impl BufRead, rank: usize, replies: &Sender<Reply>) {
    let mut line = Vec::new();
    while let Ok(1..) = output.by_ref().take(MAX_LINE).read_until(b'\n', &mut line) {
        match reply_in(&line) {
            Some(Ok(reply)) => {
                if replies.send(reply).is_err() {
                    return;
                }
            }
            Some(Err(error)) => eprintln!("rank {rank} gave an answer that is not understood: {error}"),
            None => eprintln!("rank {rank}: {}", String::from_utf8_lossy(line.trim_ascii_end())),
        }
        line.clear();
    }
}

/// The answer in a line, if it claims to be one.
fn reply_in(line: &[u8]) -> Option<serde_json::Result<Reply>> {
    line.strip_prefix(MARK.as_bytes()).map(serde_json::from_slice)
}

/// A rank's process, which ends when this is dropped.
struct Process {
    child: Child,
    input: Option<ChildStdin>,
}

impl Process {
    fn tell(&mut self, command: &Command<MemberSetup>) -> Result<(), String> {
        let mut line = serde_json::to_string(command).map_err(|error| error.to_string())?;
        line.push('\n');
        let input = self.input.as_mut().ok_or("its input is closed")?;
        input.write_all(line.as_bytes()).map_err(|error| format!("its process takes no commands: {error}"))
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        drop(self.input.take());
        let deadline = Deadline::after(EXIT_TIMEOUT);
        while !deadline.has_passed() {
            if !matches!(self.child.try_wait(), Ok(None)) {
                return;
            }
            thread::sleep(Duration::from_millis(2));
        }
        // What it was doing has been reported as hung.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// What a new group's ranks need to find each other through an address file of their own.
fn setups(folder: &Path, group: usize, ranks: usize) -> Result<Vec<MemberSetup>> {
    let mut secret = [0; 32];
    getrandom::fill(&mut secret)
        .map_err(|error| Error::io("random bytes", std::io::Error::other(error.to_string())))?;
    let secret = hex(&secret);
    let setup = |rank| MemberSetup {
        rank,
        world_size: ranks,
        address_file: folder.join(format!("group-{group}")),
        secret: secret.clone(),
    };
    Ok((0..ranks).map(setup).collect())
}

/// A rank's side: obeys its standard input until that ends.
pub(super) fn worker(connect: Arc<Connect>, lanes: usize, options: RunOptions) -> ExitCode {
    let connect = move |setup: MemberSetup| {
        let secret = Secret::new(setup.secret)?;
        let job = Job::new(setup.rank, setup.world_size, Address::File(setup.address_file), secret)?;
        let control: Arc<dyn Control> = TcpControl::connect(&job, &[], Deadline::after(options.case_limit / 2))?;
        connect(control, lanes)
    };
    let mut lines = std::io::stdin().lines();
    let mut next = || {
        let line = lines.next()?.ok()?;
        match serde_json::from_str(&line) {
            Ok(command) => Some(command),
            Err(error) => {
                eprintln!("a command that is not understood: {error}");
                None
            }
        }
    };
    let mut reply = |reply: Reply| {
        let Ok(text) = serde_json::to_string(&reply) else { return false };
        let mut output = std::io::stdout().lock();
        writeln!(output, "{MARK}{text}").and_then(|()| output.flush()).is_ok()
    };
    serve(&cases(), &connect, &mut next, &mut reply, options);
    ExitCode::SUCCESS
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_that_are_no_text_and_lines_without_end_do_not_hide_answers() {
        let answer = format!("{MARK}{}\n", serde_json::to_string(&Reply::Done(Ok(()))).unwrap());
        let mut output = b"a backend's own \xff\n".to_vec();
        output.extend_from_slice(answer.as_bytes());
        output.extend(std::iter::repeat_n(b'x', MAX_LINE as usize + 10));
        output.push(b'\n');
        output.extend_from_slice(answer.as_bytes());
        let (sender, replies) = channel();
        read_replies(&output[..], 1, &sender);
        drop(sender);
        assert_eq!(replies.iter().count(), 2);
    }
}
