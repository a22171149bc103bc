//! What can go wrong with a model.

use crate::config::ConfigError;

/// Why the model refuses its input, or what failed on the device.
#[derive(Debug, thiserror::Error)]
pub enum ModelError {
    /// The config is unusable.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// The numbers of tokens and the batch's shape disagree.
    #[error(
        "batch of {rows} rows × {cols} tokens: {what} has {len} tokens instead of {}",
        rows.saturating_mul(*cols)
    )]
    BatchShape {
        /// `inputs` or `targets`.
        what: &'static str,
        /// Tokens it has.
        len: usize,
        /// Rows of the batch.
        rows: usize,
        /// Tokens a row.
        cols: usize,
    },
    /// Sequences are empty or longer than the positions the model has.
    #[error(
        "batch of {rows} rows × {cols} tokens: a batch needs at least one row, and 1..={block_size} tokens a row for this model"
    )]
    SequenceLength {
        /// Rows of the batch.
        rows: usize,
        /// Tokens a row.
        cols: usize,
        /// The model's number of positions.
        block_size: usize,
    },
    /// A token id is not in the vocabulary.
    #[error(
        "{what} hold token {token} at index {index}, but the model's vocabulary has {vocab_size} tokens; was the data made with another tokenizer?"
    )]
    TokenOutOfRange {
        /// `inputs` or `targets`.
        what: &'static str,
        /// The token id.
        token: i32,
        /// Its index in the batch.
        index: usize,
        /// Size of the vocabulary.
        vocab_size: usize,
    },
    /// There is no segment with this index.
    #[error("segment {segment} does not exist: the model has segments 0..{segments}")]
    NoSuchSegment {
        /// The index that was asked for.
        segment: usize,
        /// Number of segments.
        segments: usize,
    },
    /// A flat vector does not have the length of its segment.
    #[error("segment {name} has {expected} elements, but {len} were given")]
    SegmentLength {
        /// The segment's name.
        name: String,
        /// Its number of elements.
        expected: usize,
        /// The number given.
        len: usize,
    },
    /// A pass needs weights that are not in memory.
    #[error("the weights of segment {name} are not in memory; a pass over a sharded model needs hooks that bring them")]
    Absent {
        /// The segment's name.
        name: String,
    },
    /// A flat vector is of another type than the weights.
    #[error("segment {name}: {detail}")]
    SegmentType {
        /// The segment's name.
        name: String,
        /// What was given.
        detail: String,
    },
    /// The loss or its gradient could not be computed.
    #[error("cross entropy failed on the device: {detail}")]
    Head {
        /// The device's message.
        detail: String,
    },
    /// The device could not do what it was asked to.
    #[error("the device failed: {detail}")]
    Waiting {
        /// The device's message.
        detail: String,
    },
    /// A tensor got no gradient, or data could not be read from the device.
    #[error("segment {segment}: {what} failed on the device: {detail}")]
    Device {
        /// The segment's index.
        segment: usize,
        /// What was tried.
        what: &'static str,
        /// The device's message.
        detail: String,
    },
}
