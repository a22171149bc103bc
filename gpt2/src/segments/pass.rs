//! The passes over a model: what runs when, and what is told to whom.

use std::sync::Arc;

use burn::module::{Module, ModuleVisitor, Param};
use burn::tensor::{Device, FloatDType, Gradients as TensorGradients, IndexingUpdateOp, Int, Tensor};

use super::error::ModelError;
use super::head::TableGradient;
use super::weights::{detach_weights, read_back, refill};
use super::{SegmentedModel, TokenBatch};
#[cfg(all(feature = "cube", not(feature = "fusion")))]
use crate::cube;
use crate::devices::Placement;
use crate::dropout::Place;
use crate::flat::{Flat, Gradients, with_values};
use crate::fused::{self, PartSums, Resident};
use crate::memory::{self, Category};
use crate::model::{About, Kernels, Layer, dropped};

/// The direction of a pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pass {
    /// From tokens to the loss.
    Forward,
    /// From the loss to gradients.
    Backward,
}

/// Takes part in a pass over a model.
///
/// A pass with gradients enters and leaves segments so: forward 0 (entered only), 1, …, L+1; backward L+1, …, 1, then 0 (left for the
/// first time: its token table is also the head's). One without gradients enters and leaves 1, …, L+1 between entering and
/// leaving 0. Each segment's gradients are handed out right after it has been left backward.
pub trait PassHooks<E: From<ModelError>> {
    /// The pass is about to use the weights of `segment`, which have to be in `model` when this returns.
    ///
    /// # Errors
    /// Whatever is to end the pass.
    fn enter(&mut self, _model: &mut SegmentedModel, _pass: Pass, _segment: usize) -> Result<(), E> {
        Ok(())
    }

    /// The pass will not use the weights of `segment` again, unless it enters it again.
    ///
    /// # Errors
    /// Whatever is to end the pass.
    fn leave(&mut self, _model: &mut SegmentedModel, _pass: Pass, _segment: usize) -> Result<(), E> {
        Ok(())
    }

    /// Where the gradients of `segment` are wanted. Asked for before they are computed, by passes that write them to one vector: it comes back
    /// with them.
    fn destination(&mut self, _segment: usize) -> Destination {
        Destination::default()
    }

    /// Takes one segment's gradients.
    ///
    /// # Errors
    /// Whatever is to end the pass.
    fn gradients(&mut self, grads: SegmentGrads) -> Result<(), E>;
}

/// Where a segment's gradients are wanted, in host memory.
#[derive(Debug)]
pub enum Destination {
    /// Behind these values, of which they become the rest.
    Behind(Vec<f32>),
    /// Added to these, which are as many.
    Onto(Vec<f32>),
}

impl Default for Destination {
    fn default() -> Self {
        Destination::Behind(Vec::new())
    }
}

/// The gradients of one segment, in order of its [`ParamInfo`](super::ParamInfo)s, where the backward pass has left them.
#[derive(Debug)]
pub struct SegmentGrads {
    segment: usize,
    values: Values,
}

#[derive(Debug)]
enum Values {
    /// In the [`Destination`], with what was there.
    Vector(Vec<f32>),
    /// On the device, those of one tensor after another.
    Tensors(Vec<Tensor<1>>),
}

impl SegmentGrads {
    /// Index of the segment.
    pub fn segment(&self) -> usize {
        self.segment
    }

    /// For a strategy: on the device, where they `stay_on_device`, in the type in which they were computed.
    pub fn into_gradients(self, stay_on_device: bool) -> Gradients {
        match self.values {
            Values::Tensors(tensors) => Gradients::of_tensors(tensors, stay_on_device),
            Values::Vector(values) if stay_on_device => Flat::on_device(&values, &Device::flex()).into(),
            Values::Vector(values) => Flat::Host(values).into(),
        }
    }

    /// All gradients as one vector of the host. From device memory they come concatenated, in one transfer; in host memory tensor by
    /// tensor, each let go of before the next is widened; without a copy where they are in a vector.
    ///
    /// # Errors
    /// [`ModelError::Device`] if the device fails.
    pub fn into_flat(self) -> Result<Vec<f32>, ModelError> {
        let segment = self.segment;
        let tensors = match self.values {
            Values::Vector(values) => return Ok(values),
            Values::Tensors(tensors) => tensors,
        };
        let placement = tensors.first().map(|tensor| Placement::of(&tensor.device()));
        if placement != Some(Placement::Host) {
            let whole = Tensor::cat(tensors.into_iter().map(|part| part.cast(FloatDType::F32)).collect(), 0);
            return read_back(segment, READING, whole);
        }
        let mut flat = Vec::with_capacity(tensors.iter().map(|tensor| tensor.dims()[0]).sum());
        for tensor in tensors {
            with_values(tensor, |values| flat.extend_from_slice(values)).map_err(|detail| ModelError::Device {
                segment,
                what: READING,
                detail,
            })?;
        }
        Ok(flat)
    }
}

/// What fails where gradients cannot be read.
const READING: &str = "reading gradients";

/// Hooks of a model whose weights stay.
struct OnReady<'a, E>(&'a mut dyn FnMut(usize, SegmentGrads) -> Result<(), E>);

impl<E: From<ModelError>> PassHooks<E> for OnReady<'_, E> {
    fn gradients(&mut self, grads: SegmentGrads) -> Result<(), E> {
        (self.0)(grads.segment(), grads)
    }
}

/// One segment's own graph, from its input to its output.
struct Graph<M> {
    /// What collects the gradients.
    leaves: M,
    /// The weights, where the graph does not keep them.
    resident: Option<Arc<Resident>>,
    input_btc: Tensor<3>,
    output_btc: Tensor<3>,
}

/// What a segment keeps between its forward and its backward pass.
enum SavedInput<M> {
    Graph(Box<Graph<M>>),
    /// For another forward pass.
    Input(Box<Tensor<3>>),
}

impl SegmentedModel {
    /// Returns the mean cross entropy in nats and hands out the gradients of `scale` times it, for a model whose weights stay.
    ///
    /// `on_ready` gets each segment's gradients as soon as its backward pass is done, in the order L+1, L, …, 1, 0. An error of its ends
    /// the pass at once and is returned.
    ///
    /// # Errors
    /// Those of a bad batch or of the device (see [`ModelError`]), and `on_ready`'s own.
    pub fn forward_backward<E: From<ModelError>>(
        &mut self,
        batch: &TokenBatch,
        scale: f32,
        on_ready: &mut dyn FnMut(usize, SegmentGrads) -> Result<(), E>,
    ) -> Result<f64, E> {
        self.train(batch, scale, &mut OnReady(on_ready))
    }

    /// Returns the mean cross entropy in nats and hands out the gradients of `scale` times it. A batch of no rows has a loss of 0 and
    /// gradients of zeros, and tells its hooks the same as any other.
    ///
    /// # Errors
    /// Those of a bad batch or of the device (see [`ModelError`]), and the hooks' own.
    pub fn train<E: From<ModelError>>(
        &mut self,
        batch: &TokenBatch,
        scale: f32,
        hooks: &mut dyn PassHooks<E>,
    ) -> Result<f64, E> {
        if *batch == TokenBatch::none(batch.cols) {
            return self.idle(hooks);
        }
        let tokens_bt = self.check_batch(batch)?;
        let (b, t, c) = (batch.rows, batch.cols, self.config.n_embd);
        let last = self.config.n_layer + 1;

        // Forward: each entry is one segment's own graph.
        let about = self.about(t);
        let site = self.dropout.map(|dropout| dropout.at(0, Place::Embedding));
        self.enter(hooks, Pass::Forward, 0)?;
        let mut x_btc = dropped(self.embed(0, tokens_bt.clone(), &batch.inputs), site, self.kernels());
        let mut kept = Vec::with_capacity(self.blocks.len());
        for segment in 1..last {
            self.enter(hooks, Pass::Forward, segment)?;
            let (block, about) = (&self.blocks[segment - 1], about.in_segment(self.dropout, segment));
            if self.compute.recompute {
                let output_btc = block.forward(x_btc.clone(), &about, self.kernels());
                kept.push(SavedInput::Input(Box::new(std::mem::replace(&mut x_btc, output_btc))));
            } else {
                let graph = self.graph(block.clone(), x_btc, &about);
                x_btc = graph.output_btc.clone().inner();
                kept.push(SavedInput::Graph(Box::new(graph)));
            }
            hooks.leave(self, Pass::Forward, segment)?;
            if let (false, Some(SavedInput::Graph(graph))) = (self.present[segment], kept.last()) {
                graph.forget();
            }
        }
        self.enter(hooks, Pass::Forward, last)?;
        let norm = self.graph(self.norm.clone(), x_btc, &about);
        hooks.leave(self, Pass::Forward, last)?;
        if !self.present[last] {
            norm.forget();
        }

        // The head, forward and backward in one go. Its table belongs to segment 0, which has not been left.
        self.require(0)?;
        let hidden_nc: Tensor<2> = norm.output_btc.clone().inner().reshape([b * t, c]);
        let head = self.head_gradients(hidden_nc, &batch.targets, scale, || hooks.destination(0));

        // Backward, from the last segment to the first.
        let mut upstream_btc: Tensor<3> = head.dhidden_nc.reshape([b, t, c]);
        self.enter(hooks, Pass::Backward, last)?;
        norm.remember(&self.norm);
        let (grads, below_btc) = norm.backward(last, upstream_btc, |segment| hooks.destination(segment))?;
        upstream_btc = below_btc;
        hooks.leave(self, Pass::Backward, last)?;
        hooks.gradients(grads)?;
        while let Some(entry) = kept.pop() {
            let segment = kept.len() + 1;
            self.enter(hooks, Pass::Backward, segment)?;
            let block = &self.blocks[segment - 1];
            let graph = match entry {
                SavedInput::Graph(graph) => {
                    graph.remember(block);
                    graph
                }
                SavedInput::Input(input_btc) => {
                    let about = about.in_segment(self.dropout, segment);
                    Box::new(self.graph(block.clone(), *input_btc, &about))
                }
            };
            let (grads, below_btc) = graph.backward(segment, upstream_btc, |segment| hooks.destination(segment))?;
            upstream_btc = below_btc;
            hooks.leave(self, Pass::Backward, segment)?;
            hooks.gradients(grads)?;
        }
        self.enter(hooks, Pass::Backward, 0)?;
        let upstream_btc = dropped(upstream_btc, site, self.kernels());
        let grads = self.embedding_grads((tokens_bt, batch), upstream_btc, head.table)?;
        hooks.leave(self, Pass::Backward, 0)?;
        hooks.gradients(grads)?;
        // Not before: it would have kept the host from asking for the backward pass.
        Ok(head.loss.read()?)
    }

    /// Mean cross entropy of the batch in nats, without gradients; of no rows, 0.
    ///
    /// # Errors
    /// Those of a bad batch or of the device (see [`ModelError`]), and the hooks' own.
    pub fn evaluate<E: From<ModelError>>(
        &mut self,
        batch: &TokenBatch,
        hooks: &mut dyn PassHooks<E>,
    ) -> Result<f64, E> {
        let last = self.config.n_layer + 1;
        let tokens_bt = if *batch == TokenBatch::none(batch.cols) { None } else { Some(self.check_batch(batch)?) };
        let about = self.about(batch.cols);
        self.enter(hooks, Pass::Forward, 0)?;
        let mut x_btc = tokens_bt.map(|tokens_bt| self.embed(0, tokens_bt, &batch.inputs));
        for segment in 1..=last {
            self.enter(hooks, Pass::Forward, segment)?;
            x_btc = x_btc.map(|x_btc| match self.blocks.get(segment - 1) {
                Some(block) => block.forward(x_btc, &about, self.kernels()),
                None => self.norm.forward(x_btc, &about, self.kernels()),
            });
            hooks.leave(self, Pass::Forward, segment)?;
        }
        let (n, c) = (batch.rows * batch.cols, self.config.n_embd);
        let loss = x_btc.map_or(Ok(0.0), |x_btc| self.head_loss(x_btc.reshape([n, c]), &batch.targets))?;
        hooks.leave(self, Pass::Forward, 0)?;
        Ok(loss)
    }

    /// A training pass without any data.
    fn idle<E: From<ModelError>>(&mut self, hooks: &mut dyn PassHooks<E>) -> Result<f64, E> {
        let last = self.config.n_layer + 1;
        self.enter(hooks, Pass::Forward, 0)?;
        for segment in 1..=last {
            self.enter(hooks, Pass::Forward, segment)?;
            hooks.leave(self, Pass::Forward, segment)?;
        }
        for segment in (0..=last).rev() {
            self.enter(hooks, Pass::Backward, segment)?;
            hooks.leave(self, Pass::Backward, segment)?;
            let zeros = Tensor::zeros([self.infos[segment].len], &self.device);
            hooks.gradients(SegmentGrads { segment, values: Values::Tensors(vec![zeros]) })?;
        }
        Ok(0.0)
    }

    fn enter<E: From<ModelError>>(
        &mut self,
        hooks: &mut dyn PassHooks<E>,
        pass: Pass,
        segment: usize,
    ) -> Result<(), E> {
        hooks.enter(self, pass, segment)?;
        Ok(self.require(segment)?)
    }

    /// One layer by itself, forward and backward, as a training pass runs it.
    pub(super) fn layer_pass<M: Layer>(
        &self,
        layer: M,
        x_btc: Tensor<3>,
        about: &About,
        upstream_btc: Tensor<3>,
    ) -> Result<(SegmentGrads, Tensor<3>), ModelError> {
        self.graph(layer, x_btc, about).backward(0, upstream_btc, |_| Destination::default())
    }

    /// The forward pass of one layer, ready for its backward pass.
    fn graph<M: Layer>(&self, layer: M, x_btc: Tensor<3>, about: &About) -> Graph<M> {
        let input_btc = x_btc.autodiff().require_grad();
        let (leaves, resident) = match self.kernels() {
            Kernels::Fused(_) => {
                let (leaves_only, resident) = detach_weights(layer, &self.device);
                (leaves_only, Some(resident))
            }
            _ => (layer.train(), None),
        };
        let kernels = match &resident {
            Some(resident) => Kernels::Fused(Some(resident)),
            None => self.kernels(),
        };
        let output_btc = leaves.forward(input_btc.clone(), about, kernels);
        Graph { leaves, resident, input_btc, output_btc }
    }

    /// The lookup's gradient is a sum of rows, added onto the head's part of the same table; in f32.
    fn embedding_grads(
        &self,
        (tokens_bt, batch): (Tensor<2, Int>, &TokenBatch),
        dx_btc: Tensor<3>,
        table: TableGradient,
    ) -> Result<SegmentGrads, ModelError> {
        let [b, t, c] = dx_btc.dims();
        let dx_btc = dx_btc.cast(FloatDType::F32);
        let dwte_vc = match table {
            TableGradient::Sums(mut sums) => {
                fused::add_embedding_gradient(&mut sums, &batch.inputs, dx_btc);
                let values = Values::Vector(sums.finish().ok_or_else(|| missing(0))?);
                return Ok(SegmentGrads { segment: 0, values });
            }
            TableGradient::Tensor(dwte_vc) => dwte_vc.cast(FloatDType::F32),
        };
        let unused = self.config.block_size - t;
        let table_vc = dwte_vc.select_assign(
            0,
            tokens_bt.reshape([b * t]),
            dx_btc.clone().reshape([b * t, c]),
            IndexingUpdateOp::Add,
        );
        // Without what is behind the vocabulary.
        let table = table_vc.reshape([-1]).narrow(0, 0, self.config.vocab_size * c);
        let mut parts = vec![table, dx_btc.sum_dim(0).reshape([-1])];
        if unused > 0 {
            parts.push(Tensor::zeros([unused * c], &self.device));
        }
        Ok(SegmentGrads { segment: 0, values: Values::Tensors(parts) })
    }
}

/// The sums of gradients of tensors of these lengths, at their destination.
pub(super) fn part_sums(destination: Destination, lengths: impl Iterator<Item = usize>) -> PartSums {
    memory::within(Category::Gradients, || match destination {
        Destination::Behind(values) => PartSums::behind(values, lengths),
        Destination::Onto(values) => PartSums::of(values, lengths),
    })
}

impl<M: Layer> Graph<M> {
    /// Lets go of the weights until the backward pass. On devices the graph keeps them.
    fn forget(&self) {
        if let Some(resident) = &self.resident {
            resident.clear();
        }
    }

    /// Takes the weights of `layer` for the backward pass.
    fn remember(&self, layer: &M) {
        if let Some(resident) = &self.resident {
            refill(&self.leaves, layer, resident);
        }
    }

    /// The gradients of the segment's weights, and that of its input.
    fn backward(
        self,
        segment: usize,
        upstream_btc: Tensor<3>,
        destination: impl FnOnce(usize) -> Destination,
    ) -> Result<(SegmentGrads, Tensor<3>), ModelError> {
        if let Some(resident) = &self.resident {
            resident.collect_in(part_sums(destination(segment), resident.lengths()));
        }
        let mut grads = match Kernels::of_device(&upstream_btc.device()) {
            #[cfg(all(feature = "cube", not(feature = "fusion")))]
            Kernels::Generated => cube::backward(self.output_btc, upstream_btc),
            // A backward pass starts from ones; the product with the gradient from above makes it start from that.
            _ => (self.output_btc * upstream_btc).sum().backward(),
        };
        let below_btc = self.input_btc.grad_remove(&mut grads).ok_or_else(|| missing(segment))?;
        let grads = match &self.resident {
            Some(resident) => {
                let values = Values::Vector(resident.collected().ok_or_else(|| missing(segment))?);
                SegmentGrads { segment, values }
            }
            None => collect(segment, &self.leaves, &mut grads)?,
        };
        Ok((grads, below_btc))
    }
}

pub(super) fn collect<M: Module>(
    segment: usize,
    module: &M,
    grads: &mut TensorGradients,
) -> Result<SegmentGrads, ModelError> {
    let mut collector = CollectGrads { grads, parts: Vec::new(), complete: true };
    module.visit(&mut collector);
    match collector {
        CollectGrads { complete: true, parts, .. } => Ok(SegmentGrads { segment, values: Values::Tensors(parts) }),
        _ => Err(missing(segment)),
    }
}

fn missing(segment: usize) -> ModelError {
    ModelError::Device { segment, what: "backward", detail: "a tensor got no gradient".into() }
}

struct CollectGrads<'a> {
    grads: &'a mut TensorGradients,
    parts: Vec<Tensor<1>>,
    complete: bool,
}

impl ModuleVisitor for CollectGrads<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        match param.val().grad_remove(self.grads) {
            Some(grad) => self.parts.push(grad.reshape([-1])),
            None => self.complete = false,
        }
    }
}
