//! `gpt2 data`.

use std::path::PathBuf;

use clap::Args;

use super::loading::LoadProgress;
use super::{CliError, say};
use crate::corpus::prepare::{HeldOut, PrepareOptions, prepare};

#[derive(Clone, Debug, Args)]
pub(super) struct DataArgs {
    /// Files or folders, whose documents follow one another in this order. A file is a document, or has one in each object of JSON lines (.jsonl,
    /// .ndjson, .json) or row of Parquet (.parquet, in a build with that feature). Of a folder, Parquet files at every depth where it holds
    /// any, else JSON lines, else .txt and .md files.
    #[arg(required = true, value_name = "INPUT")]
    inputs: Vec<PathBuf>,
    /// Folder for the shards: train_000000.bin and so on, and val_000000.bin, in llm.c's layout with GPT-2's ids. It appears when all of them
    /// are written; meanwhile they are in .NAME.partial beside it.
    #[arg(long)]
    out: PathBuf,
    /// Name of the text in each object of JSON or row of Parquet.
    #[arg(long, default_value = "text")]
    field: String,
    /// Most tokens of a shard; one takes 2 bytes.
    #[arg(long, default_value_t = 100_000_000, value_parser = clap::value_parser!(u32).range(1..))]
    shard_tokens: u32,
    /// What is held out at the end for validation: a share of the characters below 1, or a number of tokens, which then are kept in memory; 0
    /// for nothing.
    #[arg(long, value_name = "FRACTION|TOKENS", default_value_t = HeldOut::Share(0.1))]
    validation: HeldOut,
    /// Put line ends between documents instead of <|endoftext|>, and take that for text where a text file has it.
    #[arg(long)]
    no_special_tokens: bool,
    /// Replace the shards in the folder.
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
