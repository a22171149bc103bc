//! That a strategy of any order fits the seam, and that one that lies is found out.

use std::thread;
use std::time::Duration;

use burn::tensor::Device;

use super::*;
use crate::config::Preset;
use crate::corpus::CorpusSource;
use crate::flat::{Flat, Gradients};
use crate::strategy::{
    Built, Channels, DuringPass, LocalOptions, LocalStep, Ranks, Setup, StepOutcome, Strategy, put_own,
};
use crate::tokenizer::TokenizerKind;

/// Every rank trains by itself for good.
struct Alone {
    grads: Vec<Flat>,
    /// Whether it says that the replicas agree.
    agrees: bool,
    /// What it says that it sends.
    expected: Expected,
}

impl Alone {
    fn build((agrees, expected): (bool, Expected), setup: &Setup<'_>) -> comm_core::Result<Built> {
        let Built { channels, owned, .. } = strategy::build(StrategyKind::Ddp, setup)?;
        let grads = vec![Flat::default(); setup.segments.len()];
        Ok(Built::new(Alone { grads, agrees, expected }, channels, owned))
    }
}

impl DuringPass for Alone {
    fn gradient(&mut self, segment: usize, grads: Gradients, _channels: &mut Channels) -> comm_core::Result<()> {
        self.grads[segment] = grads.into_flat()?;
        Ok(())
    }
}

impl Strategy for Alone {
    fn step(
        &mut self,
        _step: u64,
        train: &mut dyn LocalStep,
        channels: &mut Channels,
    ) -> Result<StepOutcome, TrainError> {
        let loss = train.backward(self, channels)?;
        let grads = self.grads.iter_mut().map(std::mem::take).collect();
        let mut checked = train.check(loss, grads, Ranks::This)?;
        train.update(&mut checked)?;
        put_own(train, channels)?;
        Ok(StepOutcome::new(&checked, Some(self.expected), self.agrees))
    }
}

/// The reports of all steps, and what came of them, of each of two ranks.
fn run(
    build: impl Fn(&Setup<'_>) -> comm_core::Result<Built> + Sync,
    period: u64,
    steps: u64,
) -> Vec<(Vec<StepReport>, Result<Summary, TrainError>)> {
    #[derive(Default)]
    struct Kept(Vec<StepReport>);
    impl Observer for Kept {
        fn step(&mut self, report: &StepReport) {
            self.0.push(report.clone());
        }
    }
    let source = CorpusSource::Synthetic { seed: 1, bytes: 20_000 };
    let corpus = Corpus::load(&source, TokenizerKind::Bytes).unwrap();
    let usual = TrainConfig::of(Preset::Micro.config(256), StrategyKind::LocalSgd);
    let local = LocalOptions { sync_every: period, ..LocalOptions::default() };
    let config = TrainConfig { steps, options: StrategyOptions { local, ..usual.options.clone() }, ..usual };
    let options = TransportOptions { timeout: Duration::from_secs(60), ..TransportOptions::default() };
    let train = |session: Session| {
        let mut kept = Kept::default();
        let summary = train_by(&build, &config, &corpus, &session, &Device::flex(), &Keep::default(), &mut kept);
        (kept.0, summary)
    };
    thread::scope(|scope| {
        let ranks = Session::threads(2, &options).unwrap().into_iter().map(|session| scope.spawn(|| train(session)));
        let ranks: Vec<_> = ranks.collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

/// Local SGD that averages every `period` steps.
fn local_sgd(period: u64, steps: u64) -> Vec<(Vec<StepReport>, Summary)> {
    let build = |setup: &Setup<'_>| strategy::build(StrategyKind::LocalSgd, setup);
    run(build, period, steps).into_iter().map(|(reports, summary)| (reports, summary.unwrap())).collect()
}

/// What came of ranks that each train alone, and say so or not.
fn alone(agrees: bool, expected: Expected) -> Vec<Result<Summary, TrainError>> {
    let build = |setup: &Setup<'_>| Alone::build((agrees, expected), setup);
    run(build, 1, 3).into_iter().map(|(_, summary)| summary).collect()
}

#[test]
fn a_strategy_that_synchronises_every_second_step_and_in_the_end_fits() {
    for (steps, expected) in [(4, vec![false, true, false, true]), (5, vec![false, true, false, true, true])] {
        let ranks = local_sgd(2, steps);
        let mut total = 0;
        for (rank, (reports, summary)) in ranks.iter().enumerate() {
            let sent: Vec<u64> = reports.iter().map(|report| report.bytes_sent.unwrap()).collect();
            assert!(sent.iter().map(|bytes| *bytes > 0).eq(expected.iter().copied()), "{sent:?}");
            total = sent.iter().sum();
            assert_eq!(summary.weights_hash, ranks[0].1.weights_hash);
            let RankReport { bytes_steady, bytes_counted, bytes_expected, .. } = summary.ranks[rank];
            assert!(bytes_steady, "each step sent what it was to send");
            assert_eq!(bytes_counted, Some(bytes_expected));
            assert_eq!(bytes_expected, total / steps);
        }
        assert!(total > 0);
        // Each looks at its own.
        assert_ne!(ranks[0].1.losses, ranks[1].1.losses);
    }
}

#[test]
fn replicas_may_differ_where_the_strategy_says_so() {
    let summary = alone(false, Expected::default()).remove(0).unwrap();
    let [one, other] = [0, 1].map(|rank| &summary.ranks[rank]);
    assert_ne!(one.weights_hash, other.weights_hash);
    assert_eq!((one.bytes_steady, one.bytes_counted, one.bytes_expected), (true, Some(0), 0));
}

#[test]
fn a_strategy_that_lies_is_found_out() {
    for outcome in alone(true, Expected::default()) {
        let error = outcome.unwrap_err().to_string();
        assert!(error.contains("different weights"), "{error}");
    }
    let sends = Expected { payload: 1, ..Expected::default() };
    assert!(!alone(false, sends).remove(0).unwrap().ranks[0].bytes_steady);
}
