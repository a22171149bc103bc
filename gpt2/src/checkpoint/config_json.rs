//! `config.json`: how Hugging Face's libraries describe a model.

use std::path::Path;

use serde_json::{Value, json};

use super::CheckpointError;
use super::stored::read_short;
use crate::config::{LAYER_NORM_EPSILON, ModelConfig};

/// The file's name.
pub(super) const NAME: &str = "config.json";

/// The names under which Hugging Face's libraries have the tanh form of GELU.
const TANH_GELU: [&str; 2] = ["gelu_new", "gelu_pytorch_tanh"];

/// The model's shape in the file at `path`.
///
/// Rates of dropout are passed over: a trained model computes without, and this program trains without.
///
/// # Errors
/// [`CheckpointError::Io`]; [`CheckpointError::Foreign`] for a file without the shape of a GPT-2; [`CheckpointError::Unsupported`] with the
/// setting by which it computes something else.
pub(super) fn read(path: &Path) -> Result<ModelConfig, CheckpointError> {
    let foreign = |detail: String| CheckpointError::Foreign { path: path.into(), detail };
    let settings: Value =
        serde_json::from_slice(&read_short(path)?).map_err(|error| foreign(format!("it is not JSON: {error}")))?;
    if !settings.is_object() {
        return Err(foreign("it is not a JSON object".into()));
    }
    if let Some(setting) = unsupported(&settings) {
        return Err(CheckpointError::Unsupported { path: path.into(), detail: format!("it says {setting}") });
    }
    let size = |name: &str| match settings[name].as_u64().map(usize::try_from) {
        Some(Ok(size)) => Ok(size),
        _ if settings[name].is_null() => Err(foreign(format!("it has no {name}"))),
        _ => Err(foreign(format!("its {name} is {}", settings[name]))),
    };
    let config = ModelConfig {
        n_layer: size("n_layer")?,
        n_head: size("n_head")?,
        n_embd: size("n_embd")?,
        block_size: size("n_positions")?,
        vocab_size: size("vocab_size")?,
    };
    config.validate().map_err(|error| foreign(error.to_string()))?;
    Ok(config)
}

/// The first setting with which a model computes something else than this program's, with its value.
fn unsupported(settings: &Value) -> Option<String> {
    let width = settings["n_embd"].as_u64().unwrap_or(0);
    let is = |name: &str, usual: &[Value]| {
        let value = &settings[name];
        (!value.is_null() && !usual.contains(value)).then(|| format!("{name} {value}"))
    };
    let no_entries = |name: &str| {
        let value = &settings[name];
        let is_empty = value.is_null() || value.as_object().is_some_and(serde_json::Map::is_empty);
        (!is_empty).then(|| format!("{name} {value}"))
    };
    is("model_type", &[json!("gpt2")])
        .or_else(|| is("activation_function", &TANH_GELU.map(|name| json!(name))))
        .or_else(|| is("layer_norm_epsilon", &[json!(LAYER_NORM_EPSILON)]))
        .or_else(|| is("n_inner", &[json!(width.saturating_mul(4))]))
        .or_else(|| is("scale_attn_weights", &[json!(true)]))
        .or_else(|| is("scale_attn_by_inverse_layer_idx", &[json!(false)]))
        .or_else(|| is("add_cross_attention", &[json!(false)]))
        .or_else(|| is("is_encoder_decoder", &[json!(false)]))
        .or_else(|| is("tie_word_embeddings", &[json!(true)]))
        .or_else(|| no_entries("pruned_heads"))
        .or_else(|| no_entries("quantization_config"))
}

/// The file for a model of this shape, whose tokenizer has this id for the end of a document.
pub(super) fn write(config: &ModelConfig, end_of_text: Option<u16>) -> Value {
    json!({
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "activation_function": TANH_GELU[0],
        "layer_norm_epsilon": LAYER_NORM_EPSILON,
        "n_layer": config.n_layer,
        "n_head": config.n_head,
        "n_embd": config.n_embd,
        "n_inner": null,
        "n_positions": config.block_size,
        "n_ctx": config.block_size,
        "vocab_size": config.vocab_size,
        "scale_attn_weights": true,
        "tie_word_embeddings": true,
        // As it was trained.
        "attn_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "resid_pdrop": 0.0,
        "initializer_range": crate::init::INIT_STD,
        "bos_token_id": end_of_text,
        "eos_token_id": end_of_text,
        "torch_dtype": "float32",
    })
}
