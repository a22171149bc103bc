//! What is compared with one device, and the bounds.

use gpt2::config::Preset;
use gpt2::optim::LossScaling;
use gpt2::precision::Precision;
use gpt2::strategy::{StrategyKind, StrategyOptions};
use gpt2::trainer::TrainConfig;

/// The model: small, so that all runs take minutes.
pub(super) const PRESET: Preset = Preset::Micro;

/// Sequences a step: divided evenly by up to 4 ranks, each in 3 micro-steps.
pub(super) const BATCH: usize = 36;

/// Gradients are clipped to this norm where clipping is on: shorter than those of the first steps.
pub(super) const CLIP: f64 = 0.5;

/// Ranks on which faults are planted: two nodes of two.
pub(super) const FAULT_RANKS: usize = 4;

/// So that the small model has three buckets.
const BUCKET_BYTES: usize = 20_000;

/// By what a loss in f16 is multiplied: a power of two at which no gradient of this model overflows.
const F16_SCALE: f32 = 1024.0;

/// What all runs of the comparison share.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Base {
    pub(super) seed: u64,
    /// Optimizer steps of a run.
    pub(super) steps: u64,
    pub(super) vocabulary: usize,
}

/// A strategy, or a variant of one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Variant {
    pub(crate) strategy: StrategyKind,
    /// Whether the server of `ps` only serves.
    pub(crate) dedicated: bool,
}

impl Variant {
    pub(super) const SINGLE: Self = Variant { strategy: StrategyKind::Single, dedicated: false };

    /// The variants of each of these strategies that communicate.
    pub(super) fn of(strategies: &[StrategyKind]) -> Vec<Self> {
        let variants = |strategy: &StrategyKind| {
            let plain = Variant { strategy: *strategy, dedicated: false };
            let dedicated = (*strategy == StrategyKind::Ps).then_some(Variant { dedicated: true, ..plain });
            std::iter::once(plain).chain(dedicated)
        };
        strategies.iter().filter(|strategy| **strategy != StrategyKind::Single).flat_map(variants).collect()
    }

    pub(crate) fn name(self) -> String {
        if self.dedicated { format!("{}, dedicated", self.strategy) } else { self.strategy.to_string() }
    }

    pub(super) fn runs_on(self, ranks: usize) -> bool {
        ranks > 1 || !self.dedicated
    }

    /// A run in f32 with clipping on.
    pub(super) fn config(self, base: Base, ranks: usize) -> TrainConfig {
        // Two nodes, where the ranks can be divided so.
        let ranks_per_node = if ranks.is_multiple_of(2) { ranks / 2 } else { ranks };
        TrainConfig {
            options: StrategyOptions {
                first_bucket_bytes: BUCKET_BYTES,
                bucket_bytes: BUCKET_BYTES,
                fusion_bytes: BUCKET_BYTES,
                dedicated_server: self.dedicated,
                ranks_per_node,
                ..StrategyOptions::default()
            },
            seed: base.seed,
            steps: base.steps,
            global_batch: BATCH,
            clip: CLIP,
            ..TrainConfig::of(PRESET.config(base.vocabulary), self.strategy)
        }
    }
}

/// One option, all others as in [`Column::F32`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Column {
    F32,
    Unclipped,
    Accumulated,
    Recomputed,
    WireBf16,
    Bf16,
    F16,
}

impl Column {
    pub(super) const ALL: [Self; 7] =
        [Self::F32, Self::Unclipped, Self::Accumulated, Self::Recomputed, Self::WireBf16, Self::Bf16, Self::F16];

    pub(super) fn name(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::Unclipped => "no clipping",
            Self::Accumulated => "3 micro-steps",
            Self::Recomputed => "recomputation",
            Self::WireBf16 => "bf16 wire",
            Self::Bf16 => "bf16 compute",
            Self::F16 => "f16 compute",
        }
    }

    /// The largest relative difference to one device in f32, of any loss and any gradient norm, that is put down to rounding.
    ///
    /// In f32 sums run in another order, each within 6e-8; what grows out of it in twenty steps is given 1e-4. A 16-bit type with p bits
    /// of precision rounds each value by at most u = 2^-p (2^-8 for bf16, 2^-11 for f16). A gradient on the wire is rounded twice, on its
    /// way there and back: 2.5·u. Computing rounds at every layer, forward and backward: 10·u.
    pub(super) fn bound(self) -> f64 {
        const BF16: f64 = 1.0 / 256.0;
        const F16: f64 = 1.0 / 2048.0;
        match self {
            Self::F32 | Self::Unclipped | Self::Accumulated | Self::Recomputed => 1e-4,
            Self::WireBf16 => 2.5 * BF16,
            Self::Bf16 => 10.0 * BF16,
            Self::F16 => 10.0 * F16,
        }
    }

    pub(super) fn is_f32(self) -> bool {
        matches!(self, Self::F32 | Self::Unclipped | Self::Accumulated | Self::Recomputed)
    }

    pub(super) fn config(self, base: Base, variant: Variant, ranks: usize) -> TrainConfig {
        let config = variant.config(base, ranks);
        match self {
            Self::F32 => config,
            Self::Unclipped => TrainConfig { clip: 0.0, ..config },
            Self::Accumulated => TrainConfig { accumulation: 3, ..config },
            Self::Recomputed => TrainConfig { recompute: true, ..config },
            Self::WireBf16 => {
                let options = StrategyOptions { wire: Precision::Bf16, ..config.options.clone() };
                TrainConfig { options, ..config }
            }
            Self::Bf16 => TrainConfig { precision: Precision::Bf16, ..config },
            Self::F16 => TrainConfig {
                precision: Precision::F16,
                loss_scaling: LossScaling::Fixed { scale: F16_SCALE },
                ..config
            },
        }
    }
}
