//! Checkpoints of the whole state: a run that goes on from one ends where an undisturbed run ends, whatever interrupted it; and one clear
//! error for every checkpoint that is none.

#![allow(clippy::unwrap_used, reason = "a test may panic")]

use std::fs;
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use burn::tensor::Device;
use comm_core::job::{EXIT_CONFIGURATION, EXIT_STOPPED};
use comm_core::splitmix::SplitMix64;
use gpt2::checkpoint::sharded::{Saved, Store};
use gpt2::checkpoint::{Checkpoint, StoredWeights};
use gpt2::config::ModelConfig;
use gpt2::segments::SegmentedModel;
use serde_json::{Value, json};

use crate::common::{is_running, lines, ranks_of, wait, wait_for};

const SOON: Duration = Duration::from_secs(120);

/// Steps of a run.
const STEPS: u64 = 8;

/// A folder with a text, in which runs are made.
struct Place(tempfile::TempDir);

impl Place {
    fn new() -> Self {
        let place = Place(tempfile::tempdir().unwrap());
        fs::write(place.path().join("text.txt"), "Whoever is interrupted goes on where he was, they say. ".repeat(300))
            .unwrap();
        place
    }

    fn path(&self) -> &Path {
        self.0.path()
    }

    /// A run of the smallest model.
    fn command(&self, more: &str) -> Command {
        self.command_of_any(&format!("--preset micro --tokenizer bytes --block-size 16 {more}"))
    }

    /// A run of whatever model.
    fn command_of_any(&self, more: &str) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_gpt2"));
        command
            .args("train --threads 1 --log-every 1 --data text.txt".split(' '))
            .args(more.split_whitespace())
            .current_dir(self.path())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        for variable in ["COMM_RANK", "COMM_WORLD_SIZE", "RANK", "WORLD_SIZE", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK"] {
            command.env_remove(variable);
        }
        command
    }

    /// A run that ends well; its output.
    fn run(&self, more: &str) -> String {
        succeed(&mut self.command(more))
    }

    fn store(&self, out: &str) -> Store {
        Store::new(self.path().join(out).join("checkpoints"))
    }

    /// The losses in the file of steps, from a step on.
    fn losses(&self, out: &str, after: u64) -> Vec<(u64, Value, bool)> {
        let text = fs::read_to_string(self.path().join(out).join("steps.jsonl")).unwrap();
        let lines = text.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
        let steps = lines.filter(|line| line.get("loss").is_some());
        let step =
            |line: Value| (line["step"].as_u64().unwrap(), line["loss"].clone(), line["skipped"].as_bool().unwrap());
        steps.map(step).filter(|(step, ..)| *step > after).collect()
    }

    /// What lies in a folder, in order.
    fn names(&self, folder: &str) -> Vec<String> {
        let entries = fs::read_dir(self.path().join(folder)).unwrap();
        let mut names: Vec<String> = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }
}

/// The output of a run that ends well.
fn succeed(command: &mut Command) -> String {
    let output = command.output().unwrap();
    let said = both(&output);
    assert!(output.status.success(), "{command:?}: {said}");
    said
}

fn both(output: &Output) -> String {
    format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr))
}

fn hash(said: &str) -> String {
    let hash = said.lines().find_map(|line| line.split_once("weights: sha256 "));
    hash.unwrap_or_else(|| panic!("no hash in {said}")).1.to_owned()
}

/// Every strategy, each over some transport, with what else there is to be kept.
const CASES: [&str; 11] = [
    "--strategy single",
    "--strategy ps --nproc 2 --transport tcp --optimizer lamb",
    "--strategy ps --nproc 3 --transport tcp-raw --dedicated-server",
    "--strategy sharded-ps --nproc 2 --transport quic --wire bf16",
    "--strategy ring --nproc 2 --transport tcp-raw --optimizer lamb --wire bf16",
    // Overflows in the first steps, and the scale grows later.
    "--strategy ddp --nproc 2 --transport tcp --precision f16 --loss-scale dynamic:initial=524288,interval=2 --accumulation 2",
    "--strategy zero1 --nproc 2 --transport shm --wire bf16 --accumulation 2 --last-batch join",
    "--strategy zero2 --nproc 2 --transport quic --optimizer lamb --bucket-bytes 20000 --dropout 0.2",
    "--strategy fsdp --nproc 3 --transport tcp --precision bf16 --dropout 0.1",
    "--strategy hierarchical --nproc 4 --ranks-per-node 2 --transport tcp-raw --node-transport shm",
    "--strategy hsdp --nproc 4 --ranks-per-node 2 --transport tcp-raw --precision bf16 --optimizer lamb",
];

/// A run in one piece, and one that goes on from the checkpoint in its middle, in another folder.
fn goes_on_as_if_nothing_had_been(case: &str) {
    let place = Place::new();
    let case = format!("{case} --batch 12 --steps {STEPS} --eval-every 3 --eval-batches 1");
    let whole = place.run(&format!("{case} --save-every 4 --out whole"));
    assert_eq!(place.store("whole").steps(), [4], "not after the last step: {whole}");
    let rest = place.run(&format!("{case} --resume whole/checkpoints/step-4 --out rest"));
    assert!(rest.contains("resume: whole/checkpoints/step-4, after step 4 of 8, bit-identical"), "{rest}");
    assert!(rest.contains("resumed after step 4"), "{rest}");
    assert_eq!(hash(&rest), hash(&whole), "{case}");
    let losses = place.losses("rest", 0);
    assert_eq!(losses, place.losses("whole", 4), "{case}");
    assert_eq!(losses.len() as u64, STEPS - 4);
    let model = |out: &str| fs::read(place.path().join(out).join("model.safetensors")).unwrap();
    assert!(model("rest") == model("whole"), "{case}: other files");
    if case.contains(" f16 ") {
        assert!(place.losses("whole", 0).iter().any(|(.., skipped)| *skipped), "nothing overflows");
    }
}

macro_rules! cases {
    ($($name:ident = $number:literal;)*) => {
        $(#[test]
        fn $name() {
            goes_on_as_if_nothing_had_been(CASES[$number]);
        })*
    };
}

cases! {
    single_goes_on = 0;
    ps_with_lamb_goes_on = 1;
    ps_with_a_dedicated_server_goes_on = 2;
    sharded_ps_with_a_wire_of_bf16_goes_on = 3;
    ring_with_lamb_goes_on = 4;
    ddp_in_f16_with_accumulation_goes_on = 5;
    zero1_with_accumulation_goes_on = 6;
    zero2_with_lamb_goes_on = 7;
    fsdp_in_bf16_goes_on = 8;
    hierarchical_goes_on = 9;
    hsdp_in_bf16_with_lamb_goes_on = 10;
}

#[test]
fn other_ranks_strategies_transports_and_types_go_on_within_rounding() {
    let place = Place::new();
    let same = format!("--batch 12 --steps {STEPS} --eval-every 0");
    place.run(&format!("{same} --strategy ddp --transport tcp --nproc 2 --save-every 4 --out two"));
    place.run(&format!("{same} --strategy fsdp --transport tcp --nproc 4 --save-every 4 --out four"));
    let reference = place.losses("two", 4);
    for (number, (from, to, tolerance, told)) in [
        ("two", "--strategy ddp --nproc 4 --transport tcp", 1e-5, "there were 2 rank(s) and are 4 now"),
        ("two", "--strategy fsdp --nproc 2 --transport quic", 1e-5, "was \"ddp\" and is \"fsdp\" now"),
        ("two", "--strategy single", 1e-5, "there were 2 rank(s) and are 1 now"),
        ("two", "--strategy ps --nproc 3 --transport local", 1e-5, "there were 2 rank(s) and are 3 now"),
        (
            "two",
            "--strategy ddp --nproc 2 --transport tcp-raw --precision bf16",
            2e-2,
            "was \"f32\" and is \"bf16\" now",
        ),
        ("four", "--strategy sharded-ps --nproc 2 --transport shm", 1e-5, "there were 4 rank(s) and are 2 now"),
        ("four", "--strategy zero1 --nproc 3 --transport shm", 1e-5, "there were 4 rank(s) and are 3 now"),
        (
            "four",
            "--strategy hierarchical --nproc 4 --ranks-per-node 2 --transport tcp-raw --accumulation 3",
            1e-5,
            "was 1 and is 3 now",
        ),
    ]
    .into_iter()
    .enumerate()
    {
        let said = place.run(&format!("{same} {to} --resume {from}/checkpoints/step-4 --out {number}"));
        let line = said.lines().find(|line| line.contains("resume: ")).unwrap();
        assert!(line.contains("resharded; equal to the earlier run up to rounding") && line.contains(told), "{line}");
        let losses = place.losses(&number.to_string(), 0);
        assert_eq!(losses.len(), reference.len());
        for ((step, loss, _), (_, expected, _)) in losses.iter().zip(&reference) {
            let (loss, expected) = (loss.as_f64().unwrap(), expected.as_f64().unwrap());
            assert!((loss / expected - 1.0).abs() < tolerance, "{to}: step {step}: {loss} {expected}");
        }
    }
    // Another transport alone changes no bit.
    let said = place.run(&format!("{same} --strategy ddp --nproc 2 --transport quic --resume two --out quic"));
    assert!(said.contains("bit-identical") && said.contains("resume: the transport was tcp and is quic now"), "{said}");
    assert_eq!(place.losses("quic", 0), reference);
    // On the same kind of device, which the checkpoint names.
    assert!(!said.contains("resume: the device"), "{said}");
    let state = fs::read_to_string(place.store("two").path(4).join("run.json")).unwrap();
    let state: Value = serde_json::from_str(&state).unwrap();
    assert_eq!((&state["version"], &state["state"]["device"]), (&3.into(), &"cpu".into()));
    assert_eq!(state["commit"].as_str(), gpt2::build::COMMIT);
}

/// Sends a signal with this name.
fn send(signal: &str, pid: u32) {
    assert!(Command::new("kill").args([signal, &pid.to_string()]).status().unwrap().success());
}

/// What a job has yet to say, and its exit code.
fn end_of(mut job: Child, lines: &std::sync::mpsc::Receiver<(Instant, String)>) -> (Option<i32>, String) {
    let code = wait(&mut job, SOON).expect("it does not end");
    (code, lines.iter().map(|(_, line)| line + "\n").collect())
}

#[test]
fn a_job_that_is_asked_to_leave_saves_and_goes_on_later() {
    // To the launcher or to one of its ranks, to threads, to a process alone.
    for (number, (how, signal, whom)) in [
        ("--strategy fsdp --transport tcp --nproc 3 --batch 3", "-TERM", None),
        ("--strategy ddp --transport quic --nproc 2 --batch 4", "-USR1", None),
        ("--strategy ring --transport tcp-raw --nproc 2 --batch 4", "-TERM", Some(1)),
        ("--strategy zero2 --transport local --nproc 2 --batch 4", "-USR1", None),
        ("--strategy single --batch 4", "-TERM", None),
    ]
    .into_iter()
    .enumerate()
    {
        let place = Place::new();
        // Enough that it is not over before it is asked.
        let run = format!("{how} --steps 400 --eval-every 0");
        // A scheduler starts it again by the same command.
        let mut job = place.command(&format!("{run} --resume auto --out left")).spawn().unwrap();
        let said = lines(&mut job);
        wait_for(&said, "/400 | loss", SOON).unwrap_or_else(|| panic!("{how}: training did not start"));
        let ranks = ranks_of(job.id());
        let whom = whom.map_or(job.id(), |rank: usize| ranks[rank]);
        let since = Instant::now();
        send(signal, whom);
        let (code, said) = end_of(job, &said);
        assert_eq!(code, Some(EXIT_STOPPED), "{how}: {said}");
        assert!(since.elapsed() < Duration::from_secs(30), "{how}: {:?}", since.elapsed());
        assert!(said.contains("stopped after step ") && !said.contains("error:"), "{how}: {said}");
        assert!(ranks.into_iter().all(|pid| !is_running(pid)), "{how}");
        let [step] = place.store("left").steps()[..] else { panic!("{how}: {:?}", place.names("left/checkpoints")) };
        assert_eq!(place.losses("left", 0).last().unwrap().0, step, "{how}");
        // In the same folder, which is not refused for it.
        let newest = if number % 2 == 0 { "auto" } else { "latest" };
        let rest = place.run(&format!("{run} --resume {newest} --out left"));
        let undisturbed = place.run(&format!("{run} --out whole{number}"));
        assert_eq!(hash(&rest), hash(&undisturbed), "{how}");
        assert_eq!(place.losses("left", 0), place.losses(&format!("whole{number}"), 0), "{how}: each step once");
    }
}

/// Kills a random rank at random moments of a job that is started again, and compares. Returns how often a death ended the job.
fn killed_and_started_again(how: &str, kills: usize, seed: u64) -> usize {
    let place = Place::new();
    let run = format!("{how} --steps 60 --eval-every 25 --eval-batches 1");
    let undisturbed = Instant::now();
    let whole = place.run(&format!("{run} --out whole"));
    let takes = undisturbed.elapsed();
    let mut random = SplitMix64::stream(seed, &[]);
    let mut job = place.command(&format!("{run} --save-every 7 --max-restarts {kills} --out killed")).spawn().unwrap();
    let said = lines(&mut job);
    let mut killed = 0;
    for _ in 0..kills {
        thread::sleep(takes.mul_f64(random.below(1000) as f64 / 1000.0));
        if job.try_wait().unwrap().is_some() {
            break;
        }
        let ranks = ranks_of(job.id());
        if !ranks.is_empty() {
            let victim = ranks[random.below(ranks.len() as u64) as usize];
            killed +=
                usize::from(Command::new("kill").args(["-KILL", &victim.to_string()]).status().unwrap().success());
        }
    }
    let (code, said) = end_of(job, &said);
    assert_eq!(code, Some(0), "{how}, seed {seed}: {said}");
    assert_eq!(hash(&said), hash(&whole), "{how}, seed {seed}: {said}");
    assert_eq!(place.losses("killed", 0), place.losses("whole", 0), "{how}, seed {seed}: each step once");
    let restarts = said.matches("warning: rank ").count();
    assert!(restarts <= killed, "{said}");
    if restarts > 0 {
        let lost: u64 = said
            .lines()
            .filter_map(|line| {
                line.split_once(": ")?.1.split_once(" steps are repeated")?.0.rsplit_once(' ')?.1.parse::<u64>().ok()
            })
            .sum();
        assert!(said.contains(&format!("restarts: {restarts}; {lost} steps were repeated")), "{said}");
    }
    restarts
}

#[test]
fn a_job_of_ddp_survives_the_deaths_of_its_ranks() {
    killed_and_started_again("--strategy ddp --transport tcp --nproc 3 --batch 3", 3, 1);
}

#[test]
fn a_job_of_fsdp_survives_the_deaths_of_its_ranks() {
    killed_and_started_again("--strategy fsdp --transport quic --nproc 2 --batch 4", 3, 2);
}

#[test]
fn a_job_of_a_parameter_server_survives_the_deaths_of_its_ranks() {
    killed_and_started_again("--strategy ps --transport tcp-raw --nproc 3 --batch 3", 3, 3);
}

/// Of ranks that train by themselves, of workers that nobody waits for, and of what compression leaves: see also `kept`.
const WITH_MORE_TO_KEEP: [&str; 10] = [
    "--strategy local-sgd --nproc 2 --transport shm --wire bf16 --sync-every 5",
    "--strategy diloco --nproc 2 --transport shm --sync-every 5",
    "--strategy streaming-diloco --nproc 3 --transport tcp-raw --sync-every 6 --overlap-steps 2",
    "--strategy sparta --nproc 2 --transport quic --sparta-share 0.1",
    "--strategy async-ps --nproc 3 --transport tcp --staleness 0",
    "--strategy ddp --nproc 2 --transport shm --compress int8",
    "--strategy ring --nproc 3 --transport tcp-raw --compress topk:0.05 --optimizer sgd",
    "--strategy ddp --nproc 2 --transport quic --compress powersgd:2",
    "--strategy ddp --nproc 3 --transport tcp --compress sign",
    "--strategy ps --nproc 3 --transport quic --compress sign",
];

#[test]
fn a_job_of_streaming_diloco_survives_the_deaths_of_its_ranks() {
    killed_and_started_again(&format!("{} --batch 3", WITH_MORE_TO_KEEP[2]), 2, 4);
}

/// `cargo test -p gpt2 --test all -- --ignored --nocapture survives_twenty_deaths`
#[test]
#[ignore = "takes minutes"]
fn every_strategy_survives_twenty_deaths() {
    for case in CASES.into_iter().chain(WITH_MORE_TO_KEEP) {
        let case = format!("{case} --batch 12");
        let (mut deaths, mut job) = (0, 0);
        while deaths < 20 {
            // Some jobs end before they are killed.
            assert!(job < 40, "{case}: only {deaths} deaths in {job} jobs");
            deaths += killed_and_started_again(&case, 5, 100 + job);
            job += 1;
        }
        println!("{case}: {deaths} deaths in {job} jobs");
    }
}

#[test]
fn a_job_that_dies_before_its_first_checkpoint_begins_again() {
    let place = Place::new();
    let run = "--strategy zero1 --transport tcp-raw --nproc 2 --batch 4 --steps 60 --eval-every 0";
    // A checkpoint of an earlier run, with other weights, is not gone on from.
    place.run("--batch 4 --seed 5 --steps 50 --save-every 45 --eval-every 0 --out again");
    let mut job =
        place.command(&format!("{run} --save-every 50 --max-restarts 1 --overwrite --out again")).spawn().unwrap();
    let said = lines(&mut job);
    wait_for(&said, "step     3/60", SOON).unwrap();
    send("-KILL", ranks_of(job.id())[0]);
    let (code, said) = end_of(job, &said);
    assert_eq!(code, Some(0), "{said}");
    assert!(said.contains("restart 1 of 1, from the state after step 0; ") && said.contains("restarts: 1; "), "{said}");
    assert_eq!(hash(&said), hash(&place.run(&format!("{run} --out whole"))));
    assert_eq!(place.store("again").steps(), [50]);
}

#[test]
fn a_job_is_started_again_so_often_and_not_for_what_it_would_find_again() {
    let place = Place::new();
    let run = "--strategy ring --transport tcp-raw --nproc 2 --batch 4 --steps 100000 --eval-every 0 --max-restarts 1";
    let mut job = place.command(&format!("{run} --out often")).spawn().unwrap();
    let said = lines(&mut job);
    for _ in 0..2 {
        wait_for(&said, "step     3/100000", SOON).unwrap();
        send("-KILL", ranks_of(job.id())[1]);
    }
    let (code, said) = end_of(job, &said);
    assert_eq!(code, Some(128 + 9), "{said}");
    assert!(said.contains("error: rank 1 was killed by signal 9"), "{said}");
    // Ranks that cannot begin are no deaths.
    let run = "--strategy ring --transport tcp-raw --nproc 2 --batch 4 --steps 3 --eval-every 0";
    place.run(&format!("{run} --save-every 2 --out damaged"));
    let part = place.store("damaged").path(2).join("rank-0.safetensors");
    let mut bytes = fs::read(&part).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    fs::write(&part, bytes).unwrap();
    let output = place.command(&format!("{run} --resume damaged --max-restarts 1 --out rest")).output().unwrap();
    assert_eq!(output.status.code(), Some(EXIT_CONFIGURATION));
    assert!(!both(&output).contains("restart"), "{}", both(&output));
}

#[test]
fn the_newest_checkpoints_and_the_best_weights_are_kept() {
    let place = Place::new();
    let said = place.run("--batch 4 --steps 7 --save-every 1 --keep 3 --eval-every 1 --eval-batches 1 --lr 0.3 --warmup 0 --schedule constant --out run");
    assert_eq!(place.store("run").steps(), [4, 5, 6]);
    assert_eq!(place.names("run/checkpoints"), ["step-4", "step-5", "step-6"]);
    assert_eq!(said.matches(" | checkpoint run/checkpoints/step-").count(), 6, "{said}");
    let text = fs::read_to_string(place.path().join("run/steps.jsonl")).unwrap();
    let validations = text.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
    let validations: Vec<(f64, u64)> =
        validations.filter_map(|line| Some((line.get("validation_loss")?.as_f64()?, line["step"].as_u64()?))).collect();
    assert_eq!(validations.len(), 7);
    let best = validations.iter().copied().min_by(|a, b| a.0.total_cmp(&b.0)).unwrap();
    assert_ne!(best.1, 7, "a rate at which it gets worse: {validations:?}");
    let kept = gpt2::checkpoint::Checkpoint::load(&place.path().join("run/best.safetensors")).unwrap();
    assert_eq!(kept.step, best.1, "{validations:?}");
    // A run that goes on knows what was best.
    place.run("--batch 4 --steps 7 --save-every 1 --keep 1 --eval-every 1 --eval-batches 1 --lr 0.3 --warmup 0 --schedule constant --out run --resume latest");
    let kept = gpt2::checkpoint::Checkpoint::load(&place.path().join("run/best.safetensors")).unwrap();
    assert_eq!(kept.step, best.1);
}

/// A run on two ranks that takes its model from elsewhere.
const OF_ANY: &str = "--strategy zero1 --transport tcp-raw --nproc 2 --batch 4 --eval-every 0";

/// Weights of a size that is no preset's, in `weights/model.safetensors`.
fn save_weights(place: &Place) -> ModelConfig {
    let config = ModelConfig { n_layer: 2, n_head: 2, n_embd: 8, block_size: 16, vocab_size: 256 };
    let model = SegmentedModel::new(config.clone(), 7, &Device::flex()).unwrap();
    fs::create_dir(place.path().join("weights")).unwrap();
    let checkpoint = Checkpoint::of(&model, json!({"kind": "bytes"}), 0).unwrap();
    checkpoint.save(&place.path().join("weights/model.safetensors")).unwrap();
    config
}

#[test]
fn a_run_that_began_with_weights_goes_on_without_them() {
    let place = Place::new();
    let config = save_weights(&place);
    let any = |more: &str| succeed(&mut place.command_of_any(&format!("{OF_ANY} --steps 6 {more}")));
    let whole = any("--save-every 3 --out whole --init-from weights");
    // It takes nothing from where they were.
    fs::remove_dir_all(place.path().join("weights")).unwrap();
    let rest = any("--resume whole --out rest");
    assert!(rest.contains("after step 3 of 6, bit-identical to an uninterrupted run"), "{rest}");
    assert_eq!(hash(&rest), hash(&whole));
    for out in ["whole", "rest"] {
        let names = place.names(out);
        let all = ["config.json", "model.safetensors", "tokenizer.json"];
        assert!(all.iter().all(|name| names.iter().any(|found| found == name)), "{names:?}");
    }
    assert_eq!(StoredWeights::open(&place.path().join("rest")).unwrap().config(), &config);
    for (more, expected) in [
        ("--init-from rest", &["--init-from rest cannot be combined with --resume whole"][..]),
        ("--preset micro", &["other settings", "--preset", "n_embd was 8"]),
        ("--block-size 8", &["other settings", "--block-size", "block_size was 16 and is 8 now"]),
        ("--tokenizer gpt2", &["--tokenizer gpt2", "--resume whole were trained with the tokenizer bytes"]),
    ] {
        let run = format!("{OF_ANY} --steps 6 --resume whole --out other {more}");
        let said = refusal(&mut place.command_of_any(&run));
        assert!(expected.iter().all(|part| said.contains(part)), "{more}: {said}");
    }
    let said = refusal(
        &mut place.command_of_any(&format!("{OF_ANY} --max-restarts 1 --overwrite --out rest --init-from rest")),
    );
    assert!(said.contains("--init-from rest are in --out rest"), "{said}");
    // The weights are known by their hash, not by their place.
    let saved = Saved::open(&place.store("whole").path(3)).unwrap();
    let mut now = saved.state().config.clone();
    now["initial"]["path"] = "elsewhere".into();
    assert_eq!(saved.state().contradictions(&now, &saved.state().text_sha256), [""; 0]);
    now["initial"]["hash"] = "of others".into();
    let found = saved.state().contradictions(&now, &saved.state().text_sha256);
    assert!(found.len() == 1 && found[0].starts_with("--init-from") && found[0].contains("of others"), "{found:?}");
}

#[test]
fn a_job_that_began_with_weights_and_settings_of_a_file_survives_deaths() {
    let place = Place::new();
    save_weights(&place);
    fs::write(place.path().join("run.toml"), "init-from = \"weights\"\nsteps = 60\nsave-every = 20\n").unwrap();
    let run = format!("{OF_ANY} --config run.toml");
    let mut job = place.command_of_any(&format!("{run} --max-restarts 2 --out again")).spawn().unwrap();
    let said = lines(&mut job);
    // Before the first checkpoint, and after it.
    for step in ["step     3/60", "step    25/60"] {
        wait_for(&said, step, SOON).unwrap();
        send("-KILL", ranks_of(job.id())[1]);
    }
    let (code, said) = end_of(job, &said);
    assert_eq!(code, Some(0), "{said}");
    assert!(
        said.contains("restart 2 of 2, from the state after step 20; ") && said.contains("restarts: 2; "),
        "{said}"
    );
    assert_eq!(hash(&said), hash(&succeed(&mut place.command_of_any(&format!("{run} --out whole")))));
}

/// The one error of a run that is refused before its first step.
fn refused(place: &Place, more: &str) -> String {
    refusal(&mut place.command(more))
}

/// As [`refused`], of any command.
fn refusal(command: &mut Command) -> String {
    let output = command.output().unwrap();
    let said = both(&output);
    assert_eq!(output.status.code(), Some(EXIT_CONFIGURATION), "{command:?}: {said}");
    assert!(!said.contains("panicked") && !said.contains("| loss"), "{command:?}: {said}");
    assert_eq!(said.matches("error:").count(), 1, "{command:?}: {said}");
    said.lines().find(|line| line.contains("error:")).unwrap().to_owned()
}

fn copy(from: &Path, to: &Path) {
    fs::create_dir_all(to).unwrap();
    for entry in fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        fs::copy(entry.path(), to.join(entry.file_name())).unwrap();
    }
}

#[test]
fn a_checkpoint_that_is_none_is_one_clear_error() {
    let place = Place::new();
    let run = "--batch 4 --steps 4 --eval-every 0 --transport local";
    place.run(&format!("{run} --strategy fsdp --nproc 2 --save-every 2 --out good"));
    let good = place.path().join("good/checkpoints/step-2");
    let resume = |given: &str, more: &str| {
        refused(&place, &format!("{run} --strategy ddp --nproc 2 --out out --resume {given} {more}"))
    };
    let changed = |name: &str, change: &dyn Fn(&Path)| {
        let path = place.path().join(name);
        copy(&good, &path);
        change(&path);
        resume(name, "")
    };
    let edit = |file: &'static str, edit: &'static dyn Fn(Vec<u8>) -> Vec<u8>| {
        move |folder: &Path| fs::write(folder.join(file), edit(fs::read(folder.join(file)).unwrap())).unwrap()
    };
    let replaced = |bytes: Vec<u8>, from: &str, to: &str| {
        let text = String::from_utf8(bytes).unwrap();
        assert!(text.contains(from), "{from} in {text}");
        text.replace(from, to).into_bytes()
    };
    let part = "rank-1.safetensors";
    let cut = changed("cut", &edit("rank-1.safetensors", &|bytes| bytes[..bytes.len() - 1].to_vec()));
    assert!(cut.contains("cut: rank-1.safetensors has ") && cut.contains("bytes instead of"), "{cut}");
    let bit = changed(
        "bit",
        &edit("rank-1.safetensors", &|mut bytes| {
            let middle = bytes.len() / 2;
            bytes[middle] ^= 1;
            bytes
        }),
    );
    assert!(bit.contains("bit: rank-1.safetensors has SHA-256") && bit.contains("another checkpoint"), "{bit}");
    let gone = changed("gone", &|folder| fs::remove_file(folder.join(part)).unwrap());
    assert!(gone.contains("gone: rank-1.safetensors cannot be found"), "{gone}");
    let folder = changed("folder", &|folder| {
        fs::remove_file(folder.join(part)).unwrap();
        fs::create_dir(folder.join(part)).unwrap();
    });
    assert!(folder.contains("is not a file"), "{folder}");
    let no_state = changed("no-state", &|folder| fs::remove_file(folder.join("run.json")).unwrap());
    assert!(no_state.contains("no-state: there is no run.json in it"), "{no_state}");
    let half = changed("half", &edit("run.json", &|bytes| bytes[..bytes.len() / 2].to_vec()));
    assert!(half.contains("its run.json is unreadable: EOF"), "{half}");
    let garbage = changed("garbage", &edit("run.json", &|_| b"\xff\0 weights".to_vec()));
    assert!(garbage.contains("its run.json is unreadable"), "{garbage}");
    let foreign =
        changed("foreign", &edit("run.json", &|_| br#"{"format":"pt","version":1,"program":"another"}"#.to_vec()));
    assert!(foreign.contains("is of format \"pt\"") && foreign.contains("--save-every` wrote?"), "{foreign}");
    let newer = changed("newer", &|folder| {
        let text = replaced(fs::read(folder.join("run.json")).unwrap(), "\"version\": 3", "\"version\": 4");
        fs::write(folder.join("run.json"), text).unwrap();
    });
    assert!(newer.contains("newer: it has version 4 of the format, written by gpt2 "), "{newer}");
    let altered = changed("altered", &|folder| {
        let text = replaced(fs::read(folder.join("run.json")).unwrap(), "\"step\": 2", "\"step\": 1");
        fs::write(folder.join("run.json"), text).unwrap();
    });
    assert!(altered.contains("altered: run.json does not match the hash that is stored in it"), "{altered}");
    for (given, told) in [
        ("latest", "there is no checkpoint in out/checkpoints"),
        ("nowhere", "checkpoint nowhere: there is no run.json in it"),
        ("good/model.safetensors", "checkpoint good/model.safetensors: "),
        ("text.txt", "checkpoint text.txt: "),
    ] {
        let said = resume(given, "");
        assert!(said.contains(told), "{given}: {said}");
    }
}

#[test]
fn the_same_command_begins_a_run_and_goes_on_with_it() {
    let place = Place::new();
    let run = "--strategy ddp --nproc 2 --transport local --batch 4 --steps 4 --eval-every 0 --save-every 2 --resume auto --out run";
    let begun = place.run(run);
    assert!(!begun.contains("resume: "), "{begun}");
    let again = place.run(run);
    assert!(again.contains("resume: run/checkpoints/step-2, after step 2 of 4"), "{again}");
    assert_eq!(hash(&again), hash(&begun));
    // As if it had been interrupted before its first checkpoint.
    fs::remove_dir_all(place.path().join("run/checkpoints")).unwrap();
    let refused = place.command(run).output().unwrap();
    assert!(!refused.status.success() && both(&refused).contains("--overwrite"), "{}", both(&refused));
    assert_eq!(hash(&place.run(&format!("{run} --overwrite"))), hash(&begun));
    let tuned = run.replace("--out run", "--init-from run --out tuned");
    let [begun, again] = [(), ()].map(|()| succeed(&mut place.command_of_any(&tuned)));
    assert!(!begun.contains("resume: ") && again.contains("resume: tuned/checkpoints/step-2"), "{begun}{again}");
    assert_eq!(hash(&again), hash(&begun));
}

#[test]
fn settings_that_contradict_a_checkpoint_are_named() {
    let place = Place::new();
    let run = "--strategy ddp --nproc 2 --transport local --batch 4 --steps 4 --eval-every 0";
    place.run(&format!("{run} --save-every 2 --out good"));
    fs::write(place.path().join("other.txt"), "Another text altogether, which is long enough. ".repeat(300)).unwrap();
    for (more, told) in [
        ("--seed 7", "--seed: was 1337 and is 7 now"),
        ("--block-size 8", "--preset, --block-size, --tokenizer: block_size was 16 and is 8 now"),
        ("--preset tiny --block-size 16", "n_layer was 2 and is 4 now"),
        ("--batch 6", "--batch: was 4 and is 6 now"),
        ("--lr 0.01", "--lr, --min-lr, --warmup, --schedule, --steps: "),
        ("--schedule constant", "--schedule, --steps: "),
        ("--steps 5", "--steps: was 4 and is 5 now"),
        ("--optimizer lamb", "kind was \"adamw\" and is \"lamb\" now"),
        ("--beta2 0.9", "beta2 was 0.95 and is 0.9 now"),
        ("--clip 0.5", "--clip: was 1.0 and is 0.5 now"),
        ("--last-batch join", "--last-batch: was \"drop\" and is \"join\" now"),
        ("--data other.txt", "--data, --tokenizer: the text's hash was "),
    ] {
        // The last of the same options counts.
        let given: Vec<&str> = more.split(' ').step_by(2).collect();
        let kept: Vec<&str> = run
            .split(' ')
            .collect::<Vec<_>>()
            .chunks(2)
            .filter(|pair| !given.contains(&pair[0]))
            .flatten()
            .copied()
            .collect();
        let mut command = place.command("");
        if more.contains("--block-size") || more.contains("--data") || more.contains("--preset") {
            command = Command::new(env!("CARGO_BIN_EXE_gpt2"));
            let base = "train --preset micro --tokenizer bytes --block-size 16 --threads 1 --data text.txt";
            let base: Vec<&str> = base.split(' ').skip(1).collect();
            let base = base.chunks(2).filter(|pair| !given.contains(&pair[0])).flatten();
            command.arg("train").args(base).current_dir(place.path()).stdout(Stdio::piped()).stderr(Stdio::piped());
        }
        let output =
            command.args(kept).args(more.split(' ')).args(["--out", "out", "--resume", "good"]).output().unwrap();
        let said = both(&output);
        assert_eq!(output.status.code(), Some(EXIT_CONFIGURATION), "{more}: {said}");
        assert_eq!(said.matches("error:").count(), 1, "{more}: {said}");
        assert!(
            said.contains("step-2: it belongs to a run with other settings: ") && said.contains(told),
            "{more}: {said}"
        );
        assert!(!place.path().join("out/steps.jsonl").exists(), "{more}");
    }
    for (more, told) in [
        ("--keep 0", "--keep must be at least 1"),
        ("--max-restarts 2", "--max-restarts is for ranks that are processes"),
        // An earlier run in the folder is not the one that goes on.
        ("--out good2", "it holds an earlier run"),
    ] {
        if more.contains("good2") {
            place.run(&format!("{run} --out good2"));
        }
        let said = refused(&place, &format!("{run} --resume good {more}"));
        assert!(said.contains(told), "{more}: {said}");
    }
}

#[test]
fn where_a_checkpoint_cannot_be_written_the_run_goes_on_and_the_last_good_one_stays() {
    for how in [
        "--strategy fsdp --transport tcp-raw --nproc 2",
        "--strategy ddp --transport local --nproc 2",
        "--strategy single",
    ] {
        let place = Place::new();
        let run = format!("{how} --batch 4 --steps 5 --eval-every 0 --save-every 2");
        let limited = |out: &str| {
            // Less than a rank's part, and more than the log.
            let command = place.command(&format!("{run} --out {out}"));
            Command::new("sh")
                .args(["-c", "ulimit -f 60; exec \"$0\" \"$@\""])
                .arg(command.get_program())
                .args(command.get_args())
                .current_dir(place.path())
                .output()
                .unwrap()
        };
        let output = limited("full");
        let said = both(&output);
        assert_eq!(
            said.matches("no checkpoint could be saved, and the run continues: checkpoint full/checkpoints/step-")
                .count(),
            2,
            "{how}: {said}"
        );
        assert!(
            said.contains("rank 0: ") && said.contains("disk full?") && said.contains("File too large"),
            "{how}: {said}"
        );
        assert!(said.contains("step     5/5"), "{how}: {said}");
        assert_eq!(place.names("full/checkpoints"), [""; 0], "{how}");
        // A file where the folder should be, for every user.
        fs::create_dir(place.path().join("taken")).unwrap();
        fs::write(place.path().join("taken/checkpoints"), "taken").unwrap();
        let said = place.run(&format!("{run} --out taken"));
        assert_eq!(said.matches("cannot make a folder for it").count(), 2, "{how}: {said}");
        // Of a run that is asked to leave it is an error, since it cannot go on later.
        let mut job = place
            .command(&format!("{how} --batch 4 --steps 100000 --eval-every 0 --out taken --overwrite"))
            .spawn()
            .unwrap();
        let lines = lines(&mut job);
        wait_for(&lines, "/100000 | loss", SOON).unwrap();
        send("-TERM", job.id());
        let (code, said) = end_of(job, &lines);
        assert_eq!(code, Some(1), "{how}: {said}");
        assert!(said.contains("cannot make a folder for it") && said.contains("error:"), "{how}: {said}");
    }
}

/// A library that kills its process at the `KILL_AT`th call that changes something in a folder of checkpoints.
const KILLER: &str = r#"
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <stdio.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <unistd.h>
static int calls, watched[65536];
static void count(void) {
    const char *at = getenv("KILL_AT");
    if (__sync_add_and_fetch(&calls, 1) == (at ? atoi(at) : 0)) raise(SIGKILL);
}
static int ours(const char *path) { return path && strstr(path, "checkpoints") != 0; }
static int ours_fd(int fd) { return fd >= 0 && fd < 65536 && watched[fd]; }
#define NEXT(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))
#define OPEN(name) int name(const char *path, int flags, ...) { \
    va_list rest; va_start(rest, flags); int mode = va_arg(rest, int); va_end(rest); \
    if (ours(path) && (flags & O_CREAT)) count(); \
    int fd = NEXT(name)(path, flags, mode); \
    if (fd >= 0 && fd < 65536) watched[fd] = ours(path); \
    return fd; }
OPEN(open)
OPEN(open64)
ssize_t write(int fd, const void *bytes, size_t len) { if (ours_fd(fd)) count(); return NEXT(write)(fd, bytes, len); }
int fsync(int fd) { if (ours_fd(fd)) count(); return NEXT(fsync)(fd); }
int rename(const char *from, const char *to) { if (ours(to)) count(); return NEXT(rename)(from, to); }
int mkdir(const char *path, mode_t mode) { if (ours(path)) count(); return NEXT(mkdir)(path, mode); }
int unlink(const char *path) { if (ours(path)) count(); return NEXT(unlink)(path); }
int rmdir(const char *path) { if (ours(path)) count(); return NEXT(rmdir)(path); }
/* Folders are removed by these, relative to one that is open. */
int unlinkat(int fd, const char *path, int flags) { if (ours(path) || ours_fd(fd)) count(); return NEXT(unlinkat)(fd, path, flags); }
int close(int fd) { if (fd >= 0 && fd < 65536) watched[fd] = 0; return NEXT(close)(fd); }
"#;

/// Kills a run between any two changes of its folder of checkpoints, and looks whether the last good one loads.
fn killed_between_any_two_changes(how: &str, stride: usize) {
    let place = Place::new();
    let library = place.path().join("killer.so");
    fs::write(place.path().join("killer.c"), KILLER).unwrap();
    let compiled = Command::new("cc")
        .args(["-shared", "-fPIC", "-O1", "-o"])
        .arg(&library)
        .arg(place.path().join("killer.c"))
        .arg("-ldl")
        .status();
    assert!(compiled.is_ok_and(|status| status.success()), "a C compiler is needed");
    // Three checkpoints of which one is kept: each is written, and all but the last are removed.
    let run = format!("{how} --batch 4 --steps 7 --save-every 2 --keep 1 --eval-every 0");
    place.run(&format!("{} --keep 9 --out whole", run.replace("--keep 1 ", "")));
    let good: Vec<(u64, String)> =
        [2, 4, 6].map(|step| (step, Saved::open(&place.store("whole").path(step)).unwrap().digest().to_owned())).into();
    let (mut at, mut newest_before) = (1, None);
    loop {
        let out = format!("killed{at}");
        let mut command = place.command(&format!("{run} --out {out}"));
        let output = command.env("LD_PRELOAD", &library).env("KILL_AT", at.to_string()).output().unwrap();
        let store = place.store(&out);
        for step in store.steps() {
            let saved = Saved::open(&store.path(step)).unwrap_or_else(|error| panic!("{how}, change {at}: {error}"));
            saved.verify(0, 1).unwrap();
            let (_, digest) = good.iter().find(|(of, _)| *of == step).unwrap();
            assert_eq!(saved.digest(), digest, "{how}, change {at}: not that of a run that was not killed");
        }
        let newest = store.steps().last().copied();
        assert!(newest >= newest_before, "{how}, change {at}: {newest:?} after {newest_before:?}");
        newest_before = newest;
        if output.status.success() {
            break;
        }
        if newest == Some(6) {
            // The next run removes what this one has left, and goes on.
            let said = place.run(&format!("{run} --resume latest --out {out}"));
            assert_eq!(place.names(&format!("{out}/checkpoints")), ["step-6"], "{said}");
        }
        at += stride;
        fs::remove_dir_all(place.path().join(&out)).unwrap();
    }
    assert!(at > 40, "{how}: only {at} changes were seen");
    println!("{how}: {at} changes");
}

#[test]
fn at_its_end_a_run_removes_what_an_earlier_one_should_have_removed() {
    let place = Place::new();
    let run = "--strategy single --batch 4 --steps 7 --save-every 2 --eval-every 0 --out model";
    place.run(&format!("{run} --keep 9"));
    assert_eq!(place.names("model/checkpoints"), ["step-2", "step-4", "step-6"]);
    // It begins after the last step that is saved.
    place.run(&format!("{run} --keep 2 --resume latest"));
    assert_eq!(place.names("model/checkpoints"), ["step-4", "step-6"]);
}

#[test]
fn a_kill_between_two_changes_leaves_the_last_good_checkpoint() {
    killed_between_any_two_changes("--strategy single", 3);
}

/// `cargo test -p gpt2 --test all -- --ignored --nocapture between_any_two`
#[test]
#[ignore = "takes minutes"]
fn a_kill_between_any_two_changes_leaves_the_last_good_checkpoint() {
    killed_between_any_two_changes("--strategy single", 1);
    killed_between_any_two_changes("--strategy fsdp --transport tcp-raw --nproc 2", 1);
    killed_between_any_two_changes("--strategy ddp --transport local --nproc 2", 1);
}
