//! The order of the data: which window of the corpus is which row of which step, as a pure function of the seed.
//!
//! An epoch cuts the training part into windows of `T + 1` tokens (inputs and the targets one further on) at a stride
//! of `T`, so no token is a target twice within an epoch. The first window of epoch `e` starts at an offset drawn
//! uniformly from `0..T`, and the windows come in a uniformly drawn permutation, both from the stream (seed,
//! [`ORDER_STREAM`], `e`) of [`SplitMix64`]: one draw below `T`, then Fisher–Yates. Every
//! epoch has the same number of windows, `⌊(n − T) / T⌋` for `n` tokens, which fit at every offset. A step takes the
//! next `G` windows of the epoch's order; those that do not fill a step are dropped until the next epoch draws anew, or
//! with [`LastBatch::Join`] make a smaller last step, in which some ranks have fewer rows than others, or none.
//! Nothing here depends on the number of ranks or on the accumulation, so a step's global batch is the same rows in the
//! same order however it is shared.

use std::{
    fmt,
    ops::Range,
    str::FromStr,
    sync::{Arc, Mutex, PoisonError},
};

use comm_core::shard_range;
use comm_core::splitmix::SplitMix64;
use serde::{Deserialize, Serialize};

use crate::{
    corpus::{Corpus, CorpusError, TokenStream},
    segments::TokenBatch,
};

/// Names the stream of the training order among the streams of a seed.
pub const ORDER_STREAM: u64 = 0x6461_7461;

/// The training and validation batches of a corpus.
#[derive(Debug)]
pub struct Batches {
    train: TokenStream,
    validation: TokenStream,
    origin: String,
    block_size: usize,
    global_batch: usize,
    windows: usize,
    seed: u64,
    last_batch: LastBatch,
    /// The last epoch drawn: kept because drawing takes time in proportion to its windows, and it follows from (seed,
    /// epoch).
    epoch: Mutex<Option<Arc<Epoch>>>,
}

/// Which rows of a global batch are taken: those of `rank` among `world` ranks, in `accumulation` micro-steps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Share {
    /// This rank, below `world`.
    pub rank: usize,
    /// Number of ranks that share the batch.
    pub world: usize,
    /// Micro-steps in which each rank works through its rows.
    pub accumulation: usize,
}

/// A run's first steps, in which each sequence is cut into pieces of so many tokens, so that a step has the same tokens in shorter sequences; written as
/// `128x900`: 128 tokens, for 900 steps.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(into = "String", try_from = "String")]
pub struct ShortSequences {
    /// Tokens of a piece.
    pub tokens: usize,
    /// The number of first steps.
    pub steps: u64,
}

impl ShortSequences {
    /// Whether sequences of `block_size` tokens can be cut so.
    ///
    /// # Errors
    /// They cannot, for the user.
    pub fn check(self, block_size: usize) -> Result<(), String> {
        if self.tokens > 0 && block_size.is_multiple_of(self.tokens) {
            return Ok(());
        }
        Err(format!(
            "--short-sequences {self}: sequences of {block_size} tokens cannot be cut into pieces of {}; give a number that divides them",
            self.tokens
        ))
    }

    /// Pieces of each sequence of `block_size` tokens in step `step`, counted from 0.
    #[must_use]
    pub fn pieces(self, block_size: usize, step: u64) -> usize {
        if step < self.steps { block_size / self.tokens.max(1) } else { 1 }
    }
}

impl fmt::Display for ShortSequences {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&format!("{}x{}", self.tokens, self.steps))
    }
}

impl FromStr for ShortSequences {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let read = |(tokens, steps): (&str, &str)| Some((tokens.parse().ok()?, steps.parse().ok()?));
        match text.split_once('x').and_then(read) {
            Some((tokens, steps)) if tokens > 0 => Ok(ShortSequences { tokens, steps }),
            _ => Err(format!(
                "`{text}` is not of the form TOKENSxSTEPS, such as 128x900 for 128 tokens in the first 900 steps"
            )),
        }
    }
}

impl From<ShortSequences> for String {
    fn from(short: ShortSequences) -> String {
        short.to_string()
    }
}

impl TryFrom<String> for ShortSequences {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        text.parse()
    }
}

/// What becomes of the windows at the end of an epoch that do not fill a step; written as in [`LastBatch::name`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum LastBatch {
    /// They are left out until the next epoch.
    #[default]
    Drop,
    /// They make a smaller step, so an epoch sees every window. It is shared as evenly as it can be: ranks whose data is
    /// used up have fewer rows or none, and take part in what is communicated all the same.
    Join,
}

comm_core::names!(pub LastBatch, "rule for a last batch": Drop = "drop", Join = "join");

/// Why there are no batches.
#[derive(Debug, thiserror::Error)]
pub enum BatchError {
    /// Less data than one global batch, also the case of more ranks than data; with [`LastBatch::Join`] less than one
    /// window.
    #[error(
        "the training part of {origin} has {tokens} tokens, enough for {windows} sequences of {block_size}; {needs} needs {needed} tokens. \
         Give a longer text, shorter sequences (--block-size) or a smaller batch (--batch, which needs at least one sequence for each \
         rank)", needs = match last_batch {
            LastBatch::Drop => format!("a global batch of {global_batch} sequences"),
            LastBatch::Join => "one sequence".into(),
        }
    )]
    TooShort {
        /// The corpus.
        origin: String,
        /// Tokens of its training part.
        tokens: usize,
        /// Windows of an epoch.
        windows: usize,
        /// Tokens of a row.
        block_size: usize,
        /// Rows of a step.
        global_batch: usize,
        /// Whether a step may have fewer.
        last_batch: LastBatch,
        /// Tokens that would be enough.
        needed: usize,
    },
    /// Too few held-out tokens.
    #[error(
        "the validation part of {origin} has {tokens} tokens, too few for one sequence of {block_size}, which needs {}; give a longer text \
         or shorter sequences (--block-size), or turn validation off (--eval-every 0)", block_size.saturating_add(1)
    )]
    ValidationTooShort {
        /// The corpus.
        origin: String,
        /// Tokens of its validation part.
        tokens: usize,
        /// Tokens of a row.
        block_size: usize,
    },
    /// A size of zero.
    #[error("the {what} is 0; give at least 1")]
    Zero {
        /// Which size.
        what: &'static str,
    },
    /// A batch that does not divide evenly.
    #[error(
        "a global batch of {global_batch} sequences cannot be divided evenly among {world} ranks and {accumulation} micro-steps; give a \
         multiple of {}", world.saturating_mul(*accumulation)
    )]
    Uneven {
        /// Rows of a step.
        global_batch: usize,
        /// Number of ranks.
        world: usize,
        /// Micro-steps of a step.
        accumulation: usize,
    },
    /// A rank that there is not.
    #[error("rank {rank} does not exist: there are {world} ranks, numbered from 0")]
    NoSuchRank {
        /// The rank.
        rank: usize,
        /// Number of ranks.
        world: usize,
    },
    /// A micro-step that there is not.
    #[error("micro-step {micro_step} does not exist: there are {accumulation}, numbered from 0")]
    NoSuchMicroStep {
        /// The micro-step.
        micro_step: usize,
        /// Number of micro-steps of a step.
        accumulation: usize,
    },
    /// The tokens could not be read.
    #[error("cannot read a batch: {0}")]
    Corpus(#[from] CorpusError),
}

impl Batches {
    /// Batches of `global_batch` (`G`) rows a step, each of `block_size` (`T`) tokens, in the order that `seed` draws.
    /// Windows that do not fill a step are dropped.
    ///
    /// # Errors
    /// [`BatchError::Zero`], and [`BatchError::TooShort`] where an epoch has fewer than `G` windows.
    pub fn new(corpus: &Corpus, block_size: usize, global_batch: usize, seed: u64) -> Result<Self, BatchError> {
        Self::with_last_batch(corpus, block_size, global_batch, seed, LastBatch::Drop)
    }

    /// As [`new`](Batches::new), with a choice of what becomes of the windows that do not fill a step. Steps that are full
    /// have the same rows with either choice in the first epoch; later ones begin at another step.
    ///
    /// # Errors
    /// [`BatchError::Zero`], and [`BatchError::TooShort`] where an epoch has fewer than `G` windows, or with
    /// [`LastBatch::Join`] none.
    pub fn with_last_batch(
        corpus: &Corpus,
        block_size: usize,
        global_batch: usize,
        seed: u64,
        last_batch: LastBatch,
    ) -> Result<Self, BatchError> {
        for (size, what) in [(block_size, "block size"), (global_batch, "global batch")] {
            if size == 0 {
                return Err(BatchError::Zero { what });
            }
        }
        let (train, validation) = (corpus.train().clone(), corpus.validation().clone());
        let origin = corpus.origin().to_string();
        let windows = train.len().saturating_sub(block_size) / block_size;
        let enough = match last_batch {
            LastBatch::Drop => global_batch,
            LastBatch::Join => 1,
        };
        if windows < enough {
            return Err(BatchError::TooShort {
                origin,
                tokens: train.len(),
                windows,
                block_size,
                global_batch,
                last_batch,
                needed: enough.saturating_add(1).saturating_mul(block_size),
            });
        }
        let epoch = Mutex::new(None);
        Ok(Self { train, validation, origin, block_size, global_batch, windows, seed, last_batch, epoch })
    }

    /// Steps of an epoch, at least 1.
    #[must_use]
    pub fn steps_per_epoch(&self) -> usize {
        match self.last_batch {
            LastBatch::Drop => self.windows / self.global_batch,
            LastBatch::Join => self.windows.div_ceil(self.global_batch),
        }
    }

    /// Rows of step `step` of all ranks and micro-steps together: `G`, or fewer in an epoch's last step with
    /// [`LastBatch::Join`], at least 1.
    #[must_use]
    pub fn rows_in_step(&self, step: u64) -> usize {
        let (_, first) = self.place(step);
        self.global_batch.min(self.windows - first)
    }

    /// Tokens that a full step trains on, all ranks together.
    #[must_use]
    pub fn tokens_per_step(&self) -> usize {
        self.global_batch * self.block_size
    }

    /// Rows of each of a rank's micro-steps in a full step, and the most that any step has: `G / (world · accumulation)`.
    ///
    /// # Errors
    /// [`BatchError::Uneven`], [`BatchError::Zero`] and [`BatchError::NoSuchRank`]: a share accepted here is accepted
    /// by [`rows`](Batches::rows).
    pub fn rows_per_micro_step(&self, share: Share) -> Result<usize, BatchError> {
        let Share { rank, world, accumulation } = share;
        for (size, what) in [(world, "number of ranks"), (accumulation, "number of micro-steps")] {
            if size == 0 {
                return Err(BatchError::Zero { what });
            }
        }
        if rank >= world {
            return Err(BatchError::NoSuchRank { rank, world });
        }
        let global_batch = self.global_batch;
        match world.checked_mul(accumulation) {
            Some(parts) if global_batch.is_multiple_of(parts) => Ok(global_batch / parts),
            _ => Err(BatchError::Uneven { global_batch, world, accumulation }),
        }
    }

    /// The rows of one micro-step: for rank `r` of `N` and micro-step `m` of `A` those of part `r·A + m` when the `R` rows
    /// of `step` are cut into `N·A` consecutive parts, the first `R mod N·A` of them one row longer. In a full step
    /// all parts are equal; in an epoch's last step with [`LastBatch::Join`] a part may have no rows at all (and the
    /// batch no tokens), so a mean over the step weighs each part with its rows over
    /// [`rows_in_step`](Batches::rows_in_step).
    ///
    /// # Errors
    /// Those of [`rows_per_micro_step`](Batches::rows_per_micro_step), [`BatchError::NoSuchMicroStep`], and
    /// [`BatchError::Corpus`] where a shard was changed after it was opened.
    pub fn rows(&self, step: u64, micro_step: usize, share: Share) -> Result<TokenBatch, BatchError> {
        let Range { start, end } = self.part(step, micro_step, share)?;
        let (number, first) = self.place(step);
        let epoch = self.epoch(number);
        let windows = epoch.order.iter().skip(first + start).take(end - start);
        self.batch(&self.train, windows.map(|window| epoch.offset + window * self.block_size))
    }

    /// The place of the first of [`rows`](Batches::rows) among all rows of the step; the others follow it.
    ///
    /// # Errors
    /// Those of [`rows_per_micro_step`](Batches::rows_per_micro_step), and [`BatchError::NoSuchMicroStep`].
    pub fn first_row(&self, step: u64, micro_step: usize, share: Share) -> Result<usize, BatchError> {
        Ok(self.part(step, micro_step, share)?.start)
    }

    /// The validation rows of `rank`, in batches of at most as many rows as its micro-steps have. All ranks get the same
    /// number of batches, so that all pass through the model equally often; where the rows cannot be shared evenly, some
    /// ranks have a row less, and their last batch may have none (and no tokens). The loss over all rows is therefore the
    /// mean of the batches' losses weighed with their rows.
    ///
    /// The rows are windows at a stride of `T` from the start of the validation part, evenly spaced over it:
    /// `max_batches · G` of them, or as many whole global batches as there are, or, where there is not one, all windows.
    /// They are the same for every number of ranks and micro-steps.
    ///
    /// # Errors
    /// Those of [`rows_per_micro_step`](Batches::rows_per_micro_step), [`BatchError::Zero`], and
    /// [`BatchError::ValidationTooShort`] where there is not one window.
    pub fn validation(&self, max_batches: usize, share: Share) -> Result<Vec<TokenBatch>, BatchError> {
        let rows = self.rows_per_micro_step(share)?;
        if max_batches == 0 {
            return Err(BatchError::Zero { what: "number of validation batches" });
        }
        let Share { rank, world, .. } = share;
        let windows = self.validation.len().saturating_sub(1) / self.block_size;
        let used = match windows / self.global_batch {
            0 => windows,
            batches => batches.min(max_batches) * self.global_batch,
        };
        if used == 0 {
            return Err(BatchError::ValidationTooShort {
                origin: self.origin.clone(),
                tokens: self.validation.len(),
                block_size: self.block_size,
            });
        }
        let start = |row: usize| {
            let window = row as u128 * windows as u128 / used as u128;
            window as usize * self.block_size
        };
        let mine = shard_range(used, world, rank);
        // As many as the rank with the most rows needs.
        (0..used.div_ceil(world).div_ceil(rows))
            .map(|batch| {
                let from = mine.end.min(mine.start + batch * rows);
                self.batch(&self.validation, (from..mine.end.min(from + rows)).map(start))
            })
            .collect()
    }

    /// The rows of a micro-step among those of its step. A share is accepted or refused whatever the step.
    fn part(&self, step: u64, micro_step: usize, share: Share) -> Result<Range<usize>, BatchError> {
        self.rows_per_micro_step(share)?;
        let Share { rank, world, accumulation } = share;
        if micro_step >= accumulation {
            return Err(BatchError::NoSuchMicroStep { micro_step, accumulation });
        }
        // The number of parts divides the global batch, and the index is below it.
        Ok(shard_range(self.rows_in_step(step), world * accumulation, rank * accumulation + micro_step))
    }

    /// The epoch that a step lies in, and the place of its first window in the epoch's order.
    fn place(&self, step: u64) -> (u64, usize) {
        let steps = self.steps_per_epoch() as u64;
        // The remainder is below the number of steps, so it fits and the product is below `windows`.
        (step / steps, (step % steps) as usize * self.global_batch)
    }

    /// The offset and order of epoch number `number`.
    fn epoch(&self, number: u64) -> Arc<Epoch> {
        // A panic while the lock is held leaves either the old epoch or the new one, both whole.
        let mut kept = self.epoch.lock().unwrap_or_else(PoisonError::into_inner);
        match &*kept {
            Some(epoch) if epoch.number == number => Arc::clone(epoch),
            _ => {
                let epoch = Arc::new(Epoch::draw(self.seed, number, self.block_size, self.windows));
                *kept = Some(Arc::clone(&epoch));
                epoch
            }
        }
    }

    /// Inputs and targets of the windows that begin at `starts`.
    fn batch(
        &self,
        stream: &TokenStream,
        starts: impl ExactSizeIterator<Item = usize>,
    ) -> Result<TokenBatch, BatchError> {
        let (rows, cols) = (starts.len(), self.block_size);
        let mut inputs = Vec::with_capacity(rows * cols);
        let mut targets = Vec::with_capacity(rows * cols);
        for start in starts {
            stream.read(start, cols, &mut inputs)?;
            stream.read(start + 1, cols, &mut targets)?;
        }
        Ok(TokenBatch { inputs, targets, rows, cols })
    }
}

/// What an epoch draws.
#[derive(Debug)]
struct Epoch {
    number: u64,
    /// First token of window 0, below the block size.
    offset: usize,
    /// Window numbers in the order of training.
    order: Vec<usize>,
}

impl Epoch {
    fn draw(seed: u64, number: u64, block_size: usize, windows: usize) -> Self {
        let mut generator = SplitMix64::stream(seed, &[ORDER_STREAM, number]);
        let offset = generator.below(block_size as u64) as usize;
        Self { number, offset, order: generator.permutation(windows) }
    }
}

#[cfg(test)]
mod tests;
