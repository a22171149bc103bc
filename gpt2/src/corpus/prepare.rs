//! Documents of any size to token shards, in llm.c's layout: what `gpt2 data` does.
//!
//! The inputs are read twice, a block at a time. The first pass finds what is wrong with them, and how long the text is, by which the
//! held-out part is measured; the second encodes it on all cores and writes shards. Neither keeps more than a few blocks. The ids are those
//! that [`Corpus::load`](super::Corpus::load) makes of the same text.

mod assemble;
mod documents;
#[cfg(feature = "parquet")]
mod parquet;
mod pipeline;
#[cfg(test)]
mod tests;
mod write;

use std::fs;
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::thread;

use super::{CorpusError, LoadStatus, Stage, text};
use crate::tokenizer::{END_OF_TEXT, Tokenizer};
use assemble::Assembler;
use documents::Reader;
use pipeline::Pipeline;
use write::{Output, Shards};

/// How documents are made into shards.
#[derive(Clone, Debug, PartialEq)]
pub struct PrepareOptions {
    /// The name of the text in an object of JSON or a column of Parquet.
    pub field: String,
    /// Whether [`END_OF_TEXT`] stands between documents, and is one id where a text file has it. Otherwise documents are joined by line ends.
    pub documents: bool,
    /// Most tokens of a shard.
    pub shard_tokens: u32,
    /// What is held out for validation.
    pub held_out: HeldOut,
    /// Whether shards that are there already are replaced.
    pub overwrite: bool,
}

/// The end of the text that is held out; written as a share below 1, or a number of tokens.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum HeldOut {
    /// So much of the characters, as `gpt2 train` holds out a tenth of a text.
    Share(f64),
    /// The last so many tokens.
    Tokens(u32),
}

/// What was written.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Prepared {
    /// Tokens of the training part.
    pub train_tokens: u64,
    /// Tokens of the validation part.
    pub validation_tokens: u64,
    /// Shards of both.
    pub shards: u32,
    /// Documents that are more than white space; 0 where they are not told apart.
    pub documents: u64,
    /// Bytes of the text, with what was put between documents.
    pub bytes: u64,
}

/// Why there are no shards.
#[derive(Debug, thiserror::Error)]
pub enum PrepareError {
    /// A file that cannot be found, read, or is of another format.
    #[error(transparent)]
    Corpus(#[from] CorpusError),
    /// Nothing at the path.
    #[error("{} does not exist; give a file of text, JSON lines or Parquet, or a folder of them", path.display())]
    Missing {
        /// The path.
        path: PathBuf,
    },
    /// A folder without anything to read.
    #[error("{} holds no .parquet, .jsonl, .ndjson, .txt or .md file; give a folder that holds some, or a file", path.display())]
    NothingInFolder {
        /// The folder.
        path: PathBuf,
    },
    /// A token shard among the inputs.
    #[error("{} is already a token shard; give the text instead, or give the shard to `gpt2 train --data`", path.display())]
    Shard {
        /// The file.
        path: PathBuf,
    },
    /// Parquet in a program without it.
    #[error("{} is a Parquet file, which this build cannot read; build with `--features parquet`, or convert it to JSON lines", path.display())]
    NoParquet {
        /// The file.
        path: PathBuf,
    },
    /// A line that is not as it has to be.
    #[error("{}, {unit} {number}: {what}", path.display())]
    Line {
        /// The file.
        path: PathBuf,
        /// `line`, or `row` of Parquet.
        unit: &'static str,
        /// Which, from 1.
        number: u64,
        /// What is wrong, and what to do.
        what: String,
    },
    /// A whole file that is not as it has to be.
    #[error("{}: {what}", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// What is wrong, and what to do.
        what: String,
    },
    /// Less text than is to be held out, or nothing left to hold out.
    #[error("{what} of {tokens} tokens in all; give more text or another --validation")]
    TooShort {
        /// Which part is empty.
        what: &'static str,
        /// Tokens that there are.
        tokens: u64,
    },
    /// No text at all.
    #[error("there is no text in {}; give files that contain text", listed(inputs))]
    Empty {
        /// The files.
        inputs: Vec<PathBuf>,
    },
    /// The inputs were different in the second pass.
    #[error("the inputs changed while they were read; wait until they are complete, and start again")]
    Changed,
    /// A shard that cannot be written.
    #[error("cannot write {}: {source}; what was written has been removed. Check the permissions and the free space of the disk", path.display())]
    Write {
        /// The file or folder.
        path: PathBuf,
        /// The operating system's answer.
        source: io::Error,
    },
    /// The folder has something in it.
    #[error("{}: it holds {found}; {advice}", path.display())]
    Occupied {
        /// The folder.
        path: PathBuf,
        /// A name in it.
        found: String,
        /// What to do.
        advice: &'static str,
    },
    /// Another process writes there.
    #[error("{}: another process is writing to it; wait until that has ended, or give another folder", path.display())]
    Busy {
        /// The folder.
        path: PathBuf,
    },
    /// More shards than names.
    #[error("more than {MAX_SHARDS} shards; give a larger --shard-tokens")]
    TooManyShards,
    /// A thread that has gone.
    #[error("an encoding thread ended too early")]
    Thread,
}

/// The paths, or the first of many.
fn listed(paths: &[PathBuf]) -> String {
    const MOST: usize = 5;
    let names: Vec<String> = paths.iter().take(MOST).map(|path| path.display().to_string()).collect();
    let others = paths.len().saturating_sub(MOST);
    let rest = if others > 0 { format!(" and {others} others") } else { String::new() };
    format!("{}{rest}", names.join(", "))
}

/// Most shards of a part: their names have six digits.
const MAX_SHARDS: u32 = 1_000_000;

/// Longest line, document or text without a place where it could be cut, in bytes.
const LONGEST: usize = 64 << 20;

/// Bytes of text that a thread takes at a time.
const CHUNK: usize = 256 << 10;

/// How a file is read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Format {
    Text,
    JsonLines,
    Parquet,
}

/// Part of the text, in order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Piece<'a> {
    Text(&'a str),
    /// The end of a document.
    Mark,
}

/// A part of the result.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Part {
    Train,
    Validation,
}

/// Writes the documents of `inputs` to the folder `out` as shards that `--data` reads: `train_000000.bin` and so on, and `val_000000.bin`. The
/// folder appears under its name when all of it is there. Each input is a file or a folder of files: by its extension Parquet, JSON lines
/// (`.jsonl`, `.ndjson`, `.json`) or text; of a folder, Parquet files at every depth where it holds any, else JSON lines, else `.txt` and
/// `.md`. `watch` hears how far it has come, from the calling thread.
///
/// # Errors
/// See [`PrepareError`]; nothing is left at `out` that was not there before.
pub fn prepare(
    inputs: &[PathBuf],
    out: &Path,
    options: &PrepareOptions,
    watch: &mut dyn FnMut(LoadStatus),
) -> Result<Prepared, PrepareError> {
    let threads = thread::available_parallelism().map_or(1, usize::from);
    prepare_by(inputs, out, options, (threads, CHUNK), watch)
}

fn prepare_by(
    inputs: &[PathBuf],
    out: &Path,
    options: &PrepareOptions,
    (threads, chunk): (usize, usize),
    watch: &mut dyn FnMut(LoadStatus),
) -> Result<Prepared, PrepareError> {
    let files = find_all(inputs)?;
    let mut restored = || watch(LoadStatus { stage: Stage::Restored, done: 0, total: 0 });
    let output = Output::begin(out, options.overwrite, &mut restored)?;
    let reader = Reader { files: &files, field: &options.field, documents: options.documents };

    let mut totals = Totals::default();
    let size = files.iter().filter_map(|(path, _)| path.metadata().ok()).map(|metadata| metadata.len()).sum();
    reader.read(
        &mut |piece| {
            totals.add(piece);
            Ok(())
        },
        &mut |done| watch(LoadStatus { stage: Stage::Reading, done, total: size }),
    )?;
    totals.end_document();
    if totals.bytes == 0 {
        return Err(PrepareError::Empty { inputs: files.into_iter().map(|(path, _)| path).collect() });
    }

    let held_from = options.held_out.begins_at(totals.characters);
    let delay = options.held_out.tokens();
    let tokenizer = Tokenizer::gpt2();
    let mut shards = Shards::new(output.folder(), options.shard_tokens, delay);
    let mut done = 0;
    let mut encoded = |part: Part, ids: &[u16], bytes: usize| {
        done += bytes as u64;
        watch(LoadStatus { stage: Stage::Encoding, done, total: totals.bytes });
        shards.write(part, ids)
    };
    let again = thread::scope(|scope| {
        let pipeline = Pipeline::start(scope, &tokenizer, threads, &mut encoded);
        let mut assembler = Assembler::new(chunk, held_from, pipeline);
        reader.read(&mut |piece| assembler.piece(piece), &mut |_| ())?;
        assembler.finish()
    })?;
    if again != totals.characters {
        return Err(PrepareError::Changed);
    }
    let (train_tokens, validation_tokens, count) = shards.finish()?;
    check_parts(options.held_out, train_tokens, validation_tokens)?;
    output.publish()?;
    let documents = if options.documents { totals.documents } else { 0 };
    Ok(Prepared { train_tokens, validation_tokens, shards: count, documents, bytes: totals.bytes })
}

fn check_parts(held_out: HeldOut, train: u64, validation: u64) -> Result<(), PrepareError> {
    let tokens = train + validation;
    if train == 0 {
        return Err(PrepareError::TooShort { what: "the training part would be empty", tokens });
    }
    if validation == 0 && held_out != HeldOut::NOTHING {
        return Err(PrepareError::TooShort { what: "the validation part would be empty", tokens });
    }
    Ok(())
}

/// What the first pass counts.
#[derive(Debug, Default)]
struct Totals {
    characters: u64,
    bytes: u64,
    documents: u64,
    /// Whether the document has something in it so far.
    has_text: bool,
}

impl Totals {
    fn add(&mut self, piece: Piece<'_>) {
        match piece {
            Piece::Text(text) => {
                self.characters += characters(text);
                self.bytes += text.len() as u64;
                self.has_text |= !text.trim_ascii().is_empty();
            }
            Piece::Mark => {
                self.characters += END_OF_TEXT.len() as u64;
                self.bytes += END_OF_TEXT.len() as u64;
                self.end_document();
            }
        }
    }

    fn end_document(&mut self) {
        self.documents += u64::from(std::mem::take(&mut self.has_text));
    }
}

fn characters(text: &str) -> u64 {
    text.chars().count() as u64
}

impl HeldOut {
    /// No part.
    pub const NOTHING: Self = Self::Tokens(0);

    /// The character at which the held-out part begins, if it is measured so.
    fn begins_at(self, characters: u64) -> Option<u64> {
        match self {
            // As many as `gpt2 train` takes, for a tenth.
            Self::Share(share) if share > 0.0 => Some((characters as f64 * (1.0 - share)) as u64),
            Self::Share(_) | Self::Tokens(_) => None,
        }
    }

    /// Tokens at the end that are held out, if it is measured so.
    fn tokens(self) -> usize {
        match self {
            Self::Tokens(tokens) => tokens as usize,
            Self::Share(_) => 0,
        }
    }
}

impl FromStr for HeldOut {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if let Ok(tokens) = text.parse() {
            return Ok(Self::Tokens(tokens));
        }
        match text.parse::<f64>() {
            Ok(0.0) => Ok(Self::NOTHING),
            Ok(share) if share > 0.0 && share < 1.0 => Ok(Self::Share(share)),
            _ => Err(format!(
                "{text} is neither a fraction below 1, such as 0.1, nor a number of tokens up to {}",
                u32::MAX
            )),
        }
    }
}

impl std::fmt::Display for HeldOut {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Share(share) => share.fmt(f),
            Self::Tokens(tokens) => tokens.fmt(f),
        }
    }
}

/// All files of the inputs, in order, with how they are read.
fn find_all(inputs: &[PathBuf]) -> Result<Vec<(PathBuf, Format)>, PrepareError> {
    let mut files = Vec::new();
    for path in inputs {
        let metadata = fs::metadata(path).map_err(|source| match source.kind() {
            ErrorKind::NotFound => PrepareError::Missing { path: path.clone() },
            _ => CorpusError::Read { path: path.clone(), source }.into(),
        })?;
        if metadata.is_dir() {
            files.extend(find_below(path)?);
        } else {
            let format = format_of(path)?;
            text::require_file(path)?;
            files.push((path.clone(), format));
        }
    }
    if cfg!(not(feature = "parquet"))
        && let Some((path, _)) = files.iter().find(|(_, format)| *format == Format::Parquet)
    {
        return Err(PrepareError::NoParquet { path: path.clone() });
    }
    Ok(files)
}

fn find_below(folder: &Path) -> Result<Vec<(PathBuf, Format)>, PrepareError> {
    let kinds: [(&[&str], Format); 3] =
        [(&["parquet"], Format::Parquet), (&["jsonl", "ndjson"], Format::JsonLines), (&["txt", "md"], Format::Text)];
    for (extensions, format) in kinds {
        let files = text::files_below(folder, extensions)?;
        if !files.is_empty() {
            return Ok(files.into_iter().map(|path| (path, format)).collect());
        }
    }
    Err(PrepareError::NothingInFolder { path: folder.to_owned() })
}

fn format_of(path: &Path) -> Result<Format, PrepareError> {
    if text::has_extension(path, &["bin"]) {
        return Err(PrepareError::Shard { path: path.to_owned() });
    }
    Ok(if text::has_extension(path, &["parquet"]) {
        Format::Parquet
    } else if text::has_extension(path, &["jsonl", "ndjson", "json"]) {
        Format::JsonLines
    } else {
        Format::Text
    })
}
