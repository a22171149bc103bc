//! The seam between a strategy and what a rank computes by itself.

use std::borrow::Cow;
use std::ops::Range;

use comm_core::Error;

use super::formula::Expected;
use super::{Channels, Staleness};
use crate::checkpoint::sharded::Kept;
use crate::error::TrainError;
use crate::flat::{Flat, Gradients, Weights};
use crate::segments::Released;

/// How gradients become updated parameters on all ranks, and when.
pub trait Strategy: DuringPass {
    /// One step of this rank, the `step`th from 0.
    ///
    /// # Errors
    /// What ends the run: the communicator's, the model's, the optimizer's.
    fn step(
        &mut self,
        step: u64,
        train: &mut dyn LocalStep,
        channels: &mut Channels,
    ) -> Result<StepOutcome, TrainError>;

    /// Waits for what is under way after a step, whose result a later step takes. Called before [`kept`](Strategy::kept).
    ///
    /// # Errors
    /// What ends the run: the communicator's.
    fn settle(&mut self) -> Result<(), TrainError> {
        Ok(())
    }

    /// What it keeps from step to step beside masters and moments: what a run needs to go on from here. Of what
    /// [all ranks share](Kept::is_shared) all return the same.
    fn kept(&self) -> Vec<KeptVector<'_>> {
        Vec::new()
    }

    /// Goes on, before the first step, with what it has kept, or another strategy, or this one on other ranks.
    ///
    /// # Errors
    /// What cannot be read.
    fn restore(&mut self, saved: &mut SavedKept<'_>) -> Result<(), TrainError> {
        let _ = saved;
        Ok(())
    }
}

/// What a strategy keeps of some elements of a segment, from one on.
#[derive(Debug)]
pub struct KeptVector<'a> {
    /// What it is.
    pub what: Kept,
    /// The segment's number.
    pub segment: usize,
    /// The first element.
    pub start: usize,
    /// The values.
    pub values: KeptValues<'a>,
}

impl<'a> KeptVector<'a> {
    /// Of a whole segment, where masters are.
    pub fn of(what: Kept, segment: usize, values: &'a Flat) -> Self {
        KeptVector { what, segment, start: 0, values: KeptValues::Flat(values) }
    }
}

/// Values that are kept.
#[derive(Debug)]
pub enum KeptValues<'a> {
    /// Where masters are.
    Flat(&'a Flat),
    /// In host memory.
    Host(&'a [f32]),
}

impl KeptValues<'_> {
    /// Their number.
    pub fn len(&self) -> usize {
        match self {
            KeptValues::Flat(flat) => flat.len(),
            KeptValues::Host(values) => values.len(),
        }
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Some of them, in host memory.
    ///
    /// # Errors
    /// `Io` where the device fails.
    pub fn part(&self, range: Range<usize>) -> comm_core::Result<Cow<'_, [f32]>> {
        match self {
            KeptValues::Flat(flat @ Flat::Device(_)) => Ok(Cow::Owned(flat.slice(range).into_host()?)),
            KeptValues::Flat(flat) => Ok(Cow::Borrowed(&flat.host()?[range])),
            KeptValues::Host(values) => Ok(Cow::Borrowed(&values[range])),
        }
    }
}

/// Reads what a strategy has kept.
pub struct SavedKept<'a> {
    /// What is kept of these elements of a segment, with zeros where nothing is; `None` where nothing is kept of the segment.
    #[allow(clippy::type_complexity, reason = "a name for it would say less")]
    pub read: &'a mut dyn FnMut(usize, Kept, Range<usize>) -> Result<Option<Vec<f32>>, TrainError>,
    /// Whether this is, of what each rank had of its own, the mean of all whose gradients a step averaged, and not what this rank had.
    pub is_mean: bool,
    /// Puts values where masters are.
    pub place: &'a dyn Fn(Vec<f32>) -> Flat,
}

impl SavedKept<'_> {
    /// What is kept of a whole segment of `len` elements, where masters are; `None` where nothing is.
    ///
    /// # Errors
    /// What cannot be read.
    pub fn whole(&mut self, what: Kept, segment: usize, len: usize) -> Result<Option<Flat>, TrainError> {
        Ok((self.read)(segment, what, 0..len)?.map(|values| (self.place)(values)))
    }
}

/// A strategy's part in the passes over the model.
pub trait DuringPass {
    /// Whether weights are in the model only while a segment uses them.
    fn brings_weights(&self) -> bool {
        false
    }

    /// Whether weights come from all ranks after an update, so that a rank keeps its masters apart from them, however many they are.
    fn gathers_weights(&self) -> bool {
        false
    }

    /// A pass over the model begins, with gradients or without.
    fn begin(&mut self, training: bool) {
        let _ = training;
    }

    /// The weights of the next segment of the pass, where it [`brings_weights`](DuringPass::brings_weights): called for each segment that a
    /// pass enters (see [`PassHooks`](crate::segments::PassHooks)), except segment 0 backward. `masters` are this rank's.
    ///
    /// # Errors
    /// The communicator's.
    fn weights(&mut self, segment: usize, masters: &[Flat], channels: &mut Channels) -> comm_core::Result<Weights> {
        let _ = (segment, masters, channels);
        Err(Error::Internal("a strategy that keeps whole models was asked for weights".into()))
    }

    /// Weights that the model is to have got before a forward pass uses `segment`, where an update has left it to the next pass to bring them:
    /// each with its segment, which may be another. `masters` are this rank's.
    ///
    /// # Errors
    /// The communicator's.
    fn arriving(
        &mut self,
        segment: usize,
        masters: &[Flat],
        channels: &mut Channels,
    ) -> comm_core::Result<Vec<(usize, Weights)>> {
        let _ = (segment, masters, channels);
        Ok(Vec::new())
    }

    /// The weights that [`weights`](DuringPass::weights) or [`arriving`](DuringPass::arriving) returned are in the model: the next ones may come.
    ///
    /// # Errors
    /// The communicator's.
    fn prefetch(&mut self, masters: &[Flat], channels: &mut Channels) -> comm_core::Result<()> {
        let _ = (masters, channels);
        Ok(())
    }

    /// Takes what the weights of a segment were in that the pass has left, where it [`brings_weights`](DuringPass::brings_weights).
    fn released(&mut self, weights: Released) {
        drop(weights);
    }

    /// The values behind which the gradients of `segment` are wanted in host memory, with room for them where there is to be no copy; empty
    /// where they are wanted alone. Asked for before they are computed, and not always: what was returned then comes back in front of
    /// them.
    fn room(&mut self, segment: usize) -> Vec<f32> {
        let _ = segment;
        Vec::new()
    }

    /// Takes one segment's gradients, summed over the micro-steps, and weighed so that the mean over ranks is the global batch's: in host
    /// memory, or on the device in the type of computation. Segments come in the order in which the backward pass ends them: last to
    /// first.
    ///
    /// # Errors
    /// The communicator's.
    fn gradient(&mut self, segment: usize, grads: Gradients, channels: &mut Channels) -> comm_core::Result<()>;
}

/// What a rank computes by itself in a step.
pub trait LocalStep {
    /// Forward and backward passes over this rank's part of the step's batch, in which `strategy` takes its part: in the last micro-step
    /// it gets the gradients. Returns this rank's part of the mean loss over the global batch. A rank without data does nothing.
    ///
    /// # Errors
    /// Those of the batches, of the model, and of `strategy`.
    fn backward(&mut self, strategy: &mut dyn DuringPass, channels: &mut Channels) -> Result<f64, TrainError>;

    /// Looks at the gradients of the owned range of each segment, and decides whether and how they are applied: by their norm, with
    /// clipping, and by whether they are finite. With [`Ranks::All`] it is the norm of all ranks' parts and the loss of the whole batch, for
    /// which they communicate, and all decide the same; with [`Ranks::This`] this rank looks at its own gradients and the loss of its own
    /// rows. `loss` is what [`backward`](LocalStep::backward) returned.
    ///
    /// # Errors
    /// [`TrainError::NotFinite`] without loss scaling, [`TrainError::Scaling`] where it ends the run, and those of the communicator and
    /// the device.
    fn check(&mut self, loss: f64, grads: Vec<Flat>, ranks: Ranks) -> Result<CheckedGradients, TrainError>;

    /// Has the optimizers take a step on all masters, with the step's learning rate. Takes the gradients out of `checked`.
    ///
    /// # Errors
    /// Those of the optimizers and, where they need norms of tensors that are spread over ranks, of the communicator.
    fn update(&mut self, checked: &mut CheckedGradients) -> Result<(), TrainError> {
        let all: Vec<usize> = (0..checked.grads.len()).collect();
        self.update_some(checked, &all)
    }

    /// The same on the masters of these segments alone. Where that is [more than](LocalStep::updates_apart) an update of all of them, all ranks do
    /// it alike.
    ///
    /// # Errors
    /// Those of [`update`](LocalStep::update).
    fn update_some(&mut self, checked: &mut CheckedGradients, segments: &[usize]) -> Result<(), TrainError>;

    /// Whether updating segments one after another costs no more than all at once: not where optimizers need norms of tensors, for which ranks
    /// communicate.
    fn updates_apart(&self) -> bool {
        true
    }

    /// The f32 parameters that this rank's optimizer updates: the owned range of each segment. From an update until they are
    /// [lent](LocalStep::lend).
    fn masters(&self) -> &[Flat];

    /// The same, for strategies that average parameters.
    fn masters_mut(&mut self) -> &mut [Flat];

    /// Makes this rank's masters of a segment the model's weights, where the two need not be apart: all of a segment in f32 in host memory, in
    /// a rank that keeps a model. They are there until the next update. Elsewhere false, and nothing is done.
    ///
    /// # Errors
    /// The model's.
    fn lend(&mut self, segment: usize) -> Result<bool, TrainError> {
        let _ = segment;
        Ok(false)
    }

    /// Whether the step is the last of the run.
    fn is_last(&self) -> bool;

    /// Whether this rank was asked to have the run save its state and leave.
    fn is_asked_to_leave(&self) -> bool {
        false
    }

    /// Whether something else than the next step may follow: the end of the run, a validation or a checkpoint. Known once the gradients have
    /// been [checked](LocalStep::check).
    fn rests(&self) -> bool {
        true
    }

    /// Puts weights, in the type of computation, into the model.
    ///
    /// # Errors
    /// The model's.
    fn put(&mut self, segment: usize, weights: Weights) -> Result<(), TrainError>;
}

/// Over which ranks loss and norm are formed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ranks {
    /// All ranks': each has averaged those that it updates.
    All,
    /// This one's alone.
    This,
}

/// A step's gradients, after loss, norm and overflow were checked.
#[derive(Debug)]
pub struct CheckedGradients {
    /// Mean loss, in nats a token, of the rows of these ranks.
    pub loss: f64,
    /// Norm of the gradients before clipping.
    pub grad_norm: f64,
    /// Whether they are not to be applied, because something overflowed.
    pub skip: bool,
    /// The gradients of the owned range of each segment, where the optimizer is.
    pub grads: Vec<Flat>,
    /// What they are to be multiplied by.
    pub factor: f32,
    /// The part of the step's learning rate that the update takes: 1, where there is one update a step.
    pub part_of_rate: f64,
    /// Whose they are.
    pub ranks: Ranks,
}

/// The outcome of a step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StepOutcome {
    /// Mean loss in nats a token, before the update: of the global batch, or of this rank's rows.
    pub loss: f64,
    /// Norm of the gradients before clipping, likewise.
    pub grad_norm: f64,
    /// Whether the update was skipped: by all ranks, or, where each takes steps of its own, by this one.
    pub skipped: bool,
    /// What this rank was to send and to take part in; `None` of a step that was skipped before all of it was sent.
    pub expected: Option<Expected>,
    /// Whether operations were started whose messages count in a later step. What was sent is compared with what was expected in sum, at
    /// the end of each step after which nothing is under way.
    pub under_way: bool,
    /// Whether ranks that have the same parameters have the same values of them now.
    pub replicas_agree: bool,
    /// Whether all ranks have waited for each other in this step, so that it costs little if they do once more.
    pub have_met: bool,
    /// Of the gradients that this rank, as a server, has applied without waiting for all workers'.
    pub staleness: Staleness,
}

impl StepOutcome {
    /// Of a step after which nothing is under way, and in which all ranks have met if they agree.
    pub fn new(checked: &CheckedGradients, expected: Option<Expected>, replicas_agree: bool) -> Self {
        let CheckedGradients { loss, grad_norm, skip, .. } = *checked;
        let (staleness, have_met) = (Staleness::default(), replicas_agree);
        StepOutcome { loss, grad_norm, skipped: skip, expected, under_way: false, replicas_agree, have_met, staleness }
    }

    /// The same of a step in which this rank was to send these gradients, and so many times these parameters: those of an update may be sent
    /// in the next step.
    #[must_use]
    pub(super) fn that_sent(self, gradients: Expected, (parameters, times): (Expected, usize)) -> Self {
        let all = std::iter::once(gradients).chain(std::iter::repeat_n(parameters, times)).sum();
        let expected = (!self.skipped || times > 0).then_some(all);
        StepOutcome { expected, ..self }
    }
}
