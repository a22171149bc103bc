//! `gpt2 eval`.

use std::path::PathBuf;

use clap::{Args, ValueEnum};
use indicatif::{ProgressBar, ProgressStyle};
use serde_json::{Value, json};

use super::loading::LoadProgress;
use super::model::OpenModel;
use super::progress::terminal;
use super::train::Pass;
use super::{CliError, say};
use crate::corpus::{Corpus, CorpusSource, LoadOptions, TokenCache};
use crate::devices::DeviceChoice;
use crate::evaluation::{Choices, score_text};
use crate::tokenizer::TokenizerKind;

#[derive(Clone, Debug, Args)]
pub(super) struct EvalArgs {
    /// The model: a checkpoint that `gpt2 train` saved, or a GPT-2 that Hugging Face's transformers saved as safetensors (the file beside its
    /// config.json, the index of several files, or the folder).
    checkpoint: PathBuf,
    /// A text file, a folder of text files, or token shards (.bin).
    #[arg(long, required_unless_present = "hellaswag")]
    data: Option<PathBuf>,
    /// Part of the text to measure.
    #[arg(long, value_enum, default_value_t)]
    part: Part,
    /// A multiple-choice test in llm.c's layout, such as llm.c's hellaswag_val.bin; the model must have GPT-2's tokenizer.
    #[arg(long)]
    hellaswag: Option<PathBuf>,
    /// Tokenizer of a model whose files do not name one: gpt2, bytes.
    #[arg(long)]
    tokenizer: Option<TokenizerKind>,
    /// Treat <|endoftext|> as ordinary text, as for `gpt2 train`.
    #[arg(long)]
    no_special_tokens: bool,
    /// Encode the text again instead of using the token cache, as for `gpt2 train`.
    #[arg(long)]
    no_token_cache: bool,
    /// Sequences that are computed at once.
    #[arg(long, default_value_t = 8)]
    batch: usize,
    /// Device that computes, as for `gpt2 train`.
    #[arg(long, default_value_t)]
    device: DeviceChoice,
    /// Print one JSON object instead of text.
    #[arg(long)]
    json: bool,
}

/// A part of a text.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
enum Part {
    /// All of it.
    #[default]
    All,
    /// What `gpt2 train` holds out for validation: the last tenth, or the shards named val.
    Validation,
    /// The rest.
    Training,
}

/// More sequences at once than this no machine has room for.
const MAX_BATCH: usize = 1 << 16;

pub(super) fn run(args: &EvalArgs) -> Result<(), CliError> {
    if args.batch == 0 || args.batch > MAX_BATCH {
        return Err(format!("--batch {} must be from 1 to {MAX_BATCH}", args.batch).into());
    }
    // What is wrong with it is said before minutes are spent on the text.
    let test = args.hellaswag.as_deref().map(Choices::read).transpose()?;
    let open = OpenModel::open(&args.checkpoint, args.tokenizer, args.device, Pass::Training { rows: args.batch })?;
    if test.is_some() && open.tokenizer.kind() != TokenizerKind::Gpt2 {
        return Err(format!(
            "--hellaswag needs a model with the tokenizer gpt2, and this one has the tokenizer {}",
            open.tokenizer.kind()
        )
        .into());
    }
    let mut figures = json!({"parameters": open.model.config().parameter_count()});
    if let Some(data) = &args.data {
        figures["text"] = text(args, data.clone(), &open)?;
    }
    if let Some(test) = &test {
        figures["choices"] = choices(args, test, &open)?;
    }
    if args.json {
        say(serde_json::to_string_pretty(&figures)?);
    }
    Ok(())
}

/// Prints the loss on the text, and returns the figures.
fn text(args: &EvalArgs, data: PathBuf, open: &OpenModel) -> Result<Value, CliError> {
    let cache = TokenCache::of_user().filter(|_| !args.no_token_cache);
    let options = LoadOptions { documents: !args.no_special_tokens, cache, held_out: args.part != Part::All };
    let mut loading = LoadProgress::new(!args.json);
    let source = CorpusSource::Path(data);
    let corpus = Corpus::load_with(&source, &open.tokenizer, &options, &mut |now| loading.watch(now))?;
    loading.finish(options.cache.as_ref().map(TokenCache::folder), true);
    let tokens = match args.part {
        Part::All | Part::Training => corpus.train(),
        Part::Validation => corpus.validation(),
    };
    if !args.json {
        say(format_args!("text: {}", corpus.describe()));
    }
    let bar = bar(args, tokens.len() as u64);
    let score = score_text(&open.model, &open.tokenizer, tokens, args.batch, &mut |done| bar.set_position(done))?;
    bar.finish_and_clear();
    if !args.json {
        say(format_args!(
            "loss {:.4} nats per token, perplexity {:.3}, {:.4} bits per byte: {} tokens predicted, {} bytes, sequences of {}",
            score.loss(),
            score.perplexity(),
            score.bits_per_byte(),
            score.tokens,
            score.bytes,
            open.model.config().block_size
        ));
    }
    Ok(json!({
        "sha256": corpus.hash_hex(),
        "tokens": score.tokens,
        "bytes": score.bytes,
        "loss": score.loss(),
        "perplexity": score.perplexity(),
        "bits_per_byte": score.bits_per_byte(),
    }))
}

/// Prints how many questions are answered right, and returns the figures.
fn choices(args: &EvalArgs, test: &Choices, open: &OpenModel) -> Result<Value, CliError> {
    let bar = bar(args, test.questions().len() as u64);
    let score = test.score(&open.model, &mut |now| bar.set_position((now.questions + now.too_long) as u64))?;
    bar.finish_and_clear();
    if score.questions == 0 {
        return Err("--hellaswag: every question is longer than the model's longest sequence".into());
    }
    let share = |right: usize| right as f64 / score.questions as f64;
    if !args.json {
        let too_long = match score.too_long {
            0 => String::new(),
            count => format!("; {count} were too long for the model"),
        };
        say(format_args!(
            "{} questions: {:.2}% right by mean loss per token (acc_norm), {:.2}% right by total loss (acc){too_long}",
            score.questions,
            100.0 * share(score.right_by_mean),
            100.0 * share(score.right_by_sum)
        ));
    }
    Ok(json!({
        "questions": score.questions,
        "too_long": score.too_long,
        "acc_norm": share(score.right_by_mean),
        "acc": share(score.right_by_sum),
    }))
}

/// A progress bar on a terminal.
fn bar(args: &EvalArgs, total: u64) -> ProgressBar {
    let Some(terminal) = terminal().filter(|_| !args.json) else { return ProgressBar::hidden() };
    let bar = ProgressBar::with_draw_target(Some(total), terminal);
    if let Ok(style) = ProgressStyle::with_template("{wide_bar} {pos}/{len}, {elapsed} of {duration}") {
        bar.set_style(style);
    }
    bar
}
