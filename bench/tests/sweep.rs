//! Sweeps as a user meets them: real processes, small plans.

#![allow(clippy::unwrap_used, reason = "a test may panic")]

use std::fs;
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;

/// A folder with a text and a plan.
struct Bench {
    folder: tempfile::TempDir,
}

impl Bench {
    fn with_plan(rounds: u32, axes: &str) -> Self {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("text.txt"), "Sphinx of black quartz, judge my vow. ".repeat(400)).unwrap();
        let plan = format!(
            "name = \"small\"\nrounds = {rounds}\ntimeout-s = 60\n[axes]\npreset = \"micro\"\nbatch = 4\nsteps = 4\n{axes}\n"
        );
        fs::write(folder.path().join("plan.toml"), plan).unwrap();
        Bench { folder }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn command(&self, more: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_bench"));
        command.args(["sweep", "plan.toml", "--allow-debug"]).args(more).current_dir(self.folder.path());
        for (option, value) in [("--data", "text.txt"), ("--out", "out")] {
            if !more.contains(&option) {
                command.args([option, value]);
            }
        }
        command
    }

    fn sweep(&self, more: &[&str]) -> Output {
        self.command(more).output().unwrap()
    }

    fn records(&self) -> Vec<Value> {
        let text = fs::read_to_string(self.path("out/results.jsonl")).unwrap();
        text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    }
}

fn said(output: &Output) -> String {
    format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr))
}

fn kind(record: &Value) -> &str {
    record["status"]["kind"].as_str().unwrap()
}

fn numbers(value: &Value) -> Vec<f64> {
    value.as_array().unwrap().iter().map(|number| number.as_f64().unwrap()).collect()
}

/// Network namespaces of this program that exist.
fn namespaces() -> Vec<String> {
    let entries = fs::read_dir("/var/run/netns").into_iter().flatten().flatten();
    let names = entries.filter_map(|entry| entry.file_name().into_string().ok());
    names.filter(|name| name.starts_with("bench-")).collect()
}

#[test]
fn every_run_is_a_line_with_everything_in_it() {
    let bench = Bench::with_plan(
        2,
        "strategy = [\"single\", \"ps\", \"ddp\", \"fsdp\"]\ntransport = [\"null\", \"local\", \"shm\", \"tcp\", \"quic\"]",
    );
    let output = bench.sweep(&[]);
    assert!(output.status.success(), "{}", said(&output));
    let records = bench.records();
    assert_eq!(records.len(), 2 * (1 + 3 * 5));
    for record in &records {
        let name = format!("{} over {}", record["cell"]["strategy"], record["cell"]["transport"]);
        assert_eq!(kind(record), "ok", "{name}: {}", record["status"]);
        let ranks = record["measured"]["ranks"].as_array().unwrap();
        assert_eq!(ranks.len() as u64, record["cell"]["ranks"].as_u64().unwrap(), "{name}");
        for rank in ranks {
            let steps = &rank["steps"];
            let parts = ["data", "compute", "pack", "exposed", "scalars", "skew", "unpack", "optimizer", "other"];
            let columns: Vec<Vec<f64>> = parts.iter().map(|part| numbers(&steps[*part])).collect();
            for (step, total) in numbers(&steps["total"]).into_iter().enumerate() {
                let sum: f64 = columns.iter().map(|column| column[step]).sum();
                assert!((sum - total).abs() < 1e-6 * total, "{name}: the parts of step {step} make {sum} of {total}");
                // Nothing is found by subtraction, so nothing is negative, and little is left.
                assert!(columns.iter().all(|column| column[step] >= -1e-9), "{name}: {columns:?}");
            }
            if record["cell"]["transport"] != "null" {
                assert_eq!(rank["payload_bytes"], rank["payload_expected"], "{name}");
            }
        }
    }
    // Weights do not depend on the transport, where something arrives.
    for strategy in ["ps", "ddp", "fsdp"] {
        let of = |record: &&Value| record["cell"]["strategy"] == strategy && record["cell"]["transport"] != "null";
        let hashes: Vec<&Value> = records.iter().filter(of).map(|record| &record["measured"]["weights_hash"]).collect();
        assert!(hashes.len() == 8 && hashes.iter().all(|hash| *hash == hashes[0]), "{strategy}: {hashes:?}");
    }
    let tcp = records.iter().find(|record| record["cell"]["transport"] == "tcp").unwrap();
    let connections = &tcp["measured"]["ranks"][0]["network"];
    assert!(!connections["connections"].as_array().unwrap().is_empty() || connections["missing"].is_string());
    let traces: Vec<_> = fs::read_dir(bench.path("out/traces")).unwrap().collect();
    assert_eq!(traces.len(), 16);
    let trace: Value = serde_json::from_slice(&fs::read(bench.path("out/traces/cell-1.json")).unwrap()).unwrap();
    assert!(trace["traceEvents"].as_array().unwrap().len() > 20);
    let report = fs::read_to_string(bench.path("out/report.html")).unwrap();
    assert!(report.contains("ddp") && report.contains("quic"));
}

#[test]
fn a_slow_rank_is_named() {
    let bench =
        Bench::with_plan(1, "strategy = \"ring\"\ntransport = \"shm\"\nsteps = 8\nplanted = { ms = 40, rank = 1 }");
    // The plan's steps come first; the axis may be named once only.
    let plan = fs::read_to_string(bench.path("plan.toml")).unwrap().replacen("steps = 4\n", "", 1);
    fs::write(bench.path("plan.toml"), plan).unwrap();
    let output = bench.sweep(&[]);
    assert!(output.status.success(), "{}", said(&output));
    let record = bench.records().remove(0);
    let waited = |rank: usize| numbers(&record["measured"]["ranks"][rank]["waited_for"]);
    assert!(waited(0)[1] > 25.0, "{:?}", waited(0));
    assert!(waited(1)[0] < 25.0, "{:?}", waited(1));
}

#[test]
fn a_run_that_does_not_end_is_a_hole_with_its_reason() {
    let bench = Bench::with_plan(1, "strategy = \"ddp\"\ntransport = \"shm\"\nplanted = [{ ms = 60000 }, \"none\"]");
    let plan = fs::read_to_string(bench.path("plan.toml")).unwrap().replace("timeout-s = 60", "timeout-s = 3");
    fs::write(bench.path("plan.toml"), plan).unwrap();
    let output = bench.sweep(&[]);
    assert_eq!(output.status.code(), Some(1), "{}", said(&output));
    let records = bench.records();
    let mut kinds: Vec<&str> = records.iter().map(kind).collect();
    kinds.sort_unstable();
    assert_eq!(kinds, ["ok", "timed-out"], "{}", said(&output));
    let report = fs::read_to_string(bench.path("out/report.html")).unwrap();
    assert!(report.contains("timed out") || report.contains("did not end"), "the report says nothing of the hole");
}

#[test]
fn a_stopped_sweep_goes_on_where_it_was() {
    let bench = Bench::with_plan(3, "strategy = [\"ps\", \"ring\", \"ddp\"]\ntransport = \"tcp-raw\"");
    let mut sweep = bench.command(&[]).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    let began = Instant::now();
    let lines = || fs::read_to_string(bench.path("out/results.jsonl")).unwrap_or_default().lines().count();
    while lines() < 2 {
        assert!(began.elapsed() < Duration::from_secs(60), "nothing is measured");
        std::thread::sleep(Duration::from_millis(20));
    }
    assert!(Command::new("kill").args(["-TERM", &sweep.id().to_string()]).status().unwrap().success());
    assert_eq!(sweep.wait().unwrap().code(), Some(128 + 15));
    let done = lines();
    assert!(done < 9, "it was over before it was stopped");
    assert!(bench.path("out/report.html").exists(), "what there is has no report");
    // As if the power had failed in the middle of a line.
    let mut torn = fs::read(bench.path("out/results.jsonl")).unwrap();
    torn.extend_from_slice(b"{\"schema\":1,\"pla");
    fs::write(bench.path("out/results.jsonl"), torn).unwrap();

    let again = bench.sweep(&[]);
    assert!(!again.status.success() && said(&again).contains("--resume"), "{}", said(&again));
    let output = bench.sweep(&["--resume"]);
    assert!(output.status.success(), "{}", said(&output));
    let records = bench.records();
    let mut runs: Vec<(String, u64)> =
        records.iter().map(|record| (record["cell"].to_string(), record["round"].as_u64().unwrap())).collect();
    runs.sort();
    runs.dedup();
    assert_eq!((records.len(), runs.len()), (9, 9));
}

#[test]
fn a_folder_belongs_to_one_sweep_and_to_one_text() {
    let bench = Bench::with_plan(1, "strategy = \"ring\"\ntransport = \"shm\"");
    assert!(bench.sweep(&[]).status.success());
    let held = fs::File::open(bench.path("out/lock")).unwrap();
    held.lock().unwrap();
    let refused = bench.sweep(&["--resume"]);
    assert!(!refused.status.success() && said(&refused).contains("another sweep"), "{}", said(&refused));
    drop(held);
    fs::write(bench.path("text.txt"), "Pack my box with five dozen liquor jugs. ".repeat(400)).unwrap();
    let refused = bench.sweep(&["--resume"]);
    assert!(!refused.status.success() && said(&refused).contains("--data"), "{}", said(&refused));
    assert_eq!(bench.records().len(), 1);
}

#[test]
fn a_disk_that_is_full_loses_no_line() {
    let bench = Bench::with_plan(20, "strategy = \"ring\"\ntransport = \"shm\"");
    let program = env!("CARGO_BIN_EXE_bench");
    // A limit on file sizes instead of a full disk: 16 KiB, which a few lines fill.
    let script =
        format!("trap '' XFSZ; ulimit -f 32; exec {program} sweep plan.toml --allow-debug --data text.txt --out out");
    let output = Command::new("sh").args(["-c", &script]).current_dir(bench.folder.path()).output().unwrap();
    assert!(!output.status.success());
    assert!(said(&output).contains("results.jsonl") && !said(&output).contains("panicked"), "{}", said(&output));
    assert!(bench.records().len() < 20);
    let output = bench.sweep(&["--resume"]);
    assert!(output.status.success(), "{}", said(&output));
    assert_eq!(bench.records().len(), 20);
}

#[test]
fn over_a_link_ranks_live_in_namespaces_that_are_gone_afterwards() {
    let bench =
        Bench::with_plan(1, "strategy = \"ddp\"\ntransport = [\"tcp\", \"quic\"]\nlink = [\"lan-1g\", \"wan\"]");
    let before = namespaces();
    let output = bench.sweep(&[]);
    let records = bench.records();
    assert_eq!(records.len(), 4);
    if records.iter().all(|record| kind(record) == "not-available") {
        eprintln!("skipped: {}", records[0]["status"]["why"]);
        return;
    }
    assert!(output.status.success(), "{}", said(&output));
    for record in &records {
        assert_eq!(kind(record), "ok", "{}", record["status"]);
        let steps = numbers(&record["measured"]["ranks"][0]["steps"]["total"]);
        // A step over the wide link takes a round trip at least.
        assert!(record["cell"]["link"] != "wan" || steps.iter().all(|ms| *ms > 45.0), "{steps:?}");
        let interface = &record["measured"]["ranks"][0]["network"]["interface"];
        let payload = record["measured"]["ranks"][0]["payload_bytes"].as_u64().unwrap() * 3;
        assert!(interface["bytes_sent"].as_u64().unwrap() > payload, "{interface}");
    }
    assert_eq!(namespaces().len(), before.len(), "namespaces are left");
}

#[test]
fn what_is_wrong_is_one_clear_error() {
    let bench = Bench::with_plan(1, "strategy = \"ddp\"\nlink = \"moon\"");
    fs::write(bench.path("bad.toml"), "name = 3").unwrap();
    fs::create_dir(bench.path("empty")).unwrap();
    let program = |arguments: &[&str]| {
        Command::new(env!("CARGO_BIN_EXE_bench")).args(arguments).current_dir(bench.folder.path()).output().unwrap()
    };
    let cases: &[(&[&str], &str)] = &[
        (&["sweep"], "plan"),
        (&["sweep", "nowhere.toml"], "nowhere.toml"),
        (&["sweep", "bad.toml"], "bad.toml"),
        (&["sweep", "quick", "--rounds", "0"], "--rounds"),
        (&["sweep", "quick", "--resume"], "--out"),
        (&["sweep", "quick", "--allow-debug", "--out", "empty", "--resume"], "plan.toml"),
        (&["sweep", "plan.toml", "--allow-debug", "--data", "text.txt"], "moon"),
        (&["report", "empty"], "results.jsonl"),
        (&["compare", "empty", "empty"], "results.jsonl"),
    ];
    for (arguments, expected) in cases {
        let output = program(arguments);
        assert!(!output.status.success(), "{arguments:?} was accepted");
        assert!(
            said(&output).contains(expected) && !said(&output).contains("panicked"),
            "{arguments:?}: {}",
            said(&output)
        );
    }
    let listed = program(&["sweep", "--list"]);
    assert!(listed.status.success() && said(&listed).contains("ladder"));
    let dry = program(&["sweep", "quick", "--dry-run"]);
    assert!(dry.status.success() && said(&dry).contains("fsdp quic"));
}

#[test]
fn a_plan_with_ranks_that_talk_to_nobody_says_how_much_is_computed() {
    let bench = Bench::with_plan(
        1,
        "strategy = [\"ddp\", \"diloco\"]\ntransport = \"tcp\"\nsync-every = 2\n[[also]]\nstrategy = \"single\"\nalone = true\nranks = 2",
    );
    let output = bench.sweep(&[]);
    let said = said(&output);
    assert!(output.status.success(), "{said}");
    assert!(said.contains("Share of the time that is computed, over tcp:"), "{said}");
    assert!(said.contains("computes") && said.contains("A loss of"), "{said}");
    let page = fs::read_to_string(bench.path("out/report.html")).unwrap();
    for part in
        ["<h2 id=\"bandwidth\">", "Loss against bytes", "Loss against seconds, over tcp on loopback", "public, every 8"]
    {
        assert!(page.contains(part), "{part}");
    }
}

/// A process that is killed where a test ends without it.
struct Started(Option<Child>);

impl Started {
    fn new(command: &mut Command) -> Self {
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        Started(Some(command.spawn().unwrap()))
    }

    fn id(&self) -> u32 {
        self.0.as_ref().unwrap().id()
    }

    fn has_ended(&mut self) -> bool {
        self.0.as_mut().unwrap().try_wait().unwrap().is_some()
    }

    fn kill(&mut self) {
        let _ = self.0.as_mut().unwrap().kill();
    }

    fn output(mut self) -> Output {
        self.0.take().unwrap().wait_with_output().unwrap()
    }
}

impl Drop for Started {
    fn drop(&mut self) {
        if let Some(child) = &mut self.0 {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// A sweep as rank `rank` of two that a launcher has started by hand.
fn launched(bench: &Bench, rank: usize, port: u16, more: &[&str]) -> Started {
    let mut command = bench.command(more);
    command.env("COMM_RANK", rank.to_string()).env("COMM_WORLD_SIZE", "2");
    command.env("COMM_ADDR", format!("127.0.0.1:{port}")).env("COMM_SECRET", "a secret for tests only");
    Started::new(&mut command)
}

/// What two ranks have said when both have ended, in less than two minutes.
fn ended(ranks: [Started; 2]) -> [Output; 2] {
    let began = Instant::now();
    let mut ranks = ranks;
    while !ranks.iter_mut().all(Started::has_ended) {
        if began.elapsed() > Duration::from_secs(120) {
            ranks.iter_mut().for_each(Started::kill);
            let told = ranks.map(|rank| said(&rank.output()));
            panic!("the ranks have not ended: {told:?}");
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    ranks.map(Started::output)
}

fn free_port() -> u16 {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}

#[test]
fn under_mpirun_cells_come_to_the_weights_of_this_programs_own_ranks() {
    let bench = Bench::with_plan(1, "strategy = [\"ddp\", \"fsdp\"]\ntransport = [\"tcp\", \"quic\"]\nranks = [2, 4]");
    let mut mpirun = Command::new("mpirun");
    mpirun.args(["--oversubscribe", "--bind-to", "none", "-n", "2", env!("CARGO_BIN_EXE_bench")]);
    mpirun.args(["sweep", "plan.toml", "--allow-debug", "--data", "text.txt", "--out", "out"]);
    mpirun.current_dir(bench.folder.path()).env("COMM_SECRET", "a secret for tests only").stdin(Stdio::null());
    mpirun.env("OMPI_ALLOW_RUN_AS_ROOT", "1").env("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1");
    let version = Command::new("mpirun").arg("--version").output();
    if !version.is_ok_and(|output| String::from_utf8_lossy(&output.stdout).contains("Open MPI")) {
        println!("skipped: mpirun is not there: Debian's package openmpi-bin");
        return;
    }
    let output = mpirun.output().unwrap();
    assert!(output.status.success(), "{}", said(&output));
    let told = "of 8 cells left out: 4 (the launcher has started 2 ranks, and the cell has another number)";
    assert!(said(&output).contains(told), "{}", said(&output));
    let records = bench.records();
    let plan = fs::read_to_string(bench.path("plan.toml")).unwrap().replace("[2, 4]", "2");
    fs::write(bench.path("plan.toml"), plan).unwrap();
    let own = bench.sweep(&["--out", "own"]);
    assert!(own.status.success(), "{}", said(&own));
    let own: Vec<Value> = fs::read_to_string(bench.path("own/results.jsonl"))
        .unwrap()
        .lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect();
    assert_eq!((records.len(), own.len()), (8, 4));
    for record in &records {
        let cell = &record["cell"];
        if cell["ranks"] == 4 {
            assert_eq!(kind(record), "not-available", "{}", record["status"]);
            continue;
        }
        assert_eq!(kind(record), "ok", "{cell}: {}", record["status"]);
        let measured = &record["measured"];
        let same = own.iter().find(|own| own["cell"] == *cell).unwrap();
        assert_eq!(measured["weights_hash"], same["measured"]["weights_hash"], "{cell}");
        assert_eq!(measured["losses"], same["measured"]["losses"], "{cell}");
        let host = &measured["hosts"][0];
        assert_eq!((&host["ranks"], &host["clock"]), (&serde_json::json!([0, 1]), &Value::Null), "{host}");
        for rank in measured["ranks"].as_array().unwrap() {
            assert_eq!(rank["payload_bytes"], rank["payload_expected"], "{cell}");
            assert_eq!(numbers(&rank["steps"]["total"]).len(), 4, "{cell}");
        }
    }
    assert!(bench.path("out/report.html").exists() && bench.path("out/traces").read_dir().unwrap().count() == 4);
}

/// The child of a process that trains, once it is there.
fn trainer_of(parent: u32) -> u32 {
    let began = Instant::now();
    loop {
        let children = fs::read_to_string(format!("/proc/{parent}/task/{parent}/children")).unwrap_or_default();
        let trains = |child: &u32| {
            let arguments = fs::read(format!("/proc/{child}/cmdline")).unwrap_or_default();
            String::from_utf8_lossy(&arguments).contains("train-rank")
        };
        if let Some(child) = children.split_whitespace().filter_map(|child| child.parse().ok()).find(trains) {
            return child;
        }
        assert!(began.elapsed() < Duration::from_secs(30), "process {parent} has started no rank");
        std::thread::sleep(Duration::from_millis(10));
    }
}

#[test]
fn a_rank_that_dies_under_a_launcher_is_a_hole_and_the_next_cell_runs() {
    if !Path::new(&format!("/proc/self/task/{}/children", std::process::id())).exists() {
        println!("skipped: this kernel does not list the children of a process");
        return;
    }
    let bench = Bench::with_plan(2, "strategy = \"ddp\"\ntransport = \"tcp-raw\"\nplanted = { ms = 500 }");
    let port = free_port();
    let [first, second] = [0, 1].map(|rank| launched(&bench, rank, port, &[]));
    let victim = trainer_of(second.id());
    // Most of them are in their first steps then.
    std::thread::sleep(Duration::from_millis(700));
    assert!(Command::new("kill").args(["-KILL", &victim.to_string()]).status().unwrap().success());
    let [first, second] = ended([first, second]);
    assert_eq!(first.status.code(), Some(1), "{}", said(&first));
    assert!(second.status.success() && said(&second).is_empty(), "{}", said(&second));
    let records = bench.records();
    assert_eq!(records.iter().map(kind).collect::<Vec<_>>(), ["failed", "ok"], "{}", said(&first));
    let why = records[0]["status"]["why"].as_str().unwrap();
    assert!(why.contains("rank 1 was killed by signal 9"), "{why}");
    assert!(said(&first).contains(why), "{}", said(&first));
}

#[test]
fn ranks_with_another_text_are_told_apart() {
    let bench = Bench::with_plan(1, "strategy = \"ddp\"\ntransport = \"tcp-raw\"");
    fs::write(bench.path("other.txt"), "Pack my box with five dozen liquor jugs. ".repeat(400)).unwrap();
    let port = free_port();
    let first = launched(&bench, 0, port, &[]);
    let second = launched(&bench, 1, port, &["--data", "other.txt"]);
    let [first, second] = ended([first, second]);
    assert_eq!(first.status.code(), Some(1), "{}", said(&first));
    assert!(said(&first).contains("rank 1 has another text") && said(&first).contains("--data"), "{}", said(&first));
    assert!(!second.status.success() && said(&second).is_empty(), "{}", said(&second));
}

#[test]
fn a_launchers_process_that_dies_ends_the_sweep_which_goes_on_with_the_cell_that_ran() {
    if !Path::new(&format!("/proc/self/task/{}/children", std::process::id())).exists() {
        println!("skipped: this kernel does not list the children of a process");
        return;
    }
    let bench = Bench::with_plan(2, "strategy = \"ddp\"\ntransport = \"tcp-raw\"\nplanted = { ms = 500 }");
    let port = free_port();
    let [first, mut second] = [0, 1].map(|rank| launched(&bench, rank, port, &[]));
    trainer_of(second.id());
    second.kill();
    let [first, _] = ended([first, second]);
    assert_eq!(first.status.code(), Some(1), "{}", said(&first));
    assert!(said(&first).contains("no cell can run any more") && said(&first).contains("--resume"), "{}", said(&first));
    // The same text at another place.
    fs::copy(bench.path("text.txt"), bench.path("copy.txt")).unwrap();
    let port = free_port();
    let again =
        [launched(&bench, 0, port, &["--resume"]), launched(&bench, 1, port, &["--resume", "--data", "copy.txt"])];
    let [first, second] = ended(again);
    assert!(first.status.success() && second.status.success(), "{}{}", said(&first), said(&second));
    assert_eq!(bench.records().iter().map(kind).collect::<Vec<_>>(), ["ok", "ok"]);
    // Ranks without a launcher are no part of the same sweep.
    let other = bench.sweep(&["--resume"]);
    assert!(!other.status.success() && said(&other).contains("placement of ranks"), "{}", said(&other));
}

/// Two network namespaces joined by a cable: for ranks, two machines. They are gone when this is dropped.
struct TwoMachines([String; 2]);

impl TwoMachines {
    /// `None` where they cannot be had, which is said.
    fn new() -> Option<Self> {
        let names = ["a", "b"].map(|name| format!("sweep-test-{}-{name}", std::process::id()));
        let machines = TwoMachines(names);
        let [a, b] = &machines.0;
        let lines = format!(
            "netns add {a}\nnetns add {b}\nlink add va netns {a} type veth peer name vb netns {b}\n\
             -n {a} addr add 10.77.0.1/24 dev va\n-n {b} addr add 10.77.0.2/24 dev vb\n\
             -n {a} link set lo up\n-n {b} link set lo up\n-n {a} link set va up\n-n {b} link set vb up"
        );
        for line in lines.lines() {
            let output = Command::new("ip").args(line.split(' ')).output();
            if !output.is_ok_and(|output| output.status.success()) {
                println!("skipped: no network namespaces: `ip {line}` fails");
                return None;
            }
        }
        Some(machines)
    }

    /// `command` on one of them, with a monotonic clock that is so many seconds ahead.
    fn start(&self, number: usize, ahead: u64, command: &Command) -> Started {
        let mut there = Command::new("ip");
        there.args([
            "netns",
            "exec",
            &self.0[number],
            "unshare",
            "--time",
            "--monotonic",
            &ahead.to_string(),
            "--fork",
        ]);
        there.arg(command.get_program()).args(command.get_args()).current_dir(command.get_current_dir().unwrap());
        there.env("COMM_RANK", number.to_string()).env("COMM_WORLD_SIZE", "2");
        there.env("COMM_ADDR", "10.77.0.1:29400").env("COMM_SECRET", "a secret for tests only");
        Started::new(&mut there)
    }
}

impl Drop for TwoMachines {
    fn drop(&mut self) {
        for name in &self.0 {
            let _ = Command::new("ip").args(["netns", "delete", name]).stderr(Stdio::null()).status();
        }
    }
}

#[test]
fn ranks_of_two_machines_are_brought_onto_one_clock() {
    const AHEAD: u64 = 5000;
    let Some(machines) = TwoMachines::new() else { return };
    let tried = Command::new("unshare").args(["--time", "--monotonic", "1", "--fork", "true"]).output();
    if !tried.is_ok_and(|output| output.status.success()) {
        println!("skipped: no time namespaces: `unshare --time` fails");
        return;
    }
    let bench = Bench::with_plan(1, "strategy = \"ddp\"\ntransport = [\"tcp\", \"shm\"]");
    let command = bench.command(&[]);
    let ranks = [machines.start(0, 0, &command), machines.start(1, AHEAD, &command)];
    let [first, second] = ended(ranks);
    assert!(first.status.success() && second.status.success(), "{}{}", said(&first), said(&second));
    assert!(said(&first).contains("The ranks were on 2 machines"), "{}", said(&first));
    let records = bench.records();
    let of = |transport: &str| records.iter().find(|record| record["cell"]["transport"] == transport).unwrap();
    assert_eq!(kind(of("shm")), "not-available");
    let tcp = of("tcp");
    assert_eq!((kind(tcp), &tcp["cell"]["link"]), ("ok", &Value::from("network")), "{}", tcp["status"]);
    let hosts = tcp["measured"]["hosts"].as_array().unwrap();
    let clock = |name: &str| hosts[1]["clock"][name].as_f64().unwrap();
    let off = (clock("offset_ms") - 1e3 * AHEAD as f64).abs();
    println!("{}", hosts[1]["clock"]);
    assert!(hosts[0]["clock"].is_null() && off <= clock("error_ms"), "{off} ms off: {}", hosts[1]);
    // All of it happened within the run.
    let traces = fs::read_dir(bench.path("out/traces")).unwrap().flatten();
    let traces: Vec<_> = traces.collect();
    assert_eq!(traces.len(), 1);
    let trace: Value = serde_json::from_slice(&fs::read(traces[0].path()).unwrap()).unwrap();
    let times = trace["traceEvents"].as_array().unwrap().iter().filter_map(|event| event["ts"].as_f64());
    assert!(times.clone().count() > 20 && times.fold(0.0, f64::max) < 60e6, "the ranks are apart");
}
