//! The model as a chain of segments whose gradients are handed out while the backward pass still runs.
//!
//! Segment 0 is the embedding, 1..=L are the blocks, L+1 is the final norm; the head uses the token embedding and has no
//! tensors of its own. Automatic differentiation hands out gradients only when a whole backward pass is over, so each segment has a
//! small graph of its own: forward keeps every segment's input cut off from what came before, backward walks the segments in reverse
//! and feeds each graph the gradient from above. This file is the only one that knows it.
//!
//! The head's backward (softmax minus one-hot) is written by hand, outside the graphs, because each pass over the logits costs as much
//! as a block of a small model. The tied token embedding receives its head's part early and its lookup's part last, and is handed out
//! once, last, with both summed.

use burn::module::{Module, ModuleMapper, ModuleVisitor, Param};
use burn::tensor::{Device, Gradients, IndexingUpdateOp, Int, Tensor, TensorData};

use crate::config::{ConfigError, ModelConfig};
use crate::cross_entropy::{self, Placement};
use crate::init;
use crate::model::{Block, Embedding, FinalNorm, Kernels, causal_mask};

/// One tensor of a segment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ParamInfo {
    /// Its name in Hugging Face's checkpoints, such as `h.0.attn.c_attn.weight`.
    pub path: String,
    /// Its shape.
    pub shape: Vec<usize>,
    /// Where it begins in its segment's flat vector, in elements.
    pub offset: usize,
    /// Number of elements.
    pub len: usize,
    /// Whether weight decay applies: GPT-2 decays tensors of two dimensions, not biases and norms.
    pub decay: bool,
}

/// The layout of one segment's flat vector.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SegmentInfo {
    /// `embedding`, `h.0`, …, `ln_f`.
    pub name: String,
    /// Its tensors in order of their offsets, without gaps.
    pub params: Vec<ParamInfo>,
    /// Number of elements.
    pub len: usize,
}

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

/// Why the model refuses its input, or what failed on the device.
#[derive(Debug, thiserror::Error)]
pub enum ModelError {
    /// The config is unusable.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// The numbers of tokens and the batch's shape disagree.
    #[error(
        "batch of {rows} rows × {cols} tokens: {what} has {len} tokens instead of {}",
        rows.saturating_mul(*cols)
    )]
    BatchShape {
        /// `inputs` or `targets`.
        what: &'static str,
        /// Tokens it has.
        len: usize,
        /// Rows of the batch.
        rows: usize,
        /// Tokens a row.
        cols: usize,
    },
    /// Sequences are empty or longer than the positions the model has.
    #[error(
        "batch of {rows} rows × {cols} tokens: a batch needs at least one row, and 1..={block_size} tokens a row for this model"
    )]
    SequenceLength {
        /// Rows of the batch.
        rows: usize,
        /// Tokens a row.
        cols: usize,
        /// The model's number of positions.
        block_size: usize,
    },
    /// A token id is not in the vocabulary.
    #[error(
        "{what} hold token {token} at index {index}, but the model's vocabulary has {vocab_size} tokens; was the data made with another tokenizer?"
    )]
    TokenOutOfRange {
        /// `inputs` or `targets`.
        what: &'static str,
        /// The token id.
        token: i32,
        /// Its index in the batch.
        index: usize,
        /// Size of the vocabulary.
        vocab_size: usize,
    },
    /// There is no segment with this index.
    #[error("there is no segment {segment}: the model has segments 0..{segments}")]
    NoSuchSegment {
        /// The index that was asked for.
        segment: usize,
        /// Number of segments.
        segments: usize,
    },
    /// A flat vector does not have the length of its segment.
    #[error("segment {name} has {expected} elements, {len} were given")]
    SegmentLength {
        /// The segment's name.
        name: String,
        /// Its number of elements.
        expected: usize,
        /// The number given.
        len: usize,
    },
    /// The loss or its gradient could not be computed.
    #[error("cross entropy failed on the device: {detail}")]
    Head {
        /// The device's message.
        detail: String,
    },
    /// A tensor got no gradient, or data could not be read from the device.
    #[error("segment {segment}: {what} failed on the device: {detail}")]
    Device {
        /// The segment's index.
        segment: usize,
        /// What was tried.
        what: &'static str,
        /// The device's message.
        detail: String,
    },
}

/// The gradients of one segment, still on the device, in order of its [`ParamInfo`]s.
#[derive(Debug)]
pub struct SegmentGrads {
    segment: usize,
    parts: Vec<Tensor<1>>,
}

/// GPT-2 with its weights on one device.
#[derive(Debug)]
pub struct SegmentedModel {
    config: ModelConfig,
    device: Device,
    infos: Vec<SegmentInfo>,
    embedding: Embedding,
    blocks: Vec<Block>,
    norm: FinalNorm,
}

impl SegmentGrads {
    /// Index of the segment.
    pub fn segment(&self) -> usize {
        self.segment
    }

    /// All gradients as one vector on the device.
    pub fn into_tensor(self) -> Tensor<1> {
        Tensor::cat(self.parts, 0)
    }

    /// All gradients as one vector of the host: concatenated on the device, read back once.
    ///
    /// # Errors
    /// [`ModelError::Device`] if the device fails.
    pub fn into_flat(self) -> Result<Vec<f32>, ModelError> {
        let segment = self.segment;
        read_back(segment, "reading gradients", self.into_tensor())
    }
}

impl SegmentedModel {
    /// The model with GPT-2's initial weights for `seed` (see [`init`]).
    ///
    /// # Errors
    /// [`ModelError::Config`] if `config` is unusable.
    pub fn new(config: ModelConfig, seed: u64, device: &Device) -> Result<Self, ModelError> {
        let mut model = Self::zeros(config, device)?;
        for segment in 0..model.infos.len() {
            let flat: Vec<f32> = model.infos[segment]
                .params
                .iter()
                .flat_map(|p| init::initial_values(&model.config, seed, &p.path, p.len))
                .collect();
            model.write_params(segment, &flat)?;
        }
        Ok(model)
    }

    /// The model with all weights zero, for weights that come from elsewhere.
    ///
    /// # Errors
    /// [`ModelError::Config`] if `config` is unusable.
    pub fn zeros(config: ModelConfig, device: &Device) -> Result<Self, ModelError> {
        let infos = layout(&config)?;
        // Weights rest outside automatic differentiation; each pass makes leaves that share their memory.
        let device = device.clone().without_autodiff();
        Ok(Self {
            embedding: Embedding::zeros(&config, &device),
            blocks: (0..config.n_layer).map(|_| Block::zeros(&config, &device)).collect(),
            norm: FinalNorm::zeros(&config, &device),
            config,
            device,
            infos,
        })
    }

    /// The model's shape.
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// The device its weights lie on.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// The segments in forward order.
    pub fn segments(&self) -> &[SegmentInfo] {
        &self.infos
    }

    /// A segment's weights as one vector, read back once.
    ///
    /// # Errors
    /// [`ModelError::NoSuchSegment`], [`ModelError::Device`].
    pub fn read_params(&self, segment: usize) -> Result<Vec<f32>, ModelError> {
        self.info(segment)?;
        let mut collector = Flatten::default();
        match segment.checked_sub(1).map(|block| self.blocks.get(block)) {
            None => self.embedding.visit(&mut collector),
            Some(Some(block)) => block.visit(&mut collector),
            Some(None) => self.norm.visit(&mut collector),
        }
        read_back(segment, "reading weights", Tensor::cat(collector.parts, 0))
    }

    /// Replaces a segment's weights.
    ///
    /// # Errors
    /// [`ModelError::NoSuchSegment`], [`ModelError::SegmentLength`].
    pub fn write_params(&mut self, segment: usize, flat: &[f32]) -> Result<(), ModelError> {
        let info = self.info(segment)?;
        if flat.len() != info.len {
            return Err(ModelError::SegmentLength { name: info.name.clone(), expected: info.len, len: flat.len() });
        }
        let mut upload = Upload::new(flat, &self.device);
        match segment.checked_sub(1) {
            None => self.embedding = self.embedding.clone().map(&mut upload),
            Some(block) => match self.blocks.get_mut(block) {
                Some(block) => *block = block.clone().map(&mut upload),
                None => self.norm = self.norm.clone().map(&mut upload),
            },
        }
        Ok(())
    }

    /// Mean cross entropy of the batch in nats, without gradients.
    ///
    /// # Errors
    /// Those of a bad batch (see [`ModelError`]).
    pub fn loss(&self, batch: &TokenBatch) -> Result<f64, ModelError> {
        let tokens_bt = self.check_batch(batch)?;
        let logits_nv = self.hidden_nc(tokens_bt).matmul(self.head_cv());
        cross_entropy::mean_loss(logits_nv, &batch.targets, self.placement())
    }

    /// Logits `[rows, cols, vocab_size]`, row-major, of token ids `[rows, cols]`, without gradients.
    ///
    /// # Errors
    /// Those of a bad batch (see [`ModelError`]), [`ModelError::Device`].
    pub fn logits(&self, inputs: &[i32], rows: usize, cols: usize) -> Result<Vec<f32>, ModelError> {
        let tokens_bt = self.check_tokens("inputs", inputs, rows, cols)?;
        let logits_nv = self.hidden_nc(tokens_bt).matmul(self.head_cv());
        read_back(self.config.n_layer + 1, "reading logits", logits_nv)
    }

    /// Returns the mean cross entropy in nats and hands out the gradients of `scale` times it.
    ///
    /// `on_ready` gets each segment's gradients as soon as its backward pass is done, in the order L+1, L, …, 1, 0. An error of its ends
    /// the pass at once and is returned.
    ///
    /// # Errors
    /// Those of a bad batch or of the device (see [`ModelError`]), and `on_ready`'s own.
    pub fn forward_backward<E: From<ModelError>>(
        &self,
        batch: &TokenBatch,
        scale: f32,
        on_ready: &mut dyn FnMut(usize, SegmentGrads) -> Result<(), E>,
    ) -> Result<f64, E> {
        let tokens_bt = self.check_batch(batch)?;
        let (b, t, c) = (batch.rows, batch.cols, self.config.n_embd);
        let last = self.config.n_layer + 1;

        // Forward: each entry is one segment's own graph.
        let mask_tt = causal_mask(t, &self.device);
        let mut x_btc = self.embedding.forward(tokens_bt.clone());
        let mut graphs = Vec::with_capacity(self.blocks.len());
        for block in &self.blocks {
            let block = block.clone().train();
            let input_btc = leaf(x_btc);
            let output_btc = block.forward(input_btc.clone(), mask_tt.clone(), self.kernels());
            x_btc = output_btc.clone().inner();
            graphs.push((block, input_btc, output_btc));
        }
        let norm = self.norm.clone().train();
        let input_btc = leaf(x_btc);
        let output_btc = norm.forward(input_btc.clone(), self.kernels());

        // The head, forward and backward in one go.
        let hidden_nc: Tensor<2> = output_btc.clone().inner().reshape([b * t, c]);
        let logits_nv = hidden_nc.clone().matmul(self.head_cv());
        let (loss, dlogits_nv) = cross_entropy::loss_and_gradient(logits_nv, &batch.targets, scale, self.placement())?;
        let dhidden_nc = dlogits_nv.clone().matmul(self.embedding.wte.weight.val());
        let dwte_vc = dlogits_nv.transpose().matmul(hidden_nc);

        // Backward, from the last segment to the first.
        let mut upstream_btc = dhidden_nc.reshape([b, t, c]);
        let (grads, below_btc) = backward(last, &norm, &input_btc, output_btc, upstream_btc)?;
        upstream_btc = below_btc;
        on_ready(last, grads)?;
        while let Some((block, input_btc, output_btc)) = graphs.pop() {
            let segment = graphs.len() + 1;
            let (grads, below_btc) = backward(segment, &block, &input_btc, output_btc, upstream_btc)?;
            upstream_btc = below_btc;
            on_ready(segment, grads)?;
        }
        on_ready(0, self.embedding_grads(tokens_bt, upstream_btc, dwte_vc))?;
        Ok(loss)
    }

    /// Loss and all segments' gradients (in forward order) of `scale` times it from one backward pass over the whole model, with
    /// every layer composed of tensor operations and the loss differentiated automatically too: the yardstick for [`forward_backward`](Self::forward_backward), not for training.
    ///
    /// # Errors
    /// As [`forward_backward`](Self::forward_backward).
    pub fn plain_gradients(&self, batch: &TokenBatch, scale: f32) -> Result<(f64, Vec<Vec<f32>>), ModelError> {
        let tokens_bt = self.check_batch(batch)?;
        let (n, c) = (batch.rows * batch.cols, self.config.n_embd);
        let last = self.config.n_layer + 1;
        let embedding = self.embedding.clone().train();
        let blocks = self.blocks.clone().train();
        let norm = self.norm.clone().train();

        let mask_tt = causal_mask(batch.cols, &self.device);
        let x_btc = blocks.iter().fold(embedding.forward(tokens_bt), |x_btc, block| {
            block.forward(x_btc, mask_tt.clone(), Kernels::Composed)
        });
        let hidden_nc: Tensor<2> = norm.forward(x_btc, Kernels::Composed).reshape([n, c]);
        let logits_nv = hidden_nc.matmul(embedding.wte.weight.val().transpose());
        let targets_n1: Tensor<2, Int> =
            Tensor::from_data(TensorData::new(batch.targets.clone(), [n, 1]), &self.device);
        let picked_n1 = burn::tensor::activation::log_softmax(logits_nv, 1).gather(1, targets_n1);
        let loss = picked_n1.mean().neg();
        let value = read_back(last, "reading the loss", loss.clone().inner())?;
        let mut grads = (loss * scale).backward();

        let mut all = vec![collect(0, &embedding, &mut grads)?.into_flat()?];
        for (index, block) in blocks.iter().enumerate() {
            all.push(collect(index + 1, block, &mut grads)?.into_flat()?);
        }
        all.push(collect(last, &norm, &mut grads)?.into_flat()?);
        Ok((value.first().copied().map_or(f64::NAN, f64::from), all))
    }

    /// Everything before the head, without gradients: `[n, c]`.
    fn hidden_nc(&self, tokens_bt: Tensor<2, Int>) -> Tensor<2> {
        let [b, t] = tokens_bt.dims();
        let mask_tt = causal_mask(t, &self.device);
        let x_btc = self.blocks.iter().fold(self.embedding.forward(tokens_bt), |x_btc, block| {
            block.forward(x_btc, mask_tt.clone(), self.kernels())
        });
        self.norm.forward(x_btc, self.kernels()).reshape([b * t, self.config.n_embd])
    }

    fn head_cv(&self) -> Tensor<2> {
        self.embedding.wte.weight.val().transpose()
    }

    /// The lookup's gradient is a sum of rows, added onto the head's part of the same table.
    fn embedding_grads(&self, tokens_bt: Tensor<2, Int>, dx_btc: Tensor<3>, dwte_vc: Tensor<2>) -> SegmentGrads {
        let [b, t, c] = dx_btc.dims();
        let unused = self.config.block_size - t;
        let mut parts = vec![
            dwte_vc
                .select_assign(0, tokens_bt.reshape([b * t]), dx_btc.clone().reshape([b * t, c]), IndexingUpdateOp::Add)
                .reshape([-1]),
            dx_btc.sum_dim(0).reshape([-1]),
        ];
        if unused > 0 {
            parts.push(Tensor::zeros([unused * c], &self.device));
        }
        SegmentGrads { segment: 0, parts }
    }

    fn info(&self, segment: usize) -> Result<&SegmentInfo, ModelError> {
        self.infos.get(segment).ok_or(ModelError::NoSuchSegment { segment, segments: self.infos.len() })
    }

    fn kernels(&self) -> Kernels {
        match self.placement() {
            Placement::Host => Kernels::Fused,
            Placement::Device => Kernels::Composed,
        }
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

/// The segments of a model of this shape, in forward order; tensors in the order in which the module tree is visited.
///
/// # Errors
/// [`ModelError::Config`] if `config` is unusable.
pub fn layout(config: &ModelConfig) -> Result<Vec<SegmentInfo>, ModelError> {
    config.validate()?;
    let c = config.n_embd;
    let mut segments = vec![segment(
        "embedding",
        "",
        &[("wte.weight", &[config.vocab_size, c]), ("wpe.weight", &[config.block_size, c])],
    )];
    for layer in 0..config.n_layer {
        let name = format!("h.{layer}");
        segments.push(segment(
            &name,
            &format!("{name}."),
            &[
                ("ln_1.weight", &[c]),
                ("ln_1.bias", &[c]),
                ("attn.c_attn.weight", &[c, 3 * c]),
                ("attn.c_attn.bias", &[3 * c]),
                ("attn.c_proj.weight", &[c, c]),
                ("attn.c_proj.bias", &[c]),
                ("ln_2.weight", &[c]),
                ("ln_2.bias", &[c]),
                ("mlp.c_fc.weight", &[c, 4 * c]),
                ("mlp.c_fc.bias", &[4 * c]),
                ("mlp.c_proj.weight", &[4 * c, c]),
                ("mlp.c_proj.bias", &[c]),
            ],
        ));
    }
    segments.push(segment("ln_f", "", &[("ln_f.weight", &[c]), ("ln_f.bias", &[c])]));
    Ok(segments)
}

fn segment(name: &str, prefix: &str, tensors: &[(&str, &[usize])]) -> SegmentInfo {
    let mut len = 0;
    let params = tensors
        .iter()
        .map(|(path, shape)| {
            let offset = len;
            let count = shape.iter().product();
            len += count;
            ParamInfo {
                path: format!("{prefix}{path}"),
                shape: shape.to_vec(),
                offset,
                len: count,
                decay: shape.len() >= 2,
            }
        })
        .collect();
    SegmentInfo { name: name.into(), params, len }
}

/// A fresh leaf that collects the gradient for what lies below.
fn leaf(x_btc: Tensor<3>) -> Tensor<3> {
    x_btc.autodiff().require_grad()
}

/// One segment's backward pass: its gradients, and the gradient of its input.
fn backward<M: Module>(
    segment: usize,
    module: &M,
    input_btc: &Tensor<3>,
    output_btc: Tensor<3>,
    upstream_btc: Tensor<3>,
) -> Result<(SegmentGrads, Tensor<3>), ModelError> {
    // A backward pass starts from ones; the product with the gradient from above makes it start from that.
    let mut grads = (output_btc * upstream_btc).sum().backward();
    let below_btc = input_btc.grad_remove(&mut grads).ok_or_else(|| missing(segment))?;
    Ok((collect(segment, module, &mut grads)?, below_btc))
}

fn collect<M: Module>(segment: usize, module: &M, grads: &mut Gradients) -> Result<SegmentGrads, ModelError> {
    let mut collector = CollectGrads { grads, parts: Vec::new(), complete: true };
    module.visit(&mut collector);
    match collector {
        CollectGrads { complete: true, parts, .. } => Ok(SegmentGrads { segment, parts }),
        _ => Err(missing(segment)),
    }
}

fn missing(segment: usize) -> ModelError {
    ModelError::Device { segment, what: "backward", detail: "a tensor got no gradient".into() }
}

fn read_back<const D: usize>(segment: usize, what: &'static str, tensor: Tensor<D>) -> Result<Vec<f32>, ModelError> {
    tensor.try_into_vec_as::<f32>().map_err(|error| ModelError::Device { segment, what, detail: error.to_string() })
}

#[derive(Default)]
struct Flatten {
    parts: Vec<Tensor<1>>,
}

impl ModuleVisitor for Flatten {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        self.parts.push(param.val().reshape([-1]));
    }
}

struct CollectGrads<'a> {
    grads: &'a mut Gradients,
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

/// Fills tensors from a flat vector, in visit order. The caller has compared its length with the layout's, whose agreement with the
/// module tree is tested.
struct Upload<'a> {
    flat: &'a [f32],
    next: usize,
    device: &'a Device,
    /// Device memory takes one transfer and is cut apart there. In host memory each tensor gets its own piece, since kernels copy views
    /// that do not start at zero.
    transferred: Option<Tensor<1>>,
}

impl<'a> Upload<'a> {
    fn new(flat: &'a [f32], device: &'a Device) -> Self {
        let transferred = match Placement::of(device) {
            Placement::Host => None,
            Placement::Device => Some(Tensor::from_data(TensorData::new(flat.to_vec(), [flat.len()]), device)),
        };
        Self { flat, next: 0, device, transferred }
    }
}

impl ModuleMapper for Upload<'_> {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let shape = param.shape();
        let len = shape.num_elements();
        let start = self.next;
        self.next += len;
        let value = match &self.transferred {
            Some(flat) => flat.clone().narrow(0, start, len).reshape(shape),
            None => {
                let piece = self.flat[start..start + len].to_vec();
                Tensor::from_data(TensorData::new(piece, shape), self.device)
            }
        };
        param.map(|_| value)
    }
}
