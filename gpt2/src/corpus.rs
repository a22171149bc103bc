//! The corpus: where the text comes from, its tokens, and which part of them is held out.

mod cache;
mod documentation;
mod encode;
mod formats;
mod load;
pub mod prepare;
mod shards;
mod synthetic;
mod text;
mod tokens;

use std::{fmt, path::PathBuf};

use self::{cache::Entry, formats::Format, load::Loader};
use crate::tokenizer::{GPT2_VOCABULARY, Tokenizer, TokenizerError, TokenizerKind};

pub use self::cache::TokenCache;
pub use self::tokens::TokenStream;

/// Seed of the synthetic text that stands in where there is no other.
pub const FALLBACK_SEED: u64 = 1;
/// Bytes of that text.
pub const FALLBACK_BYTES: usize = 1 << 20;

/// Where to take the text from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CorpusSource {
    /// A text file, a token shard (`.bin`), or a folder of either: `.bin` shards where it holds any, else `.txt` and
    /// `.md` files at every depth, in order of path.
    Path(PathBuf),
    /// The Markdown documentation of a fixed list of this program's own dependencies, in Cargo's home folder; where one
    /// of them is not there, `Synthetic` with [`FALLBACK_SEED`] and [`FALLBACK_BYTES`].
    Documentation {
        /// Cargo's home folder (see [`default_cargo_home`](crate::env::default_cargo_home)).
        cargo_home: Option<PathBuf>,
    },
    /// A Markov source of known entropy rate.
    Synthetic {
        /// Decides the source and the text.
        seed: u64,
        /// Length of the text.
        bytes: usize,
    },
}

/// Tokens for training and for validation, and where they came from. The validation part is the last tenth of the text
/// (cut between characters before encoding, as nanoGPT does, and not inside the mark of a document's end) or of the shards, unless a folder has shards named for
/// both parts.
#[derive(Clone, Debug)]
pub struct Corpus {
    tokenizer: Tokenizer,
    train: TokenStream,
    validation: TokenStream,
    origin: Origin,
    bytes: u64,
    hash: [u8; 32],
    documents: Documents,
    /// The other format that a text of bytes begins like.
    looks: Option<&'static str>,
}

/// How a corpus is loaded.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LoadOptions {
    /// Whether documents are told apart, which GPT-2's tokenizer can: [`END_OF_TEXT`](crate::tokenizer::END_OF_TEXT) in a text is then one
    /// id, and stands between the files of a folder. Otherwise it is text like any other, and files are joined by line ends.
    pub documents: bool,
    /// Where the ids of large texts are kept, if anywhere.
    pub cache: Option<TokenCache>,
    /// Whether a part is held out for validation; otherwise everything is the training part, in order, shards named for either included.
    pub held_out: bool,
}

/// How far loading has come, for display.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LoadStatus {
    /// What is being done.
    pub stage: Stage,
    /// Bytes of that which are done.
    pub done: u64,
    /// Bytes of all of it.
    pub total: u64,
}

/// A part of loading that may take long.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stage {
    /// Text is read.
    Reading,
    /// Text is turned into ids.
    Encoding,
    /// The ids of shards are checked and hashed.
    Checking,
    /// Another process does it; this one waits for the result.
    Waiting,
    /// Ids were encoded, and are in the cache now.
    Kept,
    /// Ids were encoded or checked, and the cache cannot keep them, or that they were: the next run does it again. For the reason there is
    /// from the operating system.
    NotKept(std::io::ErrorKind),
    /// The shards that a process which was killed had moved away, to put others in their place, are in their folder again.
    Restored,
}

/// What is known of the documents of a corpus.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Documents {
    /// Its tokenizer, or its shards, say nothing of them.
    Unknown,
    /// They could be told apart, and need not be.
    PlainText,
    /// Texts with something in them between two ends of documents.
    Number(u64),
}

/// Where the tokens came from.
#[derive(Clone, Debug, PartialEq)]
pub enum Origin {
    /// Text files.
    Text {
        /// The path that was given.
        path: PathBuf,
        /// Number of files.
        files: usize,
    },
    /// Token shards.
    Shards {
        /// The path that was given.
        path: PathBuf,
        /// Number of shards.
        files: usize,
    },
    /// The documentation of the dependencies.
    Documentation {
        /// Number of crates.
        crates: usize,
        /// Number of files.
        files: usize,
    },
    /// Generated text.
    Synthetic {
        /// Seed of the source.
        seed: u64,
        /// Entropy rate in nats per byte, which is nats per token under the `bytes` tokenizer.
        entropy_rate: f64,
        /// Why no real text was used, where it was wanted.
        instead: Option<String>,
    },
}

/// Why there is no corpus.
#[derive(Debug, thiserror::Error)]
pub enum CorpusError {
    /// Nothing at the path.
    #[error("{} does not exist; give a text file, a token shard (.bin) or a folder of them", path.display())]
    Missing {
        /// The path.
        path: PathBuf,
    },
    /// The operating system refused.
    #[error("cannot read {}: {source}; check its permissions, and that the disk is mounted", path.display())]
    Read {
        /// The file or folder.
        path: PathBuf,
        /// Its answer.
        source: std::io::Error,
    },
    /// A pipe, a device or the like.
    #[error("{} is not a regular file; copy its contents to a regular file first", path.display())]
    NotAFile {
        /// The path.
        path: PathBuf,
    },
    /// A folder without anything to read.
    #[error("{} holds no .txt, .md or .bin file; give a folder that holds some, or a file", path.display())]
    NothingInFolder {
        /// The folder.
        path: PathBuf,
    },
    /// No text or no tokens.
    #[error("{} is empty; give a file with text or tokens", path.display())]
    Empty {
        /// The file or folder.
        path: PathBuf,
    },
    /// Generated text of no length.
    #[error("a synthetic text cannot have 0 bytes; give at least a few thousand")]
    EmptySynthetic,
    /// The tokenizer cannot take the text.
    #[error("cannot encode {origin}: {source}")]
    Encode {
        /// The file, folder or other origin of the text.
        origin: String,
        /// Why.
        source: TokenizerError,
    },
    /// Shards hold ids of GPT-2 and no other tokenizer.
    #[error(
        "{} is read as GPT-2 token ids, which the tokenizer `{kind}` cannot use; use the tokenizer `gpt2`, or give the text itself",
        path.display()
    )]
    ShardTokenizer {
        /// The shard or folder.
        path: PathBuf,
        /// The tokenizer asked for.
        kind: TokenizerKind,
    },
    /// Shards beside nanoGPT's table of another vocabulary.
    #[error(
        "the shards in {} have a meta.pkl beside them, so their ids are not GPT-2's; give the text itself (input.txt) with the tokenizer \
         `chars`",
        path.display()
    )]
    OtherVocabulary {
        /// The folder.
        path: PathBuf,
    },
    /// Something else altogether, by what it begins with.
    #[error("{} looks like {looks}, not like {wanted}; {advice}", path.display())]
    OtherFormat {
        /// The file.
        path: PathBuf,
        /// What it looks like.
        looks: &'static str,
        /// What it was taken for.
        wanted: &'static str,
        /// What to do.
        advice: &'static str,
    },
    /// Neither layout.
    #[error(
        "{} starts with {found}: it is neither a shard of llm.c with GPT-2 ids (magic number 20240520) nor a file of 16-bit GPT-2 ids \
         without a header, as nanoGPT writes them; write it again with the GPT-2 tokenizer",
        path.display()
    )]
    BadMagic {
        /// The shard.
        path: PathBuf,
        /// Its first integer.
        found: u32,
    },
    /// A layout of llm.c that is not read here.
    #[error(
        "{} has version {found} of llm.c's layout; only version 1 (16-bit GPT-2 ids) can be read, so write it again with that version",
        path.display()
    )]
    BadVersion {
        /// The shard.
        path: PathBuf,
        /// Its version.
        found: u32,
    },
    /// A shard cut short, or longer than it says.
    #[error(
        "{} has {found} bytes where its layout needs {expected}; fetch or write it again (is it still being written?)",
        path.display()
    )]
    ShardLength {
        /// The shard.
        path: PathBuf,
        /// Bytes that it should have.
        expected: u64,
        /// Bytes that it has.
        found: u64,
    },
    /// A token that no model of this vocabulary can take.
    #[error(
        "{}: token {position} has id {id}, outside the vocabulary of {vocab}; the shard is damaged or was written \
         with another tokenizer, so write it again with GPT-2's",
        path.display()
    )]
    OutOfVocabulary {
        /// The shard.
        path: PathBuf,
        /// Place of the token in it.
        position: usize,
        /// The id.
        id: u16,
        /// Number of ids.
        vocab: usize,
    },
    /// A read past the end of a stream.
    #[error("{count} tokens from number {start} on go beyond the end of the stream of {len} tokens")]
    PastTheEnd {
        /// First token asked for.
        start: usize,
        /// Number of tokens asked for.
        count: usize,
        /// Tokens that there are.
        len: usize,
    },
}

impl CorpusSource {
    /// The source for an optional path: that path, else the documentation of the dependencies in `cargo_home`.
    #[must_use]
    pub fn from_path(path: Option<PathBuf>, cargo_home: Option<PathBuf>) -> Self {
        path.map_or(Self::Documentation { cargo_home }, Self::Path)
    }
}

impl Corpus {
    /// Reads `source` with a tokenizer of `kind`; the characters of a `chars` tokenizer are those of the whole text.
    ///
    /// # Errors
    /// See [`CorpusError`].
    pub fn load(source: &CorpusSource, kind: TokenizerKind) -> Result<Self, CorpusError> {
        Self::load_as(source, kind, &LoadOptions::default(), &mut |_| ())
    }

    /// As [`load`](Corpus::load), with options; `watch` hears how far it has come, from the calling thread.
    ///
    /// # Errors
    /// See [`CorpusError`].
    pub fn load_as(
        source: &CorpusSource,
        kind: TokenizerKind,
        options: &LoadOptions,
        watch: &mut dyn FnMut(LoadStatus),
    ) -> Result<Self, CorpusError> {
        Loader { kind, given: None, options, watch }.load(source)
    }

    /// As [`load_as`](Corpus::load_as), with the tokenizer of a checkpoint.
    ///
    /// # Errors
    /// See [`CorpusError`]; a character that the checkpoint's `chars` tokenizer does not know is an `Encode` error.
    pub fn load_with(
        source: &CorpusSource,
        tokenizer: &Tokenizer,
        options: &LoadOptions,
        watch: &mut dyn FnMut(LoadStatus),
    ) -> Result<Self, CorpusError> {
        let kind = tokenizer.kind();
        // The others are all the same, and what is kept of their texts is for all.
        let given = (kind == TokenizerKind::Chars).then_some(tokenizer);
        Loader { kind, given, options, watch }.load(source)
    }

    /// What encodes the text.
    #[must_use]
    pub fn tokenizer(&self) -> &Tokenizer {
        &self.tokenizer
    }

    /// Number of token ids.
    #[must_use]
    pub fn vocab_size(&self) -> usize {
        self.tokenizer.vocab_size()
    }

    /// The tokens to train on.
    #[must_use]
    pub fn train(&self) -> &TokenStream {
        &self.train
    }

    /// The held-out tokens.
    #[must_use]
    pub fn validation(&self) -> &TokenStream {
        &self.validation
    }

    /// Where the tokens came from.
    #[must_use]
    pub fn origin(&self) -> &Origin {
        &self.origin
    }

    /// Bytes of the text, with what was put between its files, or of the tokens of the shards.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// The lowest expected loss that a model of this text can have, in nats per token, where it is known: for synthetic
    /// text under the `bytes` tokenizer.
    #[must_use]
    pub fn entropy_rate(&self) -> Option<f64> {
        match self.origin {
            Origin::Synthetic { entropy_rate, .. } if self.tokenizer.kind() == TokenizerKind::Bytes => {
                Some(entropy_rate)
            }
            _ => None,
        }
    }

    /// SHA-256 over a version label, the tokenizer's kind, the vocabulary size and the lengths of both parts (64-bit
    /// little-endian), then the ids of the training and of the validation part (16-bit little-endian). Ranks with the
    /// same hash train on the same tokens.
    #[must_use]
    pub fn hash(&self) -> [u8; 32] {
        self.hash
    }

    /// [`hash`](Corpus::hash) in 64 hexadecimal digits.
    #[must_use]
    pub fn hash_hex(&self) -> String {
        comm_core::hex(&self.hash)
    }

    /// Number of documents of a text for GPT-2, unless they are not told apart; those without anything but white space do not count.
    #[must_use]
    pub fn documents(&self) -> Option<u64> {
        match self.documents {
            Documents::Number(number) => Some(number),
            Documents::Unknown | Documents::PlainText => None,
        }
    }

    /// Whether a document may begin after GPT-2's mark of an end: in a text of two documents and more, and in shards, which are not searched
    /// for marks but usually written with them.
    #[must_use]
    pub fn has_several_documents(&self) -> bool {
        matches!(self.origin, Origin::Shards { .. }) || self.documents().is_some_and(|number| number > 1)
    }

    /// One line that says which source was used, its bytes, tokens and hash, and the entropy rate of synthetic text.
    #[must_use]
    pub fn describe(&self) -> String {
        let (train, validation) = (self.train.len(), self.validation.len());
        let looks =
            self.looks.map_or(String::new(), |looks| format!(" (taken as text, although it looks like {looks})"));
        let documents = match self.documents {
            Documents::Unknown => String::new(),
            Documents::PlainText => "<|endoftext|> as plain text, ".into(),
            Documents::Number(1) => "1 document, ".into(),
            Documents::Number(number) => format!("{number} documents, "),
        };
        format!(
            "{}{looks}: {} bytes, {documents}{} {} tokens ({train} training, {validation} validation), vocabulary {}, sha256 {}",
            self.origin,
            self.bytes,
            train + validation,
            self.tokenizer.kind(),
            self.vocab_size(),
            self.hash_hex(),
        )
    }

    fn new(entry: Entry, origin: Origin, documents: Documents, looks: Option<&'static str>) -> Self {
        let Entry { tokenizer, train, validation, hash, bytes, .. } = entry;
        Self { tokenizer, train, validation, origin, bytes, hash, documents, looks }
    }
}

impl Default for LoadOptions {
    /// Documents are told apart, nothing is kept, and a part is held out.
    fn default() -> Self {
        Self { documents: true, cache: None, held_out: true }
    }
}

impl CorpusError {
    fn other_format(path: PathBuf, format: Format, wanted: &'static str) -> Self {
        Self::OtherFormat { path, looks: format.name, wanted, advice: format.advice }
    }
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Text { path, files: 1 } => write!(f, "text of {}", path.display()),
            Self::Text { path, files } => write!(f, "text of {files} files in {}", path.display()),
            Self::Shards { path, files: 1 } => write!(f, "token shard {}", path.display()),
            Self::Shards { path, files } => write!(f, "{files} token shards in {}", path.display()),
            Self::Documentation { crates, files } => {
                write!(f, "documentation of {crates} dependencies ({files} Markdown files)")
            }
            Self::Synthetic { seed, entropy_rate, instead } => {
                write!(
                    f,
                    "synthetic Markov text (seed {seed}, entropy rate {entropy_rate:.4} nats per token with the bytes tokenizer"
                )?;
                match instead {
                    Some(why) => write!(f, "; no documentation was found: {why})"),
                    None => f.write_str(")"),
                }
            }
        }
    }
}

// A vocabulary of 16-bit ids is what every stream above relies on.
const _: () = assert!(GPT2_VOCABULARY <= 1 << 16);

#[cfg(test)]
mod tests;
