//! Multiple-choice tests such as HellaSwag, in llm.c's layout: 256 little-endian 32-bit integers (magic 20240522, version 1, number of
//! questions, bytes of the longest), then each question as 16-bit integers: 65535, its length in bytes, its index, the right choice, the number
//! of choices, the context and each choice, both as a count and so many GPT-2 ids.

use std::fs;
use std::path::{Path, PathBuf};

use super::EvaluationError;
use crate::segments::SegmentedModel;
use crate::tokenizer::GPT2_VOCABULARY;

const MAGIC: u32 = 20_240_522;
const VERSION: u32 = 1;
/// Bytes of the header.
const HEADER: usize = 256 * 4;
/// What each question begins with.
const START: u16 = u16::MAX;

/// The questions of a test.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Choices(Vec<Question>);

/// A question: which of several texts goes on from another.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Question {
    /// GPT-2 ids of the text before, at least one.
    pub context: Vec<u16>,
    /// Those of each choice, at least one.
    pub choices: Vec<Vec<u16>>,
    /// Which choice is right.
    pub right: usize,
}

/// How a model did in a test.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ChoiceScore {
    /// Questions answered.
    pub questions: usize,
    /// Right answers, where the answer is the choice with the smallest mean loss a token.
    pub right_by_mean: usize,
    /// Right answers, where it is the one with the smallest loss in all.
    pub right_by_sum: usize,
    /// Questions that were left out, because they have more tokens than the model has positions.
    pub too_long: usize,
}

/// Why there is no test.
#[derive(Debug, thiserror::Error)]
pub enum ChoicesError {
    /// The operating system refused.
    #[error("cannot read {}: {source}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// Its answer.
        source: std::io::Error,
    },
    /// Another layout, or a file that was cut.
    #[error("{}: {detail}; give a test in llm.c's layout, such as its hellaswag_val.bin", path.display())]
    Layout {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        detail: String,
    },
}

impl Choices {
    /// Reads the test at `path`.
    ///
    /// # Errors
    /// See [`ChoicesError`].
    pub fn read(path: &Path) -> Result<Self, ChoicesError> {
        let cannot_read = |source| ChoicesError::Read { path: path.into(), source };
        let layout = |detail: String| ChoicesError::Layout { path: path.into(), detail };
        if !fs::metadata(path).map_err(cannot_read)?.is_file() {
            return Err(layout("it is not a regular file".into()));
        }
        Self::of_bytes(&fs::read(path).map_err(cannot_read)?).map_err(layout)
    }

    /// The test in the contents of a file.
    ///
    /// # Errors
    /// What is wrong with it.
    pub fn of_bytes(bytes: &[u8]) -> Result<Self, String> {
        let (header, stream) = bytes.split_at_checked(HEADER).ok_or("it is shorter than a header")?;
        let integer = |index: usize| {
            header.get(4 * index..).and_then(|at| at.first_chunk()).map_or(0, |four| u32::from_le_bytes(*four))
        };
        if (integer(0), integer(1)) != (MAGIC, VERSION) {
            return Err(format!("it begins with {} and {} instead of {MAGIC} and {VERSION}", integer(0), integer(1)));
        }
        let (pairs, odd) = stream.as_chunks::<2>();
        if !odd.is_empty() {
            return Err("its length is odd".into());
        }
        let mut words = Words(pairs);
        // Each has five words and more; what the header says is not believed before that.
        let mut questions = Vec::with_capacity((integer(2) as usize).min(pairs.len() / 8));
        for index in 0..integer(2) {
            questions.push(words.question().map_err(|what| format!("question {index} {what}"))?);
        }
        if questions.is_empty() {
            return Err("it has no questions".into());
        }
        if !words.0.is_empty() {
            return Err(format!("there is more data after its {} questions", questions.len()));
        }
        Ok(Self(questions))
    }

    /// The questions, at least one.
    pub fn questions(&self) -> &[Question] {
        &self.0
    }

    /// How `model` does; `watch` hears how far it has come.
    ///
    /// # Errors
    /// [`EvaluationError::Model`], also for a model with another vocabulary than GPT-2's.
    pub fn score(
        &self,
        model: &SegmentedModel,
        watch: &mut dyn FnMut(ChoiceScore),
    ) -> Result<ChoiceScore, EvaluationError> {
        let mut score = ChoiceScore::default();
        for question in &self.0 {
            match question.losses(model)? {
                None => score.too_long += 1,
                Some(losses) => {
                    let least = |of: fn(&[f64]) -> f64| {
                        let order = |a: &usize, b: &usize| of(&losses[*a]).total_cmp(&of(&losses[*b]));
                        (0..losses.len()).min_by(order)
                    };
                    score.questions += 1;
                    let sum = |losses: &[f64]| losses.iter().sum::<f64>();
                    let mean = |losses: &[f64]| losses.iter().sum::<f64>() / losses.len() as f64;
                    score.right_by_sum += usize::from(least(sum) == Some(question.right));
                    score.right_by_mean += usize::from(least(mean) == Some(question.right));
                }
            }
            watch(score);
        }
        Ok(score)
    }
}

impl Question {
    /// The loss of each token of each choice after the context; `None` where they are too long for the model.
    fn losses(&self, model: &SegmentedModel) -> Result<Option<Vec<Vec<f64>>>, EvaluationError> {
        let longest = self.choices.iter().map(Vec::len).max().unwrap_or(0);
        let (rows, cols) = (self.choices.len(), (self.context.len() + longest).saturating_sub(1));
        if cols > model.config().block_size {
            return Ok(None);
        }
        let mut inputs = Vec::with_capacity(rows * cols);
        for choice in &self.choices {
            inputs.extend(self.context.iter().chain(choice).take(cols).map(|id| i32::from(*id)));
            // Nothing before looks at what fills it up.
            inputs.resize(inputs.len().next_multiple_of(cols), 0);
        }
        let logits = model.logits(&inputs, rows, cols)?;
        let vocab = model.config().vocab_size;
        let (first, rows) = (self.context.len() - 1, logits.chunks_exact(vocab * cols));
        let of_choice = |(row, choice): (&[f32], &Vec<u16>)| {
            let after_context = row.chunks_exact(vocab).skip(first);
            after_context.zip(choice).map(|(logits, id)| loss(logits, usize::from(*id))).collect()
        };
        Ok(Some(rows.zip(&self.choices).map(of_choice).collect()))
    }
}

/// −ln softmax(logits)[target], in nats.
fn loss(logits: &[f32], target: usize) -> f64 {
    let max = logits.iter().fold(f32::NEG_INFINITY, |a, b| a.max(*b));
    let sum: f64 = logits.iter().map(|logit| f64::from(logit - max).exp()).sum();
    sum.ln() + f64::from(max - logits[target])
}

/// 16-bit integers that have not been read yet.
struct Words<'a>(&'a [[u8; 2]]);

impl Words<'_> {
    fn next(&mut self) -> Result<u16, String> {
        let (word, rest) = self.0.split_first().ok_or("is cut short")?;
        self.0 = rest;
        Ok(u16::from_le_bytes(*word))
    }

    fn question(&mut self) -> Result<Question, String> {
        let all = self.0.len();
        if self.next()? != START {
            return Err(format!("does not begin with {START}"));
        }
        let length = self.next()?;
        let (_index, right, choices) = (self.next()?, usize::from(self.next()?), self.next()?);
        if right >= usize::from(choices) {
            return Err(format!("has {choices} choices, and names number {right} as the right one"));
        }
        let context = self.ids()?;
        let choices = (0..choices).map(|_| self.ids()).collect::<Result<Vec<_>, String>>()?;
        let read = 2 * (all - self.0.len());
        if read != usize::from(length) {
            return Err(format!("says that it has {length} bytes, and has {read}"));
        }
        Ok(Question { context, choices, right })
    }

    /// A count and so many ids.
    fn ids(&mut self) -> Result<Vec<u16>, String> {
        let count = usize::from(self.next()?);
        let (ids, rest) = self.0.split_at_checked(count).ok_or("is cut short")?;
        self.0 = rest;
        let ids: Vec<u16> = ids.iter().map(|pair| u16::from_le_bytes(*pair)).collect();
        if ids.is_empty() {
            return Err("has a text without tokens".into());
        }
        match ids.iter().find(|id| usize::from(**id) >= GPT2_VOCABULARY) {
            Some(id) => Err(format!("has the token {id}, which GPT-2 does not have")),
            None => Ok(ids),
        }
    }
}

#[cfg(test)]
mod tests {
    use burn::tensor::Device;

    use super::*;
    use crate::config::{ModelConfig, Preset};
    use crate::segments::TokenBatch;

    fn file(questions: &[Question]) -> Vec<u8> {
        let mut header = [0u32; 256];
        header[..3].copy_from_slice(&[MAGIC, VERSION, questions.len() as u32]);
        let mut bytes: Vec<u8> = header.iter().flat_map(|number| number.to_le_bytes()).collect();
        for (index, question) in questions.iter().enumerate() {
            let mut words = vec![START, 0, index as u16, question.right as u16, question.choices.len() as u16];
            for ids in [&question.context].into_iter().chain(&question.choices) {
                words.push(ids.len() as u16);
                words.extend(ids);
            }
            words[1] = 2 * words.len() as u16;
            bytes.extend(words.iter().flat_map(|word| word.to_le_bytes()));
        }
        bytes
    }

    fn questions() -> Vec<Question> {
        let question = |right| Question {
            context: vec![10, 20, 30],
            choices: vec![vec![1, 2], vec![3], vec![4, 5, 6], vec![7, 8]],
            right,
        };
        (0..4).map(question).collect()
    }

    #[test]
    fn a_test_is_read_as_it_was_written_and_a_damaged_one_is_explained() {
        let whole = file(&questions());
        assert_eq!(Choices::of_bytes(&whole).unwrap().questions(), questions());
        for cut in [0, 100, HEADER, HEADER + 1, HEADER + 20, whole.len() - 2] {
            Choices::of_bytes(&whole[..cut]).unwrap_err();
        }
        let changed = |at: usize, byte: u8| {
            let mut bytes = whole.clone();
            bytes[at] = byte;
            Choices::of_bytes(&bytes).unwrap_err()
        };
        for (at, byte, expected) in [
            (0, 1, "instead of"),
            (4, 2, "instead of"),
            (8, 5, "question 4 is cut short"),
            (8, 3, "there is more data"),
            (8, 0, "no questions"),
            (HEADER, 0, "does not begin"),
            (HEADER + 2, 2, "bytes, and has"),
            (HEADER + 6, 9, "number 9"),
            (HEADER + 10, 0, "without tokens"),
            (HEADER + 13, 0xff, "the token"),
        ] {
            let said = changed(at, byte);
            assert!(said.contains(expected), "{at}: {said}");
        }
    }

    #[test]
    fn the_choice_with_the_smallest_loss_is_the_answer() {
        let config = ModelConfig { n_layer: 1, n_head: 1, n_embd: 8, ..Preset::Micro.config(50_257) };
        let mut model = SegmentedModel::new(config, 5, &Device::flex()).unwrap();
        let test = Choices::of_bytes(&file(&questions())).unwrap();
        let score = test.score(&model, &mut |_| ()).unwrap();
        // Each choice is right once, so one answer of four is, whatever the model prefers. In all the shortest has the smallest loss.
        assert_eq!((score.questions, score.right_by_mean, score.right_by_sum, score.too_long), (4, 1, 1, 0));
        let losses = test.questions()[0].losses(&model).unwrap().unwrap();
        assert_eq!(losses.iter().map(Vec::len).collect::<Vec<_>>(), [2, 1, 3, 2]);
        // As those of each choice by itself.
        for (losses, choice) in losses.iter().zip(&test.questions()[0].choices) {
            let ids: Vec<i32> = [10, 20, 30].into_iter().chain(choice.iter().copied()).map(i32::from).collect();
            let cols = ids.len() - 1;
            let batch = TokenBatch { inputs: ids[..cols].to_vec(), targets: ids[1..].to_vec(), rows: 1, cols };
            let context = TokenBatch { inputs: ids[..2].to_vec(), targets: ids[1..3].to_vec(), rows: 1, cols: 2 };
            let of_choice = model.loss(&batch).unwrap() * cols as f64 - 2.0 * model.loss(&context).unwrap();
            assert!((losses.iter().sum::<f64>() - of_choice).abs() < 1e-4, "{losses:?} {of_choice}");
        }
        // A model that expects the tokens of the third choice: they come only with its mean.
        let mut flat = model.read_params(0).unwrap();
        for id in [4, 5, 6] {
            flat[8 * id..8 * id + 8].fill(1.0);
        }
        model.write_params(0, &flat).unwrap();
        let last = model.segments().len() - 1;
        model.write_params(last, &[[0.0; 8], [1.0; 8]].concat()).unwrap();
        let right = Choices::of_bytes(&file(&questions()[2..3])).unwrap();
        assert_eq!(right.score(&model, &mut |_| ()).unwrap().right_by_mean, 1);
        let long = Question { context: vec![1; 32], choices: vec![vec![1], vec![1, 2]], right: 0 };
        let score = Choices::of_bytes(&file(&[long])).unwrap().score(&model, &mut |_| ()).unwrap();
        assert_eq!((score.questions, score.too_long), (0, 1));
    }
}
