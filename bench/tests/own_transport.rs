//! A transport that only the program knows, under `gpt2 train` and under `bench`.

#![allow(clippy::unwrap_used, reason = "in a test a panic is the report")]

#[path = "../examples/own_transport.rs"]
mod program;

use std::env;
use std::path::Path;
use std::process::{Command, ExitCode, Output};

use libtest_mimic::{Arguments, Trial};

/// Where it is set this process is not the test but the program, or one of its ranks.
const IS_PROGRAM: &str = "OWN_TRANSPORT_PROGRAM";

fn main() -> ExitCode {
    if env::var_os(IS_PROGRAM).is_some() {
        return program::main();
    }
    let trials = vec![
        Trial::test("gpt2_trains_over_it_to_the_weights_of_tcp", || {
            gpt2_trains_over_it();
            Ok(())
        }),
        Trial::test("bench_measures_it_without_being_told_more", || {
            bench_measures_it();
            Ok(())
        }),
    ];
    libtest_mimic::run(&Arguments::from_args(), trials).exit_code()
}

fn program(folder: &Path, arguments: &[&str]) -> Output {
    let program = env::current_exe().unwrap();
    Command::new(program).args(arguments).env(IS_PROGRAM, "1").current_dir(folder).output().unwrap()
}

fn text(folder: &Path) -> String {
    let path = folder.join("text.txt");
    let words: String = (0..4000).map(|i| format!("{} ", (i * 7919) % 1013)).collect();
    std::fs::write(&path, words).unwrap();
    path.display().to_string()
}

fn gpt2_trains_over_it() {
    let folder = tempfile::tempdir().unwrap();
    let data = text(folder.path());
    let weights = |transport: &str| {
        let arguments = ["train", "--strategy", "ddp", "--nproc", "2", "--preset", "micro", "--tokenizer", "bytes"];
        let run = ["--steps", "3", "--batch", "4", "--data", &data, "--transport", transport, "--out", transport];
        let output = program(folder.path(), &[&arguments[..], &run].concat());
        let said = String::from_utf8_lossy(&output.stdout).into_owned();
        assert!(output.status.success(), "{transport}: {said}{}", String::from_utf8_lossy(&output.stderr));
        std::fs::read(folder.path().join(transport).join("model.safetensors")).unwrap()
    };
    assert!(weights("sockets") == weights("tcp"), "the weights differ");
    let output = program(folder.path(), &["train", "--help"]);
    assert!(String::from_utf8_lossy(&output.stdout).contains("sockets (plain sockets, polled)"));
    let refused = ["train", "--transport", "sockets", "--congestion", "cubic", "--nproc", "2", "--strategy", "ddp"];
    let output = program(folder.path(), &[&refused[..], &["--data", &data, "--out", "refused"]].concat());
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(!output.status.success() && said.contains("sockets has no option congestion"), "{said}");
}

fn bench_measures_it() {
    let folder = tempfile::tempdir().unwrap();
    let data = text(folder.path());
    let arguments =
        ["--allow-debug", "--skip-proof", "--links", "loopback", "--rounds", "1", "--steps", "3", "--preset", "micro"];
    let run =
        ["--batch", "4", "--strategies", "ddp", "--transports", "sockets,tcp", "--data", &data, "--out", "results"];
    let output = program(folder.path(), &[&arguments[..], &run].concat());
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{said}{}", String::from_utf8_lossy(&output.stderr));
    let rows = std::fs::read_to_string(folder.path().join("results/results.jsonl")).unwrap();
    let rows: Vec<serde_json::Value> = rows.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let of = |transport: &str| {
        let row = rows.iter().find(|row| row["cell"]["transport"] == transport).unwrap();
        row["measured"]["weights_hash"].as_str().unwrap_or_else(|| panic!("{row}")).to_string()
    };
    assert_eq!(of("sockets"), of("tcp"));
}
