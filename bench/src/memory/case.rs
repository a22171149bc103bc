//! A run.

use gpt2::precision::Precision;
use gpt2::strategy::StrategyKind;
use rig::record::Cell;

/// What is run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Case {
    pub(super) strategy: StrategyKind,
    pub(super) ranks: usize,
    pub(super) precision: Precision,
    pub(super) recompute: bool,
}

impl Case {
    /// # Errors
    /// The cell names what there is not.
    pub(super) fn of(cell: &Cell) -> Result<Self, String> {
        Ok(Case {
            strategy: cell.strategy.parse()?,
            ranks: cell.ranks,
            precision: cell.precision.parse()?,
            recompute: cell.recompute,
        })
    }

    pub(super) fn how(self) -> &'static str {
        match (self.precision, self.recompute) {
            (Precision::F32, false) => "f32",
            (Precision::F32, true) => "f32, recomputed",
            (Precision::Bf16, false) => "bf16",
            (Precision::Bf16, true) => "bf16, recomputed",
            (Precision::F16, false) => "f16",
            (Precision::F16, true) => "f16, recomputed",
        }
    }
}
