//! Local SGD (Stich 2019): ranks train by themselves, and their parameters are averaged now and then.

use super::average::{Averager, anchored, averaged, saved_anchors};
use super::formula::Expected;
use super::own_step::OwnGradients;
use super::settings::Setting;
use super::{
    Built, Channels, DuringPass, KeptVector, LocalStep, SavedKept, Setup, Spec, StepOutcome, Strategy, StrategyKind,
    put_own,
};
use crate::error::TrainError;
use crate::flat::{Flat, Gradients};
use crate::precision::Precision;

pub(super) const SPEC: Spec = Spec {
    name: "local-sgd",
    about: "every rank trains by itself, and parameters are averaged every few steps",
    is_one_device: false,
    tells_nodes_apart: false,
    in_buckets: true,
    overlaps: false,
    settings: &[Setting::SyncEvery],
    build: |setup| Ok(LocalSgd::build(setup)),
    expected: |run, layout, rank| averaged(run, layout, &layout.all(), run.options.wire, rank),
};

/// After every `period` steps, and after the last, each rank's parameters become the mean of all ranks'. In f32 they travel themselves. In 16
/// bits their changes since the last mean do, which lose less by rounding, and are subtracted from that on every rank.
struct LocalSgd {
    period: u64,
    own: OwnGradients,
    average: Averager,
    /// Each segment of the last mean, where changes travel; before the first step none.
    anchors: Option<Vec<Flat>>,
    expected: Expected,
    /// Elements of each segment.
    lengths: Vec<usize>,
}

impl LocalSgd {
    fn build(setup: &Setup<'_>) -> Built {
        let (layout, options) = (setup.layout(), setup.options);
        let travels = if options.wire == Precision::F32 { "parameters" } else { "changes of parameters" };
        let strategy = LocalSgd {
            period: options.local.sync_every,
            own: OwnGradients::of(&layout),
            average: Averager::new(setup, &layout.all(), options.wire, travels),
            anchors: (options.wire != Precision::F32).then(Vec::new),
            expected: setup.expected(StrategyKind::LocalSgd),
            lengths: layout.lengths(),
        };
        Built::alone(strategy, setup.channels(), &layout)
    }

    /// Replaces this rank's parameters by the mean of all ranks'.
    fn synchronise(&mut self, train: &mut dyn LocalStep) -> Result<(), TrainError> {
        let LocalSgd { average, anchors, .. } = self;
        let masters = train.masters_mut();
        average.start(|segment| match anchors {
            None => Ok(std::mem::take(&mut masters[segment])),
            Some(anchors) => anchors[segment].clone().plus_scaled(-1.0, &masters[segment]),
        })?;
        average.finish(|segment, mean, channel| {
            masters[segment] = match anchors {
                None => mean,
                Some(anchors) => channel.applying(|| {
                    let anchor = std::mem::take(&mut anchors[segment]);
                    anchors[segment] = anchor.plus_scaled(-1.0, &mean)?;
                    Ok::<_, TrainError>(anchors[segment].clone())
                })?,
            };
            Ok(())
        })
    }
}

impl DuringPass for LocalSgd {
    fn gradient(&mut self, segment: usize, grads: Gradients, channels: &mut Channels) -> comm_core::Result<()> {
        self.own.gradient(segment, grads, channels)
    }
}

impl Strategy for LocalSgd {
    fn step(
        &mut self,
        step: u64,
        train: &mut dyn LocalStep,
        channels: &mut Channels,
    ) -> Result<StepOutcome, TrainError> {
        if let Some(anchors) = self.anchors.as_mut().filter(|anchors| anchors.is_empty()) {
            *anchors = self.average.keep(train.masters());
        }
        let checked = self.own.step(train, channels)?;
        let synchronises = (step + 1).is_multiple_of(self.period) || train.is_last();
        if synchronises {
            self.synchronise(train)?;
        }
        put_own(train, channels)?;
        let expected = if synchronises { self.expected } else { Expected::default() };
        Ok(StepOutcome::new(&checked, Some(expected), synchronises))
    }

    fn kept(&self) -> Vec<KeptVector<'_>> {
        anchored(self.anchors.as_deref().unwrap_or_default()).collect()
    }

    fn restore(&mut self, saved: &mut SavedKept<'_>) -> Result<(), TrainError> {
        if let Some(anchors) = &mut self.anchors {
            *anchors = saved_anchors(saved, &self.lengths)?;
        }
        Ok(())
    }
}
