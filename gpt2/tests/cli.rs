//! The program as a user meets it: what it prints, and one clear error for everything that is wrong.

#![allow(clippy::unwrap_used, reason = "a test may panic")]

use std::fs;
use std::io::{BufRead, BufReader, Read};
use std::net::TcpListener;
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use comm_core::job::{EXIT_CONFIGURATION, EXIT_ECHO, EXIT_STOPPED};
use gpt2::checkpoint::Checkpoint;
use gpt2::config::ModelConfig;
use gpt2::segments::layout;

pub(crate) fn gpt2(arguments: &[&str], folder: &Path) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_gpt2"));
    for variable in
        ["COMM_RANK", "COMM_WORLD_SIZE", "RANK", "WORLD_SIZE", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK"]
    {
        command.env_remove(variable);
    }
    command.args(arguments).current_dir(folder).output().unwrap()
}

fn text(folder: &Path) -> String {
    let path = folder.join("text.txt");
    let words = "The quick brown fox jumps over the lazy dog, and runs away from a bear. ";
    fs::write(&path, words.repeat(200)).unwrap();
    path.to_str().unwrap().to_string()
}

/// Trains the smallest model for a few steps.
fn train(more: &str, data: &str, folder: &Path) -> Output {
    let arguments = "train --preset micro --tokenizer bytes --batch 4 --steps 3 --eval-every 0 --threads 1 --data";
    let arguments: Vec<&str> = arguments.split(' ').chain([data]).chain(more.split_whitespace()).collect();
    gpt2(&arguments, folder)
}

/// Runs and expects failure: exit code, nothing but one error, no panic; returns what it said.
pub(crate) fn refused(arguments: &[&str], folder: &Path) -> String {
    let output = gpt2(arguments, folder);
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(!output.status.success(), "{arguments:?} was accepted");
    assert!(!said.contains("panicked"), "{arguments:?}: {said}");
    assert_eq!(said.matches("error:").count(), 1, "{arguments:?}: {said}");
    said
}

#[test]
fn trains_on_two_processes_and_samples_from_the_checkpoint() {
    let folder = tempfile::tempdir().unwrap();
    let data = text(folder.path());
    let arguments = [
        "train",
        "--strategy",
        "ddp",
        "--transport",
        "tcp",
        "--nproc",
        "2",
        "--preset",
        "micro",
        "--data",
        &data,
        "--tokenizer",
        "chars",
        "--steps",
        "6",
        "--batch",
        "4",
        "--log-every",
        "2",
        "--out",
        "model",
    ];
    let output = gpt2(&arguments, folder.path());
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{said}{}", String::from_utf8_lossy(&output.stderr));
    for expected in
        ["[rank 0] step     6/6 | loss ", "| norm ", "| lr ", " tok/s | mfu ", "validation loss", "weights: sha256 "]
    {
        assert!(said.contains(expected), "no '{expected}' in: {said}");
    }
    let steps = fs::read_to_string(folder.path().join("model/steps.jsonl")).unwrap();
    assert!(steps.lines().all(|line| serde_json::from_str::<serde_json::Value>(line).is_ok()));
    assert!(steps.lines().count() >= 6);

    let sample = gpt2(
        &["sample", "--checkpoint", "model/model.safetensors", "--prompt", "The ", "--tokens", "20"],
        folder.path(),
    );
    assert!(sample.status.success(), "{}", String::from_utf8_lossy(&sample.stderr));
    let written = String::from_utf8_lossy(&sample.stdout).into_owned();
    assert!(written.starts_with("The ") && written.trim_end().chars().count() > 10, "{written}");
}

#[test]
fn a_large_text_is_encoded_once_for_all_ranks_and_runs() {
    let folder = tempfile::tempdir().unwrap();
    let data = folder.path().join("text.txt");
    fs::write(&data, "The quick brown fox jumps over the lazy dog.\n".repeat(60_000)).unwrap();
    let run = |cache: &Path, more: &[&str]| {
        let arguments = "train --strategy ddp --transport shm --nproc 3 --preset micro --tokenizer chars --steps 2 --batch 3 \
                         --eval-every 0 --data text.txt";
        let output = Command::new(env!("CARGO_BIN_EXE_gpt2"))
            .args(arguments.split_whitespace().chain(more.iter().copied()))
            .env("XDG_CACHE_HOME", cache)
            .current_dir(folder.path())
            .output()
            .unwrap();
        let said = String::from_utf8_lossy(&output.stdout).into_owned();
        let errors = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.success(), "{said}{errors}");
        let warned = errors.matches("warning:").count();
        assert_eq!(errors.matches("could not be kept").count(), warned, "{errors}");
        assert_eq!(errors.matches("--no-token-cache").count(), warned, "{errors}");
        let weights = said.lines().find_map(|line| line.split_once("weights: sha256 ")).unwrap().1.to_string();
        let kept = said.contains("the next run reads the token ids from");
        (said.matches("encoding 2.57 MiB of text").count(), kept, warned, weights)
    };
    let cache = folder.path().join("cache");
    let (encoded, kept, warned, weights) = run(&cache, &["--out", "a"]);
    assert_eq!((encoded, kept, warned), (1, true, 0), "by the launcher alone");
    let ids = fs::read_dir(cache.join("isocomm/tokens")).unwrap().map(|file| file.unwrap().path());
    assert_eq!(ids.filter(|path| path.extension().is_some_and(|found| found == "ids")).count(), 1);
    assert_eq!(run(&cache, &["--out", "b"]), (0, false, 0, weights.clone()), "by nobody");
    assert_eq!(run(&cache, &["--out", "c", "--no-token-cache"]), (2, false, 0, weights.clone()), "rank 0 says so, too");
    assert_eq!(run(Path::new("/proc/isocomm"), &["--out", "d"]), (2, false, 1, weights), "where nothing can be kept");
}

#[test]
fn a_sample_starts_from_a_character_that_the_model_knows() {
    let folder = tempfile::tempdir().unwrap();
    // No line end.
    let data = text(folder.path());
    for (tokenizer, start) in [("chars", " "), ("bytes", "\n")] {
        let arguments = ["train", "--preset", "micro", "--data", &data, "--tokenizer", tokenizer, "--steps", "1"];
        let trained = gpt2(&[&arguments[..], &["--eval-every", "0", "--out", tokenizer]].concat(), folder.path());
        assert!(trained.status.success(), "{}", String::from_utf8_lossy(&trained.stderr));
        let checkpoint = format!("{tokenizer}/model.safetensors");
        let sample = gpt2(&["sample", "--checkpoint", &checkpoint, "--tokens", "5"], folder.path());
        assert!(sample.status.success(), "{}", String::from_utf8_lossy(&sample.stderr));
        assert!(String::from_utf8_lossy(&sample.stdout).starts_with(start), "{tokenizer}: {:?}", sample.stdout);
    }
}

/// A model whose token depends on its place alone: `A`, `B`, the end of the document, and so on from the start.
fn counting_model(path: &Path, several_documents: bool) {
    let config = ModelConfig { n_layer: 1, n_head: 1, n_embd: 4, block_size: 16, vocab_size: 50_257 };
    let segments = layout(&config).unwrap();
    let weights = segments.iter().map(|segment| {
        let mut flat = vec![0.0; segment.len];
        for param in &segment.params {
            let values = &mut flat[param.offset..param.offset + param.len];
            match param.path.as_str() {
                // `A`, `B` and the end of a document, each a direction of its own.
                "wte.weight" => {
                    for (direction, id) in [32, 33, 50_256].into_iter().enumerate() {
                        values[4 * id + direction] = 1.0;
                    }
                }
                "wpe.weight" => (0..16).for_each(|place| values[4 * place + place % 3] = 100.0),
                "ln_f.weight" => values.fill(1.0),
                _ => {}
            }
        }
        flat
    });
    let weights = weights.collect();
    let tokenizer = serde_json::json!({"kind": "gpt2"});
    Checkpoint { config, tokenizer, step: 1, several_documents, weights }.save(path).unwrap();
}

#[test]
fn a_sample_begins_and_ends_with_a_document() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.safetensors");
    counting_model(&path, true);
    let sample = |more: &[&str]| {
        let arguments = ["sample", "--checkpoint", "model.safetensors", "--temperature", "0"];
        let tokens = if more.is_empty() { "200" } else { "7" };
        let output = gpt2(&[&arguments[..], &["--tokens", tokens], more].concat(), folder.path());
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).unwrap()
    };
    assert_eq!(sample(&[]), "AB\n");
    assert_eq!(sample(&["--no-stop"]), "AB<|endoftext|>AB<|endoftext|>A\n");
    // Two tokens, of which the second is the end: the third place's token follows, which ends the text.
    assert_eq!(sample(&["--prompt", "A<|endoftext|>"]), "A<|endoftext|>B\n");
    assert_eq!(sample(&["--no-special-tokens"]), "\nAB<|endoftext|>AB<|endoftext|>A\n");
    // A model of one document has never seen the token that would begin another.
    counting_model(&path, false);
    assert_eq!(sample(&[]), "\nAB\n");
}

#[test]
fn a_checkpoint_says_whether_there_were_several_documents() {
    let folder = tempfile::tempdir().unwrap();
    let words = "The quick brown fox jumps over the lazy dog. ".repeat(100);
    for (name, text, more, several) in [
        ("one", words.clone(), "", false),
        ("two", format!("{words}<|endoftext|>{words}"), "", true),
        ("plain", format!("{words}<|endoftext|>{words}"), "--no-special-tokens", false),
    ] {
        fs::write(folder.path().join(format!("{name}.txt")), text).unwrap();
        let arguments = format!("--tokenizer gpt2 --batch 1 --steps 1 --out {name} {more}");
        let arguments = format!("train --preset micro --eval-every 0 --threads 1 --data {name}.txt {arguments}");
        let output = gpt2(&arguments.split_whitespace().collect::<Vec<_>>(), folder.path());
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let checkpoint = Checkpoint::load(&folder.path().join(name).join("model.safetensors")).unwrap();
        assert_eq!(checkpoint.several_documents, several, "{name}");
    }
}

#[test]
fn the_same_weights_from_processes_over_every_transport() {
    let folder = tempfile::tempdir().unwrap();
    let data = text(folder.path());
    let mut hashes = Vec::new();
    for transport in ["local", "tcp-raw", "tcp", "quic"] {
        let arguments = [
            "train",
            "--strategy",
            "ring",
            "--transport",
            transport,
            "--nproc",
            "3",
            "--preset",
            "micro",
            "--data",
            &data,
            "--tokenizer",
            "bytes",
            "--steps",
            "3",
            "--batch",
            "6",
            "--eval-every",
            "0",
            "--out",
            transport,
        ];
        let output = gpt2(&arguments, folder.path());
        let said = String::from_utf8_lossy(&output.stdout).into_owned();
        assert!(output.status.success(), "{transport}: {said}{}", String::from_utf8_lossy(&output.stderr));
        let hash = said.lines().find_map(|line| line.split_once("weights: sha256 ")).map(|(_, hash)| hash.to_string());
        hashes.push(hash.unwrap());
    }
    assert!(hashes.iter().all(|hash| *hash == hashes[0]), "{hashes:?}");
}

#[test]
fn wrong_arguments_are_one_clear_error_each() {
    let folder = tempfile::tempdir().unwrap();
    let data = text(folder.path());
    let empty = folder.path().join("empty.txt");
    fs::write(&empty, "").unwrap();
    let short = folder.path().join("short.txt");
    fs::write(&short, "too short").unwrap();
    // Ids in 32 bits each.
    let wide = folder.path().join("wide.bin");
    fs::write(&wide, (0..60_000_u32).flat_map(|id| (id % 50_257).to_le_bytes()).collect::<Vec<u8>>()).unwrap();
    let packed = folder.path().join("packed.txt");
    fs::write(&packed, b"\x1f\x8b\x08\0\0\0\0\0\0\x03 and so on").unwrap();
    let (empty, short) = (empty.to_str().unwrap(), short.to_str().unwrap());
    let (wide, packed) = (wide.to_str().unwrap(), packed.to_str().unwrap());
    let cases: &[(&[&str], &str)] = &[
        (&["train", "--no-such-flag"], "--no-such-flag"),
        (&["train", "--strategy", "telepathy"], "telepathy"),
        (&["train", "--transport", "pigeon"], "pigeon"),
        (&["train", "--preset", "gigantic"], "gigantic"),
        (&["train", "--tokenizer", "runes"], "runes"),
        (&["train", "--data", "/nowhere/text.txt"], "/nowhere/text.txt"),
        (&["train", "--data", empty], "empty"),
        (&["train", "--data", wide], "32-bit integers"),
        (&["train", "--data", packed], "a gzip file"),
        (&["train", "--data", short, "--tokenizer", "bytes"], "short.txt"),
        (&["train", "--data", &data, "--nproc", "0"], "--nproc 0"),
        (&["train", "--data", &data, "--strategy", "single", "--nproc", "2"], "single"),
        (&["train", "--data", &data, "--strategy", "ring", "--nproc", "5"], "12"),
        (&["train", "--data", &data, "--strategy", "ring", "--nproc", "600", "--batch", "600"], "tokens"),
        (&["train", "--data", &data, "--lr", "-1"], "--lr"),
        (&["train", "--data", &data, "--steps", "0"], "--steps"),
        (&["train", "--data", &data, "--threads", "0"], "--threads"),
        (&["train", "--data", &data, "--threads", "5000"], "--threads"),
        (&["train", "--data", &data, "--lanes", "18446744073709551615"], "--lanes"),
        (&["train", "--data", &data, "--bind", "255.255.255.255"], "broadcast"),
        (&["train", "--data", &data, "--bind", "192.0.2.1"], "192.0.2.1"),
        (&["train", "--data", &data, "--transport", "shm", "--congestion", "cubic"], "tcp-raw, tcp, quic"),
        (&["train", "--data", &data, "--transport", "local", "--waiting", "busy"], "local has no option waiting"),
        (&["train", "--data", &data, "--quic-mtu", "1400"], "tcp has no option mtu (--quic-mtu"),
        (&["train", "--data", &data, "--transport", "quic", "--quic-mtu", "9"], "quic mtu (--quic-mtu): 9"),
        (&["train", "--data", &data, "--transport", "quic", "--no-gate"], "quic has no option gate (--no-gate"),
        (&["train", "--data", &data, "--transport", "quic", "--congestion", "vegas"], "vegas"),
        (&["train", "--data", &data, "--transport", "quic-unprotected"], "quic-unprotected"),
        (&["train", "--data", &data, "--transport", "null"], "null"),
        (&["train", "--data", &data, "--liveness", "0"], "--liveness"),
        (&["train", "--data", &data, "--strategy", "ring", "--nproc", "20000", "--batch", "20000"], "20000 ranks"),
        (&["sample", "--checkpoint", "/dev/zero"], "/dev/zero"),
        (&["train", "--data", &data, "--beta2", "1.5"], "--beta2"),
        (&["train", "--data", &data, "--block-size", "0"], "block"),
        (&["train", "--data", &data, "--out", "/proc/isocomm"], "--out /proc/isocomm"),
        (&["train", "--data", &data, "--device", "cuda"], "cuda"),
        (&["train", "--data", &data, "--strategy", "ring", "--transport", "nccl"], "nccl"),
        (&["sample", "--checkpoint", "nothing.safetensors"], "nothing.safetensors"),
        (&["sample", "--checkpoint", short], "short.txt"),
    ];
    for (arguments, expected) in cases {
        let said = refused(arguments, folder.path());
        assert!(said.contains(expected), "{arguments:?} should name '{expected}': {said}");
    }
}

#[test]
fn a_read_only_folder_is_refused_before_training() {
    let folder = tempfile::tempdir().unwrap();
    let data = text(folder.path());
    // A file where a folder should be is refused for every user, root included.
    fs::write(folder.path().join("taken"), "").unwrap();
    let said = refused(&["train", "--data", &data, "--out", "taken/model"], folder.path());
    assert!(said.contains("taken/model"), "{said}");
}

#[test]
fn a_port_in_use_is_a_clear_error() {
    let folder = tempfile::tempdir().unwrap();
    let data = text(folder.path());
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap().to_string();
    let output = Command::new(env!("CARGO_BIN_EXE_gpt2"))
        .args([
            "train",
            "--strategy",
            "ring",
            "--preset",
            "micro",
            "--data",
            &data,
            "--tokenizer",
            "bytes",
            "--timeout",
            "5",
        ])
        .envs([
            ("COMM_RANK", "0"),
            ("COMM_WORLD_SIZE", "2"),
            ("COMM_ADDR", &address),
            ("COMM_SECRET", "a secret of the test"),
        ])
        .current_dir(folder.path())
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success());
    assert!(said.contains(&address) && !said.contains("panicked"), "{said}");
}

#[test]
fn two_runs_do_not_share_a_folder() {
    let folder = tempfile::tempdir().unwrap();
    let data = text(folder.path());
    fs::create_dir(folder.path().join("out")).unwrap();
    let held = fs::File::create(folder.path().join("out/.lock")).unwrap();
    held.try_lock().unwrap();
    let said = refused(&["train", "--preset", "micro", "--data", &data, "--steps", "1"], folder.path());
    assert!(said.contains("another run"), "{said}");
}

type Variables<'a> = &'a [(&'a str, &'a str)];

/// As [`gpt2`], in an environment that a launcher has left.
fn launched(arguments: &str, data: &str, variables: Variables<'_>, folder: &Path) -> Output {
    let arguments =
        format!("train --preset micro --tokenizer bytes --steps 2 --batch 4 --eval-every 0 {arguments} --data {data}");
    let mut command = Command::new(env!("CARGO_BIN_EXE_gpt2"));
    command.args(arguments.split_whitespace()).envs(variables.iter().copied()).current_dir(folder).output().unwrap()
}

#[test]
fn a_launcher_that_contradicts_nproc_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let data = text(folder.path());
    let slurm = [("SLURM_PROCID", "0"), ("SLURM_NTASKS", "1"), ("SLURM_STEP_ID", "0"), ("SLURM_JOB_ID", "5")];
    let mpi = [("OMPI_COMM_WORLD_RANK", "1"), ("OMPI_COMM_WORLD_SIZE", "4"), ("OMPI_COMM_WORLD_LOCAL_SIZE", "4")];
    let secret = [("COMM_SECRET", "a secret of the test"), ("COMM_ADDR", "127.0.0.1:29400")];
    let mpi = [&mpi[..], &secret].concat();
    let torchrun = [&[("RANK", "0"), ("WORLD_SIZE", "4")][..], &secret].concat();
    let cases: &[(Variables<'_>, &[&str])] = &[
        (&[("RANK", "0"), ("WORLD_SIZE", "1")], &["RANK and WORLD_SIZE (torchrun)", "rank 0 of 1", "env -u RANK "]),
        (&slurm, &["SLURM_PROCID and SLURM_NTASKS (Slurm)", "rank 0 of 1", "env -u SLURM_PROCID "]),
        (&[("PMI_RANK", "0"), ("PMI_SIZE", "1")], &["PMI_RANK and PMI_SIZE", "env -u PMI_RANK "]),
        (&mpi, &["OMPI_COMM_WORLD_RANK", "rank 1 of 4, with 4 on this machine"]),
        (&torchrun, &["rank 0 of 4", "set LOCAL_WORLD_SIZE=2"]),
        (&[("COMM_RANK", "0"), ("COMM_WORLD_SIZE", "1")], &["COMM_RANK and COMM_WORLD_SIZE say", "rank 0 of 1"]),
    ];
    for (variables, parts) in cases {
        let output = launched("--strategy ddp --nproc 2", &data, variables, folder.path());
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(EXIT_CONFIGURATION), "{variables:?}: {said}");
        assert_eq!(said.matches("error:").count(), 1, "{said}");
        for part in ["--nproc 2 ", "leave out --nproc"].iter().chain(*parts) {
            assert!(said.contains(part), "{variables:?}: no {part:?} in {said}");
        }
        assert!(!folder.path().join("out").exists(), "something was written");
    }
}

#[test]
fn rank_0_says_where_its_rank_comes_from() {
    let folder = tempfile::tempdir().unwrap();
    let data = text(folder.path());
    let stdout = |arguments: &str, variables: Variables<'_>| {
        let output = launched(arguments, &data, variables, folder.path());
        let said = String::from_utf8_lossy(&output.stdout).into_owned();
        assert!(output.status.success(), "{said}{}", String::from_utf8_lossy(&output.stderr));
        for line in ["text: ", "model: micro ", "strategy: "] {
            assert_eq!(said.lines().filter(|l| l.starts_with(line)).count(), 1, "{line:?} in {said}");
        }
        said
    };
    let step = [("SLURM_PROCID", "0"), ("SLURM_NTASKS", "1"), ("SLURM_STEP_ID", "0")];
    let said = stdout("--strategy ddp --out step", &step);
    assert!(said.starts_with("ranks: 1, by SLURM_PROCID and SLURM_NTASKS (Slurm)\n"), "{said}");
    let said = stdout("--strategy ddp --nproc 1 --out one", &[("RANK", "0"), ("WORLD_SIZE", "1")]);
    assert!(said.starts_with("ranks: 1, by RANK and WORLD_SIZE (torchrun)\n"), "{said}");
    // A batch script is no step: --nproc decides, and its ranks see none of this.
    let batch = [("SLURM_PROCID", "0"), ("SLURM_NTASKS", "1"), ("SLURM_NTASKS_PER_NODE", "1")];
    let said = stdout("--strategy ddp --nproc 2 --out batch", &batch);
    let line = "[rank 0] ranks: 2, by COMM_RANK and COMM_WORLD_SIZE of this program's own launcher\n";
    assert!(said.contains(line) && said.contains("strategy: ddp on 2 rank(s)"), "{said}");
    let said = stdout("--strategy ddp --transport local --nproc 2 --out local", &[]);
    assert!(said.starts_with("ranks: 2, by --nproc\n"), "{said}");
    let said = stdout("--out single", &[]);
    assert!(said.starts_with("ranks: 1, the default for --strategy single; see --nproc\n"), "{said}");
}

#[test]
fn half_an_environment_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let data = text(folder.path());
    for (name, value) in [("COMM_WORLD_SIZE", "2"), ("COMM_RANK", "0")] {
        let output = Command::new(env!("CARGO_BIN_EXE_gpt2"))
            .args(["train", "--preset", "micro", "--data", &data, "--steps", "1"])
            .env(name, value)
            .current_dir(folder.path())
            .output()
            .unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success() && said.contains("COMM_RANK") && said.contains("COMM_WORLD_SIZE"), "{said}");
    }
}

#[test]
fn options_that_do_not_go_together_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let data = text(folder.path());
    let refuse = |more: &[&str], parts: &[&str]| {
        let mut arguments = vec!["train", "--preset", "micro", "--steps", "2", "--batch", "12", "--data", &data];
        arguments.extend(more);
        let said = refused(&arguments, folder.path());
        for part in parts {
            assert!(said.contains(part), "{more:?}: {part:?} in {said}");
        }
    };
    refuse(&["--strategy", "ddp", "--ranks-per-node", "2"], &["--ranks-per-node", "hierarchical and hsdp", "ddp"]);
    refuse(
        &["--strategy", "hsdp", "--ranks-per-node", "1", "--transport", "local"],
        &["--strategy hsdp", "2 nodes of 1 ranks", "--ranks-per-node", "fsdp"],
    );
    refuse(&["--strategy", "ddp", "--node-transport", "shm"], &["--node-transport", "hierarchical"]);
    refuse(&["--strategy", "hierarchical", "--ranks-per-node", "0"], &["--ranks-per-node 0", "at least 1 rank"]);
    refuse(
        &["--strategy", "hierarchical", "--nproc", "2", "--node-transport", "local", "--transport", "tcp"],
        &["--node-transport local", "--transport tcp"],
    );
    refuse(&["--strategy", "ring", "--dedicated-server"], &["--dedicated-server", "ps", "ring"]);
    refuse(&["--strategy", "ps", "--nproc", "1", "--dedicated-server"], &["--dedicated-server", "2 ranks"]);
    refuse(
        &["--strategy", "ddp", "--sync-every", "5"],
        &["--sync-every", "local-sgd, diloco, streaming-diloco", "ddp"],
    );
    refuse(&["--strategy", "local-sgd", "--outer-rate", "1"], &["--outer-rate", "diloco", "local-sgd"]);
    refuse(&["--strategy", "diloco", "--no-overlap"], &["--no-overlap", "diloco"]);
    refuse(&["--strategy", "local-sgd", "--sync-every", "0"], &["--sync-every 0"]);
    refuse(&["--strategy", "diloco", "--outer-momentum", "1"], &["--outer-momentum 1", "[0, 1)"]);
    refuse(&["--strategy", "streaming-diloco", "--fragments", "3"], &["--fragments 3", "divide --sync-every"]);
    refuse(&["--strategy", "streaming-diloco", "--overlap-steps", "5"], &["--overlap-steps 5", "less than"]);
    refuse(&["--strategy", "streaming-diloco", "--mixing", "1.5"], &["--mixing 1.5"]);
    refuse(&["--strategy", "sparta", "--sparta-share", "0"], &["--sparta-share 0"]);
    refuse(&["--strategy", "ps", "--staleness", "1"], &["--staleness", "async-ps", "ps"]);
    refuse(&["--strategy", "async-ps", "--nproc", "3", "--lanes", "2"], &["--strategy async-ps", "--lanes 3"]);
    refuse(&["--strategy", "async-ps", "--nproc", "1"], &["async-ps", "2 ranks"]);
    refuse(&["--strategy", "async-ps", "--nproc", "257"], &["--strategy async-ps", "at most 256 ranks"]);
    refuse(&["--strategy", "async-ps", "--staleness", "1001"], &["--staleness 1001", "at most 1000"]);
    refuse(&["--strategy", "async-ps", "--precision", "f16"], &["--loss-scale dynamic", "--strategy async-ps"]);
    refuse(&["--compress", "zip"], &["zip", "none, int8, sign, topk:FRACTION, powersgd:RANK"]);
    refuse(&["--strategy", "ddp", "--compress", "topk:2"], &["topk:2", "(0, 1]"]);
    refuse(&["--strategy", "fsdp", "--compress", "int8"], &["--compress int8", "ps, ring, ddp", "fsdp"]);
    refuse(&["--compress", "int8"], &["--compress int8", "ps, ring, ddp", "single"]);
    refuse(
        &["--strategy", "ps", "--compress", "powersgd:2"],
        &["--compress powersgd:2", "--strategy ring, ddp,", "not ps: its factors are averages"],
    );
    refuse(&["--strategy", "ddp", "--nproc", "1", "--compress", "int8"], &["--compress int8", "one rank"]);
    let compressed = |more: &[&'static str]| [&["--strategy", "ring", "--compress", "powersgd:2"], more].concat();
    refuse(&compressed(&["--wire", "bf16"]), &["--compress powersgd:2", "--wire bf16"]);
    refuse(
        &compressed(&["--precision", "f16"]),
        &["--compress powersgd:2", "--loss-scale dynamic", "--loss-scale off"],
    );
    refuse(&compressed(&["--check-finite"]), &["--check-finite", "--compress powersgd:2"]);
    refuse(&["--precision", "f8"], &["f8", "f32, bf16, f16"]);
    refuse(&["--kernels", "flash"], &["flash", "fused, composed"]);
    refuse(&["--loss-scale", "-3"], &["--loss-scale"]);
    refuse(&["--loss-scale", "sometimes"], &["--loss-scale", "sometimes"]);
    refuse(&["--loss-factor", "0"], &["--loss-factor 0"]);
    refuse(&["--optimizer", "adam"], &["adam", "adamw, lamb, sgd"]);
    refuse(&["--optimizer", "sgd", "--beta1", "0.9"], &["--beta1", "--optimizer sgd"]);
    refuse(&["--epsilon", "0"], &["epsilon", "--epsilon"]);
    refuse(&["--beta1", "1"], &["beta1"]);
    refuse(&["--schedule", "stairs"], &["stairs", "cosine"]);
    refuse(&["--last-batch", "keep"], &["keep", "join"]);
    refuse(&["--short-sequences", "7x3"], &["--short-sequences 7x3", "divides"]);
    refuse(&["--short-sequences", "16"], &["TOKENSxSTEPS"]);
}

#[test]
fn what_all_ranks_find_wrong_is_said_once() {
    let folder = tempfile::tempdir().unwrap();
    let data = text(folder.path());
    let run = "train --preset micro --tokenizer bytes --steps 2 --batch 6 --nproc 3 --transport tcp-raw --eval-every 0 --data";
    for (more, told) in [
        ("--strategy hsdp --ranks-per-node 2", "hsdp needs nodes of equal size"),
        ("--strategy streaming-diloco --sync-every 20 --fragments 10 --overlap-steps 0", "--fragments 10 is more than"),
    ] {
        let arguments: Vec<&str> = run.split(' ').chain([data.as_str()]).chain(more.split(' ')).collect();
        let output = gpt2(&arguments, folder.path());
        let said = format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
        assert_eq!(output.status.code(), Some(1), "{said}");
        assert_eq!((said.matches(told).count(), said.matches("[rank 0] error: ").count()), (1, 1), "{said}");
        assert!(!said.contains("was lost"), "{said}");
    }
}

#[test]
fn a_sharded_sixteen_bit_run_shows_what_it_measured() {
    let folder = tempfile::tempdir().unwrap();
    let data = text(folder.path());
    let arguments: Vec<&str> =
        "train --strategy fsdp --precision f16 --transport shm --nproc 2 --preset micro --tokenizer bytes \
                                --steps 3 --batch 4 --eval-every 0 --out run --data"
            .split_whitespace()
            .chain([data.as_str()])
            .collect();
    let output = gpt2(&arguments, folder.path());
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{said}\n{}", String::from_utf8_lossy(&output.stderr));
    for part in ["peak memory of its process during training", "activations ", "messages: ", "hidden"] {
        assert!(said.contains(part), "{part:?} in {said}");
    }
    let steps = fs::read_to_string(folder.path().join("run/steps.jsonl")).unwrap();
    let first: serde_json::Value = serde_json::from_str(steps.lines().next().unwrap()).unwrap();
    assert_eq!(first["loss_scale"], 65536.0);
    assert!(first["peak_memory_bytes"].as_u64().unwrap() > 0);
    assert!(first["cpu_utilization"].as_f64().unwrap() > 0.0);
    let is_event_file = |name: &str| name.starts_with("events.out.tfevents.");
    let names = fs::read_dir(folder.path().join("run/tensorboard")).unwrap().map(|entry| entry.unwrap().file_name());
    assert_eq!(names.filter(|name| is_event_file(name.to_str().unwrap())).count(), 1);
}

#[test]
fn nodes_have_a_transport_of_their_own() {
    let folder = tempfile::tempdir().unwrap();
    let data = text(folder.path());
    let hash = |strategy: &str, out: &str| {
        let arguments = format!(
            "train {strategy} --transport tcp --nproc 4 --preset micro --tokenizer bytes --steps 3 --batch 4 --threads 1 --eval-every 0 \
             --data {data} --out {out}"
        );
        let output = gpt2(&arguments.split_whitespace().collect::<Vec<_>>(), folder.path());
        let said = String::from_utf8_lossy(&output.stdout).into_owned();
        assert!(output.status.success(), "{said}\n{}", String::from_utf8_lossy(&output.stderr));
        // At the start, and at the end.
        assert_eq!(said.matches("nodes: 2 nodes of 2 ranks").count(), 2, "{said}");
        let nodes = said.matches("of these inside its node").count();
        assert_eq!(nodes, if strategy.contains("--node-transport") { 4 } else { 0 }, "{said}");
        for line in said.lines().filter(|line| line.contains(" by the formula")) {
            let numbers: Vec<&str> =
                line.split(|c: char| !c.is_ascii_digit()).filter(|part| !part.is_empty()).collect();
            // Twice counted and by the formula, after the two ranks' numbers.
            let [bytes, expected_bytes, messages, expected_messages] = numbers[2..6] else { panic!("{line}") };
            assert_eq!((bytes, messages), (expected_bytes, expected_messages), "{line}");
        }
        said.lines().find_map(|line| line.split_once("weights: sha256 ")).unwrap().1.to_string()
    };
    let over_one = hash("--strategy hierarchical --ranks-per-node 2", "one");
    assert_eq!(over_one, hash("--strategy hierarchical --ranks-per-node 2 --node-transport shm", "two"));
}

#[test]
fn equal_runs_save_equal_files() {
    let folder = tempfile::tempdir().unwrap();
    let data = text(folder.path());
    for tokenizer in ["bytes", "chars"] {
        let files: Vec<Vec<u8>> = (0..3)
            .map(|run| {
                let out = format!("{tokenizer}-{run}");
                let arguments: Vec<&str> =
                    "train --preset micro --batch 4 --steps 2 --threads 1 --tokenizer".split(' ').collect();
                let output =
                    gpt2(&[&arguments[..], &[tokenizer, "--data", &data, "--out", &out]].concat(), folder.path());
                assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
                fs::read(folder.path().join(out).join("model.safetensors")).unwrap()
            })
            .collect();
        assert!(files.iter().all(|file| *file == files[0]), "{tokenizer}: equal runs saved different files");
    }
}

#[test]
fn an_earlier_run_is_replaced_only_when_told() {
    let folder = tempfile::tempdir().unwrap();
    let data = text(folder.path());
    for (out, more) in [("one", ""), ("two", "--strategy ddp --transport tcp-raw --nproc 2")] {
        let out_folder = folder.path().join(out);
        let files = || {
            let all = [out_folder.clone(), out_folder.join("tensorboard")];
            let entries =
                all.iter().flat_map(|folder| fs::read_dir(folder).unwrap()).map(|entry| entry.unwrap().path());
            let contents = |path: std::path::PathBuf| {
                let bytes = if path.is_file() { fs::read(&path).unwrap() } else { Vec::new() };
                (path.file_name().unwrap().to_str().unwrap().to_string(), bytes)
            };
            entries.map(contents).collect::<std::collections::BTreeMap<_, _>>()
        };
        // The folder may be there, with files of others.
        fs::create_dir(&out_folder).unwrap();
        fs::write(out_folder.join("notes.txt"), "mine").unwrap();
        let first = train(&format!("--out {out}"), &data, folder.path());
        assert!(first.status.success(), "{}", String::from_utf8_lossy(&first.stderr));
        let before = files();

        let again = train(&format!("--seed 2 {more} --out {out}"), &data, folder.path());
        let said = String::from_utf8_lossy(&again.stderr).into_owned();
        assert_eq!(again.status.code(), Some(EXIT_CONFIGURATION), "{said}");
        assert_eq!(said.matches("error:").count(), 1, "{said}");
        for part in [&format!("--out {out}"), "model.safetensors", "steps.jsonl", "events.out.tfevents.", "--overwrite"]
        {
            assert!(said.contains(part), "{part:?} in {said}");
        }
        assert!(!String::from_utf8_lossy(&again.stdout).contains("step "));
        assert!(files() == before, "{:?}", files().keys());

        let replaced = train(&format!("--seed 2 {more} --out {out} --overwrite"), &data, folder.path());
        assert!(replaced.status.success(), "{}", String::from_utf8_lossy(&replaced.stderr));
        let after = files();
        assert_eq!(after.len(), before.len(), "{:?}", after.keys());
        for name in ["model.safetensors", "steps.jsonl"] {
            assert!(after[name] != before[name], "{name}");
        }
        assert_eq!(after["notes.txt"], b"mine");
    }
}

#[test]
fn a_run_that_cannot_be_saved_is_summed_up_all_the_same() {
    let folder = tempfile::tempdir().unwrap();
    let data = text(folder.path());
    for (out, more) in [("one", ""), ("two", "--strategy fsdp --transport tcp-raw --nproc 2")] {
        // Where the checkpoint is written before it gets its name, a folder is in the way, for every user.
        fs::create_dir_all(folder.path().join(out).join(".model.safetensors.tmp/taken")).unwrap();
        let output = train(&format!("{more} --out {out}"), &data, folder.path());
        let said = String::from_utf8_lossy(&output.stdout);
        let errors = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{out}: {said}{errors}");
        for part in ["done: 3 steps", "weights: sha256 ", "peak memory of its process"] {
            assert_eq!(
                said.matches(part).count(),
                if part.starts_with("peak") && !more.is_empty() { 2 } else { 1 },
                "{out}: {said}"
            );
        }
        assert!(!said.contains("checkpoint: "), "{out}: {said}");
        assert!(errors.contains("model.safetensors: cannot create a file beside it"), "{out}: {errors}");
        assert!(!folder.path().join(out).join("model.safetensors").exists());
    }
}

#[test]
fn a_scale_that_lets_no_step_pass_is_an_error_without_a_checkpoint() {
    let folder = tempfile::tempdir().unwrap();
    let data = text(folder.path());
    for (out, more) in [("one", ""), ("two", "--strategy ddp --transport tcp-raw --nproc 2")] {
        let arguments = format!("--precision f16 --loss-scale 1073741824 --steps 30 --eval-every 5 --out {out} {more}");
        let arguments: Vec<&str> = "train --preset micro --tokenizer bytes --batch 4 --threads 1 --data"
            .split(' ')
            .chain([data.as_str()])
            .chain(arguments.split_whitespace())
            .collect();
        let output = gpt2(&arguments, folder.path());
        let errors = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{errors}");
        for part in ["step 10: ", "9 steps before", "fixed at 1073741824", "--loss-scale dynamic"] {
            assert!(errors.contains(part), "{part:?} in {errors}");
        }
        assert!(!String::from_utf8_lossy(&output.stdout).contains("done: "));
        assert!(!folder.path().join(out).join("model.safetensors").exists(), "weights that nothing has changed");
    }
}

/// Rank `rank` of two, which somebody has started by hand; the other is reached at this port of the machine.
fn by_hand(rank: &str, port: u16, arguments: &str, folder: &Path) -> Command {
    let address = format!("127.0.0.1:{port}");
    let given = "train --strategy ddp --transport tcp-raw --preset micro --tokenizer bytes --batch 4 --eval-every 0 --threads 1 \
                 --no-token-cache";
    let steps = if arguments.contains("--steps") { "" } else { "--steps 2" };
    let mut command = Command::new(env!("CARGO_BIN_EXE_gpt2"));
    command
        .args([given, steps, arguments].into_iter().flat_map(str::split_whitespace))
        .envs([("COMM_RANK", rank), ("COMM_WORLD_SIZE", "2"), ("COMM_ADDR", &address)])
        .env("COMM_SECRET", "a secret of the test")
        .current_dir(folder)
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    command
}

fn free_port() -> u16 {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}

#[test]
fn ranks_end_with_the_code_of_what_ended_them() {
    let folder = tempfile::tempdir().unwrap();
    let data = text(folder.path());
    for (signal, whom, codes) in [
        // A rank that is lost, and one that every rank's scheduler asks to leave.
        ("-KILL", &[1][..], [Some(EXIT_ECHO), None]),
        ("-TERM", &[0, 1], [Some(EXIT_STOPPED), Some(EXIT_STOPPED)]),
    ] {
        let (port, out) = (free_port(), folder.path().join(signal.trim_start_matches('-')));
        let arguments = format!("--data {data} --steps 100000 --out {}", out.display());
        let mut ranks = ["0", "1"].map(|rank| by_hand(rank, port, &arguments, folder.path()).spawn().unwrap());
        let since = Instant::now();
        while !fs::read_to_string(out.join("steps.jsonl")).is_ok_and(|steps| steps.lines().count() > 1) {
            assert!(since.elapsed() < Duration::from_secs(60), "{signal}: no step is done");
            std::thread::sleep(Duration::from_millis(20));
        }
        for rank in whom {
            let process = ranks[*rank].id().to_string();
            assert!(Command::new("kill").args([signal, &process]).status().unwrap().success());
        }
        let ended = ranks.each_mut().map(|rank| rank.wait().unwrap().code());
        assert_eq!(ended, codes, "{signal}");
        assert!(since.elapsed() < Duration::from_secs(60), "{signal}: {:?}", since.elapsed());
    }
    // By a text that is not there, and by a variable that makes no sense.
    let mut wrong = by_hand("0", free_port(), "--data nothing.txt", folder.path());
    assert_eq!(wrong.output().unwrap().status.code(), Some(EXIT_CONFIGURATION));
    let mut wrong = by_hand("7", free_port(), &format!("--data {data}"), folder.path());
    let output = wrong.output().unwrap();
    assert_eq!(output.status.code(), Some(EXIT_CONFIGURATION));
    assert!(String::from_utf8_lossy(&output.stderr).contains("COMM_RANK is 7"), "{output:?}");
}

#[test]
fn ranks_wait_longer_for_those_that_have_more_text_to_encode() {
    let folder = tempfile::tempdir().unwrap();
    // Seconds for which a rank waited for one that never came, with a text of so many bytes.
    let waited = |bytes: usize| {
        let name = format!("{bytes}.txt");
        fs::write(folder.path().join(&name), "x ".repeat(bytes / 2)).unwrap();
        let arguments = format!("--timeout 0.5 --data {name} --out {bytes}");
        let output = by_hand("0", free_port(), &arguments, folder.path()).output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(!output.status.success(), "{said}");
        let seconds = said.split_once("did not finish within ").and_then(|(_, rest)| rest.split_once(" s ")).unwrap().0;
        seconds.parse::<f64>().unwrap()
    };
    let (short, long) = (waited(10_000), waited(3 << 20));
    assert!(short < 2.5 && long >= 3.5, "{short} {long}");
}

#[test]
fn an_earlier_run_stays_until_the_ranks_have_met() {
    let folder = tempfile::tempdir().unwrap();
    let data = text(folder.path());
    let out = folder.path().join("out");
    let alone = |more: &str| {
        let arguments = format!("--timeout 0.5 --data {data} {more}");
        let output = by_hand("0", free_port(), &arguments, folder.path()).output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(said.contains("did not finish within"), "{said}");
    };
    // A run that never began is no earlier run.
    alone("");
    let trained = train("", &data, folder.path());
    assert!(trained.status.success(), "{}", String::from_utf8_lossy(&trained.stderr));
    let names = ["model.safetensors", "steps.jsonl"];
    let before = names.map(|name| fs::read(out.join(name)).unwrap());
    let events = || fs::read_dir(out.join("tensorboard")).unwrap().map(|file| file.unwrap().path()).collect::<Vec<_>>();
    let curves = events();
    alone("--overwrite");
    assert!(names.map(|name| fs::read(out.join(name)).unwrap()) == before);
    assert_eq!(events(), curves);
}

#[test]
fn a_run_waits_for_one_that_is_ending_and_does_not_replace_what_that_has_saved() {
    let folder = tempfile::tempdir().unwrap();
    let data = text(folder.path());
    let out = folder.path().join("out");
    fs::create_dir_all(&out).unwrap();
    for saves in [false, true] {
        let held = fs::File::create(out.join(".lock")).unwrap();
        held.try_lock().unwrap();
        let given = "train --preset micro --tokenizer bytes --batch 4 --steps 1 --eval-every 0 --threads 1 --resume auto --overwrite --data";
        let mut command = Command::new(env!("CARGO_BIN_EXE_gpt2"));
        command.args(given.split(' ').chain([data.as_str()])).current_dir(folder.path());
        let mut run = command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
        let mut said = BufReader::new(run.stderr.take().unwrap());
        let mut line = String::new();
        while !line.contains("another run is writing there; waiting up to") {
            line.clear();
            assert!(said.read_line(&mut line).unwrap() > 0, "it did not wait");
        }
        let saved = out.join("checkpoints/step-2");
        if saves {
            fs::create_dir_all(&saved).unwrap();
        }
        drop(held);
        let mut rest = String::new();
        said.read_to_string(&mut rest).unwrap();
        let code = run.wait().unwrap().code();
        assert_eq!(code, Some(i32::from(saves)), "{rest}");
        if saves {
            assert!(rest.contains("was no checkpoint and is now") && rest.contains("step-2"), "{rest}");
            assert!(saved.is_dir());
        }
    }
}

#[test]
fn other_ranks_hear_why_rank_0_refuses() {
    let folder = tempfile::tempdir().unwrap();
    let data = text(folder.path());
    let (port, arguments) = (free_port(), format!("--timeout 300 --data {data}"));
    let metrics = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let metrics = metrics.local_addr().map(|address| (metrics, address)).unwrap();
    let out = folder.path().join("out");
    fs::create_dir_all(&out).unwrap();
    fs::write(out.join("steps.jsonl"), "{}\n").unwrap();
    // What has to be asked for otherwise, and what passes by itself.
    for (more, why, code) in [
        (String::new(), "it holds an earlier run (steps.jsonl)", EXIT_CONFIGURATION),
        (format!(" --overwrite --metrics {}", metrics.1), "cannot listen on it", 1),
    ] {
        let arguments = format!("{arguments}{more}");
        let since = Instant::now();
        let ranks = ["0", "1"].map(|rank| by_hand(rank, port, &arguments, folder.path()).spawn().unwrap());
        let [first, second] = ranks.map(|rank| rank.wait_with_output().unwrap());
        assert!(since.elapsed() < Duration::from_secs(60), "{:?}", since.elapsed());
        for output in [&first, &second] {
            let said = String::from_utf8_lossy(&output.stderr);
            assert!(said.contains(why) && said.matches("error:").count() == 1, "{said}");
            assert!(!output.status.success());
        }
        assert_eq!(first.status.code(), Some(code));
        assert_eq!(second.status.code(), Some(EXIT_ECHO));
        assert!(String::from_utf8_lossy(&second.stderr).contains("rank 0 aborted the job"), "{second:?}");
    }
}
