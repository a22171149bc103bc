//! `gpt2 data`.

use std::path::PathBuf;

use clap::Args;

use super::loading::LoadProgress;
use super::{CliError, say};
use crate::corpus::prepare::{HeldOut, PrepareOptions, prepare};

#[derive(Clone, Debug, Args)]
pub(super) struct DataArgs {
    /// Files or folders; their documents follow one another in this order. A text file is one document. JSON lines (.jsonl, .ndjson, .json) have a
    /// document in each object, Parquet files (.parquet, in a build with the feature `parquet`) in each row. A folder is searched at every depth for
    /// Parquet files; if it has none, for JSON lines; if it has none of those, for .txt and .md files.
    #[arg(required = true, value_name = "INPUT")]
    inputs: Vec<PathBuf>,
    /// Folder for the shards, in llm.c's layout with GPT-2's token ids: train_000000.bin, train_000001.bin, …, and val_000000.bin. They are written
    /// to .NAME.partial beside this folder, which takes the folder's name when all of them are complete.
    #[arg(long)]
    out: PathBuf,
    /// Name of the field that has the text, in each JSON object or Parquet row.
    #[arg(long, default_value = "text")]
    field: String,
    /// Most tokens of a shard; a token takes 2 bytes.
    #[arg(long, default_value_t = 100_000_000, value_parser = clap::value_parser!(u32).range(1..))]
    shard_tokens: u32,
    /// How much of the end of the text is held out for validation: a fraction of its characters, below 1, or a number of tokens, which are then held
    /// in memory; 0 for nothing.
    #[arg(long, value_name = "FRACTION|TOKENS", default_value_t = HeldOut::Share(0.1))]
    validation: HeldOut,
    /// Put line ends between documents instead of <|endoftext|>, and treat <|endoftext|> in a text file as ordinary text.
    #[arg(long)]
    no_special_tokens: bool,
    /// Replace shards that are in the folder.
    #[arg(long)]
    overwrite: bool,
}

pub(super) fn run(args: &DataArgs) -> Result<(), CliError> {
    let options = PrepareOptions {
        field: args.field.clone(),
        documents: !args.no_special_tokens,
        shard_tokens: args.shard_tokens,
        held_out: args.validation,
        overwrite: args.overwrite,
    };
    let mut loading = LoadProgress::new(true);
    let prepared = prepare(&args.inputs, &args.out, &options, &mut |now| loading.watch(now))?;
    loading.finish(None, false);
    let documents = match prepared.documents {
        0 => String::new(),
        1 => "1 document, ".into(),
        number => format!("{number} documents, "),
    };
    say(format_args!(
        "{}: {} bytes, {documents}{} gpt2 tokens ({} training, {} validation) in {} shard(s)",
        args.out.display(),
        prepared.bytes,
        prepared.train_tokens + prepared.validation_tokens,
        prepared.train_tokens,
        prepared.validation_tokens,
        prepared.shards
    ));
    Ok(())
}
