//! That a strategy of any order fits the seam.

use std::thread;
use std::time::Duration;

use burn::tensor::Device;

use super::*;
use crate::config::Preset;
use crate::corpus::CorpusSource;
use crate::flat::{Flat, Gradients};
use crate::strategy::{
    Built, Channels, CheckedGradients, DuringPass, LocalStep, Ranks, Setup, StepOutcome, Strategy, put_own,
};
use crate::tokenizer::TokenizerKind;

/// Local training: every rank takes steps of its own, and after every `period` of them the ranks' parameters are averaged.
struct EveryFew {
    period: u64,
    /// Says after every step that it has averaged.
    lies: bool,
    grads: Vec<Flat>,
    expected: Expected,
}

impl EveryFew {
    fn build((period, lies): (u64, bool), setup: &Setup<'_>) -> comm_core::Result<Built> {
        // It sends as often and as much as `ddp` with a bucket a segment.
        let options = StrategyOptions { first_bucket_bytes: 0, bucket_bytes: 0, ..setup.options.clone() };
        let setup = Setup { options: &options, ..*setup };
        let Built { channels, owned, .. } = strategy::build(StrategyKind::Ddp, &setup)?;
        let grads = vec![Flat::default(); setup.segments.len()];
        let expected = setup.expected(StrategyKind::Ddp);
        Ok(Built::new(EveryFew { period, lies, grads, expected }, channels, owned))
    }

    /// Averages the parameters of all ranks, segment by segment.
    fn average(&self, train: &mut dyn LocalStep, channels: &Channels) -> Result<(), TrainError> {
        for segment in (0..self.grads.len()).rev() {
            let own = std::mem::take(&mut train.masters_mut()[segment]);
            train.masters_mut()[segment] = channels.average_masters(own, "parameters")?;
        }
        Ok(())
    }
}

impl DuringPass for EveryFew {
    fn gradient(&mut self, segment: usize, grads: Gradients, _channels: &mut Channels) -> comm_core::Result<()> {
        self.grads[segment] = grads.into_flat()?;
        Ok(())
    }
}

impl Strategy for EveryFew {
    fn step(
        &mut self,
        step: u64,
        train: &mut dyn LocalStep,
        channels: &mut Channels,
    ) -> Result<StepOutcome, TrainError> {
        let loss = train.backward(self, channels)?;
        let grads = self.grads.iter_mut().map(std::mem::take).collect();
        let mut checked: CheckedGradients = train.check(loss, grads, Ranks::This)?;
        train.update(&mut checked)?;
        let averages = (step + 1).is_multiple_of(self.period);
        if averages {
            self.average(train, channels)?;
        }
        put_own(train, channels)?;
        let says = averages || self.lies;
        let expected = if says { self.expected } else { Expected::default() };
        Ok(StepOutcome::new(&checked, expected, says))
    }
}

/// The reports of all steps, and what came of them, of each rank.
fn run(every: (u64, bool), steps: u64, ranks: usize) -> Vec<(Vec<StepReport>, Result<Summary, TrainError>)> {
    #[derive(Default)]
    struct Kept(Vec<StepReport>);
    impl Observer for Kept {
        fn step(&mut self, report: &StepReport) {
            self.0.push(report.clone());
        }
    }
    let source = CorpusSource::Synthetic { seed: 1, bytes: 20_000 };
    let corpus = Corpus::load(&source, TokenizerKind::Bytes).unwrap();
    let config = TrainConfig { steps, ..TrainConfig::of(Preset::Micro.config(256), StrategyKind::Ddp) };
    let options = TransportOptions { timeout: Duration::from_secs(60), ..TransportOptions::default() };
    let train = |session: Session| {
        let mut kept = Kept::default();
        let build = |setup: &Setup<'_>| EveryFew::build(every, setup);
        let summary = train_by(&build, &config, &corpus, &session, &Device::flex(), &Keep::default(), &mut kept);
        (kept.0, summary)
    };
    thread::scope(|scope| {
        let ranks =
            Session::threads(ranks, &options).unwrap().into_iter().map(|session| scope.spawn(|| train(session)));
        let ranks: Vec<_> = ranks.collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

/// As [`run`] of a strategy that says the truth.
fn honest(period: u64, steps: u64) -> Vec<(Vec<StepReport>, Summary)> {
    run((period, false), steps, 2).into_iter().map(|(reports, summary)| (reports, summary.unwrap())).collect()
}

#[test]
fn a_strategy_that_synchronises_every_second_step_fits() {
    let ranks = honest(2, 4);
    for (rank, (reports, summary)) in ranks.iter().enumerate() {
        let sent: Vec<bool> = reports.iter().map(|report| report.bytes_sent.unwrap() > 0).collect();
        assert_eq!(sent, [false, true, false, true]);
        assert_eq!(summary.weights_hash, ranks[0].1.weights_hash);
        let RankReport { bytes_steady, bytes_counted, bytes_expected, .. } = summary.ranks[rank];
        assert!(bytes_steady, "each step sent what it was to send");
        assert_eq!(bytes_counted, Some(bytes_expected));
    }
    // Each looks at its own.
    assert_ne!(ranks[0].1.losses, ranks[1].1.losses);
}

#[test]
fn replicas_may_differ_where_the_strategy_says_so() {
    let ranks = honest(2, 5);
    let [one, other] = [0, 1].map(|rank| &ranks[0].1.ranks[rank]);
    assert_ne!(one.weights_hash, other.weights_hash);
    assert_eq!((one.bytes_steady, one.bytes_counted, one.bytes_expected), (true, Some(0), 0));
}

#[test]
fn a_strategy_that_lies_is_found_out() {
    for (_, outcome) in run((2, true), 3, 2) {
        let error = outcome.unwrap_err().to_string();
        assert!(error.contains("different weights"), "{error}");
    }
    // The weights are equal in the end, but the first of two steps has sent nothing.
    let (_, summary) = run((2, true), 2, 2).remove(0);
    assert!(!summary.unwrap().ranks[0].bytes_steady);
}
