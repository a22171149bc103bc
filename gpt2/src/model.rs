//! GPT-2's layers, exactly: pre-norm blocks, causal attention, tanh GELU, biases everywhere, and [`dropout`] where a training pass
//! asks for it.
//!
//! Field names are those of Hugging Face's checkpoints, so that the path of a tensor in the module tree is its name in a file.
//! Shapes in tensor names: `b` rows of a batch, `t` positions, `c` width of the residual stream, `h` heads, `q` width of a head, `v`
//! vocabulary, `n` = b·t.

mod cached;

use std::sync::Arc;

use burn::module::{Module, Param};
use burn::tensor::activation::softmax;
use burn::tensor::module::linear;
use burn::tensor::{Device, FloatDType, Int, Tensor};
use serde::{Deserialize, Serialize};

use crate::config::{LAYER_NORM_EPSILON, ModelConfig};
#[cfg(all(feature = "cube", not(feature = "fusion")))]
use crate::cube;
use crate::dropout::{self, Dropout, Place, Site};
use crate::fused::{self, Resident};
pub(crate) use cached::KeysAndValues;

/// By which kernels a model computes its layers and its loss; written as in [`KernelChoice::name`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum KernelChoice {
    /// Our own, each of which does a layer's work in as few passes over memory as there can be, where there are any for the device; on
    /// others as [`Composed`](Self::Composed).
    #[default]
    Fused,
    /// The backend's single operations, to measure what the fused ones gain.
    Composed,
}

comm_core::names!(pub KernelChoice, "choice of kernels": Fused = "fused", Composed = "composed");

/// Which form of the layers runs.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Kernels<'a> {
    /// The CPU's fused operations (see [`fused`]); host tensors only. For a pass with gradients the module's tensors are empty leaves, and the
    /// weights are in here.
    Fused(Option<&'a Arc<Resident>>),
    /// Composed of tensor operations, on any device.
    Composed,
    /// Kernels of our own (see [`cube`](crate::cube)), on the devices that it serves.
    #[cfg(all(feature = "cube", not(feature = "fusion")))]
    Generated,
}

impl Kernels<'_> {
    /// Those for a device other than the processor.
    pub(crate) fn of_device(device: &Device) -> Self {
        match device {
            #[cfg(all(feature = "cube", not(feature = "fusion")))]
            device if cube::serves(device) => Kernels::Generated,
            _ => Kernels::Composed,
        }
    }
}

/// What maps the residual stream to itself.
pub(crate) trait Layer: Module {
    /// The residual stream `[b, t, c]` through this layer.
    fn forward(&self, x_btc: Tensor<3>, about: &About, kernels: Kernels<'_>) -> Tensor<3>;
}

/// What a pass tells its layers.
#[derive(Clone, Debug)]
pub(crate) struct About {
    /// That of [`causal_mask`], which composed kernels alone look at.
    pub(crate) mask_tt: Tensor<4>,
    /// What is dropped, and the segment that the layer belongs to; `None` in passes without gradients.
    pub(crate) dropout: Option<(Dropout, usize)>,
}

impl About {
    /// Of a pass in which nothing is dropped.
    pub(crate) fn mask(mask_tt: Tensor<4>) -> Self {
        About { mask_tt, dropout: None }
    }

    /// The same for a segment of a pass in which elements may be dropped.
    pub(crate) fn in_segment(&self, dropout: Option<Dropout>, segment: usize) -> Self {
        About { mask_tt: self.mask_tt.clone(), dropout: dropout.map(|dropout| (dropout, segment)) }
    }

    fn site(&self, place: Place) -> Option<Site> {
        self.dropout.map(|(dropout, segment)| dropout.at(segment, place))
    }
}

/// `[b, t, c]` with elements dropped where there is a `site`.
pub(crate) fn dropped(x_btc: Tensor<3>, site: Option<Site>, kernels: Kernels<'_>) -> Tensor<3> {
    match (site, kernels) {
        (None, _) => x_btc,
        (Some(site), Kernels::Fused(_)) => fused::dropout(x_btc, site),
        (Some(site), Kernels::Composed) => dropout::composed(x_btc, &site),
        #[cfg(all(feature = "cube", not(feature = "fusion")))]
        (Some(site), Kernels::Generated) => cube::dropout(x_btc, site),
    }
}

/// Affine map `x · weight + bias`; `weight` is `[in, out]`, as in GPT-2's files.
#[derive(Module, Debug)]
pub struct Projection {
    /// `[in, out]`.
    pub weight: Param<Tensor<2>>,
    /// `[out]`.
    pub bias: Param<Tensor<1>>,
}

/// Layer norm over the last axis.
#[derive(Module, Debug)]
pub struct LayerNorm {
    /// Gain, `[c]`.
    pub weight: Param<Tensor<1>>,
    /// Offset, `[c]`.
    pub bias: Param<Tensor<1>>,
}

/// A table of vectors, one a row.
#[derive(Module, Debug)]
pub struct Table {
    /// `[entries, c]`.
    pub weight: Param<Tensor<2>>,
}

/// Causal multi-head self-attention.
#[derive(Module, Debug)]
pub struct Attention {
    /// Queries, keys and values in one projection, `[c, 3c]`.
    pub c_attn: Projection,
    /// Output projection, `[c, c]`.
    pub c_proj: Projection,
    n_head: usize,
}

/// The part of attention that has no weights: scores, softmax, and the values that they mix.
#[derive(Module, Debug)]
pub(crate) struct Mixing {
    n_head: usize,
}

/// Feed-forward layer, four times as wide inside.
#[derive(Module, Debug)]
pub struct Mlp {
    /// `[c, 4c]`.
    pub c_fc: Projection,
    /// `[4c, c]`.
    pub c_proj: Projection,
}

/// Token and position embedding: the first segment.
#[derive(Module, Debug)]
pub struct Embedding {
    /// Token table, `[v, c]`; also the head's weight.
    pub wte: Table,
    /// Position table, `[block_size, c]`.
    pub wpe: Table,
}

/// One transformer block.
#[derive(Module, Debug)]
pub struct Block {
    /// Norm before attention.
    pub ln_1: LayerNorm,
    /// Attention.
    pub attn: Attention,
    /// Norm before the feed-forward layer.
    pub ln_2: LayerNorm,
    /// Feed-forward layer.
    pub mlp: Mlp,
}

/// The norm after the last block.
#[derive(Module, Debug)]
pub struct FinalNorm {
    /// Norm before the head.
    pub ln_f: LayerNorm,
}

impl Embedding {
    /// Tables of zeros of the right shapes.
    pub fn zeros(config: &ModelConfig, device: &Device) -> Self {
        let table = |entries| Table { weight: Param::from_tensor(Tensor::zeros([entries, config.n_embd], device)) };
        Self { wte: table(config.vocab_size), wpe: table(config.block_size) }
    }

    /// Token ids `[b, t]` to the residual stream `[b, t, c]`.
    pub fn forward(&self, tokens_bt: Tensor<2, Int>) -> Tensor<3> {
        self.forward_from(0, tokens_bt)
    }

    /// As [`forward`](Self::forward), of tokens of which the first has the position `start`.
    pub(crate) fn forward_from(&self, start: usize, tokens_bt: Tensor<2, Int>) -> Tensor<3> {
        let [_, t] = tokens_bt.dims();
        let token_btc = burn::tensor::module::embedding(self.wte.weight.val(), tokens_bt);
        let position_tc = self.wpe.weight.val().narrow(0, start, t);
        token_btc + position_tc.unsqueeze()
    }
}

impl Block {
    /// A block of zeros of the right shapes.
    pub fn zeros(config: &ModelConfig, device: &Device) -> Self {
        let c = config.n_embd;
        Self {
            ln_1: LayerNorm::zeros(c, device),
            attn: Attention {
                c_attn: Projection::zeros(c, 3 * c, device),
                c_proj: Projection::zeros(c, c, device),
                n_head: config.n_head,
            },
            ln_2: LayerNorm::zeros(c, device),
            mlp: Mlp { c_fc: Projection::zeros(c, 4 * c, device), c_proj: Projection::zeros(4 * c, c, device) },
        }
    }
}

impl Layer for Block {
    fn forward(&self, x_btc: Tensor<3>, about: &About, kernels: Kernels<'_>) -> Tensor<3> {
        let attention_btc = self.attn.forward(self.ln_1.forward(x_btc.clone(), kernels), about, kernels);
        let x_btc = x_btc + dropped(attention_btc, about.site(Place::AttentionOutput), kernels);
        let mlp_btc = self.mlp.forward(self.ln_2.forward(x_btc.clone(), kernels), about, kernels);
        x_btc + dropped(mlp_btc, about.site(Place::MlpOutput), kernels)
    }
}

impl FinalNorm {
    /// A norm of zeros of the right shape.
    pub fn zeros(config: &ModelConfig, device: &Device) -> Self {
        Self { ln_f: LayerNorm::zeros(config.n_embd, device) }
    }
}

impl Layer for FinalNorm {
    fn forward(&self, x_btc: Tensor<3>, _about: &About, kernels: Kernels<'_>) -> Tensor<3> {
        self.ln_f.forward(x_btc, kernels)
    }
}

impl Attention {
    fn forward(&self, x_btc: Tensor<3>, about: &About, kernels: Kernels<'_>) -> Tensor<3> {
        let qkv_btc3 = self.c_attn.forward(x_btc, kernels);
        let mixed_btc = self.mixing().forward(qkv_btc3, about, kernels);
        self.c_proj.forward(mixed_btc, kernels)
    }

    /// What is between its two projections.
    pub(crate) fn mixing(&self) -> Mixing {
        Mixing { n_head: self.n_head }
    }
}

impl Layer for Mixing {
    /// `[b, t, 3c]` of queries, keys and values to `[b, t, c]`.
    fn forward(&self, qkv_btc3: Tensor<3>, about: &About, kernels: Kernels<'_>) -> Tensor<3> {
        let ([b, t, c3], dtype) = (qkv_btc3.dims(), FloatDType::from(qkv_btc3.dtype()));
        let c = c3 / 3;
        let q = c / self.n_head;
        let site = about.site(Place::Attention);
        match kernels {
            Kernels::Fused(_) => return fused::attention(qkv_btc3, self.n_head, site),
            #[cfg(all(feature = "cube", not(feature = "fusion")))]
            Kernels::Generated => return cube::attention(qkv_btc3, self.n_head, site),
            Kernels::Composed => (),
        }
        let heads_bhtq = |part: usize| -> Tensor<4> {
            qkv_btc3.clone().narrow(2, part * c, c).reshape([b, t, self.n_head, q]).swap_dims(1, 2)
        };
        let (query_bhtq, key_bhtq, value_bhtq) = (heads_bhtq(0), heads_bhtq(1), heads_bhtq(2));
        let scores_bhtt = query_bhtq.matmul(key_bhtq.transpose()).cast(FloatDType::F32);
        let scores_bhtt = scores_bhtt / (q as f64).sqrt() + about.mask_tt.clone();
        let weights_bhtt = softmax(scores_bhtt, 3);
        let weights_bhtt = match &site {
            Some(site) => dropout::composed(weights_bhtt, site),
            None => weights_bhtt,
        };
        let mixed_bhtq = weights_bhtt.cast(dtype).matmul(value_bhtq);
        mixed_bhtq.swap_dims(1, 2).reshape([b, t, c])
    }
}

impl Layer for Mlp {
    fn forward(&self, x_btc: Tensor<3>, _about: &About, kernels: Kernels<'_>) -> Tensor<3> {
        let inner = self.c_fc.forward(x_btc, kernels);
        let inner = match kernels {
            Kernels::Fused(_) => fused::gelu(inner),
            Kernels::Composed => gelu(inner),
            #[cfg(all(feature = "cube", not(feature = "fusion")))]
            Kernels::Generated => cube::gelu(inner),
        };
        self.c_proj.forward(inner, kernels)
    }
}

impl LayerNorm {
    fn zeros(c: usize, device: &Device) -> Self {
        Self {
            weight: Param::from_tensor(Tensor::zeros([c], device)),
            bias: Param::from_tensor(Tensor::zeros([c], device)),
        }
    }

    pub(crate) fn forward(&self, x_btc: Tensor<3>, kernels: Kernels<'_>) -> Tensor<3> {
        let (weight_c, bias_c) = (self.weight.val(), self.bias.val());
        match kernels {
            Kernels::Fused(resident) => fused::layer_norm(x_btc, weight_c, bias_c, resident),
            Kernels::Composed => {
                let (dtype, wide) = (FloatDType::from(x_btc.dtype()), FloatDType::F32);
                let (weight_c, bias_c) = (weight_c.cast(wide), bias_c.cast(wide));
                let y_btc =
                    burn::tensor::module::layer_norm(x_btc.cast(wide), weight_c, Some(bias_c), LAYER_NORM_EPSILON);
                y_btc.cast(dtype)
            }
            #[cfg(all(feature = "cube", not(feature = "fusion")))]
            Kernels::Generated => cube::layer_norm(x_btc, weight_c, bias_c),
        }
    }
}

impl Layer for LayerNorm {
    fn forward(&self, x_btc: Tensor<3>, _about: &About, kernels: Kernels<'_>) -> Tensor<3> {
        self.forward(x_btc, kernels)
    }
}

impl Layer for Projection {
    fn forward(&self, x_btc: Tensor<3>, _about: &About, kernels: Kernels<'_>) -> Tensor<3> {
        self.forward(x_btc, kernels)
    }
}

impl Projection {
    fn zeros(input: usize, output: usize, device: &Device) -> Self {
        Self {
            weight: Param::from_tensor(Tensor::zeros([input, output], device)),
            bias: Param::from_tensor(Tensor::zeros([output], device)),
        }
    }

    fn forward(&self, x: Tensor<3>, kernels: Kernels<'_>) -> Tensor<3> {
        match kernels {
            Kernels::Fused(resident) => fused::linear(x, self.weight.val(), self.bias.val(), resident),
            // In two dimensions: else the weight's gradient is first made for each row of the batch, and these are summed.
            _ => {
                let ([b, t, i], [_, o]) = (x.dims(), self.weight.dims());
                linear(x.reshape([b * t, i]), self.weight.val(), Some(self.bias.val())).reshape([b, t, o])
            }
        }
    }
}

/// What is added to attention scores: 0 where position i may look at position j ≤ i, −∞ elsewhere; `[1, 1, t, t]`.
pub fn causal_mask(t: usize, device: &Device) -> Tensor<4> {
    let mut values = vec![0.0f32; t * t];
    for (i, row) in values.chunks_mut(t.max(1)).enumerate() {
        row[i + 1..].fill(f32::NEG_INFINITY);
    }
    Tensor::from_data(burn::tensor::TensorData::new(values, [1, 1, t, t]), device)
}

/// GELU in its tanh form, as GPT-2 was trained with (Hendrycks and Gimpel 2016). Written with products: a general power costs several
/// times as much, forward and backward.
fn gelu(x: Tensor<3>) -> Tensor<3> {
    const SQRT_2_OVER_PI: f64 = 0.797_884_560_802_865_4;
    let inner = x.clone() * (x.clone() * x.clone() * (0.044715 * SQRT_2_OVER_PI) + SQRT_2_OVER_PI);
    x * ((inner.tanh() + 1.0) * 0.5)
}
