//! The order of the data: which window of the corpus is which row of which step, as a pure function of the seed.
//!
//! An epoch cuts the training part into windows of `T + 1` tokens (inputs and the targets one further on) at a stride
//! of `T`, so no token is a target twice within an epoch. The first window of epoch `e` starts at an offset drawn
//! uniformly from `0..T`, and the windows come in a uniformly drawn permutation, both from the stream (seed,
//! [`ORDER_STREAM`], `e`) of [`SplitMix64`]: one draw below `T`, then Fisher–Yates. Every
//! epoch has the same number of windows, `⌊(n − T) / T⌋` for `n` tokens, which fit at every offset. A step takes the
//! next `G` windows of the epoch's order; those that do not fill a step are dropped until the next epoch draws anew.
//! Nothing here depends on the number of ranks or on the accumulation, so a step's global batch is the same rows in the
//! same order however it is shared.

use std::sync::{Arc, Mutex, PoisonError};

use crate::{
    corpus::{Corpus, CorpusError, TokenStream},
    segments::TokenBatch,
    splitmix::SplitMix64,
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

/// Why there are no batches.
#[derive(Debug, thiserror::Error)]
pub enum BatchError {
    /// Less data than one global batch: also the case of more ranks than data.
    #[error(
        "the training part of {origin} has {tokens} tokens, which make {windows} windows of {block_size}; a global \
         batch of {global_batch} rows needs {needed} tokens. Give a longer corpus, a shorter block or a smaller \
         global batch (and with it fewer ranks: each takes at least one row)"
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
        /// Tokens that would be enough.
        needed: usize,
    },
    /// Too few held-out tokens.
    #[error(
        "the validation part of {origin} has {tokens} tokens, which make {windows} windows of {block_size}, fewer \
         than one for each of {world} ranks; give a longer corpus or a shorter block, use fewer ranks, or leave \
         validation out"
    )]
    ValidationTooShort {
        /// The corpus.
        origin: String,
        /// Tokens of its validation part.
        tokens: usize,
        /// Windows that they make.
        windows: usize,
        /// Tokens of a row.
        block_size: usize,
        /// Number of ranks.
        world: usize,
    },
    /// A size of zero.
    #[error("the {what} is 0; give at least 1")]
    Zero {
        /// Which size.
        what: &'static str,
    },
    /// A batch that does not divide evenly.
    #[error(
        "a global batch of {global_batch} rows cannot be shared evenly by {world} ranks in {accumulation} \
         micro-steps; make it a multiple of {}", world.saturating_mul(*accumulation)
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
    #[error("rank {rank} was asked for among {world} ranks; ranks count from 0")]
    NoSuchRank {
        /// The rank.
        rank: usize,
        /// Number of ranks.
        world: usize,
    },
    /// A micro-step that there is not.
    #[error("micro-step {micro_step} was asked for of {accumulation}; micro-steps count from 0")]
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
    ///
    /// # Errors
    /// [`BatchError::Zero`], and [`BatchError::TooShort`] where an epoch has fewer than `G` windows.
    pub fn new(corpus: &Corpus, block_size: usize, global_batch: usize, seed: u64) -> Result<Self, BatchError> {
        for (size, what) in [(block_size, "block size"), (global_batch, "global batch")] {
            if size == 0 {
                return Err(BatchError::Zero { what });
            }
        }
        let (train, validation) = (corpus.train().clone(), corpus.validation().clone());
        let origin = corpus.origin().to_string();
        let windows = train.len().saturating_sub(block_size) / block_size;
        if windows < global_batch {
            return Err(BatchError::TooShort {
                origin,
                tokens: train.len(),
                windows,
                block_size,
                global_batch,
                needed: global_batch.saturating_add(1).saturating_mul(block_size),
            });
        }
        Ok(Self { train, validation, origin, block_size, global_batch, windows, seed, epoch: Mutex::new(None) })
    }

    /// Steps of an epoch, at least 1.
    #[must_use]
    pub fn steps_per_epoch(&self) -> usize {
        self.windows / self.global_batch
    }

    /// Tokens that a step trains on, all ranks together.
    #[must_use]
    pub fn tokens_per_step(&self) -> usize {
        self.global_batch * self.block_size
    }

    /// Rows of each of a rank's micro-steps: `G / (world · accumulation)`.
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

    /// The rows of one micro-step: rows `r·G/N + m·G/(N·A) ..` of the global batch of `step` for rank `r` of `N` and
    /// micro-step `m` of `A`.
    ///
    /// # Errors
    /// Those of [`rows_per_micro_step`](Batches::rows_per_micro_step), [`BatchError::NoSuchMicroStep`], and
    /// [`BatchError::Corpus`] where a shard was changed after it was opened.
    pub fn rows(&self, step: u64, micro_step: usize, share: Share) -> Result<TokenBatch, BatchError> {
        let rows = self.rows_per_micro_step(share)?;
        let Share { rank, accumulation, .. } = share;
        if micro_step >= accumulation {
            return Err(BatchError::NoSuchMicroStep { micro_step, accumulation });
        }
        let steps = self.steps_per_epoch() as u64;
        let epoch = self.epoch(step / steps);
        // Below `windows`, so it fits.
        let first = (step % steps) as usize * self.global_batch + (rank * accumulation + micro_step) * rows;
        let starts = epoch.order.iter().skip(first).take(rows).map(|window| epoch.offset + window * self.block_size);
        self.batch(&self.train, starts)
    }

    /// The validation rows of `rank`, in batches of at most as many rows as its micro-steps have. All ranks get the
    /// same number of rows, so the mean of their mean losses is the loss over all.
    ///
    /// The rows are windows at a stride of `T` from the start of the validation part, evenly spaced over it:
    /// `max_batches · G` of them, or as many whole global batches as there are, the same for every number of ranks.
    /// Where there is not one global batch, they are all windows but the fewer than `world` that cannot be shared
    /// evenly.
    ///
    /// # Errors
    /// Those of [`rows_per_micro_step`](Batches::rows_per_micro_step), [`BatchError::Zero`], and
    /// [`BatchError::ValidationTooShort`] where there is not one row for each rank.
    pub fn validation(&self, max_batches: usize, share: Share) -> Result<Vec<TokenBatch>, BatchError> {
        let rows = self.rows_per_micro_step(share)?;
        if max_batches == 0 {
            return Err(BatchError::Zero { what: "number of validation batches" });
        }
        let Share { rank, world, .. } = share;
        let windows = self.validation.len().saturating_sub(1) / self.block_size;
        let used = match windows / self.global_batch {
            0 => windows - windows % world,
            batches => batches.min(max_batches) * self.global_batch,
        };
        if used == 0 {
            return Err(BatchError::ValidationTooShort {
                origin: self.origin.clone(),
                tokens: self.validation.len(),
                windows,
                block_size: self.block_size,
                world,
            });
        }
        let mine = used / world;
        let start = |row: usize| {
            let window = row as u128 * windows as u128 / used as u128;
            window as usize * self.block_size
        };
        (0..mine)
            .step_by(rows)
            .map(|from| {
                let first = rank * mine + from;
                let count = rows.min(mine - from);
                self.batch(&self.validation, (first..first + count).map(start))
            })
            .collect()
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
mod tests {
    use std::collections::BTreeSet;

    use super::*;
    use crate::{corpus::CorpusSource, tokenizer::TokenizerKind};

    /// Shards whose ids are their own positions, so that a window shows where it was cut.
    fn numbered(train: usize, validation: usize) -> Corpus {
        let folder = tempfile::tempdir().unwrap();
        for (name, count) in [("train.bin", train), ("val.bin", validation)] {
            let bytes: Vec<u8> = (0..count).flat_map(|id| (id as u16).to_le_bytes()).collect();
            std::fs::write(folder.path().join(name), bytes).unwrap();
        }
        Corpus::load(&CorpusSource::Path(folder.path().to_owned()), TokenizerKind::Gpt2).unwrap()
    }

    fn share(rank: usize, world: usize, accumulation: usize) -> Share {
        Share { rank, world, accumulation }
    }

    /// The global batch of a step put together from the shares of all ranks, and the positions its windows start at.
    fn global(batches: &Batches, step: u64, world: usize, accumulation: usize) -> (Vec<i32>, Vec<i32>) {
        let mut inputs = Vec::new();
        for rank in 0..world {
            for micro_step in 0..accumulation {
                let batch = batches.rows(step, micro_step, share(rank, world, accumulation)).unwrap();
                assert_eq!(batch.rows, batches.global_batch / world / accumulation);
                assert_eq!(batch.cols, batches.block_size);
                assert_eq!(batch.inputs.len(), batch.rows * batch.cols);
                let shifted: Vec<i32> = batch.inputs.iter().map(|id| id + 1).collect();
                assert_eq!(batch.targets, shifted, "targets are one token further on");
                for row in batch.inputs.chunks(batch.cols) {
                    assert!(row.windows(2).all(|pair| pair[1] == pair[0] + 1), "a row is contiguous");
                }
                inputs.extend(batch.inputs);
            }
        }
        let starts = inputs.iter().step_by(batches.block_size).copied().collect();
        (inputs, starts)
    }

    #[test]
    fn the_global_batch_is_the_same_for_every_number_of_ranks_and_micro_steps() {
        let batches = Batches::new(&numbered(2_000, 100), 8, 24, 7).unwrap();
        for step in [0, 1, 9, 10, 11, 1_000, u64::MAX] {
            let (whole, _) = global(&batches, step, 1, 1);
            for (world, accumulation) in [(1, 2), (1, 24), (2, 1), (2, 3), (3, 1), (3, 4), (4, 1), (4, 2), (24, 1)] {
                assert_eq!(global(&batches, step, world, accumulation).0, whole, "{world} ranks, {accumulation}");
            }
        }
    }

    #[test]
    fn an_epoch_visits_distinct_windows_and_all_but_the_tail() {
        let corpus = numbered(2_003, 100);
        let batches = Batches::new(&corpus, 8, 12, 7).unwrap();
        // (2003 - 8) / 8 = 249 windows, 20 steps of 12, 9 windows over.
        assert_eq!(batches.steps_per_epoch(), 20);
        let mut offsets = BTreeSet::new();
        let mut dropped = BTreeSet::new();
        for epoch in 0..12 {
            for world in 1..=4 {
                let mut of_rank = vec![Vec::new(); world];
                for step in 0..20 {
                    for (rank, starts) in of_rank.iter_mut().enumerate() {
                        let batch = batches.rows(epoch * 20 + step, 0, share(rank, world, 1)).unwrap();
                        assert_eq!(batch.rows, 12 / world);
                        starts.extend(batch.inputs.iter().step_by(8).copied());
                    }
                }
                let all: Vec<i32> = of_rank.concat();
                let distinct: BTreeSet<i32> = all.iter().copied().collect();
                assert_eq!(distinct.len(), 240, "ranks read disjoint windows");
                assert!(of_rank.iter().all(|starts| starts.len() == 240 / world));
                let offset = all[0] % 8;
                assert!(all.iter().all(|start| start % 8 == offset && start + 8 < 2_003), "windows do not overlap");
                offsets.insert(offset);
                let windows: BTreeSet<i32> = (0..249).map(|window| offset + window * 8).collect();
                assert!(distinct.is_subset(&windows));
                dropped.extend(windows.difference(&distinct).map(|start| start / 8));
            }
        }
        assert!(offsets.len() > 3, "the offset shifts between epochs: {offsets:?}");
        assert!(dropped.len() > 50, "the tail is another one each epoch: {}", dropped.len());
    }

    #[test]
    fn every_offset_fits_where_the_corpus_is_just_long_enough() {
        // (G + 1) · T tokens are what the error asks for.
        let batches = Batches::new(&numbered(40, 10), 8, 4, 0).unwrap();
        let mut seen = BTreeSet::new();
        for step in 0..400 {
            let (inputs, _) = global(&batches, step, 2, 2);
            seen.extend(inputs);
        }
        assert_eq!(seen, (0..39).collect(), "every token but the last is an input in some epoch");
    }

    #[test]
    fn the_order_follows_from_the_seed_and_the_step_alone() {
        let corpus = numbered(3_000, 100);
        let batches = |seed| Batches::new(&corpus, 16, 8, seed).unwrap();
        let forwards: Vec<_> = (0..60).map(|step| global(&batches(3), step, 1, 1)).collect();
        let one = batches(3);
        for step in (0..60).rev() {
            assert_eq!(global(&one, step, 1, 1), forwards[step as usize], "step {step}, asked in reverse");
        }
        let other: Vec<_> = (0..60).map(|step| global(&batches(4), step, 1, 1)).collect();
        assert_ne!(forwards, other);
        let epoch = |number: usize| -> Vec<i32> {
            forwards[number * 23..(number + 1) * 23].iter().flat_map(|(_, starts)| starts.clone()).collect()
        };
        assert_eq!(one.steps_per_epoch(), 23);
        assert_ne!(epoch(0), epoch(1));
        assert!(!epoch(0).is_sorted());
    }

    #[test]
    fn the_documented_order_is_pinned() {
        // A change of these numbers changes what every seed trains on.
        let batches = Batches::new(&numbered(1_000, 100), 10, 6, 42).unwrap();
        let starts: Vec<_> = [0, 16, 5_000].map(|step| global(&batches, step, 1, 1).1).into();
        assert_eq!(starts, PINNED);
    }

    /// Computed by a program written apart from this one, from the description at the top.
    const PINNED: [[i32; 6]; 3] =
        [[846, 836, 376, 676, 166, 826], [535, 75, 945, 905, 255, 265], [512, 2, 932, 112, 282, 712]];

    #[test]
    fn validation_rows_are_fixed_shared_evenly_and_spread_over_the_part() {
        // 999 / 10 = 99 windows: 8 whole batches of 12.
        let batches = Batches::new(&numbered(1_000, 1_000), 10, 12, 1).unwrap();
        let rows = |max_batches, world, accumulation| -> Vec<i32> {
            let of_rank: Vec<Vec<i32>> = (0..world)
                .map(|rank| {
                    let parts = batches.validation(max_batches, share(rank, world, accumulation)).unwrap();
                    assert!(parts.iter().all(|part| part.rows <= 12 / world / accumulation && part.rows > 0));
                    assert!(
                        parts.iter().all(|part| { part.targets.iter().zip(&part.inputs).all(|(t, i)| *t == i + 1) })
                    );
                    parts.into_iter().flat_map(|part| part.inputs).step_by(10).collect()
                })
                .collect();
            assert!(of_rank.iter().all(|starts| starts.len() == of_rank[0].len()));
            of_rank.concat()
        };
        let three = rows(3, 1, 1);
        assert_eq!(three.len(), 36);
        assert!(three.is_sorted() && three[0] == 0 && three[35] >= 950, "{three:?}");
        assert_eq!(three.iter().collect::<BTreeSet<_>>().len(), 36);
        for (world, accumulation) in [(1, 3), (2, 1), (2, 3), (3, 2), (4, 1), (4, 3), (12, 1)] {
            assert_eq!(rows(3, world, accumulation), three);
        }
        assert_eq!(rows(1_000, 2, 1).len(), 96);
        assert_eq!(rows(usize::MAX, 3, 1).len(), 96);

        // 49 / 10 = 4 windows, fewer than a batch.
        let few = Batches::new(&numbered(1_000, 50), 10, 12, 1).unwrap();
        let count = |rank, world| -> usize {
            few.validation(5, share(rank, world, 1)).unwrap().iter().map(|part| part.rows).sum()
        };
        assert_eq!((count(0, 1), count(0, 2), count(1, 2)), (4, 2, 2));
        assert_eq!((count(0, 3), count(1, 3), count(2, 3)), (1, 1, 1));
        let error = few.validation(5, share(0, 6, 1)).unwrap_err();
        assert!(matches!(error, BatchError::ValidationTooShort { windows: 4, world: 6, .. }), "{error}");
    }

    #[test]
    fn validation_is_never_seen_in_training() {
        let corpus = Corpus::load(&CorpusSource::Synthetic { seed: 1, bytes: 1_000 }, TokenizerKind::Bytes).unwrap();
        assert_eq!((corpus.train().len(), corpus.validation().len()), (900, 100));
        // The training stream ends before the validation part: no window can reach into it.
        assert!(corpus.train().read(899, 2, &mut Vec::new()).is_err());
    }

    #[test]
    fn every_error_says_what_to_try() {
        let corpus = numbered(39, 10);
        let error = Batches::new(&corpus, 8, 4, 0).unwrap_err();
        assert!(matches!(error, BatchError::TooShort { tokens: 39, windows: 3, needed: 40, .. }));
        let text = error.to_string();
        assert!(
            text.contains("2 token shards in") && text.contains("needs 40 tokens") && text.contains("ranks"),
            "{text}"
        );
        assert!(matches!(Batches::new(&corpus, 64, 1, 0), Err(BatchError::TooShort { windows: 0, .. })));
        assert!(matches!(Batches::new(&corpus, usize::MAX, usize::MAX, 0), Err(BatchError::TooShort { .. })));
        assert!(matches!(Batches::new(&corpus, 0, 1, 0), Err(BatchError::Zero { what: "block size" })));
        assert!(matches!(Batches::new(&corpus, 1, 0, 0), Err(BatchError::Zero { what: "global batch" })));

        let batches = Batches::new(&corpus, 3, 12, 0).unwrap();
        let fails = |micro_step, share| batches.rows(0, micro_step, share).unwrap_err();
        let error = fails(0, share(0, 5, 1));
        assert!(matches!(error, BatchError::Uneven { global_batch: 12, world: 5, accumulation: 1 }));
        assert!(error.to_string().contains("multiple of 5"), "{error}");
        assert!(matches!(fails(0, share(0, 4, 2)), BatchError::Uneven { .. }));
        assert!(matches!(fails(0, share(0, 24, 1)), BatchError::Uneven { .. }));
        assert!(matches!(fails(0, share(0, usize::MAX, 2)), BatchError::Uneven { .. }));
        assert!(matches!(fails(0, share(3, 3, 1)), BatchError::NoSuchRank { rank: 3, world: 3 }));
        assert!(matches!(fails(2, share(0, 1, 2)), BatchError::NoSuchMicroStep { micro_step: 2, accumulation: 2 }));
        assert!(matches!(fails(0, share(0, 0, 1)), BatchError::Zero { .. }));
        assert!(matches!(fails(0, share(0, 1, 0)), BatchError::Zero { .. }));
        assert!(matches!(batches.validation(0, share(0, 1, 1)), Err(BatchError::Zero { .. })));
    }
}
