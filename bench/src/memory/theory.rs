//! What parameters, gradients and optimizer of each strategy should take.

use gpt2::memory::Category;
use gpt2::precision::Precision;
use gpt2::segments::SegmentInfo;
use gpt2::strategy::StrategyKind;

use super::case::Case;
use super::options::{Settings, embedding_share};

/// What a peak may exceed its formula by: alignment, names, tables.
const SLACK_SHARE: f64 = 0.02;
const SLACK_BYTES: f64 = 65_536.0;

/// What the model takes for each of its tensors beside the elements, in bytes: the handle and its shapes, and for weights that come and go
/// what stands for them meanwhile. Measured: 779.
const TENSOR_BYTES: f64 = 1024.0;

/// The categories that have a formula.
pub(super) const JUDGED: [Category; 3] = [Category::Parameters, Category::Gradients, Category::Optimizer];

/// Bytes by category, slack included.
#[derive(Clone, Copy, Debug)]
pub(super) struct Bounds {
    parameters: f64,
    gradients: f64,
    optimizer: f64,
}

impl Bounds {
    /// The bound of `category`, where there is one.
    pub(super) fn of(&self, category: Category) -> Option<u64> {
        let bytes = match category {
            Category::Parameters => self.parameters,
            Category::Gradients => self.gradients,
            Category::Optimizer => self.optimizer,
            _ => return None,
        };
        Some((bytes * (1.0 + SLACK_SHARE) + SLACK_BYTES) as u64)
    }
}

/// Elements of what the formulas speak of.
struct Sizes {
    /// P
    all: f64,
    /// S
    segment: f64,
    /// T
    tensor: f64,
    /// E
    embedding: f64,
    /// Number of tensors.
    tensors: f64,
}

impl Sizes {
    fn of(segments: &[SegmentInfo]) -> Self {
        let lengths = || segments.iter().map(|segment| segment.len);
        let tensors = || segments.iter().flat_map(|segment| &segment.params).map(|param| param.len);
        Sizes {
            all: lengths().sum::<usize>() as f64,
            segment: lengths().max().unwrap_or(0) as f64,
            tensor: tensors().max().unwrap_or(0) as f64,
            embedding: lengths().next().unwrap_or(0) as f64,
            tensors: tensors().count() as f64,
        }
    }
}

/// The bounds of a case; see [`formulas`].
pub(super) fn bounds(segments: &[SegmentInfo], case: Case) -> Bounds {
    const F32: f64 = 4.0;
    let Sizes { all, segment, tensor, embedding, tensors } = Sizes::of(segments);
    let w = case.precision.dtype().size() as f64;
    let ranks = case.ranks as f64;
    let shard = all / ranks;
    let gathered = w * (all + 2.0 * segment + tensor.max(segment / ranks));
    let sharded = F32 * (shard + 2.0 * segment);
    let mut bounds = match case.strategy {
        StrategyKind::Zero1 => {
            Bounds { parameters: gathered, gradients: F32 * (all + segment), optimizer: F32 * 3.0 * shard }
        }
        StrategyKind::Zero2 => Bounds { parameters: gathered, gradients: sharded, optimizer: F32 * 3.0 * shard },
        StrategyKind::Fsdp => Bounds {
            parameters: F32 * shard + w * (2.0 * segment + embedding),
            gradients: sharded,
            optimizer: F32 * 2.0 * shard,
        },
        // The masters are the weights.
        _ if case.precision == Precision::F32 => {
            Bounds { parameters: w * all, gradients: F32 * all, optimizer: F32 * 2.0 * all }
        }
        _ => Bounds { parameters: w * (all + segment + tensor), gradients: F32 * all, optimizer: F32 * 3.0 * all },
    };
    bounds.parameters += TENSOR_BYTES * tensors;
    bounds
}

/// The model, and what the letters stand for in it.
pub(super) fn introduction(settings: &Settings) -> String {
    let Sizes { all, segment, tensor, embedding, .. } = Sizes::of(&settings.segments);
    let mib = |elements: f64| elements * 4.0 / f64::from(1 << 20);
    format!(
        "model: {} with {} blocks, bytes: {:.2} M parameters, of which the embedding is {:.1} %; {} sequences of {} tokens a step, {} steps\n\
         in f32: P = {:.2} MiB (all parameters), S = {:.2} (largest segment, each a bucket), T = {:.2} (largest tensor), \
         E = {:.2} (embedding)",
        settings.preset,
        settings.model.n_layer,
        all / 1e6,
        100.0 * embedding_share(&settings.segments),
        settings.batch,
        settings.model.block_size,
        settings.steps,
        mib(all),
        mib(segment),
        mib(tensor),
        mib(embedding),
    )
}

/// The bounds in words.
pub(super) fn formulas() -> String {
    format!(
        "bounds (sizes in f32; N ranks; w is 1, or 1/2 if weights have 16 bits; plus {:.0} % and {:.0} KiB, and for parameters {} KiB per \
         tensor):\n\
         parameters  single, ddp    P                         all weights in f32, which are also the optimizer's masters\n\
         \x20           the same       w(P + S + T)              weights in 16 bits, and the gathered segment that replaces the old one \
         tensor by tensor\n\
         \x20           zero1, zero2   w(P + 2S + max(T, S/N))  all weights, two segments that are being gathered, and one tensor or this \
         rank's shard\n\
         \x20           fsdp           P/N + w(2S + E)           masters, the segment in use and the next one, and the embedding from its \
         forward to its backward pass\n\
         gradients   single, ddp    P                         all of them\n\
         \x20           zero1          P + S                     all of them until the end of the pass, then this rank's shards\n\
         \x20           zero2, fsdp    P/N + 2S                  this rank's shards, the segment being sent and the segment being packed\n\
         optimizer   single, ddp    2P                        two moments; 3P in 16 bits, with the masters\n\
         \x20           zero1, zero2   3P/N\n\
         \x20           fsdp           2P/N                      two moments",
        100.0 * SLACK_SHARE,
        SLACK_BYTES / 1024.0,
        TENSOR_BYTES / 1024.0
    )
}
