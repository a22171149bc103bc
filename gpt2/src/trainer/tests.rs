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

#[test]
fn what_is_refused_is_left_to_rank_0_only_where_it_says_the_same() {
    let ends = |errors: [Error; 2]| {
        let build = |setup: &Setup<'_>| Err(errors[setup.comms.world.rank()].clone());
        run(build, 1, 3).into_iter().map(|(_, summary)| summary.unwrap_err()).collect::<Vec<_>>()
    };
    let are_said = |errors: [Error; 2]| {
        let said = |error: &TrainError| match error {
            TrainError::Refused { is_said, .. } => Some(*is_said),
            _ => None,
        };
        ends(errors).iter().map(said).collect::<Vec<_>>()
    };
    assert_eq!(are_said([Error::invalid("a"), Error::invalid("a")]), [Some(false), Some(true)]);
    assert_eq!(are_said([Error::invalid("a"), Error::invalid("b")]), [Some(false), Some(false)]);
    // Rank 0 ends for another reason.
    assert_eq!(are_said([Error::Internal("c".into()), Error::invalid("b")]), [None, Some(false)]);
}

/// A strategy on a rank whose masters change by themselves in the last step.
struct Spoilt(Box<dyn Strategy>);

impl DuringPass for Spoilt {
    fn brings_weights(&self) -> bool {
        self.0.brings_weights()
    }

    fn gradient(&mut self, segment: usize, grads: Gradients, channels: &mut Channels) -> comm_core::Result<()> {
        self.0.gradient(segment, grads, channels)
    }
}

impl Strategy for Spoilt {
    fn step(
        &mut self,
        step: u64,
        train: &mut dyn LocalStep,
        channels: &mut Channels,
    ) -> Result<StepOutcome, TrainError> {
        let outcome = self.0.step(step, train, channels)?;
        if train.is_last() {
            train.masters_mut()[1].host_mut()?[0] += 1e-3;
        }
        Ok(outcome)
    }
}

/// What comes of two steps of `strategy` on four ranks in nodes of `ranks_per_node`, with all warnings; the masters of one rank may be spoilt.
fn in_nodes(
    strategy: StrategyKind,
    ranks_per_node: usize,
    spoilt: Option<usize>,
) -> Vec<(Result<Summary, TrainError>, Vec<String>)> {
    #[derive(Default)]
    struct Warned(Vec<String>);
    impl Observer for Warned {
        fn warning(&mut self, text: &str) {
            self.0.push(text.into());
        }
    }
    let source = CorpusSource::Synthetic { seed: 1, bytes: 20_000 };
    let corpus = Corpus::load(&source, TokenizerKind::Bytes).unwrap();
    let usual = TrainConfig::of(Preset::Micro.config(256), strategy);
    let config =
        TrainConfig { steps: 2, options: StrategyOptions { ranks_per_node, ..usual.options.clone() }, ..usual };
    let options = TransportOptions { timeout: Duration::from_secs(60), ..TransportOptions::default() };
    let build = |setup: &Setup<'_>| {
        let built = strategy::build(strategy, setup)?;
        let is_spoilt = Some(setup.comms.world.rank()) == spoilt;
        Ok(Built { strategy: if is_spoilt { Box::new(Spoilt(built.strategy)) } else { built.strategy }, ..built })
    };
    let train = |session: Session| {
        let mut warned = Warned::default();
        let summary = train_by(&build, &config, &corpus, &session, &Device::flex(), &Keep::default(), &mut warned);
        (summary, warned.0)
    };
    thread::scope(|scope| {
        let ranks = Session::threads(4, &options).unwrap().into_iter().map(|session| scope.spawn(|| train(session)));
        let ranks: Vec<_> = ranks.collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

#[test]
fn replicas_of_parts_that_differ_are_found_out() {
    // Whichever of the two ranks that have the part is wrong, it is the other node's that notices.
    for spoilt in [1, 3] {
        let outcomes = in_nodes(StrategyKind::Hsdp, 2, Some(spoilt));
        let errors: Vec<TrainError> = outcomes.into_iter().map(|(outcome, _)| outcome.unwrap_err()).collect();
        let TrainError::Diverged(what) = &errors[3] else { panic!("{errors:?}") };
        assert!(what.contains("rank 3: its part of segment 1"), "{what}");
    }
    assert!(in_nodes(StrategyKind::Hsdp, 2, None).into_iter().all(|(outcome, _)| outcome.is_ok()));
}

#[test]
fn nodes_are_named_and_missed_where_they_are_too_small() {
    for (asked, found, warnings) in
        [(3, "nodes of 3, 1 ranks", 0), (5, "1 nodes of 4 ranks", 1), (0, "1 nodes of 4 ranks", 0)]
    {
        for (outcome, warned) in in_nodes(StrategyKind::Hierarchical, asked, None) {
            assert!(outcome.unwrap().transport.contains(&(NODES.into(), found.into())), "{asked}");
            assert_eq!(warned.len(), warnings, "{asked}: {warned:?}");
            assert!(
                warned.iter().all(|text| text.contains("--ranks-per-node 5") && text.contains(found)),
                "{warned:?}"
            );
        }
    }
}
