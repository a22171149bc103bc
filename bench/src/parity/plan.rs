//! What is compared with one device, and the bounds.

use gpt2::precision::Precision;
use gpt2::strategy::StrategyKind;
use rig::record::Cell;

/// Ranks on which faults are planted: two nodes of two.
pub(super) const FAULT_RANKS: usize = 4;

/// A strategy, or a variant of one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Variant {
    pub(crate) strategy: StrategyKind,
    /// Whether the server of `ps` only serves.
    pub(crate) dedicated: bool,
}

impl Variant {
    /// What a cell trains by.
    ///
    /// # Errors
    /// There is no such strategy.
    pub(crate) fn in_cell(cell: &Cell) -> Result<Self, String> {
        Ok(Variant { strategy: cell.strategy.parse()?, dedicated: cell.dedicated_server })
    }

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

    /// The option that a cell has; `None` where it has several, or others.
    pub(super) fn of(cell: &Cell) -> Option<Self> {
        if cell.compress.is_some() {
            return None;
        }
        let unclipped = cell.clip.as_deref() == Some("0");
        match (cell.precision.parse().ok()?, cell.wire.parse().ok()?, cell.accumulation, cell.recompute, unclipped) {
            (Precision::F32, Precision::F32, 1, false, false) => Some(Self::F32),
            (Precision::F32, Precision::F32, 1, false, true) => Some(Self::Unclipped),
            (Precision::F32, Precision::F32, 3, false, false) => Some(Self::Accumulated),
            (Precision::F32, Precision::F32, 1, true, false) => Some(Self::Recomputed),
            (Precision::F32, Precision::Bf16, 1, false, false) => Some(Self::WireBf16),
            (Precision::Bf16, Precision::F32, 1, false, false) => Some(Self::Bf16),
            (Precision::F16, Precision::F32, 1, false, false) => Some(Self::F16),
            _ => None,
        }
    }
}
