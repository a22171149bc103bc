//! DiLoCo (Douillard et al. 2023, arXiv 2311.08105) and Streaming DiLoCo (Douillard et al. 2025, arXiv 2501.18512): ranks train by themselves, and
//! an outer optimizer takes the mean of what has become of their parameters for a gradient.

use comm_core::Error;

use super::average::{Averager, anchored, averaged, saved_anchors};
use super::formula::{Expected, Run};
use super::own_step::OwnGradients;
use super::settings::{LocalOptions, Setting};
use super::{
    Built, Channels, DuringPass, KeptVector, Layout, LocalStep, SavedKept, Setup, Spec, StepOutcome, Strategy, put_own,
};
use crate::checkpoint::sharded::Kept;
use crate::error::TrainError;
use crate::flat::{Flat, Gradients};

pub(super) const DILOCO: Spec = Spec {
    name: "diloco",
    about: "every rank trains by itself, and an outer optimizer steps by the mean change of parameters every few steps",
    is_one_device: false,
    tells_nodes_apart: false,
    in_buckets: true,
    overlaps: false,
    settings: &[Setting::SyncEvery, Setting::OuterRate, Setting::OuterMomentum],
    build: |setup| {
        let whole = vec![setup.layout().all()];
        Ok(DiLoCo::build(setup, whole, Schedule { period: setup.options.local.sync_every, overlap: 0 }, 0.0))
    },
    expected: whole_model,
};

pub(super) const STREAMING: Spec = Spec {
    name: "streaming-diloco",
    about: "diloco, one fragment of the model after another, while training continues",
    is_one_device: false,
    tells_nodes_apart: false,
    in_buckets: true,
    overlaps: false,
    settings: &[
        Setting::SyncEvery,
        Setting::OuterRate,
        Setting::OuterMomentum,
        Setting::Fragments,
        Setting::OverlapSteps,
        Setting::Mixing,
    ],
    build: |setup| {
        let (layout, local) = (setup.layout(), &setup.options.local);
        if local.fragments > layout.segments() {
            return Err(Error::invalid(format!(
                "--fragments {} is more than the model's {} segments",
                local.fragments,
                layout.segments()
            )));
        }
        let schedule = Schedule { period: local.sync_every / local.fragments as u64, overlap: local.overlap_steps };
        Ok(DiLoCo::build(setup, layout.fragments(local.fragments), schedule, local.mixing))
    },
    expected: |run, layout, rank| {
        let fragments = layout.fragments(run.options.local.fragments);
        let one = |segments: &Vec<usize>| averaged(run, layout, segments, run.options.wire, rank);
        fragments.iter().map(one).sum()
    },
};

fn whole_model(run: &Run<'_>, layout: &Layout, rank: usize) -> Expected {
    averaged(run, layout, &layout.all(), run.options.wire, rank)
}

/// When what travels, of some fragments that take turns.
#[derive(Clone, Copy, Debug)]
struct Schedule {
    /// Steps between two synchronisations, whichever fragments they are of.
    period: u64,
    /// Steps from the start of a fragment's average until it is applied.
    overlap: u64,
}

impl Schedule {
    /// The fragment, of `fragments`, whose average starts after `done` steps.
    fn starts(self, done: u64, fragments: usize) -> Option<usize> {
        self.ends(done + self.overlap, fragments)
    }

    /// That whose average is applied then.
    fn ends(self, done: u64, fragments: usize) -> Option<usize> {
        let turn = (done / self.period).checked_sub(1).filter(|_| done.is_multiple_of(self.period))?;
        Some((turn % fragments as u64) as usize)
    }
}

/// Segments that are synchronised together.
struct Fragment {
    average: Averager,
    expected: Expected,
}

/// SGD with Nesterov's momentum, in PyTorch's order: v ← m·v + g; p ← p − rate·(g + m·v).
struct OuterOptimizer {
    rate: f32,
    momentum: f32,
    /// v of each segment, once there is one; with no momentum none is kept.
    velocities: Vec<Flat>,
}

impl OuterOptimizer {
    fn new(options: &LocalOptions, layout: &Layout) -> Self {
        let (rate, momentum) = (options.outer_rate as f32, options.outer_momentum as f32);
        OuterOptimizer { rate, momentum, velocities: layout.vectors() }
    }

    /// A step on the parameters of a segment.
    fn step(&mut self, segment: usize, params: Flat, gradient: Flat) -> comm_core::Result<Flat> {
        if self.momentum == 0.0 {
            return params.plus_scaled(-self.rate, &gradient);
        }
        let velocity = &mut self.velocities[segment];
        *velocity = match velocity.is_empty() {
            true => gradient.clone(),
            false => gradient.clone().plus_scaled(self.momentum, velocity)?,
        };
        params.plus_scaled(-self.rate, &gradient.plus_scaled(self.momentum, velocity)?)
    }
}

/// What becomes of a mean.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Rule {
    /// It is a gradient for the outer optimizer.
    OuterStep,
    /// It is the change of the parameters.
    Mean,
}

/// After every `period` steps a fragment's parameters become those that the outer optimizer makes of the ones before, by the mean over ranks
/// of how far each has come from there; of DiLoCo there is one fragment, all of the model. That mean may have been under way for some steps, and
/// the rank's own parameters may be mixed in. After the last step of a run all that is under way is applied, and where replicas differ then, their
/// parameters become their mean.
struct DiLoCo {
    schedule: Schedule,
    /// Share of the rank's own parameters in what it goes on with.
    mixing: f32,
    own: OwnGradients,
    outer: OuterOptimizer,
    fragments: Vec<Fragment>,
    /// Each segment as all ranks had it after its last synchronisation; before the first step none.
    anchors: Vec<Flat>,
    /// Elements of each segment.
    lengths: Vec<usize>,
}

impl DiLoCo {
    fn build(setup: &Setup<'_>, fragments: Vec<Vec<usize>>, schedule: Schedule, mixing: f64) -> Built {
        let (layout, options) = (setup.layout(), setup.options);
        let several = fragments.len() > 1;
        let fragment = |(number, segments): (usize, &Vec<usize>)| {
            let of = if several { format!(", fragment {number}") } else { String::new() };
            let expected =
                setup.expected_by(|run, layout, rank| averaged(run, layout, segments, run.options.wire, rank));
            Fragment {
                average: Averager::new(setup, segments, options.wire, &format!("changes of parameters{of}")),
                expected,
            }
        };
        let strategy = DiLoCo {
            schedule,
            mixing: mixing as f32,
            own: OwnGradients::of(&layout),
            outer: OuterOptimizer::new(&options.local, &layout),
            fragments: fragments.iter().enumerate().map(fragment).collect(),
            anchors: Vec::new(),
            lengths: layout.lengths(),
        };
        Built::alone(strategy, setup.channels(), &layout)
    }

    /// Starts the average of a fragment's changes. Returns what this rank sends for it.
    fn start(&mut self, fragment: usize, train: &dyn LocalStep) -> Result<Expected, TrainError> {
        let (anchors, masters) = (&self.anchors, train.masters());
        let Fragment { average, expected } = &mut self.fragments[fragment];
        average.start(|segment| anchors[segment].clone().plus_scaled(-1.0, &masters[segment]))?;
        Ok(*expected)
    }

    /// Waits for a fragment's average, and applies it. Returns whether all ranks have the same parameters in it now.
    fn apply(&mut self, fragment: usize, rule: Rule, train: &mut dyn LocalStep) -> Result<bool, TrainError> {
        let DiLoCo { outer, anchors, mixing, fragments, .. } = self;
        let mixing = if rule == Rule::OuterStep { *mixing } else { 0.0 };
        let masters = train.masters_mut();
        fragments[fragment].average.finish(|segment, mean, channel| {
            let own = std::mem::take(&mut masters[segment]);
            let anchor = std::mem::take(&mut anchors[segment]);
            (anchors[segment], masters[segment]) = channel.applying(|| {
                let all = match rule {
                    Rule::OuterStep => outer.step(segment, anchor, mean)?,
                    Rule::Mean => anchor.plus_scaled(-1.0, &mean)?,
                };
                let mixed = all.clone().mixed(own, mixing)?;
                Ok::<_, Error>((all, mixed))
            })?;
            Ok::<_, TrainError>(())
        })?;
        Ok(mixing == 0.0)
    }

    /// Applies what is under way, and takes the mean of what differs then: `agree` says of which fragments it does not. Returns what this rank
    /// sends for it.
    fn end(&mut self, agree: &mut [bool], train: &mut dyn LocalStep) -> Result<Vec<Expected>, TrainError> {
        let mut sent = Vec::new();
        for (fragment, agrees) in agree.iter_mut().enumerate() {
            if self.fragments[fragment].average.is_under_way() {
                *agrees = self.apply(fragment, Rule::OuterStep, train)?;
            }
            if !*agrees {
                sent.push(self.start(fragment, train)?);
                *agrees = self.apply(fragment, Rule::Mean, train)?;
            }
        }
        Ok(sent)
    }
}

impl DuringPass for DiLoCo {
    fn gradient(&mut self, segment: usize, grads: Gradients, channels: &mut Channels) -> comm_core::Result<()> {
        self.own.gradient(segment, grads, channels)
    }
}

impl Strategy for DiLoCo {
    fn step(
        &mut self,
        step: u64,
        train: &mut dyn LocalStep,
        channels: &mut Channels,
    ) -> Result<StepOutcome, TrainError> {
        if self.anchors.is_empty() {
            self.anchors = self.fragments[0].average.keep(train.masters());
        }
        let checked = self.own.step(train, channels)?;
        let (done, count) = (step + 1, self.fragments.len());
        let mut sent = Vec::new();
        if let Some(fragment) = self.schedule.starts(done, count) {
            sent.push(self.start(fragment, train)?);
        }
        let mut agree = vec![false; count];
        let applied =
            self.schedule.ends(done, count).filter(|fragment| self.fragments[*fragment].average.is_under_way());
        if let Some(fragment) = applied {
            agree[fragment] = self.apply(fragment, Rule::OuterStep, train)?;
        }
        if train.is_last() {
            sent.extend(self.end(&mut agree, train)?);
        }
        put_own(train, channels)?;
        let under_way = self.fragments.iter().any(|fragment| fragment.average.is_under_way());
        let all_agree = agree.iter().all(|agrees| *agrees);
        let have_met = applied.is_some() || train.is_last();
        let expected = Some(sent.into_iter().sum());
        Ok(StepOutcome { under_way, have_met, ..StepOutcome::new(&checked, expected, all_agree) })
    }

    fn settle(&mut self) -> Result<(), TrainError> {
        Ok(self.fragments.iter_mut().try_for_each(|fragment| fragment.average.settle())?)
    }

    fn kept(&self) -> Vec<KeptVector<'_>> {
        let velocities = self.outer.velocities.iter().enumerate().filter(|(_, velocity)| !velocity.is_empty());
        let velocities = velocities.map(|(segment, velocity)| KeptVector::of(Kept::Velocity, segment, velocity));
        let arrived = self.fragments.iter().flat_map(|fragment| fragment.average.kept());
        anchored(&self.anchors).chain(velocities).chain(arrived).collect()
    }

    fn restore(&mut self, saved: &mut SavedKept<'_>) -> Result<(), TrainError> {
        self.anchors = saved_anchors(saved, &self.lengths)?;
        if self.outer.momentum != 0.0 {
            for ((segment, velocity), len) in self.outer.velocities.iter_mut().enumerate().zip(&self.lengths) {
                *velocity = saved.whole(Kept::Velocity, segment, *len)?.unwrap_or_default();
            }
        }
        self.fragments.iter_mut().try_for_each(|fragment| fragment.average.restore(saved))
    }
}
