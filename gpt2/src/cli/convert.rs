//! `gpt2 convert`.

use std::path::PathBuf;

use clap::Args;

use super::model::tokenizer_of;
use super::{CliError, folder, say};
use crate::checkpoint::{Checkpoint, StoredWeights, save_companions};
use crate::tokenizer::TokenizerKind;

#[derive(Clone, Debug, Args)]
pub(super) struct ConvertArgs {
    /// The model: a checkpoint that `gpt2 train` saved, or a GPT-2 that Hugging Face's transformers saved as safetensors (the file beside its
    /// config.json, the index of several files, or the folder).
    input: PathBuf,
    /// Folder for the weights in f32 (model.safetensors), config.json, generation_config.json and the tokenizer's files.
    output: PathBuf,
    /// Tokenizer of a model whose files do not name one: gpt2, bytes.
    #[arg(long)]
    tokenizer: Option<TokenizerKind>,
    /// Replace a model in the folder.
    #[arg(long)]
    overwrite: bool,
}

pub(super) fn run(args: &ConvertArgs) -> Result<(), CliError> {
    let stored = StoredWeights::open(&args.input)?;
    let tokenizer = tokenizer_of(&stored, args.tokenizer)?;
    if !args.overwrite {
        folder::refuse_model(&args.output)?;
    }
    folder::make_writable(&args.output, "")?;
    let checkpoint = Checkpoint { tokenizer: serde_json::to_value(&tokenizer)?, ..stored.load()? };
    let path = args.output.join(folder::CHECKPOINT);
    checkpoint.save(&path)?;
    save_companions(&args.output, &checkpoint.config, Some(&tokenizer))?;
    say(format_args!(
        "{}: {:.2} M parameters, tokenizer {}",
        path.display(),
        checkpoint.config.parameter_count() as f64 / 1e6,
        tokenizer.kind()
    ));
    say(format_args!("weights: sha256 {}", checkpoint.weights_hash()));
    Ok(())
}
