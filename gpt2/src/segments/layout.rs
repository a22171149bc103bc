//! Which tensors make up which segment.

use super::error::ModelError;
use crate::config::ModelConfig;
use crate::init::initial_values;

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

impl SegmentInfo {
    /// GPT-2's initial weights of this segment (see [`init`](crate::init)), in order of their offsets.
    pub fn initial(&self, config: &ModelConfig, seed: u64) -> Vec<f32> {
        let mut values = Vec::with_capacity(self.len);
        values.extend(self.params.iter().flat_map(|param| initial_values(config, seed, &param.path, param.len)));
        values
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
