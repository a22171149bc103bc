//! Training under the launchers of clusters: the same weights as under this program's own, an end when a rank is killed, and a checkpoint when
//! the launcher is asked to stop. A launcher that is not installed is named as skipped.

#![allow(clippy::unwrap_used, reason = "a test may panic")]

use std::collections::HashMap;
use std::ffi::OsString;
use std::fs::{self, File};
use std::io::{BufRead, BufReader, Read};
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use comm_core::job::EXIT_STOPPED;
use gpt2::checkpoint::sharded::Store;

use crate::common::wait;

/// Ranks of a job: under Slurm two on each of two nodes.
const RANKS: usize = 4;

/// The rank that is killed.
const VICTIM: &str = "2";

/// By then everything has happened, or hangs.
const SOON: Duration = Duration::from_secs(60);

/// By this variable the processes of a job are found.
const MARK: &str = "TEST_FOLDER";

/// Long enough to be interrupted, with checkpoints on the way.
const LONG: &str = "--strategy fsdp --transport tcp --steps 350 --save-every 50";

#[derive(Clone, Copy, Debug, PartialEq)]
enum Launcher {
    OpenMpi,
    Mpich,
    Torchrun,
    Slurm,
}

use Launcher::{Mpich, OpenMpi, Slurm, Torchrun};

impl Launcher {
    /// The variable by which it tells a process its rank.
    fn rank(self) -> &'static str {
        match self {
            OpenMpi => "OMPI_COMM_WORLD_RANK",
            Mpich => "PMI_RANK",
            Torchrun => "RANK",
            Slurm => "SLURM_PROCID",
        }
    }

    /// The signal that asks it to stop so that ranks can save what they have, and what it ends with then.
    fn stop(self) -> (&'static str, i32) {
        match self {
            // A second after SIGTERM it kills them.
            OpenMpi | Slurm => ("USR1", EXIT_STOPPED),
            Mpich => ("TERM", EXIT_STOPPED),
            // SIGUSR1 ends it, and nothing else.
            Torchrun => ("TERM", 1),
        }
    }

    /// What it ends with when a rank is killed, and what it says then.
    fn report(self) -> (i32, &'static [&'static str]) {
        match self {
            OpenMpi => (128 + 9, &["rank 2 was lost", "exited on signal 9"]),
            // It ends the others before they can say anything.
            Mpich => (9, &["Killed (signal 9)"]),
            Torchrun => (1, &["rank 2 was lost", "Signal 9 (SIGKILL)"]),
            Slurm => (128 + 9, &["rank 2 was lost", "task 2: Killed", "Exited with exit code 75"]),
        }
    }
}

/// A launcher that is there, and a folder with a text to train on.
struct Place {
    launcher: Launcher,
    program: PathBuf,
    folder: tempfile::TempDir,
    slurm: Option<TwoNodes>,
}

impl Place {
    /// `None` where the launcher is not installed, which is said.
    fn with(launcher: Launcher) -> Option<Self> {
        let (name, package) = match launcher {
            OpenMpi => ("mpirun", "Debian's package openmpi-bin"),
            Mpich => ("mpiexec.hydra", "Debian's package mpich"),
            Torchrun => ("torchrun", "Python's package torch; VIRTUAL_ENV may name where it is"),
            Slurm => ("srun", "Debian's packages slurmctld, slurmd, slurm-client and munge"),
        };
        let program = find(name).filter(|path| launcher != OpenMpi || says(path, "--version", "Open MPI"));
        let Some(program) = program else {
            println!("skipped: {name} is not there: {package}");
            return None;
        };
        let slurm = if launcher == Slurm { Some(TwoNodes::start()?) } else { None };
        let folder = tempfile::tempdir().unwrap();
        text(folder.path());
        Some(Place { launcher, program, folder, slurm })
    }

    fn path(&self) -> &Path {
        self.folder.path()
    }

    fn out(&self, name: &str) -> PathBuf {
        self.path().join(name)
    }

    /// The step of the newest checkpoint in the folder of a run; 0 where there is none.
    fn saved(&self, out: &str) -> u64 {
        Store::new(self.out(out).join("checkpoints")).steps().last().copied().unwrap_or(0)
    }

    /// A program, where the launcher's nodes are.
    fn program(&self, program: &Path) -> Command {
        let mut command = match &self.slurm {
            Some(slurm) => slurm.enter(program),
            None => Command::new(program),
        };
        forget_launchers(&mut command);
        command.current_dir(self.path()).env(MARK, self.path()).env("COMM_SECRET", "a secret for tests only");
        if let Some(slurm) = &self.slurm {
            command.env("SLURM_CONF", &slurm.conf);
        }
        command
    }

    /// The launcher with `more` of its options, and `gpt2 train` with `arguments`.
    fn command(&self, more: &[&str], out: &str, arguments: &str) -> Command {
        let (port, ranks) = (free_port(), RANKS.to_string());
        let mut command = self.program(&self.program);
        match self.launcher {
            OpenMpi => {
                command.args(["--oversubscribe", "-n", &ranks]).env("COMM_ADDR", format!("127.0.0.1:{port}"));
                command.env("OMPI_ALLOW_RUN_AS_ROOT", "1").env("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1");
            }
            Mpich => _ = command.args(["-n", &ranks]).env("COMM_ADDR", format!("127.0.0.1:{port}")),
            Torchrun => {
                command.args(["--nnodes", "1", "--nproc-per-node", &ranks, "--master-addr", "127.0.0.1"]);
                command.args(["--master-port", &port.to_string()]).args(more).arg("--no-python");
            }
            Slurm => {
                command.args(["--nodes", "2", "--ntasks", &ranks, "--chdir"]).arg(self.path());
                command.env("COMM_ADDR", format!("{NODES}:{port}"));
            }
        }
        command.arg(gpt2()).arg("train").args(options(arguments)).args(["--threads", "1", "--out", out]);
        command
    }

    /// Trains; the hash of the weights.
    fn weights(&self, more: &[&str], arguments: &str) -> String {
        let mut job = Started::new(self, self.command(more, "out", &format!("{arguments} --overwrite")));
        let (code, said) = job.end();
        assert_eq!(code, Some(0), "{:?}, {arguments}: {said}", self.launcher);
        assert!(!said.contains('\u{1b}'), "a progress bar in a file: {said:?}");
        hash(&said)
    }

    /// Trains, and asks the launcher to stop: all ranks save the state of the run, and leave.
    fn stop(&self, arguments: &str) {
        let what = format!("{:?}, {arguments}", self.launcher);
        let (signal, expected) = self.launcher.stop();
        let _ = fs::remove_dir_all(self.out("stopped"));
        let mut job = Started::new(self, self.command(&[], "stopped", &format!("{arguments} --steps 1000000")));
        job.wait_until(|| self.out("stopped/steps.jsonl").metadata().is_ok_and(|file| file.len() > 0));
        send(signal, job.launcher.id());
        let (code, said) = job.end();
        assert_eq!(code, Some(expected), "{what}: {said}");
        assert!(said.contains("stopped after step ") && self.saved("stopped") > 0, "{what}: {said}");
        job.wait_until(|| job.ranks().is_empty());
    }

    /// Trains over a transport with a strategy, and kills a rank: the launcher ends, with its own words, and nothing is left.
    fn kill(&self, arguments: &str) {
        let what = format!("{:?}, {arguments}", self.launcher);
        let _ = fs::remove_dir_all(self.out("killed"));
        let mut job = Started::new(self, self.command(&[], "killed", &format!("{arguments} --steps 1000000")));
        job.wait_until(|| self.out("killed/steps.jsonl").metadata().is_ok_and(|file| file.len() > 0));
        job.kill_rank();
        let (code, said) = job.end();
        let (expected, words) = self.launcher.report();
        assert_eq!(code, Some(expected), "{what}: {said}");
        for word in words {
            assert!(said.contains(word), "{what}: no '{word}' in {said}");
        }
        job.wait_until(|| job.ranks().is_empty());
    }
}

/// A job that runs.
struct Started<'a> {
    place: &'a Place,
    launcher: Child,
    output: PathBuf,
}

impl<'a> Started<'a> {
    fn new(place: &'a Place, mut command: Command) -> Self {
        let output = place.out("said.txt");
        let file = File::create(&output).unwrap();
        let launcher = command
            .stdin(Stdio::null())
            .stdout(file.try_clone().unwrap())
            .stderr(file)
            .spawn()
            .unwrap_or_else(|error| panic!("{command:?}: {error}"));
        Started { place, launcher, output }
    }

    /// What was said up to now.
    fn said(&self) -> String {
        String::from_utf8_lossy(&fs::read(&self.output).unwrap_or_default()).into_owned()
    }

    /// Exit code and output, once it has ended.
    fn end(&mut self) -> (Option<i32>, String) {
        let code = wait(&mut self.launcher, SOON);
        let code = code.unwrap_or_else(|| panic!("{:?} has not ended: {}", self.place.launcher, self.said()));
        (code, self.said())
    }

    fn wait_until(&self, happened: impl Fn() -> bool) {
        wait_until(LOOKS, happened, || format!("{:?}: {}", self.place.launcher, self.said()));
    }

    /// The processes of its ranks, by rank.
    fn ranks(&self) -> HashMap<String, u32> {
        ranks(self.place.path(), self.place.launcher.rank())
    }

    fn kill_rank(&self) {
        let ranks = self.ranks();
        assert_eq!(ranks.len(), RANKS, "{ranks:?}: {}", self.said());
        if self.place.launcher == OpenMpi {
            // It ends with the code of the process whose end it sees first. It wakes the others before it ends them.
            ranks.iter().filter(|(rank, _)| *rank != VICTIM).for_each(|(_, process)| send("STOP", *process));
        }
        send("KILL", ranks[VICTIM]);
    }
}

impl Drop for Started<'_> {
    fn drop(&mut self) {
        // A test that has failed leaves nothing running.
        if self.launcher.try_wait().is_ok_and(|ended| ended.is_none()) {
            let _ = self.launcher.kill();
            let _ = self.launcher.wait();
            for process in self.ranks().into_values() {
                let _ = Command::new("kill").args(["-s", "KILL", &process.to_string()]).status();
            }
        }
    }
}

/// A Slurm of two nodes, which are this machine, in namespaces of their own.
struct TwoNodes {
    process: Child,
    /// The path of its configuration, which is in the environment of whoever talks to it.
    conf: String,
}

/// The address of both nodes.
const NODES: &str = "10.91.0.1";

impl TwoNodes {
    /// `None` where it cannot be had, which is said.
    fn start() -> Option<Self> {
        let missing = ["slurmctld", "slurmd", "munged", "ip", "unshare"].into_iter().find(|name| find(name).is_none());
        if let Some(name) = missing {
            println!("skipped: {name} is not there: Debian's packages slurmctld, slurmd, munge, iproute2");
            return None;
        }
        let namespaces = ["--net", "--mount"];
        if !Command::new("unshare").args(namespaces).arg("true").stderr(Stdio::null()).status().unwrap().success() {
            println!("skipped: Slurm of two nodes needs root and network namespaces");
            return None;
        }
        let script = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/launchers/two-nodes");
        let mut command = Command::new("unshare");
        command.args(namespaces).args([script, "sh", "-c", "echo $SLURM_CONF; exec cat"]);
        forget_launchers(&mut command);
        let mut process = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let mut conf = String::new();
        BufReader::new(process.stdout.as_mut().unwrap()).read_line(&mut conf).unwrap();
        if conf.is_empty() {
            let mut why = String::new();
            process.stderr.take().unwrap().read_to_string(&mut why).unwrap();
            panic!("no Slurm: {why}");
        }
        Some(TwoNodes { process, conf: conf.trim().into() })
    }

    /// A program that runs on a node.
    fn enter(&self, program: &Path) -> Command {
        let mut command = Command::new("nsenter");
        command.args(["--net", "--mount", "--target", &self.process.id().to_string()]).arg(program);
        command
    }
}

impl Drop for TwoNodes {
    fn drop(&mut self) {
        drop(self.process.stdin.take());
        let _ = wait(&mut self.process, SOON);
    }
}

fn gpt2() -> &'static str {
    env!("CARGO_BIN_EXE_gpt2")
}

/// Options of a training of the smallest model on the text of [`text`], and `more`.
fn options(more: &str) -> impl Iterator<Item = &str> {
    let usual = "--preset micro --tokenizer bytes --data text.txt --batch 4 --eval-every 0 --log-every 1";
    usual.split(' ').chain(more.split_whitespace())
}

fn text(folder: &Path) {
    fs::write(folder.join("text.txt"), "Whoever starts the ranks, the weights are the same. ".repeat(300)).unwrap();
}

/// The weights of a job of this program's own launcher.
fn own(arguments: &str) -> String {
    static KNOWN: Mutex<Option<HashMap<String, String>>> = Mutex::new(None);
    let mut known = KNOWN.lock().unwrap_or_else(PoisonError::into_inner);
    let known = known.get_or_insert_default();
    if let Some(weights) = known.get(arguments) {
        return weights.clone();
    }
    let folder = tempfile::tempdir().unwrap();
    text(folder.path());
    let mut command = Command::new(gpt2());
    forget_launchers(&mut command);
    let ranks = RANKS.to_string();
    command
        .arg("train")
        .args(options(arguments))
        .args(["--threads", "1", "--nproc", &ranks])
        .current_dir(folder.path());
    let output = command.output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{said}{}", String::from_utf8_lossy(&output.stderr));
    known.entry(arguments.into()).or_insert(hash(&said)).clone()
}

fn hash(said: &str) -> String {
    let line = said.lines().find_map(|line| line.split_once("weights: sha256 "));
    line.unwrap_or_else(|| panic!("no hash in {said}")).1.trim().to_owned()
}

/// Takes away what another launcher, under which the tests may run, has left in the environment.
fn forget_launchers(command: &mut Command) {
    let of_launchers =
        ["COMM_", "SLURM", "SBATCH", "SRUN", "PMI", "OMPI_", "MPI_", "PET_", "TORCHELASTIC", "MASTER_", "LOCAL_"];
    for (name, _) in std::env::vars_os() {
        let text = name.to_string_lossy();
        if of_launchers.iter().any(|start| text.starts_with(start)) || ["RANK", "WORLD_SIZE"].contains(&&*text) {
            command.env_remove(&name);
        }
    }
}

/// A program of this name: of the Python environment that is active, or wherever programs are.
fn find(name: &str) -> Option<PathBuf> {
    let active = std::env::var_os("VIRTUAL_ENV").map(|folder| Path::new(&folder).join("bin"));
    let path = std::env::var_os("PATH").unwrap_or_default();
    // Daemons are where a user's path may not lead.
    let folders = active.into_iter().chain(std::env::split_paths(&path)).chain([PathBuf::from("/usr/sbin")]);
    folders.map(|folder| folder.join(name)).find(|path| path.is_file())
}

fn says(program: &Path, option: &str, words: &str) -> bool {
    let output = Command::new(program).arg(option).output();
    output.is_ok_and(|output| String::from_utf8_lossy(&output.stdout).contains(words))
}

/// A port with another free one after it, where ranks meet under torchrun, which has the first to itself.
fn free_port() -> u16 {
    let next_is_free = |first: &TcpListener| {
        let port = first.local_addr().unwrap().port();
        port.checked_add(1).filter(|next| TcpListener::bind(("127.0.0.1", *next)).is_ok()).map(|_| port)
    };
    let mut tried = Vec::new();
    loop {
        let first = TcpListener::bind("127.0.0.1:0").unwrap();
        if let Some(port) = next_is_free(&first) {
            return port;
        }
        tried.push(first);
    }
}

fn send(signal: &str, process: u32) {
    assert!(Command::new("kill").args(["-s", signal, &process.to_string()]).status().unwrap().success());
}

/// The processes of a job with its files in `folder`, by their rank, which is in the variable `rank`.
fn ranks(folder: &Path, rank: &str) -> HashMap<String, u32> {
    let mark = [MARK.as_bytes(), b"=", folder.as_os_str().as_encoded_bytes()].concat();
    let is_rank = |process: &Path| fs::read_link(process.join("exe")).is_ok_and(|exe| exe == Path::new(gpt2()));
    let rank_of = |entry: fs::DirEntry| {
        let process: u32 = entry.file_name().to_str()?.parse().ok()?;
        let environment = fs::read(entry.path().join("environ")).ok().filter(|_| is_rank(&entry.path()))?;
        let mut variables = environment.split(|byte| *byte == 0);
        variables.clone().find(|variable| *variable == mark)?;
        let value = variables.find_map(|variable| variable.strip_prefix(rank.as_bytes())?.strip_prefix(b"="))?;
        Some((String::from_utf8_lossy(value).into_owned(), process))
    };
    fs::read_dir("/proc").unwrap().flatten().filter_map(rank_of).collect()
}

fn wait_until(pause: Duration, happened: impl Fn() -> bool, otherwise: impl Fn() -> String) {
    let began = Instant::now();
    while !happened() {
        assert!(began.elapsed() < SOON, "{}", otherwise());
        thread::sleep(pause);
    }
}

/// Between two looks at a file or at processes.
const LOOKS: Duration = Duration::from_millis(10);

/// Between two questions to Slurm, each of which takes a process.
const QUESTIONS: Duration = Duration::from_millis(150);

/// Two strategies over two transports, and a rank that is killed.
fn trains_and_ends(launcher: Launcher) {
    let Some(place) = Place::with(launcher) else { return };
    for arguments in ["--strategy ddp --transport tcp --steps 2", "--strategy fsdp --transport quic --steps 2"] {
        assert_eq!(place.weights(&[], arguments), own(arguments), "{launcher:?}, {arguments}");
    }
    place.kill("--strategy ddp --transport tcp");
    place.stop("--strategy fsdp --transport tcp");
}

#[test]
fn of_open_mpi() {
    trains_and_ends(OpenMpi);
}

#[test]
fn of_mpich() {
    trains_and_ends(Mpich);
}

#[test]
fn of_slurm() {
    trains_and_ends(Slurm);
}

/// Its start takes seconds, so that there is one, which has everything.
#[test]
fn of_torchrun_that_starts_the_ranks_again() {
    let Some(place) = Place::with(Torchrun) else { return };
    let arguments = format!("{LONG} --resume auto --overwrite");
    let mut job = Started::new(&place, place.command(&["--max-restarts", "1"], "out", &arguments));
    job.wait_until(|| place.saved("out") > 0);
    job.kill_rank();
    let (code, said) = job.end();
    assert_eq!(code, Some(0), "{said}");
    assert!(said.contains("rank 2 was lost") && said.contains("resume: out/checkpoints/step-"), "{said}");
    assert_eq!(hash(&said), own(LONG));
}

/// What is submitted by `sbatch`: a rank is killed, then the time is almost up.
#[test]
fn of_the_batch_script_for_slurm() {
    let Some(place) = Place::with(Slurm) else { return };
    let mut sbatch = place.program(Path::new("sbatch"));
    sbatch
        .args("--parsable --nodes 2 --ntasks-per-node 2 --cpus-per-task 1 --time 5 --output log --chdir".split(' '))
        .arg(place.path());
    sbatch.arg(concat!(env!("CARGO_MANIFEST_DIR"), "/../deploy/slurm.sbatch")).args(options(LONG));
    sbatch.env_remove("COMM_SECRET").env("RUN", place.out("run")).env("PATH", with_gpt2());
    let job = succeed(&mut sbatch);
    let slurm =
        |program: &str, arguments: &[&str]| succeed(place.program(Path::new(program)).args(arguments).arg(&job));
    let state = || slurm("scontrol", &["show", "job"]);
    let said = || fs::read_to_string(place.out("log")).unwrap_or_default();
    let until = |pause, happened: &dyn Fn() -> bool| wait_until(pause, happened, || format!("{}{}", said(), state()));

    until(LOOKS, &|| place.saved("run") > 0);
    send("KILL", ranks(place.path(), Slurm.rank())[VICTIM]);
    let before = place.saved("run");
    until(LOOKS, &|| said().contains("resume: ") && place.saved("run") > before);
    slurm("scancel", &["--batch", "--signal=USR1"]);
    until(QUESTIONS, &|| state().contains("JobState=PENDING"));
    // Slurm would wait for two minutes. For a second it takes the job's credentials for those of the start that it has ended.
    thread::sleep(Duration::from_secs(2));
    succeed(place.program(Path::new("scontrol")).args(["update", &format!("JobId={job}"), "StartTime=now"]));
    until(QUESTIONS, &|| state().contains("JobState=COMPLETED"));

    let said = said();
    for words in ["rank 2 was lost", "exit code 137: starting again", "stopped after step ", "weights: sha256 "] {
        assert!(said.contains(words), "no '{words}' in {said}");
    }
    assert_eq!(said.matches("resume: ").count(), 2, "{said}");
    assert!(state().contains("Restarts=1"), "{}", state());
    assert_eq!(hash(&said), own(LONG));
    assert!(!place.out("run/secret").exists());
}

/// Where programs are, with this one.
fn with_gpt2() -> OsString {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let own = Path::new(gpt2()).parent().unwrap().to_owned();
    std::env::join_paths([own].into_iter().chain(std::env::split_paths(&path))).unwrap()
}

/// What a program prints that ends well.
fn succeed(command: &mut Command) -> String {
    let output = command.output().unwrap_or_else(|error| panic!("{command:?}: {error}"));
    assert!(output.status.success(), "{command:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8_lossy(&output.stdout).trim().to_owned()
}

#[test]
#[ignore = "a minute; the shorter tests have a part of it"]
fn of_every_launcher_with_two_strategies_over_two_transports() {
    for launcher in [OpenMpi, Mpich, Torchrun, Slurm] {
        let Some(place) = Place::with(launcher) else { continue };
        for strategy in ["ddp", "fsdp"] {
            for transport in ["tcp", "quic"] {
                let arguments = format!("--strategy {strategy} --transport {transport} --steps 2");
                assert_eq!(place.weights(&[], &arguments), own(&arguments), "{launcher:?}, {arguments}");
                let arguments = format!("--strategy {strategy} --transport {transport}");
                place.kill(&arguments);
                place.stop(&arguments);
            }
        }
    }
}
