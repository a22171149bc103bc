//! `async-ps`: what it is without staleness, that its bound holds, and what it sends.

#![allow(clippy::unwrap_used, reason = "a test may panic")]

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use burn::tensor::Device;
use comm_core::local;
use gpt2::optim::LossScaling;
use gpt2::precision::Precision;
use gpt2::strategy::{LocalOptions, StrategyKind, StrategyOptions};
use gpt2::trainer::{Observer, Session, Summary, TrainConfig, TrainError, train};
use isocomm::{TransportKind, TransportOptions};

use crate::local::{assert_close, assert_counts, corpus, single, with};

/// Rank 0 serves.
const RANKS: usize = 3;

fn options() -> TransportOptions {
    TransportOptions { timeout: Duration::from_secs(60), lanes: RANKS, ..TransportOptions::default() }
}

fn config(base: &TrainConfig, strategy: StrategyKind, staleness: u64) -> TrainConfig {
    let config = with(base, (strategy, strategy == StrategyKind::Ps), RANKS);
    let local = LocalOptions { staleness, ..LocalOptions::default() };
    TrainConfig { options: StrategyOptions { local, ..config.options.clone() }, ..config }
}

fn sessions(transport: TransportKind) -> Vec<Session> {
    let options = &options();
    if transport == TransportKind::LOCAL {
        return Session::threads(RANKS, options).unwrap();
    }
    thread::scope(|scope| {
        let connect = |control| Session::new(transport.connect(control, options).unwrap(), options);
        let ranks: Vec<_> =
            local::group(RANKS, 1).into_iter().map(|rank| scope.spawn(move || connect(rank.control))).collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

/// Trains with an observer on each rank.
fn run<O: Observer + Send>(
    config: &TrainConfig,
    transport: TransportKind,
    observer: impl Fn(usize) -> O,
) -> Vec<Result<Summary, TrainError>> {
    let corpus = &corpus(20_000);
    thread::scope(|scope| {
        let train = |(rank, session): (usize, Session)| {
            let mut observer = observer(rank);
            scope.spawn(move || train(config, corpus, &session, &Device::flex(), None, &mut observer))
        };
        let ranks: Vec<_> = sessions(transport).into_iter().enumerate().map(train).collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

#[test]
fn without_staleness_it_is_ps_to_the_last_bit() {
    for wire in [Precision::F32, Precision::Bf16] {
        let base = TrainConfig { eval_every: 2, ..single(5) };
        let of = |strategy, transport| {
            let config = config(&base, strategy, 0);
            let config = TrainConfig { options: StrategyOptions { wire, ..config.options.clone() }, ..config };
            let mut ranks = run(&config, transport, |_| ());
            ranks.iter().for_each(|summary| assert_counts(summary.as_ref().unwrap(), strategy.name()));
            ranks.remove(0).unwrap()
        };
        let ps = of(StrategyKind::Ps, TransportKind::LOCAL);
        let transports = [TransportKind::LOCAL, TransportKind::TCP_RAW, TransportKind::QUIC];
        for transport in &transports[..if wire == Precision::F32 { 3 } else { 1 }] {
            let own = of(StrategyKind::AsyncPs, *transport);
            assert_eq!(own.weights_hash, ps.weights_hash, "{wire} over {transport}");
            assert_eq!(own.validations, ps.validations, "{wire} over {transport}");
            assert_eq!(own.grad_norms, ps.grad_norms, "{wire} over {transport}");
            assert_close(&own, &ps, 1e-12, "losses are added in another order");
            let staleness = own.ranks[0].staleness.unwrap();
            assert_eq!((staleness.pushes, staleness.sum, staleness.max), (10, 0, 0));
        }
    }
}

/// How far the fast worker has come, for the slow one to wait for it.
#[derive(Default)]
struct Gate {
    begun: Mutex<u64>,
    moved: Condvar,
}

impl Gate {
    fn lock(&self) -> MutexGuard<'_, u64> {
        self.begun.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Worker 2 begins its first step when worker 1 has begun `ahead` steps, and no more of them after a while.
struct Planted<'a> {
    rank: usize,
    ahead: u64,
    gate: &'a Gate,
}

impl Observer for Planted<'_> {
    fn reading(&mut self, step: u64) {
        if self.rank == 1 {
            *self.gate.lock() = step;
            self.gate.moved.notify_all();
        }
        if self.rank == 2 && step == 1 {
            let (begun, late) = self
                .gate
                .moved
                .wait_timeout_while(self.gate.lock(), Duration::from_secs(60), |begun| *begun < self.ahead)
                .unwrap();
            assert!(!late.timed_out(), "the fast worker has begun {begun} steps, not {}", self.ahead);
            drop(begun);
            // Time to do what it must not.
            thread::sleep(Duration::from_millis(100));
            assert_eq!(*self.gate.lock(), self.ahead, "the fast worker is too far ahead");
        }
    }
}

#[test]
fn a_slow_worker_holds_the_others_up_at_the_bound_and_not_before() {
    for bound in [1, 3] {
        let config = config(&single(8), StrategyKind::AsyncPs, bound);
        let gate = Gate::default();
        let ranks = run(&config, TransportKind::TCP_RAW, |rank| Planted { rank, ahead: bound + 1, gate: &gate });
        for summary in &ranks {
            let summary = summary.as_ref().unwrap();
            assert_eq!(summary.weights_hash, ranks[0].as_ref().unwrap().weights_hash);
            assert_counts(summary, &format!("a bound of {bound}"));
            let staleness = summary.ranks[0].staleness.unwrap();
            assert_eq!((staleness.pushes, staleness.max), (16, bound));
            assert!(staleness.mean() > 0.0 && staleness.mean() <= bound as f64);
            assert!(summary.ranks[1..].iter().all(|rank| rank.staleness.is_none()));
            assert_eq!(summary.ranks[0].optimizer_steps, (16, 16));
        }
        let first = ranks[0].as_ref().unwrap();
        assert!(first.losses[7] < first.losses[0], "{:?}", first.losses);
    }
}

#[test]
fn validations_and_compared_calls_do_not_disturb_it() {
    let config = config(&TrainConfig { eval_every: 2, ..single(6) }, StrategyKind::AsyncPs, 2);
    let checked = TransportOptions { checked: true, ..options() };
    let sessions = Session::threads(RANKS, &checked).unwrap();
    let corpus = &corpus(20_000);
    let summaries: Vec<Summary> = thread::scope(|scope| {
        let train =
            |session: Session| scope.spawn(|| train(&config, corpus, &{ session }, &Device::flex(), None, &mut ()));
        let ranks: Vec<_> = sessions.into_iter().map(train).collect();
        ranks.into_iter().map(|rank| rank.join().unwrap().unwrap()).collect()
    });
    for summary in &summaries {
        assert_counts(summary, "with compared calls");
        assert_eq!(summary.validations.len(), 3);
        assert_eq!(summary.validations, summaries[0].validations);
    }
}

/// Worker 2 takes so long before each step.
struct Slow(Duration);

impl Observer for Slow {
    fn reading(&mut self, _step: u64) {
        thread::sleep(self.0);
    }
}

#[test]
fn waiting_for_the_slowest_before_all_meet_may_take_longer_than_an_operation() {
    // With a bound of 2 the fast worker has sent the gradients of its third step when the slow one begins its first.
    let config = config(&TrainConfig { eval_every: 3, ..single(4) }, StrategyKind::AsyncPs, 2);
    let timeout = Duration::from_secs(3);
    let sessions = Session::threads(RANKS, &TransportOptions { timeout, ..options() }).unwrap();
    let corpus = &corpus(20_000);
    let summaries: Vec<Summary> = thread::scope(|scope| {
        let train = |(rank, session): (usize, Session)| {
            let mut slow = Slow(if rank == 2 { timeout.mul_f64(0.37) } else { Duration::ZERO });
            let config = &config;
            scope.spawn(move || train(config, corpus, &session, &Device::flex(), None, &mut slow).unwrap())
        };
        let ranks: Vec<_> = sessions.into_iter().enumerate().map(train).collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    });
    for summary in &summaries {
        assert_counts(summary, "a slow worker");
        assert_eq!((summary.validations.len(), &summary.weights_hash), (2, &summaries[0].weights_hash));
    }
    let staleness = summaries[0].ranks[0].staleness.unwrap();
    assert_eq!(staleness.pushes, 8);
    assert!(staleness.max <= 2, "{staleness:?}");
}

#[test]
fn what_it_cannot_do_is_refused_with_a_reason() {
    let refused = |config: &TrainConfig, ranks: usize, lanes: usize, parts: &[&str]| {
        let sessions = Session::threads(ranks, &TransportOptions { lanes, ..options() }).unwrap();
        let corpus = &corpus(20_000);
        thread::scope(|scope| {
            let train = |session: Session| {
                scope.spawn(move || train(config, corpus, &session, &Device::flex(), None, &mut ()).map(|_| ()))
            };
            let ranks: Vec<_> = sessions.into_iter().map(train).collect();
            let errors: Vec<_> = ranks.into_iter().map(|rank| rank.join().unwrap().unwrap_err().to_string()).collect();
            assert!(parts.iter().all(|part| errors[0].contains(part)), "{errors:?}");
        });
    };
    let config = config(&single(2), StrategyKind::AsyncPs, 1);
    refused(&config, 1, 3, &["async-ps", "2 ranks"]);
    refused(&config, 3, 2, &["--strategy async-ps", "--lanes 3"]);
    let scaled = TrainConfig { loss_scaling: LossScaling::DYNAMIC, ..config };
    refused(&scaled, 3, 3, &["--loss-scale", "--strategy async-ps"]);
}

#[test]
fn a_worker_whose_gradients_are_no_numbers_ends_the_run_for_all() {
    let config = TrainConfig { loss_factor: 1e39, ..config(&single(3), StrategyKind::AsyncPs, 2) };
    let start = Instant::now();
    let outcomes = run(&config, TransportKind::TCP_RAW, |_| ());
    let errors: Vec<TrainError> = outcomes.into_iter().map(|outcome| outcome.map(|_| ()).unwrap_err()).collect();
    assert!(matches!(errors[1], TrainError::NotFinite { step: 1, .. }), "{errors:?}");
    assert!(matches!(errors[0], TrainError::Comm(_)), "{errors:?}");
    // Nobody has waited for a deadline.
    assert!(start.elapsed() < options().timeout, "{errors:?}");
}
