//! The files beside the weights by which Hugging Face's libraries open a folder.

use std::io::Write;
use std::path::Path;

use serde_json::{Value, json};

use super::tokenizer_files::{self, MERGES, TOKENIZER, TOKENIZER_CONFIG, VOCABULARY};
use super::{CheckpointError, config_json, write_atomically};
use crate::config::ModelConfig;
use crate::tokenizer::Tokenizer;

const GENERATION: &str = "generation_config.json";

/// The names of all files that may lie beside the weights.
pub const COMPANIONS: [&str; 6] = [config_json::NAME, GENERATION, TOKENIZER, TOKENIZER_CONFIG, VOCABULARY, MERGES];

/// The files with which `GPT2LMHeadModel.from_pretrained` and `AutoTokenizer.from_pretrained` open a folder with a checkpoint of this shape,
/// as names and contents. Without a tokenizer there are those of the model alone.
///
/// # Errors
/// `serde_json`'s, which values of these types do not give.
pub fn companions(
    config: &ModelConfig,
    tokenizer: Option<&Tokenizer>,
) -> Result<Vec<(&'static str, Vec<u8>)>, serde_json::Error> {
    let end_of_text = tokenizer.and_then(Tokenizer::end_of_text);
    let mut generation = json!({"_from_model_config": true});
    if let Some(end) = end_of_text {
        generation["bos_token_id"] = end.into();
        generation["eos_token_id"] = end.into();
    }
    let json = |value: &Value| {
        let mut text = serde_json::to_vec_pretty(value)?;
        text.push(b'\n');
        Ok::<_, serde_json::Error>(text)
    };
    let mut files =
        vec![(config_json::NAME, json(&config_json::write(config, end_of_text))?), (GENERATION, json(&generation)?)];
    if let Some(tokenizer) = tokenizer {
        files.extend(tokenizer_files::files(tokenizer, config.block_size)?);
    }
    Ok(files)
}

/// Writes [`companions()`] into `folder`, each under its name only when it is whole.
///
/// # Errors
/// [`CheckpointError::Io`].
pub fn save_companions(
    folder: &Path,
    config: &ModelConfig,
    tokenizer: Option<&Tokenizer>,
) -> Result<(), CheckpointError> {
    let files = companions(config, tokenizer)
        .map_err(|error| CheckpointError::Format { path: folder.into(), detail: error.to_string() })?;
    files.iter().try_for_each(|(name, bytes)| write_atomically(&folder.join(name), |file| file.write_all(bytes)))
}
