//! The model as a chain of segments whose gradients are handed out while the backward pass still runs.
//!
//! Segment 0 is the embedding, 1..=L are the blocks, L+1 is the final norm; the head uses the token embedding and has no
//! tensors of its own. Automatic differentiation hands out gradients only when a whole backward pass is over, so each segment has a
//! small graph of its own: forward keeps every segment's input cut off from what came before, backward walks the segments in reverse
//! and feeds each graph the gradient from above. This folder is the only place that knows it.
//!
//! The head's backward (softmax minus one-hot) is written by hand, outside the graphs, because each pass over the logits costs as much
//! as a block of a small model; on the processor it never has them all. The tied token embedding receives its head's part early and its lookup's part last, and is handed out
//! once, last, with both summed.
//!
//! Weights may be in memory only while a segment uses them: a pass tells its [`PassHooks`] before and after. On the CPU the graphs do not
//! keep them either.

pub(crate) mod cross_entropy;
mod error;
mod generation;
mod head;
mod layers;
mod layout;
mod pass;
mod weights;

use burn::backend::flex::FlexTensor;
use burn::module::Module;
use burn::tensor::{Device, FloatDType, Int, Tensor, TensorData};
use comm_core::Buffer;

pub use error::ModelError;
pub use generation::Generation;
pub use layers::{BlockLayer, LayerRun};
pub use layout::{ParamInfo, SegmentInfo, layout};
pub use pass::{Destination, Pass, PassHooks, SegmentGrads};
pub use weights::Released;

use crate::config::ModelConfig;
use crate::devices::{self, Placement};
use crate::dropout::{Dropout, Place};
use crate::flat::Weights;
use crate::fused;
use crate::model::{About, Block, Embedding, FinalNorm, KernelChoice, Kernels, Layer, causal_mask, dropped};
use crate::precision::Precision;
use weights::{Flatten, Release, Upload, read_back};

/// A batch of token ids and the ids that follow them, row-major `[rows, cols]`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TokenBatch {
    /// What the model sees.
    pub inputs: Vec<i32>,
    /// What it should predict at each position.
    pub targets: Vec<i32>,
    /// Number of sequences.
    pub rows: usize,
    /// Tokens a sequence.
    pub cols: usize,
}

impl TokenBatch {
    /// A batch of no sequences, each of `cols` tokens.
    pub fn none(cols: usize) -> Self {
        TokenBatch { cols, ..Self::default() }
    }

    /// The same tokens as `pieces` times as many sequences, each a part of one; `pieces` divides `cols`.
    #[must_use]
    pub(crate) fn cut(self, pieces: usize) -> Self {
        TokenBatch { rows: self.rows * pieces, cols: self.cols / pieces, ..self }
    }
}

/// How a model computes, apart from its shape.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Compute {
    /// Type of weights, activations and products of matrices. Layer norm, softmax, loss and all long sums are in f32.
    pub precision: Precision,
    /// Whether a block's activations are computed again in the backward pass instead of being kept from the forward pass. Costs a
    /// third more products, changes no bit.
    pub recompute: bool,
    /// By which kernels. Changes last bits alone.
    pub kernels: KernelChoice,
}

/// GPT-2 with its weights on one device.
#[derive(Debug)]
pub struct SegmentedModel {
    config: ModelConfig,
    compute: Compute,
    device: Device,
    infos: Vec<SegmentInfo>,
    /// Whether each segment's weights are in memory.
    present: Vec<bool>,
    /// Each segment's weights where they are f32 in host memory: the tensors are views of them.
    flats: Vec<Option<FlexTensor>>,
    /// The token table with as many of the rows behind it, which are those of positions, as make its rows a multiple of [`ROWS`]: products with
    /// it run by wider loads. On devices with kernels of our own, which know where the vocabulary ends.
    long_table_vc: Option<Tensor<2>>,
    embedding: Embedding,
    blocks: Vec<Block>,
    norm: FinalNorm,
    /// What the next training passes drop.
    dropout: Option<Dropout>,
}

/// What a GPU's products like the sizes of matrices to be multiples of.
const ROWS: usize = 64;

impl SegmentedModel {
    /// The model with GPT-2's initial weights for `seed` (see [`init`](crate::init)), in f32.
    ///
    /// # Errors
    /// [`ModelError::Config`] if `config` is unusable.
    pub fn new(config: ModelConfig, seed: u64, device: &Device) -> Result<Self, ModelError> {
        let mut model = Self::absent(config, Compute::default(), device)?;
        for segment in 0..model.infos.len() {
            let flat = model.infos[segment].initial(&model.config, seed);
            model.write_params(segment, &flat)?;
        }
        Ok(model)
    }

    /// The model with all weights zero, in f32, for weights that come from elsewhere.
    ///
    /// # Errors
    /// [`ModelError::Config`] if `config` is unusable.
    pub fn zeros(config: ModelConfig, device: &Device) -> Result<Self, ModelError> {
        let mut model = Self::absent(config, Compute::default(), device)?;
        for segment in 0..model.infos.len() {
            model.write_params(segment, &vec![0.0; model.infos[segment].len])?;
        }
        Ok(model)
    }

    /// The model without weights: each segment's come with [`write_params`](Self::write_params) or [`put_params`](Self::put_params).
    ///
    /// # Errors
    /// [`ModelError::Config`] if `config` is unusable.
    pub fn absent(config: ModelConfig, compute: Compute, device: &Device) -> Result<Self, ModelError> {
        let infos = layout(&config)?;
        // Weights rest outside automatic differentiation; each pass makes leaves for them.
        let device = device.clone().without_autodiff();
        let mut release = Release(&device);
        Ok(Self {
            embedding: Embedding::zeros(&config, &device).map(&mut release),
            blocks: (0..config.n_layer).map(|_| Block::zeros(&config, &device).map(&mut release)).collect(),
            norm: FinalNorm::zeros(&config, &device).map(&mut release),
            present: vec![false; infos.len()],
            flats: vec![None; infos.len()],
            long_table_vc: None,
            config,
            compute,
            device,
            infos,
            dropout: None,
        })
    }

    /// The model's shape.
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// How it computes.
    pub fn compute(&self) -> Compute {
        self.compute
    }

    /// The device its weights lie on.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// The segments in forward order.
    pub fn segments(&self) -> &[SegmentInfo] {
        &self.infos
    }

    /// What the next passes with gradients drop, if anything. Others never do.
    pub fn set_dropout(&mut self, dropout: Option<Dropout>) {
        self.dropout = dropout;
    }

    /// Waits until the device has done what it was asked to.
    ///
    /// # Errors
    /// [`ModelError::Waiting`] if it fails.
    pub fn wait(&self) -> Result<(), ModelError> {
        self.device.sync().map_err(|error| ModelError::Waiting { detail: devices::reason(error) })
    }

    /// A segment's weights as one vector of f32, read back once.
    ///
    /// # Errors
    /// [`ModelError::NoSuchSegment`], [`ModelError::Absent`], [`ModelError::Device`].
    pub fn read_params(&self, segment: usize) -> Result<Vec<f32>, ModelError> {
        self.info(segment)?;
        self.require(segment)?;
        let mut collector = Flatten::default();
        match segment.checked_sub(1).map(|block| self.blocks.get(block)) {
            None => self.embedding.visit(&mut collector),
            Some(Some(block)) => block.visit(&mut collector),
            Some(None) => self.norm.visit(&mut collector),
        }
        read_back(segment, "reading weights", Tensor::cat(collector.parts, 0))
    }

    /// Replaces a segment's weights by these values, rounded to the model's precision.
    ///
    /// # Errors
    /// [`ModelError::NoSuchSegment`], [`ModelError::SegmentLength`].
    pub fn write_params(&mut self, segment: usize, flat: &[f32]) -> Result<(), ModelError> {
        self.put_params(segment, self.compute.precision.pack_into(flat, 0, flat.len()))
    }

    /// A segment's weights, where they are f32 in host memory.
    pub fn params(&self, segment: usize) -> Option<&[f32]> {
        self.flats.get(segment)?.as_ref()?.as_slice::<f32>()
    }

    /// Takes a segment's weights out of the model, without a copy, where they are f32 in host memory; `None` elsewhere.
    /// [`put_params`](Self::put_params) puts them back.
    ///
    /// # Errors
    /// [`ModelError::NoSuchSegment`], [`ModelError::Device`].
    pub fn take_params(&mut self, segment: usize) -> Result<Option<Vec<f32>>, ModelError> {
        self.info(segment)?;
        let Some(flat) = self.flats[segment].take() else { return Ok(None) };
        // Without the tensors nobody else has the vector.
        self.release_params(segment)?;
        let values = flat.into_data().try_into_vec::<f32>().map_err(|error| ModelError::Device {
            segment,
            what: "taking weights",
            detail: error.to_string(),
        })?;
        Ok(Some(values))
    }

    /// Replaces a segment's weights by a buffer of the model's precision, in the memory of which the tensors stay as far as possible: f32 in
    /// host memory is not copied.
    ///
    /// # Errors
    /// [`ModelError::NoSuchSegment`], [`ModelError::SegmentLength`], [`ModelError::SegmentType`].
    pub fn put_params(&mut self, segment: usize, flat: Buffer) -> Result<(), ModelError> {
        let info = self.info(segment)?;
        let name = || info.name.clone();
        if flat.count() != info.len {
            return Err(ModelError::SegmentLength { name: name(), expected: info.len, len: flat.count() });
        }
        let wrong_type = |error: comm_core::Error| ModelError::SegmentType { name: name(), detail: error.to_string() };
        let views = self.placement() == Placement::Host && self.compute.precision == Precision::F32;
        let (upload, flat) = if views {
            let values = flat.into_vec::<f32>().map_err(wrong_type)?;
            let flat = FlexTensor::from_data(TensorData::new(values, [info.len]));
            (Upload::views(flat.clone(), info, &self.device), Some(flat))
        } else {
            (Upload::new(flat, self.compute.precision, info, &self.device).map_err(wrong_type)?, None)
        };
        if segment == 0 {
            self.long_table_vc = self.long_table_vc(&upload);
        }
        replace(&mut self.embedding, &mut self.blocks, &mut self.norm, segment, upload);
        self.present[segment] = true;
        self.flats[segment] = flat;
        Ok(())
    }

    /// Lets go of a segment's weights, and returns what they were in, where that is f32 in host memory.
    ///
    /// # Errors
    /// [`ModelError::NoSuchSegment`].
    pub fn take_released(&mut self, segment: usize) -> Result<Option<Released>, ModelError> {
        self.info(segment)?;
        let flat = self.flats[segment].take();
        self.release_params(segment)?;
        Ok(flat.map(Released::new))
    }

    /// Replaces a segment's weights by the values of one flat tensor on the model's device, rounded to the model's precision. The tensors
    /// are views of it as far as possible.
    ///
    /// # Errors
    /// [`ModelError::NoSuchSegment`], [`ModelError::SegmentLength`], [`ModelError::SegmentType`].
    pub fn put_tensor(&mut self, segment: usize, flat: Tensor<1>) -> Result<(), ModelError> {
        let info = self.info(segment)?;
        let [len] = flat.dims();
        if len != info.len {
            return Err(ModelError::SegmentLength { name: info.name.clone(), expected: info.len, len });
        }
        if flat.device() != self.device {
            let detail = format!("a tensor on {:?} for weights on {:?}", flat.device(), self.device);
            return Err(ModelError::SegmentType { name: info.name.clone(), detail });
        }
        let upload = Upload::cut(flat, self.compute.precision, info, &self.device);
        if segment == 0 {
            self.long_table_vc = self.long_table_vc(&upload);
        }
        replace(&mut self.embedding, &mut self.blocks, &mut self.norm, segment, upload);
        self.present[segment] = true;
        self.flats[segment] = None;
        Ok(())
    }

    /// Replaces a segment's weights.
    ///
    /// # Errors
    /// Those of [`put_params`](Self::put_params) or [`put_tensor`](Self::put_tensor).
    pub fn put_weights(&mut self, segment: usize, weights: Weights) -> Result<(), ModelError> {
        match weights {
            Weights::Host(flat) => self.put_params(segment, flat),
            Weights::Device(flat) => self.put_tensor(segment, *flat),
        }
    }

    /// Lets go of a segment's weights.
    ///
    /// # Errors
    /// [`ModelError::NoSuchSegment`].
    pub fn release_params(&mut self, segment: usize) -> Result<(), ModelError> {
        self.info(segment)?;
        let mut release = Release(&self.device);
        match segment.checked_sub(1) {
            None => {
                self.embedding = self.embedding.clone().map(&mut release);
                self.long_table_vc = None;
            }
            Some(block) => match self.blocks.get_mut(block) {
                Some(block) => *block = block.clone().map(&mut release),
                None => self.norm = self.norm.clone().map(&mut release),
            },
        }
        self.present[segment] = false;
        self.flats[segment] = None;
        Ok(())
    }

    /// Mean cross entropy of the batch in nats, without gradients.
    ///
    /// # Errors
    /// Those of a bad batch (see [`ModelError`]), [`ModelError::Absent`].
    pub fn loss(&self, batch: &TokenBatch) -> Result<f64, ModelError> {
        let tokens_bt = self.check_batch(batch)?;
        self.head_loss(self.hidden_nc(self.stream_btc(tokens_bt, &batch.inputs)?), &batch.targets)
    }

    /// Logits `[rows, cols, vocab_size]`, row-major, of token ids `[rows, cols]`, without gradients.
    ///
    /// # Errors
    /// Those of a bad batch (see [`ModelError`]), [`ModelError::Absent`], [`ModelError::Device`].
    pub fn logits(&self, inputs: &[i32], rows: usize, cols: usize) -> Result<Vec<f32>, ModelError> {
        let tokens_bt = self.check_tokens("inputs", inputs, rows, cols)?;
        self.read_logits(self.stream_btc(tokens_bt, inputs)?)
    }

    /// Loss and all segments' gradients (in forward order) of `scale` times it from one backward pass over the whole model, with
    /// every layer composed of tensor operations and the loss differentiated automatically too: what
    /// [`forward_backward`](Self::forward_backward) is compared with, not for training.
    ///
    /// # Errors
    /// As [`forward_backward`](Self::forward_backward).
    pub fn plain_gradients(&self, batch: &TokenBatch, scale: f32) -> Result<(f64, Vec<Vec<f32>>), ModelError> {
        let tokens_bt = self.check_batch(batch)?;
        (0..self.infos.len()).try_for_each(|segment| self.require(segment))?;
        let (n, c) = (batch.rows * batch.cols, self.config.n_embd);
        let last = self.config.n_layer + 1;
        let embedding = self.embedding.clone().train();
        let blocks = self.blocks.clone().train();
        let norm = self.norm.clone().train();

        let about = About::mask(causal_mask(batch.cols, &self.device));
        let site = self.dropout.map(|dropout| dropout.at(0, Place::Embedding));
        let mut x_btc = dropped(embedding.forward(tokens_bt), site, Kernels::Composed);
        for (index, block) in blocks.iter().enumerate() {
            x_btc = block.forward(x_btc, &about.in_segment(self.dropout, index + 1), Kernels::Composed);
        }
        let hidden_nc: Tensor<2> = norm.forward(x_btc, &about, Kernels::Composed).reshape([n, c]);
        let logits_nv = hidden_nc.matmul(embedding.wte.weight.val().transpose());
        let targets_n1: Tensor<2, Int> =
            Tensor::from_data(TensorData::new(batch.targets.clone(), [n, 1]), &self.device);
        let picked_n1 = burn::tensor::activation::log_softmax(logits_nv, 1).gather(1, targets_n1);
        let loss = picked_n1.mean().neg();
        let value = read_back(last, "reading the loss", loss.clone().inner())?;
        let mut grads = (loss * scale).backward();

        let mut all = vec![pass::collect(0, &embedding, &mut grads)?.into_flat()?];
        for (index, block) in blocks.iter().enumerate() {
            all.push(pass::collect(index + 1, block, &mut grads)?.into_flat()?);
        }
        all.push(pass::collect(last, &norm, &mut grads)?.into_flat()?);
        Ok((value.first().copied().map_or(f64::NAN, f64::from), all))
    }

    /// Everything before the final norm, without gradients.
    fn stream_btc(&self, tokens_bt: Tensor<2, Int>, tokens: &[i32]) -> Result<Tensor<3>, ModelError> {
        (0..self.infos.len()).try_for_each(|segment| self.require(segment))?;
        let [_, t] = tokens_bt.dims();
        let about = self.about(t);
        let blocks = self.blocks.iter();
        Ok(blocks.fold(self.embed(0, tokens_bt, tokens), |x_btc, block| block.forward(x_btc, &about, self.kernels())))
    }

    /// Token ids, which `tokens` are too, at the positions from `start` on, to the residual stream.
    fn embed(&self, start: usize, tokens_bt: Tensor<2, Int>, tokens: &[i32]) -> Tensor<3> {
        // The backend's lookup copies a table that is a view.
        if self.flats[0].is_some() {
            let Embedding { wte, wpe } = &self.embedding;
            return fused::embedding(wte.weight.val(), wpe.weight.val(), tokens, start, tokens_bt.dims());
        }
        self.embedding.forward_from(start, tokens_bt)
    }

    /// The final norm, without gradients: `[n, c]`.
    fn hidden_nc(&self, x_btc: Tensor<3>) -> Tensor<2> {
        let [b, t, c] = x_btc.dims();
        self.norm.ln_f.forward(x_btc, self.kernels()).reshape([b * t, c])
    }

    /// The logits of the residual stream before the final norm, in f32.
    fn read_logits(&self, x_btc: Tensor<3>) -> Result<Vec<f32>, ModelError> {
        let logits_nv = self.logits_nv(self.hidden_nc(x_btc));
        read_back(self.config.n_layer + 1, "reading logits", logits_nv.cast(FloatDType::F32))
    }

    fn info(&self, segment: usize) -> Result<&SegmentInfo, ModelError> {
        self.infos.get(segment).ok_or(ModelError::NoSuchSegment { segment, segments: self.infos.len() })
    }

    fn require(&self, segment: usize) -> Result<(), ModelError> {
        if self.present[segment] { Ok(()) } else { Err(ModelError::Absent { name: self.infos[segment].name.clone() }) }
    }

    /// For passes without gradients.
    fn kernels(&self) -> Kernels<'static> {
        match (self.compute.kernels, self.placement()) {
            (KernelChoice::Composed, _) => Kernels::Composed,
            (KernelChoice::Fused, Placement::Host) => Kernels::Fused(None),
            (KernelChoice::Fused, Placement::Device) => Kernels::of_device(&self.device),
        }
    }

    /// [`causal_mask`] for the kernels that look at it; for others, which know it, a small one. Nothing is dropped.
    fn about(&self, t: usize) -> About {
        About::mask(causal_mask(if let Kernels::Composed = self.kernels() { t } else { 1 }, &self.device))
    }

    /// The token table of segment 0 with rows behind it, where that is of use and they are there.
    fn long_table_vc(&self, upload: &Upload<'_>) -> Option<Tensor<2>> {
        let (v, c) = (self.config.vocab_size, self.config.n_embd);
        let is_of_use = !v.is_multiple_of(ROWS) && !matches!(self.kernels(), Kernels::Fused(_) | Kernels::Composed);
        if is_of_use { upload.first_rows([v.next_multiple_of(ROWS), c]) } else { None }
    }

    fn placement(&self) -> Placement {
        Placement::of(&self.device)
    }

    fn check_batch(&self, batch: &TokenBatch) -> Result<Tensor<2, Int>, ModelError> {
        self.check_tokens("targets", &batch.targets, batch.rows, batch.cols)?;
        self.check_tokens("inputs", &batch.inputs, batch.rows, batch.cols)
    }

    fn check_tokens(
        &self,
        what: &'static str,
        tokens: &[i32],
        rows: usize,
        cols: usize,
    ) -> Result<Tensor<2, Int>, ModelError> {
        let (block_size, vocab_size) = (self.config.block_size, self.config.vocab_size);
        if rows == 0 || cols == 0 || cols > block_size {
            return Err(ModelError::SequenceLength { rows, cols, block_size });
        }
        if rows.checked_mul(cols) != Some(tokens.len()) {
            return Err(ModelError::BatchShape { what, len: tokens.len(), rows, cols });
        }
        let outside = |token: &i32| usize::try_from(*token).map_or(true, |id| id >= vocab_size);
        if let Some(index) = tokens.iter().position(outside) {
            return Err(ModelError::TokenOutOfRange { what, token: tokens[index], index, vocab_size });
        }
        Ok(Tensor::from_data(TensorData::new(tokens.to_vec(), [rows, cols]), &self.device))
    }
}

/// Puts new values into one segment's tensors.
fn replace(
    embedding: &mut Embedding,
    blocks: &mut [Block],
    norm: &mut FinalNorm,
    segment: usize,
    mut upload: Upload<'_>,
) {
    match segment.checked_sub(1) {
        None => *embedding = embedding.clone().map(&mut upload),
        Some(block) => match blocks.get_mut(block) {
            Some(block) => *block = block.clone().map(&mut upload),
            None => *norm = norm.clone().map(&mut upload),
        },
    }
}
