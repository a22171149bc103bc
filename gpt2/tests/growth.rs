//! A run may take any number of steps: what it keeps does not grow with them.

#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod local;

use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::Path;
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use burn::tensor::Device;
use comm_core::conformance::Barrier;
use comm_core::local::group;
use gpt2::config::ModelConfig;
use gpt2::corpus::Corpus;
use gpt2::corpus::prepare::{HeldOut, PrepareOptions, prepare};
use gpt2::memory::{self, CountingAllocator};
use gpt2::strategy::StrategyKind;
use gpt2::trainer::{Observer, Session, StepReport, TrainConfig, train};
use isocomm::{TransportKind, TransportOptions};

use local::{corpus, single, with};

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;

/// Most that preparing shards may hold at a time: a few blocks of text and their ids for each thread.
const PREPARING: u64 = 12 << 20;

/// The figures are the process's, so that one test at a time may run.
static ALONE: Mutex<()> = Mutex::new(());

/// Steps in which nearly everything has found its size.
const WARM_UP: u64 = 100;

/// How often the memory is looked at after that, in equal intervals.
const LOOKS: u64 = 8;

/// What most intervals may add: the list of validations. A report that is kept is thousands of bytes a step and rank.
const USUAL: u64 = 1 << 10;

/// What all steps may add on one rank.
const SLACK: u64 = 16 << 10;

/// The same on several. A transport's buffers and those that it keeps for the next messages grow, up to a limit, whenever one rank runs
/// further ahead than before. A step of these ranks sends about 40 KB.
const SLACK_OF_TRANSPORTS: u64 = 1 << 20;

/// Looks at what the process has allocated, while all ranks wait between two steps.
struct Watch<'a> {
    barrier: &'a Barrier,
    /// Steps between two looks.
    interval: u64,
    /// On rank 0, what was allocated at each look, in bytes.
    seen: Option<&'a mut Vec<u64>>,
}

impl Observer for Watch<'_> {
    fn step(&mut self, report: &StepReport) {
        if !report.step.checked_sub(WARM_UP).is_some_and(|steps| steps.is_multiple_of(self.interval)) {
            return;
        }
        self.barrier.wait();
        if let Some(seen) = &mut self.seen {
            seen.push(memory::usage().unwrap().total.current);
        }
        self.barrier.wait();
    }
}

/// The smallest steps that there are.
fn config(strategy: StrategyKind, ranks: usize, steps: u64) -> TrainConfig {
    let config = single(steps);
    let model = ModelConfig { block_size: 8, n_layer: 1, ..config.model.clone() };
    // Each validation but the last is followed by a checkpoint.
    with(&TrainConfig { model, global_batch: ranks, eval_every: steps / 10, ..config }, (strategy, false), ranks)
}

fn sessions(transport: TransportKind, ranks: usize) -> Vec<Session> {
    let options = TransportOptions { timeout: Duration::from_secs(60), ..TransportOptions::default() };
    if transport == TransportKind::LOCAL {
        return Session::threads(ranks, &options).unwrap();
    }
    thread::scope(|scope| {
        let connecting: Vec<_> = group(ranks, 1)
            .into_iter()
            .map(|rank| scope.spawn(|| Session::new(transport.connect(rank.control, &options).unwrap(), &options)))
            .collect();
        connecting.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

/// Bytes that the process holds at each look.
fn looks(corpus: &Corpus, config: &TrainConfig, sessions: Vec<Session>, checkpoint: &Path) -> Vec<u64> {
    let mut seen = Vec::new();
    let barrier = Barrier::new(sessions.len());
    let interval = (config.steps - WARM_UP) / LOOKS;
    thread::scope(|scope| {
        let mut first = Some(&mut seen);
        for session in sessions {
            let checkpoint = first.is_some().then(|| checkpoint.to_owned());
            let mut watch = Watch { barrier: &barrier, interval, seen: first.take() };
            scope.spawn(move || {
                let one = rayon::ThreadPoolBuilder::new().num_threads(1).build().unwrap();
                one.install(|| train(config, corpus, &session, &Device::flex(), checkpoint, &mut watch)).unwrap();
            });
        }
    });
    seen
}

fn prove(cases: &[(StrategyKind, TransportKind, usize)], steps: u64) {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let folder = tempfile::tempdir().unwrap();
    let corpus = corpus(5_000);
    for (strategy, transport, ranks) in cases.iter().copied() {
        let config = config(strategy, ranks, steps);
        let seen = looks(&corpus, &config, sessions(transport, ranks), &folder.path().join("model.safetensors"));
        assert_eq!(seen.len() as u64, LOOKS + 1, "{seen:?}");
        let mut added: Vec<u64> = seen.windows(2).map(|pair| pair[1].saturating_sub(pair[0])).collect();
        let case = format!("{strategy} over {transport}, {steps} steps: {added:?} bytes more at each look");
        println!("{case}");
        let slack = if ranks == 1 { SLACK } else { SLACK_OF_TRANSPORTS };
        assert!(seen[0] > 0 && seen[seen.len() - 1].saturating_sub(seen[0]) <= slack, "{case}");
        added.sort_unstable();
        assert!(added[added.len() / 2] <= USUAL, "{case}");
    }
}

#[test]
fn memory_does_not_grow_over_any_transport() {
    let over =
        [TransportKind::LOCAL, TransportKind::SHM, TransportKind::TCP_RAW, TransportKind::TCP, TransportKind::QUIC];
    let cases = over.map(|transport| (StrategyKind::Ddp, transport, 2));
    prove(&cases, 500);
}

#[test]
fn memory_does_not_grow_with_any_strategy() {
    let all = [
        StrategyKind::Ps,
        StrategyKind::ShardedPs,
        StrategyKind::Ring,
        StrategyKind::Zero1,
        StrategyKind::Zero2,
        StrategyKind::Fsdp,
        StrategyKind::Hierarchical,
    ];
    prove(&all.map(|strategy| (strategy, TransportKind::TCP_RAW, 2)), 500);
}

#[test]
fn memory_is_flat_over_twenty_thousand_steps() {
    prove(&[(StrategyKind::Single, TransportKind::LOCAL, 1)], 20_000);
}

/// `cargo test -p gpt2 --test growth -- --ignored --nocapture`
#[test]
#[ignore = "takes minutes"]
fn memory_is_flat_over_twenty_thousand_steps_and_every_transport() {
    let over =
        [TransportKind::LOCAL, TransportKind::SHM, TransportKind::TCP_RAW, TransportKind::TCP, TransportKind::QUIC];
    let cases = over.map(|transport| (StrategyKind::Ddp, transport, 2));
    prove(&cases, 20_000);
}

#[test]
fn shards_are_made_of_more_text_than_memory_holds() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("all.jsonl");
    let mut file = BufWriter::new(File::create(&path).unwrap());
    // Most of it is not the text.
    let (text, rest) = ("The quick brown fox jumps over the lazy dog. ".repeat(40), "x".repeat(16 << 10));
    for id in 0..4_000 {
        writeln!(file, "{{\"id\": {id}, \"rest\": \"{rest}\", \"text\": \"{text}\"}}").unwrap();
    }
    file.into_inner().unwrap();
    let bytes = path.metadata().unwrap().len();
    let options = PrepareOptions {
        field: "text".into(),
        documents: true,
        shard_tokens: 500_000,
        held_out: HeldOut::Share(0.1),
        overwrite: false,
    };
    // What the tokenizer needs once is not counted.
    let _ = gpt2::tokenizer::Tokenizer::gpt2().encode(&text).unwrap();
    memory::reset_peaks();
    let before = memory::usage().unwrap().total.current;
    let prepared = prepare(&[path], &folder.path().join("tokens"), &options, &mut |_| ()).unwrap();
    let held = memory::usage().unwrap().total.peak - before;
    println!("{bytes} bytes with {} of text: {held} bytes held", prepared.bytes);
    assert!(prepared.bytes > 7_000_000 && bytes > 70_000_000);
    assert!(held < PREPARING, "{held} bytes were held");
}
