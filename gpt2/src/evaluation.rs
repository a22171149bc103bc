//! How good a model is: its loss on a text, and how often it finds the right end of a sentence.

mod choices;

use crate::corpus::{CorpusError, TokenStream};
use crate::segments::{ModelError, SegmentedModel, TokenBatch};
use crate::tokenizer::{Tokenizer, TokenizerError};

pub use choices::{ChoiceScore, Choices, ChoicesError, Question};

/// What a model makes of a text.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct TextScore {
    /// Tokens that were predicted: all but the first.
    pub tokens: u64,
    /// Their bytes as text; the end of a document is none.
    pub bytes: u64,
    /// Sum of their losses, in nats.
    pub nats: f64,
}

impl TextScore {
    /// Mean loss, in nats a token.
    pub fn loss(&self) -> f64 {
        self.nats / self.tokens as f64
    }

    /// The exponential of the loss: among how many equally likely tokens the model hesitates.
    pub fn perplexity(&self) -> f64 {
        self.loss().exp()
    }

    /// Bits that the text takes, by the model, over its bytes: comparable between tokenizers.
    pub fn bits_per_byte(&self) -> f64 {
        self.nats / std::f64::consts::LN_2 / self.bytes as f64
    }
}

/// Why a model could not be evaluated.
#[derive(Debug, thiserror::Error)]
pub enum EvaluationError {
    /// The model or the device.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// The tokens could not be read.
    #[error(transparent)]
    Corpus(#[from] CorpusError),
    /// The tokens are not the tokenizer's.
    #[error(transparent)]
    Tokenizer(#[from] TokenizerError),
    /// Less than two tokens.
    #[error("the text has {tokens} token(s), and at least 2 are needed; give a longer text")]
    TooShort {
        /// Tokens that there are.
        tokens: usize,
    },
}

/// The score of `model` on all of `tokens`, cut into sequences as long as the model has positions, one after the other; each begins without a
/// memory of the one before. `rows` of them are computed at once; `watch` hears how many tokens are done.
///
/// # Errors
/// See [`EvaluationError`].
pub fn score_text(
    model: &SegmentedModel,
    tokenizer: &Tokenizer,
    tokens: &TokenStream,
    rows: usize,
    watch: &mut dyn FnMut(u64),
) -> Result<TextScore, EvaluationError> {
    let t = model.config().block_size;
    let Some(predicted) = tokens.len().checked_sub(1).filter(|predicted| *predicted > 0) else {
        return Err(EvaluationError::TooShort { tokens: tokens.len() });
    };
    let lengths = lengths(tokenizer)?;
    let mut score = TextScore::default();
    let mut start = 0;
    while start < predicted {
        let left = predicted - start;
        // The last sequence is what is left.
        let (rows, cols) = if left < t { (1, left) } else { (rows.clamp(1, left / t), t) };
        let mut ids = Vec::with_capacity(rows * cols + 1);
        tokens.read(start, rows * cols + 1, &mut ids)?;
        let batch = TokenBatch { inputs: ids[..rows * cols].to_vec(), targets: ids.split_off(1), rows, cols };
        score.nats += model.loss(&batch)? * batch.targets.len() as f64;
        score.tokens += batch.targets.len() as u64;
        let bytes = batch.targets.iter().filter_map(|id| lengths.get(usize::try_from(*id).ok()?));
        score.bytes += bytes.sum::<u64>();
        start += rows * cols;
        watch(score.tokens);
    }
    Ok(score)
}

/// Bytes of each id as text; 0 for the end of a document.
fn lengths(tokenizer: &Tokenizer) -> Result<Vec<u64>, TokenizerError> {
    let end = tokenizer.end_of_text();
    (0..tokenizer.vocab_size())
        .map(|id| {
            let id = id as u16;
            if end == Some(id) { Ok(0) } else { Ok(tokenizer.decode_bytes(&[id])?.len() as u64) }
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use burn::tensor::Device;

    use super::*;
    use crate::config::Preset;
    use crate::corpus::{Corpus, CorpusSource, LoadOptions};
    use crate::tokenizer::TokenizerKind;

    fn whole(text: &str, kind: TokenizerKind) -> Corpus {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("text.txt");
        std::fs::write(&path, text).unwrap();
        let options = LoadOptions { held_out: false, ..LoadOptions::default() };
        Corpus::load_as(&CorpusSource::Path(path), kind, &options, &mut |_| ()).unwrap()
    }

    #[test]
    fn every_token_but_the_first_counts_once_however_rows_are_grouped() {
        let text = "Zwölf Boxkämpfer jagen Viktor quer über den großen Sylter Deich. ".repeat(5);
        let corpus = whole(&text, TokenizerKind::Bytes);
        assert_eq!((corpus.train().len(), corpus.validation().len()), (text.len(), 0));
        let model = SegmentedModel::new(Preset::Micro.config(256), 3, &Device::flex()).unwrap();
        let score = |rows| {
            let mut heard = Vec::new();
            let score = score_text(&model, corpus.tokenizer(), corpus.train(), rows, &mut |done| heard.push(done));
            assert_eq!(heard.last(), Some(&(text.len() as u64 - 1)));
            score.unwrap()
        };
        let one = score(1);
        assert_eq!((one.tokens, one.bytes), (text.len() as u64 - 1, text.len() as u64 - 1));
        // Sequence by sequence, by the loss that training reports.
        let ids: Vec<i32> = text.bytes().map(i32::from).collect();
        let mut nats = 0.0;
        for start in (0..ids.len() - 1).step_by(32) {
            let cols = 32.min(ids.len() - 1 - start);
            let [inputs, targets] = [0, 1].map(|shift| ids[start + shift..start + shift + cols].to_vec());
            nats += model.loss(&TokenBatch { inputs, targets, rows: 1, cols }).unwrap() * cols as f64;
        }
        assert!((one.nats - nats).abs() < 1e-6 * nats, "{} {nats}", one.nats);
        for rows in [3, 1000] {
            let many = score(rows);
            assert_eq!((many.tokens, many.bytes), (one.tokens, one.bytes));
            assert!((many.nats - one.nats).abs() < 1e-5 * one.nats, "{rows}");
        }
        // A model that knows nothing needs about the 8 bits of a byte.
        assert!((one.bits_per_byte() - 8.0).abs() < 0.2, "{}", one.bits_per_byte());
        assert!((one.perplexity().ln() - one.loss()).abs() < 1e-12);
    }

    #[test]
    fn the_end_of_a_document_has_no_bytes_and_one_token_is_not_enough() {
        let corpus = whole("Hello world<|endoftext|> Hello", TokenizerKind::Gpt2);
        let config = crate::config::ModelConfig { n_layer: 1, n_head: 1, n_embd: 4, ..Preset::Micro.config(50_257) };
        let model = SegmentedModel::new(config, 3, &Device::flex()).unwrap();
        let score = score_text(&model, corpus.tokenizer(), corpus.train(), 8, &mut |_| ()).unwrap();
        // " world", the end, " Hello".
        assert_eq!((score.tokens, score.bytes), (3, 12));
        let corpus = whole("a", TokenizerKind::Bytes);
        let model = SegmentedModel::new(Preset::Micro.config(256), 3, &Device::flex()).unwrap();
        let error = score_text(&model, corpus.tokenizer(), corpus.train(), 8, &mut |_| ()).unwrap_err();
        assert!(matches!(error, EvaluationError::TooShort { tokens: 1 }), "{error}");
    }
}
