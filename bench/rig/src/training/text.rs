//! The text that all cells of a sweep train on.

use std::path::PathBuf;

use gpt2::tokenizer::TokenizerKind;

use crate::BenchError;
use crate::rank::load_text;

/// Where the text is, and what the plan's cells have to know about it.
#[derive(Clone, Debug)]
pub struct TextSource {
    /// The path given with `--data`; `None` for the documentation of this program's own dependencies.
    pub source: Option<PathBuf>,
    pub tokenizer: TokenizerKind,
    pub vocabulary: usize,
    /// One line about it.
    pub description: String,
}

impl TextSource {
    /// Bytes of the text at `source`.
    ///
    /// # Errors
    /// It cannot be read, or is too short.
    pub fn bytes(source: Option<PathBuf>) -> Result<Self, BenchError> {
        let tokenizer = TokenizerKind::Bytes;
        let corpus = load_text(source.as_deref(), tokenizer)?;
        Ok(TextSource { source, tokenizer, vocabulary: corpus.vocab_size(), description: corpus.describe() })
    }
}
