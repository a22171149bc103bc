//! Every strategy over every transport: the losses of one device, the bytes of the formula, the same bits everywhere.

#![allow(clippy::unwrap_used, reason = "a test may panic")]

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use burn::tensor::Device;
use comm_core::{BorrowedCall, Call, Communicator, Completed, Handle, Op, ReduceOp, local};
use gpt2::config::Preset;
use gpt2::corpus::{Corpus, CorpusSource};
use gpt2::optim::LossScaling;
use gpt2::precision::Precision;
use gpt2::strategy::{StrategyKind, StrategyOptions};
use gpt2::tokenizer::TokenizerKind;
use gpt2::trainer::{Node, Observer, Session, StepReport, Summary, TrainConfig, train};
use isocomm::{Nodes, TransportKind, TransportOptions};

const TRANSPORTS: [TransportKind; 4] =
    [TransportKind::LOCAL, TransportKind::TCP_RAW, TransportKind::TCP, TransportKind::QUIC];

/// Rounding: the ranks' sums run in another order than one device's.
const TOLERANCE: f64 = 1e-5;

fn corpus() -> Corpus {
    Corpus::load(&CorpusSource::Synthetic { seed: 1, bytes: 20_000 }, TokenizerKind::Bytes).unwrap()
}

fn config(strategy: StrategyKind) -> TrainConfig {
    TrainConfig {
        options: StrategyOptions { bucket_bytes: 20_000, first_bucket_bytes: 20_000, ..StrategyOptions::default() },
        seed: 7,
        steps: 4,
        clip: 0.5,
        eval_every: 2,
        ..TrainConfig::of(Preset::Micro.config(256), strategy)
    }
}

fn sessions(transport: TransportKind, ranks: usize) -> Vec<Session> {
    sessions_with(transport, ranks, &TransportOptions::default())
}

fn sessions_with(transport: TransportKind, ranks: usize, options: &TransportOptions) -> Vec<Session> {
    let options = TransportOptions { timeout: Duration::from_secs(60), ..options.clone() };
    if transport == TransportKind::LOCAL {
        return Session::threads(ranks, &options).unwrap();
    }
    let connecting: Vec<_> = local::group(ranks, 1)
        .into_iter()
        .map(|rank| {
            let options = options.clone();
            thread::spawn(move || Session::new(transport.connect(rank.control, &options).unwrap(), &options))
        })
        .collect();
    connecting.into_iter().map(|rank| rank.join().unwrap()).collect()
}

/// Trains on threads; all ranks must agree on the result.
fn run(config: &TrainConfig, transport: TransportKind, ranks: usize) -> Summary {
    train_on(config, sessions(transport, ranks))
}

fn train_on(config: &TrainConfig, sessions: Vec<Session>) -> Summary {
    let corpus = Arc::new(corpus());
    let threads: Vec<_> = sessions
        .into_iter()
        .map(|session| {
            let (config, corpus) = (config.clone(), corpus.clone());
            thread::spawn(move || train(&config, &corpus, &session, &Device::flex(), None, &mut ()).unwrap())
        })
        .collect();
    let summaries: Vec<Summary> = threads.into_iter().map(|rank| rank.join().unwrap()).collect();
    for summary in &summaries {
        assert_eq!(summary.weights_hash, summaries[0].weights_hash);
        assert_eq!(summary.losses, summaries[0].losses);
    }
    summaries.into_iter().next().unwrap()
}

fn assert_close(losses: &[f64], reference: &[f64], tolerance: f64, what: &str) {
    assert_eq!(losses.len(), reference.len());
    for (step, (a, b)) in losses.iter().zip(reference).enumerate() {
        assert!(((a - b) / b).abs() <= tolerance, "{what}: step {}: loss {a}, one device has {b}", step + 1);
    }
}

fn assert_bytes(summary: &Summary, what: &str) {
    for rank in &summary.ranks {
        assert_eq!(rank.bytes_counted, Some(rank.bytes_expected), "{what}: payload of rank {}", rank.rank);
        assert_eq!(rank.messages, Some(rank.expected.messages), "{what}: messages of rank {}", rank.rank);
        assert_eq!(rank.operations, rank.expected.operations, "{what}: operations of rank {}", rank.rank);
        assert!(rank.bytes_steady, "{what}: rank {} sent another number of bytes in some step", rank.rank);
    }
}

/// Two nodes; of an odd number of ranks the first has one more.
fn with_nodes(config: &TrainConfig, ranks: usize) -> TrainConfig {
    // Those of one strategy are to have one size, and several ranks.
    let in_one = config.strategy == StrategyKind::Hsdp && (ranks < 4 || !ranks.is_multiple_of(2));
    let ranks_per_node = if in_one { ranks } else { ranks.div_ceil(2) };
    TrainConfig { options: StrategyOptions { ranks_per_node, ..config.options.clone() }, ..config.clone() }
}

fn prove(strategy: StrategyKind) {
    prove_over(strategy, &[3, 4], &TRANSPORTS);
}

fn prove_over(strategy: StrategyKind, sizes: &[usize], transports: &[TransportKind]) {
    let config = config(strategy);
    let single = run(&TrainConfig { strategy: StrategyKind::Single, ..config.clone() }, TransportKind::LOCAL, 1);
    for ranks in sizes.iter().copied() {
        let config = with_nodes(&config, ranks);
        let mut first: Option<Summary> = None;
        for transport in transports.iter().copied() {
            let what = format!("{strategy} over {transport} on {ranks} ranks");
            let summary = run(&config, transport, ranks);
            assert_close(&summary.losses, &single.losses, TOLERANCE, &what);
            assert_close(&summary.grad_norms, &single.grad_norms, TOLERANCE, &what);
            assert_bytes(&summary, &what);
            let first = first.get_or_insert_with(|| summary.clone());
            assert_eq!(summary.weights_hash, first.weights_hash, "{what}: the weights");
        }
    }
}

#[test]
fn ps_is_one_device_on_every_transport() {
    prove(StrategyKind::Ps);
}

#[test]
fn sharded_ps_is_one_device_on_every_transport() {
    prove(StrategyKind::ShardedPs);
}

#[test]
fn ring_is_one_device_on_every_transport() {
    prove(StrategyKind::Ring);
}

#[test]
fn ddp_is_one_device_on_every_transport() {
    prove(StrategyKind::Ddp);
}

#[test]
fn zero1_is_one_device_on_every_transport() {
    prove(StrategyKind::Zero1);
}

#[test]
fn zero2_is_one_device_on_every_transport() {
    prove(StrategyKind::Zero2);
}

#[test]
fn fsdp_is_one_device_on_every_transport() {
    prove(StrategyKind::Fsdp);
}

#[test]
fn hierarchical_is_one_device_on_every_transport() {
    prove(StrategyKind::Hierarchical);
}

#[test]
fn hsdp_is_one_device() {
    prove_over(StrategyKind::Hsdp, &[4], &[TransportKind::LOCAL, TransportKind::QUIC]);
}

#[test]
fn ranks_are_placed_as_the_launcher_likes() {
    for machines in ["abab", "abaa"] {
        let machines: Vec<char> = machines.chars().collect();
        let nodes = Nodes::of_machines(&machines, &[0; 4]);
        let kinds = [StrategyKind::Hierarchical, StrategyKind::Hsdp];
        for kind in kinds.into_iter().filter(|kind| *kind == StrategyKind::Hierarchical || nodes.even_size().is_some())
        {
            let config = config(kind);
            let placed = |session: Session| Session { nodes: Some(nodes.clone()), ..session };
            let summary = train_on(&config, sessions(TransportKind::LOCAL, 4).into_iter().map(placed).collect());
            let single = TrainConfig { strategy: StrategyKind::Single, ..config };
            let single = run(&single, TransportKind::LOCAL, 1);
            let what = format!("{kind} on {machines:?}");
            assert_close(&summary.losses, &single.losses, TOLERANCE, &what);
            assert_close(&summary.grad_norms, &single.grad_norms, TOLERANCE, &what);
            assert_bytes(&summary, &what);
        }
    }
}

#[test]
fn parameters_travel_in_the_next_step_unless_something_else_follows() {
    #[derive(Default)]
    struct Sent(Vec<(u64, u64)>);
    impl Observer for Sent {
        fn step(&mut self, report: &StepReport) {
            self.0.push((report.bytes_sent.unwrap(), report.operations));
        }
    }
    let corpus = Arc::new(corpus());
    for strategy in [StrategyKind::Zero1, StrategyKind::Zero2, StrategyKind::ShardedPs] {
        for overlap in [true, false] {
            let config = config(strategy);
            let options = StrategyOptions { overlap, ..config.options.clone() };
            // Validations follow steps 3 and 5, and the last.
            let config = TrainConfig { steps: 5, eval_every: 3, options, ..config };
            let ranks: Vec<_> = sessions(TransportKind::LOCAL, 2)
                .into_iter()
                .map(|session| {
                    let (config, corpus) = (config.clone(), corpus.clone());
                    thread::spawn(move || {
                        let mut sent = Sent::default();
                        train(&config, &corpus, &session, &Device::flex(), None, &mut sent).unwrap();
                        sent.0
                    })
                })
                .collect();
            for sent in ranks.into_iter().map(|rank| rank.join().unwrap()) {
                let what = format!("{strategy}, {overlap}: {sent:?}");
                let [first, second, third, fourth, last] = sent[..] else { panic!("{what}") };
                if !overlap {
                    assert!(sent.iter().all(|step| *step == first), "{what}");
                    continue;
                }
                let parameters = (second.0 - first.0, second.1 - first.1);
                assert!(parameters.0 > 0 && parameters.1 > 0, "{what}");
                assert_eq!(third, (second.0 + parameters.0, second.1 + parameters.1), "{what}");
                assert_eq!((fourth, last), (first, third), "{what}");
            }
        }
    }
}

#[test]
fn steps_that_are_skipped_send_what_was_left_to_them() {
    // Two good steps, and one with an overflow.
    let loss_scaling =
        LossScaling::Dynamic { initial: 1024.0, growth: 2f32.powi(30), backoff: 2f32.powi(-30), interval: 2 };
    for strategy in [StrategyKind::Zero2, StrategyKind::Ps, StrategyKind::ShardedPs] {
        let config = config(strategy);
        let config = TrainConfig { precision: Precision::F16, steps: 8, eval_every: 0, loss_scaling, ..config };
        let summary = run(&config, TransportKind::LOCAL, 3);
        assert_eq!(summary.skipped_steps, 2, "{strategy}");
        assert_bytes(&summary, &format!("{strategy} with skipped steps"));
    }
}

#[test]
fn where_a_node_counts_nothing_the_rest_is_held_against_the_rest_of_the_formula() {
    let config = with_nodes(&config(StrategyKind::Hierarchical), 4);
    let train = |is_counted: bool| {
        let options = TransportOptions { timeout: Duration::from_secs(60), ..TransportOptions::default() };
        let sessions = Session::threads_in_nodes(&Nodes::of_size(4, 2), &options).unwrap();
        let equip = |session: Session| {
            let node = session.node.map(|node| {
                let counters = node.counters.clone().filter(|_| is_counted);
                Node { counters, ..node }
            });
            Session { node, ..session }
        };
        train_on(&config, sessions.into_iter().map(equip).collect())
    };
    let (all, part) = (train(true), train(false));
    assert_bytes(&all, "nodes that count");
    assert_bytes(&part, "nodes that count nothing");
    for (all, part) in all.ranks.iter().zip(&part.ranks) {
        let (bytes, messages) = all.node_sent.unwrap();
        assert_eq!((bytes, messages), (all.expected.node_payload, all.expected.node_messages));
        assert!(bytes > 0 && messages > 0 && part.bytes_expected > 0);
        assert_eq!(part.bytes_expected, all.bytes_expected - bytes);
        assert_eq!(part.expected.messages, all.expected.messages - messages);
        assert_eq!((all.between_nodes, part.between_nodes, part.node_sent), (false, true, None));
        assert_eq!(part.scalar_bytes, all.scalar_bytes);
    }
}

/// Passes everything on, but turns the mean over ranks into a sum, or drops what a bucket would bring.
struct Broken {
    inner: Arc<dyn Communicator>,
    fault: Planted,
    buckets: AtomicU64,
}

#[derive(Clone, Copy)]
enum Planted {
    ForgetsToDivide,
    DropsEveryThirdBucket,
}

#[deny(clippy::missing_trait_methods)]
impl Communicator for Broken {
    fn name(&self) -> &str {
        self.inner.name()
    }

    fn rank(&self) -> usize {
        self.inner.rank()
    }

    fn world_size(&self) -> usize {
        self.inner.world_size()
    }

    fn lanes(&self) -> usize {
        self.inner.lanes()
    }

    fn id(&self) -> u64 {
        self.inner.id()
    }

    fn start(&self, mut call: Call) -> Handle {
        match self.fault {
            Planted::ForgetsToDivide => {
                if call.op == Op::AllReduce(ReduceOp::Mean) {
                    call.op = Op::AllReduce(ReduceOp::Sum);
                }
            }
            Planted::DropsEveryThirdBucket => {
                if self.buckets.fetch_add(1, Ordering::Relaxed) % 3 == 2 {
                    let now = Instant::now();
                    return Handle::done(Ok(Completed {
                        buffer: call.buffer,
                        input: call.input,
                        began: now,
                        ended: now,
                    }));
                }
            }
        }
        self.inner.start(call)
    }

    fn run_borrowed(&self, call: BorrowedCall<'_>) -> comm_core::Result<()> {
        self.inner.run_borrowed(call)
    }

    fn split(&self, color: Option<u64>, key: i64) -> comm_core::Result<Option<Arc<dyn Communicator>>> {
        self.inner.split(color, key)
    }

    fn abort(&self, reason: &str) {
        self.inner.abort(reason);
    }

    fn finish(&self, timeout: Duration) -> comm_core::Result<()> {
        self.inner.finish(timeout)
    }
}

#[test]
fn planted_faults_exceed_the_tolerance() {
    let config = config(StrategyKind::Ddp);
    let single = run(&TrainConfig { strategy: StrategyKind::Single, ..config.clone() }, TransportKind::LOCAL, 1);
    for fault in [Planted::ForgetsToDivide, Planted::DropsEveryThirdBucket] {
        let corpus = Arc::new(corpus());
        let ranks: Vec<_> = sessions(TransportKind::LOCAL, 3)
            .into_iter()
            .map(|mut session| {
                session.comm = Arc::new(Broken { inner: session.comm, fault, buckets: AtomicU64::new(0) });
                let (config, corpus) = (config.clone(), corpus.clone());
                thread::spawn(move || train(&config, &corpus, &session, &Device::flex(), None, &mut ()))
            })
            .collect();
        let outcomes: Vec<_> = ranks.into_iter().map(|rank| rank.join().unwrap()).collect();
        match fault {
            Planted::ForgetsToDivide => {
                let broken = outcomes.into_iter().next().unwrap().unwrap();
                let norms = broken.grad_norms.iter().zip(&single.grad_norms);
                let difference = norms.map(|(a, b)| ((a - b) / b).abs()).max_by(f64::total_cmp).unwrap_or_default();
                assert!(difference > 1000.0 * TOLERANCE, "the comparison would not notice: {difference:e}");
            }
            // Each rank keeps its own gradients of that bucket.
            Planted::DropsEveryThirdBucket => {
                for outcome in outcomes {
                    let said = outcome.map(|_| ()).unwrap_err().to_string();
                    assert!(said.contains("different weights"), "{said}");
                }
            }
        }
    }
}

#[test]
fn accumulation_changes_nothing_but_rounding_and_sends_once_a_step() {
    let config = config(StrategyKind::Ddp);
    let plain = run(&config, TransportKind::LOCAL, 2);
    let accumulated = run(&TrainConfig { accumulation: 3, ..config }, TransportKind::LOCAL, 2);
    assert_close(&accumulated.losses, &plain.losses, TOLERANCE, "accumulation");
    assert_close(&accumulated.grad_norms, &plain.grad_norms, TOLERANCE, "accumulation");
    assert_bytes(&accumulated, "accumulation");
    assert_eq!(accumulated.ranks[0].bytes_counted, plain.ranks[0].bytes_counted);
}

#[test]
fn a_sixteen_bit_wire_halves_gradients_and_stays_near() {
    for strategy in [StrategyKind::Ring, StrategyKind::Ddp, StrategyKind::Ps, StrategyKind::ShardedPs] {
        let config = config(strategy);
        let options = StrategyOptions { wire: Precision::Bf16, ..config.options.clone() };
        let wide = run(&config, TransportKind::LOCAL, 3);
        let narrow = run(&TrainConfig { options, ..config }, TransportKind::LOCAL, 3);
        assert_close(&narrow.losses, &wide.losses, 1e-2, "bf16 on the wire");
        assert_bytes(&narrow, "bf16 on the wire");
        let bytes = |summary: &Summary| summary.ranks.iter().map(|rank| rank.bytes_expected).sum::<u64>();
        if matches!(strategy, StrategyKind::Ring | StrategyKind::Ddp) {
            assert_eq!(2 * bytes(&narrow), bytes(&wide));
        } else {
            // Parameters still travel in f32.
            assert_eq!(4 * bytes(&narrow), 3 * bytes(&wide));
        }
    }
}

#[test]
fn one_rank_of_every_strategy_that_averages_gradients_is_single() {
    let single = run(&config(StrategyKind::Single), TransportKind::LOCAL, 1);
    for strategy in StrategyKind::of_one_device() {
        assert_eq!(run(&config(strategy), TransportKind::LOCAL, 1).weights_hash, single.weights_hash, "{strategy}");
    }
}

#[test]
fn single_refuses_company() {
    let corpus = Arc::new(corpus());
    let outcomes: Vec<_> = sessions(TransportKind::LOCAL, 2)
        .into_iter()
        .map(|session| {
            let corpus = corpus.clone();
            thread::spawn(move || {
                let config = config(StrategyKind::Single);
                train(&config, &corpus, &session, &Device::flex(), None, &mut ()).map(|_| ()).unwrap_err().to_string()
            })
        })
        .map(|rank| rank.join().unwrap())
        .collect();
    assert!(outcomes[0].contains("trains on 1 rank, not on 2"), "{outcomes:?}");
}

#[test]
fn compared_calls_are_messages_of_the_formula_too() {
    let options = TransportOptions { checked: true, ..TransportOptions::default() };
    for strategy in StrategyKind::of_one_device().filter(|kind| *kind != StrategyKind::Single) {
        let config = TrainConfig { steps: 2, ..with_nodes(&config(strategy), 4) };
        let summary = train_on(&config, sessions_with(TransportKind::LOCAL, 4, &options));
        assert_bytes(&summary, &format!("{strategy} with compared calls"));
    }
}

#[test]
fn the_summary_of_a_run_with_skipped_steps_survives_json() {
    let loss_scaling =
        LossScaling::Dynamic { initial: 1_073_741_824.0, growth: 2.0, backoff: 2f32.powi(-20), interval: 100 };
    let config = TrainConfig { precision: Precision::F16, loss_scaling, ..config(StrategyKind::Zero2) };
    let mut summary = run(&config, TransportKind::LOCAL, 2);
    assert_eq!(summary.skipped_steps, 1);
    // As where the model itself overflows.
    summary.validations[0].1 = f64::NAN;
    let copy: Summary = serde_json::from_slice(&serde_json::to_vec(&summary).unwrap()).unwrap();
    assert_eq!((copy.losses, copy.weights_hash), (summary.losses, summary.weights_hash));
    assert!(copy.grad_norms[0].is_nan() && copy.grad_norms[1..] == summary.grad_norms[1..]);
    assert!(copy.validations[0].1.is_nan() && copy.validations[1..] == summary.validations[1..]);
}
