//! `bench collectives` as a user meets it.

#![allow(clippy::unwrap_used, reason = "a test may panic")]

use std::fs;
use std::io::Read;
use std::net::TcpListener;
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};

use serde_json::Value;

fn collectives(arguments: &[&str], folder: &Path) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_bench"));
    command.args(["collectives", "--allow-debug"]).args(arguments).current_dir(folder).output().unwrap()
}

fn stdout(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned()
}

fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

fn rows(text: &str) -> Vec<Value> {
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

#[test]
#[cfg(debug_assertions)]
fn a_debug_build_is_refused_unless_allowed() {
    let output = Command::new(env!("CARGO_BIN_EXE_bench")).arg("collectives").output().unwrap();
    assert!(!output.status.success());
    assert!(stderr(&output).contains("--allow-debug"));
}

#[test]
fn every_collective_is_right_on_threads_and_processes() {
    let folder = tempfile::tempdir().unwrap();
    for ranks in ["2", "3"] {
        let out = format!("results-{ranks}");
        let arguments = [
            "--ops",
            "all-reduce,broadcast,reduce,scatter,gather,all-gather,reduce-scatter,all-to-all,send-recv",
            "--transports",
            "local,shm,tcp-raw",
            "--ranks",
            ranks,
            "-b",
            "8",
            "-e",
            "32K",
            "-f",
            "64",
            "-n",
            "2",
            "-r",
            "1",
            "--rounds",
            "2",
            "--out",
            &out,
        ];
        let output = collectives(&arguments, folder.path());
        let said = stdout(&output);
        assert!(output.status.success(), "{said}{}", stderr(&output));
        assert!(said.contains("wrong elements: 0 OK"), "{said}");
        let rows = rows(&fs::read_to_string(folder.path().join(out).join("collectives.jsonl")).unwrap());
        // Nine collectives, three sizes, three transports.
        assert_eq!(rows.len(), 9 * 3 * 3, "{said}");
        for row in rows {
            let name = format!("{} over {}", row["operation"], row["transport"]);
            for place in ["in_place", "out_of_place"] {
                let figures = &row[place];
                assert_eq!(figures["wrong"], 0, "{name}, {place}: {figures}");
                assert_eq!(figures["rounds_us"].as_array().unwrap().len(), 2, "{name}, {place}");
                for figure in ["time_us", "algbw", "busbw", "cpu_s_per_gb", "p50_us", "p99_us"] {
                    assert!(figures[figure].as_f64().unwrap() > 0.0, "{name}, {place}: {figure}");
                }
            }
            assert!(row["environment"]["kernel"].is_string() && row["tcp_congestion_in_use"].is_string(), "{name}");
            assert!(row["transport"] == "local" || !row["transport_facts"].as_array().unwrap().is_empty(), "{name}");
        }
    }
}

#[test]
fn every_type_and_reduction_is_right() {
    let folder = tempfile::tempdir().unwrap();
    let arguments = [
        "-o",
        "all",
        "-d",
        "all",
        "-b",
        "8K",
        "-e",
        "8K",
        "-n",
        "1",
        "--rounds",
        "1",
        "--transports",
        "local",
        "--ranks",
        "3",
        "--json",
    ];
    let output = collectives(&arguments, folder.path());
    assert!(output.status.success(), "{}{}", stdout(&output), stderr(&output));
    let rows = rows(&stdout(&output));
    // Twelve types, five reductions.
    assert_eq!(rows.len(), 12 * 5);
    for row in rows {
        for place in ["in_place", "out_of_place"] {
            assert_eq!(row[place]["wrong"], 0, "{} {}, {place}: {}", row["type"], row["redop"], row[place]);
        }
    }
}

#[test]
fn one_way_compares_with_plain_tcp() {
    let folder = tempfile::tempdir().unwrap();
    let arguments = ["--one-way", "--transports", "local,tcp-raw", "-n", "4", "--rounds", "3"];
    let output = collectives(&arguments, folder.path());
    let said = stdout(&output);
    assert!(output.status.success(), "{said}{}", stderr(&output));
    let line = |name: &str| said.lines().find(|line| line.trim_start().starts_with(name) && !line.contains('#'));
    assert!(line("tcp-raw").unwrap().contains("1.00 (1.00-1.00)"), "{said}");
    assert!(line("local").is_some(), "{said}");
}

#[test]
fn tuning_prints_rules_and_forced_algorithms_are_right() {
    let folder = tempfile::tempdir().unwrap();
    let small = ["--transports", "local,tcp-raw", "-b", "8", "-e", "8K", "-f", "32", "-n", "2", "--rounds", "1"];
    let output = collectives(&[&["--tune"], &small[..]].concat(), folder.path());
    let said = stdout(&output);
    assert!(output.status.success(), "{said}{}", stderr(&output));
    for line in ["rule(OpKind::AllReduce, 2, ANY, Algorithm::", "rule(OpKind::Broadcast, 2, ANY, Algorithm::"] {
        // For each of the two transports, and for both together.
        assert_eq!(said.matches(line).count(), 3, "{said}");
    }
    assert!(said.contains("wrong elements: 0 OK"), "{said}");
    let output = collectives(&[&["--algorithm", "sharded", "--json"], &small[..]].concat(), folder.path());
    assert!(output.status.success(), "{}", stderr(&output));
    assert!(rows(&stdout(&output)).iter().all(|row| row["algorithm"] == "sharded" && row["in_place"]["wrong"] == 0));
    let output = collectives(&[&["--algorithm", "tree", "--json"], &small[..]].concat(), folder.path());
    let why = rows(&stdout(&output))[0]["in_place"]["missing"].as_str().unwrap().to_string();
    assert!(why.contains("tree cannot run all-reduce"), "{why}");
}

#[test]
fn missing_peers_are_named_and_the_rest_goes_on() {
    let folder = tempfile::tempdir().unwrap();
    let arguments = [
        "--peers",
        "--peer-python",
        "/nowhere/python",
        "--transports",
        "local,nccl",
        "-b",
        "8",
        "-e",
        "8",
        "-n",
        "1",
        "--rounds",
        "1",
    ];
    let output = collectives(&arguments, folder.path());
    let said = stdout(&output);
    assert!(output.status.success(), "{said}{}", stderr(&output));
    for name in ["gloo", "mpi-shm", "mpi-tcp"] {
        let line = said.lines().find(|line| line.starts_with(&format!("# {name}"))).unwrap();
        assert!(line.contains("not available") && line.contains("/nowhere/python"), "{line}");
    }
    assert!(said.lines().any(|line| line.starts_with("# nccl") && line.contains("not available")), "{said}");
}

#[test]
fn wrong_arguments_are_one_clear_error_each() {
    let folder = tempfile::tempdir().unwrap();
    fs::create_dir(folder.path().join("earlier")).unwrap();
    fs::write(folder.path().join("earlier/collectives.jsonl"), "{}\n").unwrap();
    let cases: &[(&[&str], &str)] = &[
        (&["--no-such-flag"], "--no-such-flag"),
        (&["-b", "4X"], "4X"),
        (&["-b", "0"], "--minbytes"),
        (&["-b", "8M", "-e", "4M"], "--maxbytes"),
        (&["-b", "1", "-e", "1G", "-i", "1"], "sizes"),
        (&["-f", "1"], "--stepfactor"),
        (&["-i", "0"], "--stepbytes"),
        (&["-o", "xor"], "xor"),
        (&["-d", "quad"], "quad"),
        (&["--ops", "telepathy"], "telepathy"),
        (&["--transports", "pigeon"], "pigeon"),
        (&["--transports", "nccl"], "nccl"),
        (&["--ranks", "0"], "--ranks"),
        (&["--ranks", "100000"], "--ranks"),
        (&["-r", "2"], "--root"),
        (&["-n", "0"], "--iters"),
        (&["-t", "0"], "--timeout"),
        (&["--rounds", "0"], "--rounds"),
        (&["--lanes", "0"], "--lanes"),
        (&["-c", "2"], "--check"),
        (&["--waiting", "dozing"], "dozing"),
        (&["--congestion", "pigeon"], "--congestion pigeon"),
        (&["--quic-congestion", "pigeon"], "pigeon"),
        (&["--algorithm", "gossip"], "gossip"),
        (&["--namespace-congestion", "pigeon"], "--namespace-congestion pigeon"),
        (&["--one-way", "--ranks", "3"], "--one-way"),
        (&["-e", "1000G"], "memory"),
        (&["--out", "earlier"], "earlier/collectives.jsonl"),
    ];
    for (arguments, expected) in cases {
        let output = collectives(arguments, folder.path());
        let said = stderr(&output);
        assert!(!output.status.success(), "{arguments:?} was accepted");
        assert!(said.contains(expected) && !said.contains("panicked"), "{arguments:?}: {said}");
    }
}

/// This program as rank `rank` of three, as a launcher starts it.
fn launched(rank: usize, port: u16, arguments: &[&str], folder: &Path) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_bench"));
    command.args(arguments).current_dir(folder).env("COMM_RANK", rank.to_string()).env("COMM_WORLD_SIZE", "3");
    command.env("COMM_ADDR", format!("127.0.0.1:{port}")).env("COMM_SECRET", "a secret for tests only");
    command
}

/// A process that is killed where a test ends without it.
struct Started(Child);

impl Drop for Started {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn ranks_of_a_launcher_are_measured_and_rank_0_has_the_rows() {
    let folder = tempfile::tempdir().unwrap();
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let arguments =
        "collectives --allow-debug --transports tcp-raw,tcp,quic,shm -b 8 -e 8K -f 1024 -n 2 --rounds 2 --out rows";
    let arguments: Vec<&str> = arguments.split(' ').collect();
    let mut others = [1, 2]
        .map(|rank| Started(launched(rank, port, &arguments, folder.path()).stdout(Stdio::piped()).spawn().unwrap()));
    let output = launched(0, port, &arguments, folder.path()).output().unwrap();
    let said = stdout(&output);
    assert!(output.status.success(), "{said}{}", stderr(&output));
    assert!(said.contains("wrong elements: 0 OK") && said.contains(" (3 rank(s))"), "{said}");
    for Started(other) in &mut others {
        let mut said = String::new();
        other.stdout.take().unwrap().read_to_string(&mut said).unwrap();
        assert!(other.wait().unwrap().success() && said.is_empty(), "{said}");
    }
    let rows = rows(&fs::read_to_string(folder.path().join("rows/collectives.jsonl")).unwrap());
    // Two sizes, four transports.
    assert_eq!(rows.len(), 2 * 4, "{said}");
    for row in rows {
        assert_eq!((&row["ranks"], &row["in_place"]["wrong"]), (&Value::from(3), &Value::from(0)), "{row}");
        assert!(row["transport_facts"].to_string().contains(r#"["machines","1"]"#), "{row}");
    }
}

#[test]
fn what_starts_its_ranks_itself_is_refused_under_a_launcher() {
    let folder = tempfile::tempdir().unwrap();
    for command in ["memory", "soak --for 1s", "links"] {
        let arguments: Vec<&str> = command.split(' ').collect();
        let output = launched(1, 1, &arguments, folder.path()).output().unwrap();
        let said = stderr(&output);
        assert!(!output.status.success() && said.contains("rank 1 of 3, by COMM_RANK"), "{command}: {said}");
    }
}
