//! Training whose output nobody reads, or on a terminal that is stopped, goes on; and nothing of it is lost to who reads late.

#![allow(clippy::unwrap_used, reason = "a test may panic")]

use std::fs::{self, File};
use std::io::Read;
use std::os::fd::{FromRawFd, OwnedFd};
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::thread;
use std::time::{Duration, Instant};

/// Enough for several times what a pipe holds.
const STEPS: u64 = 1000;

/// A job that prints a line a step, and whose operations may take 10 s.
fn train(folder: &Path, more: &str) -> Command {
    let data = folder.join("text.txt");
    fs::write(&data, "Nobody has to read this for training to go on. ".repeat(300)).unwrap();
    let arguments = format!(
        "train --preset micro --tokenizer bytes --block-size 8 --batch 2 --threads 1 --eval-every 0 --log-every 1 --timeout 10 \
         --steps {STEPS} {more} --data"
    );
    let mut command = Command::new(env!("CARGO_BIN_EXE_gpt2"));
    command
        .args(arguments.split_whitespace())
        .arg(&data)
        .current_dir(folder)
        .env("TERM", "xterm")
        .stderr(Stdio::piped());
    command
}

/// Waits, reading nothing, until the job has trained and saved.
fn wait_until_saved(job: &mut Child, folder: &Path) {
    let end = Instant::now() + Duration::from_secs(300);
    while !folder.join("out/model.safetensors").exists() {
        if let Some(status) = job.try_wait().unwrap() {
            let mut said = String::new();
            job.stderr.take().unwrap().read_to_string(&mut said).unwrap();
            panic!("ended before it had trained: {status}: {said}");
        }
        assert!(Instant::now() < end, "it does not get on");
        thread::sleep(Duration::from_millis(10));
    }
}

fn check(said: &str, status: ExitStatus) {
    assert!(status.success(), "{status}: {said}");
    for step in 1..=STEPS {
        assert!(said.contains(&format!("step {step:>5}/{STEPS} | loss ")), "step {step} is missing");
    }
    let last = said.lines().rev().find(|line| !line.trim().is_empty()).unwrap();
    assert!(last.contains("weights: sha256 "), "{last}");
    assert!(!said.contains("left out"));
}

fn read_late(more: &str) {
    let folder = tempfile::tempdir().unwrap();
    let mut job = train(folder.path(), more).stdout(Stdio::piped()).spawn().unwrap();
    wait_until_saved(&mut job, folder.path());
    let mut said = String::new();
    job.stdout.take().unwrap().read_to_string(&mut said).unwrap();
    assert!(said.len() > 2 * (64 << 10), "a pipe holds all {} bytes", said.len());
    check(&said, job.wait().unwrap());
}

#[test]
fn two_processes_train_while_nobody_reads() {
    read_late("--strategy ddp --transport tcp-raw --nproc 2");
}

#[test]
fn two_threads_train_while_nobody_reads() {
    read_late("--strategy ddp --transport local --nproc 2");
}

#[test]
fn one_rank_trains_while_nobody_reads() {
    read_late("");
}

#[test]
fn ranks_of_another_launcher_train_while_nobody_reads() {
    let folder = tempfile::tempdir().unwrap();
    let mut ranks: Vec<Child> = (0..2)
        .map(|rank| {
            train(folder.path(), "--strategy ddp --transport tcp-raw")
                .envs([("OMPI_COMM_WORLD_RANK", rank.to_string()), ("OMPI_COMM_WORLD_SIZE", "2".into())])
                .envs([("COMM_SECRET", "a secret of the test")])
                .env("COMM_ADDR", format!("file:{}", folder.path().join("address").display()))
                .stdout(Stdio::piped())
                .spawn()
                .unwrap()
        })
        .collect();
    wait_until_saved(&mut ranks[0], folder.path());
    let mut said = String::new();
    ranks[0].stdout.take().unwrap().read_to_string(&mut said).unwrap();
    check(&said, ranks[0].wait().unwrap());
    assert!(ranks[1].wait().unwrap().success());
    for line in [
        "ranks: 2, by OMPI_COMM_WORLD_RANK and OMPI_COMM_WORLD_SIZE (Open MPI)\n",
        "text: ",
        "model: ",
        "strategy: ddp on 2 rank",
    ] {
        assert!(said.contains(line), "no {line:?} in {said}");
    }
}

/// A terminal, and what is connected to it.
fn terminal() -> (File, OwnedFd) {
    let (mut master, mut slave) = (-1, -1);
    let (name, settings, size) = (std::ptr::null_mut(), std::ptr::null(), std::ptr::null());
    // SAFETY: the call writes two descriptors to live integers, and takes null for what is not asked.
    let status = unsafe { libc::openpty(&raw mut master, &raw mut slave, name, settings, size) };
    assert_eq!(status, 0, "{}", std::io::Error::last_os_error());
    // SAFETY: both have just been opened, and nothing else knows of them.
    unsafe { (File::from_raw_fd(master), OwnedFd::from_raw_fd(slave)) }
}

/// With a progress bar, on a terminal that takes no more than its buffer holds: as after Ctrl-S.
fn stopped_terminal(more: &str) {
    let folder = tempfile::tempdir().unwrap();
    let (mut master, slave) = terminal();
    let mut job = train(folder.path(), more).stdout(slave).spawn().unwrap();
    wait_until_saved(&mut job, folder.path());
    // It goes on. The end of what a terminal says is an error.
    let mut said = Vec::new();
    let mut piece = [0; 4096];
    while let Ok(count @ 1..) = master.read(&mut piece) {
        said.extend_from_slice(&piece[..count]);
    }
    let said = String::from_utf8_lossy(&said);
    check(&said, job.wait().unwrap());
    assert!(said.contains(&format!("/{STEPS} steps")), "no progress bar");
    // The bar was not drawn for every step that nobody could see.
    assert!(said.matches("\x1b[2K").count() < 3 * STEPS as usize);
}

#[test]
fn a_stopped_terminal_holds_up_no_processes() {
    stopped_terminal("--strategy ddp --transport tcp-raw --nproc 2");
}

#[test]
fn a_stopped_terminal_holds_up_no_threads() {
    stopped_terminal("--strategy ddp --transport local --nproc 2");
}

/// The system's limit of a file's size is met as a full disk is: an error, and nothing half-written.
#[test]
fn a_file_that_may_not_get_that_large_is_an_error() {
    for more in ["", "--strategy ddp --transport tcp-raw --nproc 2", "--strategy ddp --transport local --nproc 2"] {
        let folder = tempfile::tempdir().unwrap();
        let of_gpt2 = train(folder.path(), more);
        let output = Command::new("sh")
            .args(["-c", "ulimit -f 8; exec \"$0\" \"$@\""])
            .arg(of_gpt2.get_program())
            .args(of_gpt2.get_args())
            .current_dir(folder.path())
            .output()
            .unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{more}: {said}");
        assert!(said.contains("model.safetensors") && said.contains("File too large"), "{more}: {said}");
        assert!(said.contains("no more steps are written to steps.jsonl: File too large"), "{more}: {said}");
        let mut left: Vec<_> =
            fs::read_dir(folder.path().join("out")).unwrap().map(|e| e.unwrap().file_name()).collect();
        left.sort();
        assert_eq!(left, [".lock", "steps.jsonl", "tensorboard"], "{more}");
    }
}
