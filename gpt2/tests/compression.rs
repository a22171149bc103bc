//! Gradients compressed on their way: what that is where it is something else, the bytes of its formulas, the same bits on every transport.

#![allow(clippy::unwrap_used, reason = "a test may panic")]

use std::thread;
use std::time::Duration;

use burn::tensor::Device;
use comm_core::local;
use gpt2::optim::LossScaling;
use gpt2::strategy::{Compression, StrategyKind, StrategyOptions};
use gpt2::trainer::{Session, Summary, TrainConfig, TrainError, train};
use isocomm::{TransportKind, TransportOptions};

use crate::local::{TOLERANCE, assert_close, assert_counts, corpus, difference, run, single, with};

const ALL: [&str; 5] = ["int8", "sign", "topk:0.05", "powersgd:1", "powersgd:2"];

/// Of `ps`.
const PUSHED: [&str; 3] = ["int8", "sign", "topk:0.05"];

/// What compresses, by each strategy that can.
fn cases() -> impl Iterator<Item = (StrategyKind, &'static str)> {
    let of_ddp = ALL.map(|compress| (StrategyKind::Ddp, compress));
    let of_ps = PUSHED.map(|compress| (StrategyKind::Ps, compress));
    of_ddp.into_iter().chain(of_ps).chain([(StrategyKind::Ring, "powersgd:1"), (StrategyKind::Ring, "sign")])
}

fn compressed(config: &TrainConfig, strategy: StrategyKind, ranks: usize, compress: &str) -> TrainConfig {
    let config = with(config, (strategy, false), ranks);
    let options = StrategyOptions { compress: compress.parse().unwrap(), ..config.options.clone() };
    TrainConfig { options, ..config }
}

fn run_over(config: &TrainConfig, transport: TransportKind, ranks: usize) -> Vec<Result<Summary, TrainError>> {
    let options = &TransportOptions { timeout: Duration::from_secs(60), ..TransportOptions::default() };
    let corpus = &corpus(20_000);
    thread::scope(|scope| {
        let train = |control| {
            let session = Session::new(transport.connect(control, options).unwrap(), options);
            train(config, corpus, &session, &Device::flex(), None, &mut ())
        };
        let ranks: Vec<_> =
            local::group(ranks, 1).into_iter().map(|rank| scope.spawn(move || train(rank.control))).collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

#[test]
fn all_elements_are_ddp() {
    let corpus = corpus(20_000);
    for (strategy, ranks) in [(StrategyKind::Ddp, 3), (StrategyKind::Ring, 2), (StrategyKind::Ddp, 2)] {
        let config = single(3);
        let plain = run(&with(&config, (strategy, false), ranks), &corpus, ranks);
        let all = run(&compressed(&config, strategy, ranks, "topk:1"), &corpus, ranks);
        assert_counts(&all, &format!("{strategy} with all elements"));
        assert_close(&all, &plain, TOLERANCE, &format!("{strategy} on {ranks} ranks"));
        if ranks == 2 {
            // A sum of two has one order.
            assert_eq!(all.weights_hash, plain.weights_hash, "{strategy}");
        } else {
            let half = run(&compressed(&config, strategy, ranks, "topk:0.5"), &corpus, ranks);
            assert!(difference(&half, &plain) > 10.0 * TOLERANCE, "half of all elements would pass for all");
        }
    }
}

#[test]
fn ranks_agree_on_every_transport_and_send_what_the_formula_says() {
    for (strategy, compress) in cases() {
        let config = compressed(&single(2), strategy, 3, compress);
        let first = run(&config, &corpus(20_000), 3);
        let what = format!("{strategy} with {compress}");
        assert_counts(&first, &what);
        let transports: &[TransportKind] = match (strategy, compress) {
            (StrategyKind::Ps, "sign") => &[TransportKind::QUIC, TransportKind::TCP_RAW],
            (StrategyKind::Ddp, "int8" | "sign") => &[TransportKind::QUIC],
            _ => &[TransportKind::TCP_RAW],
        };
        for transport in transports {
            for summary in run_over(&config, *transport, 3) {
                let summary = summary.unwrap();
                assert_eq!(summary.weights_hash, first.weights_hash, "{what} over {transport}");
                assert_counts(&summary, &what);
            }
        }
        let late = StrategyOptions { overlap: false, ..config.options.clone() };
        let late = run(&TrainConfig { options: late, ..config }, &corpus(20_000), 3);
        assert_eq!(late.weights_hash, first.weights_hash, "{what} without overlap");
    }
}

#[test]
fn less_is_sent_and_the_loss_stays_near() {
    let corpus = corpus(20_000);
    let config = single(8);
    let bytes = |summary: &Summary| summary.ranks.iter().map(|rank| rank.bytes_expected).sum::<u64>();
    let plain = run(&with(&config, (StrategyKind::Ddp, false), 2), &corpus, 2);
    for (compress, part, off) in
        [("int8", 0.27, 1e-3), ("sign", 0.04, 0.05), ("topk:0.05", 0.11, 0.05), ("powersgd:2", 0.5, 0.05)]
    {
        let summary = run(&compressed(&config, StrategyKind::Ddp, 2, compress), &corpus, 2);
        let sent = bytes(&summary) as f64 / bytes(&plain) as f64;
        assert!(sent < part, "{compress}: {sent} of the bytes");
        let (loss, other) = (summary.losses[7], plain.losses[7]);
        assert!((loss / other - 1.0).abs() < off, "{compress}: {loss}, and {other} without");
    }
}

/// The server alone has less to receive: parameters travel whole.
#[test]
fn a_server_gets_less_and_gives_whole_parameters() {
    let corpus = corpus(20_000);
    let config = single(4);
    for dedicated in [false, true] {
        let plain = run(&with(&config, (StrategyKind::Ps, dedicated), 3), &corpus, 3);
        let compressed = |compress: &str| {
            let mut config = compressed(&config, StrategyKind::Ps, 3, compress);
            config.options.dedicated_server = dedicated;
            run(&config, &corpus, 3)
        };
        // Added up in rank order, as they are without.
        let all = compressed("topk:1");
        assert_eq!((all.weights_hash, all.losses), (plain.weights_hash.clone(), plain.losses.clone()));
        for (compress, part, off) in [("int8", 0.27, 1e-3), ("sign", 0.04, 0.05)] {
            let summary = compressed(compress);
            assert_counts(&summary, compress);
            let sent = |summary: &Summary, rank: usize| summary.ranks[rank].bytes_expected as f64;
            assert_eq!(sent(&summary, 0), sent(&plain, 0), "parameters");
            for worker in [1, 2] {
                let share = sent(&summary, worker) / sent(&plain, worker);
                assert!(share < part, "{compress}: {share} of the bytes");
            }
            let (loss, other) = (summary.losses[3], plain.losses[3]);
            assert!((loss / other - 1.0).abs() < off, "{compress}: {loss}, and {other} without");
            assert_ne!(summary.weights_hash, plain.weights_hash, "{compress}");
        }
    }
}

#[test]
fn what_is_no_number_ends_the_run_on_all_ranks() {
    for (strategy, compress) in cases() {
        let config = TrainConfig { loss_factor: 1e39, ..compressed(&single(3), strategy, 3, compress) };
        for outcome in run_over(&config, TransportKind::TCP_RAW, 3) {
            // Of the rank itself, or the echo of another's that came before.
            let error = outcome.map(|_| ()).unwrap_err().to_string();
            assert!(error.contains("step 1: the gradient norm is NaN"), "{strategy} with {compress}: {error}");
        }
    }
}

#[test]
fn what_does_not_go_with_compression_is_refused_with_a_reason() {
    let refused = |config: &TrainConfig, ranks: usize, parts: &[&str]| {
        let sessions = Session::threads(ranks, &TransportOptions::default()).unwrap();
        let corpus = &corpus(20_000);
        thread::scope(|scope| {
            let train = |session: Session| train(config, corpus, &session, &Device::flex(), None, &mut ());
            let ranks: Vec<_> = sessions.into_iter().map(|session| scope.spawn(move || train(session))).collect();
            let errors = ranks.into_iter().map(|rank| rank.join().unwrap().map(|_| ()).unwrap_err().to_string());
            let errors: Vec<String> = errors.collect();
            assert!(parts.iter().all(|part| errors[0].contains(part)), "{errors:?}");
        });
    };
    let config = |strategy| compressed(&single(2), strategy, 2, "int8");
    for strategy in StrategyKind::ALL.into_iter().filter(|kind| !kind.compresses() && *kind != StrategyKind::Single) {
        refused(&config(strategy), 2, &["--compress int8", "ps, ring, ddp", strategy.name()]);
    }
    let factors = compressed(&single(2), StrategyKind::Ps, 2, "powersgd:2");
    refused(&factors, 2, &["--compress powersgd:2", "--strategy ring, ddp, ", "not ps: its factors are averages"]);
    let ddp = config(StrategyKind::Ddp);
    refused(&ddp, 1, &["--compress int8", "one rank"]);
    let scaled = TrainConfig { loss_scaling: LossScaling::DYNAMIC, ..ddp.clone() };
    refused(&scaled, 2, &["--compress int8", "--loss-scale"]);
    assert_eq!(ddp.options.compress, Compression::Int8);
}
