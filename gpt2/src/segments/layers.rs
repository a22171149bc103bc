//! Layers of a block by themselves, for who measures where the time of a step goes.

use std::fmt;

use burn::tensor::{Tensor, TensorData};
use comm_core::splitmix::SplitMix64;
use serde::{Deserialize, Serialize};

use super::{ModelError, SegmentGrads, SegmentedModel};
use crate::config::ModelConfig;
use crate::model::About;

/// A layer of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum BlockLayer {
    /// A layer norm; a block has two.
    LayerNorm,
    /// The projection to queries, keys and values.
    Qkv,
    /// Scores, softmax, and the values that they mix.
    Attention,
    /// The projection after them.
    Proj,
    /// The feed-forward layer: two projections, and GELU between them.
    Mlp,
}

impl BlockLayer {
    /// All, in the order in which a block runs them first.
    pub const ALL: [Self; 5] = [Self::LayerNorm, Self::Qkv, Self::Attention, Self::Proj, Self::Mlp];

    /// Its name.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::LayerNorm => "layer norm",
            Self::Qkv => "qkv",
            Self::Attention => "attention",
            Self::Proj => "proj",
            Self::Mlp => "mlp",
        }
    }

    /// How many a block has.
    #[must_use]
    pub const fn in_a_block(self) -> usize {
        if matches!(self, Self::LayerNorm) { 2 } else { 1 }
    }

    /// Widths of its input and its output, in multiples of the residual stream's.
    const fn widths(self) -> (usize, usize) {
        match self {
            Self::LayerNorm | Self::Proj | Self::Mlp => (1, 1),
            Self::Qkv => (1, 3),
            Self::Attention => (3, 1),
        }
    }

    /// FLOP of its matrix products, forward and backward, for one token of a sequence of `t`. Attention's are those of the full `t × t` square,
    /// as in [`flops_per_token`](ModelConfig::flops_per_token).
    #[must_use]
    pub fn flops_per_token(self, config: &ModelConfig, t: usize) -> f64 {
        let c = config.n_embd as f64;
        match self {
            Self::LayerNorm => 0.0,
            // Each weight is multiplied and added once forward and twice backward.
            Self::Qkv => 6.0 * 3.0 * c * c,
            Self::Proj => 6.0 * c * c,
            Self::Mlp => 6.0 * 8.0 * c * c,
            Self::Attention => 12.0 * c * t as f64,
        }
    }
}

impl fmt::Display for BlockLayer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// A layer of a model's first block, with an input and a gradient from above, ready to be run again and again.
#[derive(Debug)]
pub struct LayerRun<'a> {
    model: &'a SegmentedModel,
    layer: BlockLayer,
    x_btc: Tensor<3>,
    upstream_btc: Tensor<3>,
    about: About,
}

impl LayerRun<'_> {
    /// Runs the layer forward and backward, and waits for the device.
    ///
    /// # Errors
    /// [`ModelError::Device`], [`ModelError::Waiting`].
    pub fn run(&self) -> Result<(), ModelError> {
        let (gradients, below_btc) = self.pass()?;
        self.model.wait()?;
        drop((gradients, below_btc));
        Ok(())
    }

    fn pass(&self) -> Result<(SegmentGrads, Tensor<3>), ModelError> {
        let LayerRun { model, layer, x_btc, upstream_btc, about } = self;
        let block = model.blocks.first().ok_or(ModelError::NoSuchSegment { segment: 1, segments: 2 })?;
        let (x_btc, upstream_btc) = (x_btc.clone(), upstream_btc.clone());
        match layer {
            BlockLayer::LayerNorm => model.layer_pass(block.ln_1.clone(), x_btc, about, upstream_btc),
            BlockLayer::Qkv => model.layer_pass(block.attn.c_attn.clone(), x_btc, about, upstream_btc),
            BlockLayer::Attention => model.layer_pass(block.attn.mixing(), x_btc, about, upstream_btc),
            BlockLayer::Proj => model.layer_pass(block.attn.c_proj.clone(), x_btc, about, upstream_btc),
            BlockLayer::Mlp => model.layer_pass(block.mlp.clone(), x_btc, about, upstream_btc),
        }
    }
}

impl SegmentedModel {
    /// A layer of the first block, for sequences of `cols` tokens, `rows` at a time. Input and gradient are uniform in −1..1, the same in every run.
    ///
    /// # Errors
    /// [`ModelError::SequenceLength`], [`ModelError::Absent`].
    pub fn layer_run(&self, layer: BlockLayer, rows: usize, cols: usize) -> Result<LayerRun<'_>, ModelError> {
        let block_size = self.config.block_size;
        if rows == 0 || cols == 0 || cols > block_size {
            return Err(ModelError::SequenceLength { rows, cols, block_size });
        }
        self.require(1)?;
        let (input, output) = layer.widths();
        let tensor = |stream: u64, width: usize| -> Tensor<3> {
            let mut draw = SplitMix64::stream(1, &[stream]);
            let count = rows * cols * width;
            let values: Vec<f32> = (0..count).map(|_| 2.0 * draw.unit() as f32 - 1.0).collect();
            let tensor: Tensor<3> = Tensor::from_data(TensorData::new(values, [rows, cols, width]), &self.device);
            tensor.cast(self.compute.precision.float())
        };
        let c = self.config.n_embd;
        Ok(LayerRun {
            model: self,
            layer,
            x_btc: tensor(1, input * c),
            upstream_btc: tensor(2, output * c),
            about: self.about(cols),
        })
    }
}

#[cfg(test)]
mod tests {
    use burn::tensor::Device;

    use super::*;
    use crate::config::Preset;

    #[test]
    fn layers_have_inputs_and_gradients_of_their_widths() {
        let model = SegmentedModel::new(Preset::Micro.config(256), 1, &Device::flex()).unwrap();
        let c = 32;
        for (layer, input, gradients) in [
            (BlockLayer::LayerNorm, c, 2 * c),
            (BlockLayer::Qkv, c, 3 * c * c + 3 * c),
            (BlockLayer::Attention, 3 * c, 0),
            (BlockLayer::Proj, c, c * c + c),
            (BlockLayer::Mlp, c, 8 * c * c + 5 * c),
        ] {
            let run = model.layer_run(layer, 2, 8).unwrap();
            let (grads, below_btc) = run.pass().unwrap();
            assert_eq!(below_btc.dims(), [2, 8, input], "{layer}");
            let below = below_btc.try_into_vec_as::<f32>().unwrap();
            assert!(below.iter().all(|value| value.is_finite()) && below.iter().any(|value| *value != 0.0), "{layer}");
            assert_eq!(grads.into_flat().unwrap().len(), gradients, "{layer}");
        }
        let wrong = model.layer_run(BlockLayer::Mlp, 1, 33).unwrap_err();
        assert!(matches!(wrong, ModelError::SequenceLength { .. }), "{wrong}");
    }

    #[test]
    fn layers_and_the_head_add_up_to_a_steps_products() {
        let config = Preset::Gpt2.config(50257);
        let block: f64 =
            BlockLayer::ALL.map(|layer| layer.in_a_block() as f64 * layer.flops_per_token(&config, 1024)).iter().sum();
        let head = 6.0 * (config.vocab_size * config.n_embd) as f64;
        // 6N counts biases and norms, which are in no product.
        let outside = 6.0 * (config.n_layer * 13 * config.n_embd + 2 * config.n_embd) as f64;
        let whole = config.flops_per_token(1024);
        assert!((12.0 * block + head + outside - whole).abs() < 1.0, "{block} {head} {outside} {whole}");
    }
}
