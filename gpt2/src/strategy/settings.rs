//! Settings of the strategies in which ranks do not all average gradients in every step.

use comm_core::Error;
use serde::{Deserialize, Serialize};

use super::StrategyKind;

/// A setting that some strategies have; written as in [`Setting::name`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Setting {
    /// [`LocalOptions::sync_every`].
    SyncEvery,
    /// [`LocalOptions::outer_rate`].
    OuterRate,
    /// [`LocalOptions::outer_momentum`].
    OuterMomentum,
    /// [`LocalOptions::fragments`].
    Fragments,
    /// [`LocalOptions::overlap_steps`].
    OverlapSteps,
    /// [`LocalOptions::mixing`].
    Mixing,
    /// [`LocalOptions::sparta_share`].
    SpartaShare,
    /// [`LocalOptions::staleness`].
    Staleness,
}

comm_core::names!(
    pub Setting, "setting of a strategy":
    SyncEvery = "sync-every", OuterRate = "outer-rate", OuterMomentum = "outer-momentum",
    Fragments = "fragments", OverlapSteps = "overlap-steps", Mixing = "mixing",
    SpartaShare = "sparta-share", Staleness = "staleness",
);

impl Setting {
    /// The strategies that have it, as help texts and errors name them.
    pub fn strategies(self) -> String {
        let have: Vec<&str> =
            StrategyKind::ALL.into_iter().filter(|kind| kind.has(self)).map(StrategyKind::name).collect();
        have.join(", ")
    }
}

/// The largest bound: a worker waits for as many steps of the slowest one.
const MOST_STALENESS: u64 = 1000;

/// What the strategies in which ranks do not all average gradients in every step are told. Each takes those settings that its
/// [`Spec`](super::Spec::settings) names.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct LocalOptions {
    /// Steps between two synchronisations of the same parameters.
    pub sync_every: u64,
    /// Learning rate of the outer optimizer.
    pub outer_rate: f64,
    /// Nesterov momentum of the outer optimizer.
    pub outer_momentum: f64,
    /// Fragments, groups of segments that are synchronised one after another.
    pub fragments: usize,
    /// Training steps between starting a fragment's average and applying it (tau in the paper).
    pub overlap_steps: u64,
    /// Weight of a rank's own parameters when a synchronised fragment is applied, in [0, 1] (alpha in the paper).
    pub mixing: f64,
    /// Share of all parameters that `sparta` averages in a step.
    pub sparta_share: f64,
    /// Most steps that a worker of `async-ps` may be ahead of the slowest worker, and so the largest staleness.
    pub staleness: u64,
}

impl Default for LocalOptions {
    /// Ten steps, DiLoCo's outer rate and momentum, and two fragments that overlap one step and are mixed by half;
    /// a two-hundredth of the parameters for SPARTA, the most that its paper has; two steps of staleness.
    fn default() -> Self {
        LocalOptions {
            sync_every: 10,
            outer_rate: 0.7,
            outer_momentum: 0.9,
            fragments: 2,
            overlap_steps: 1,
            mixing: 0.5,
            sparta_share: 0.005,
            staleness: 2,
        }
    }
}

impl LocalOptions {
    /// The value of a setting, as a command line takes it.
    pub fn value(&self, setting: Setting) -> String {
        match setting {
            Setting::SyncEvery => self.sync_every.to_string(),
            Setting::OuterRate => self.outer_rate.to_string(),
            Setting::OuterMomentum => self.outer_momentum.to_string(),
            Setting::Fragments => self.fragments.to_string(),
            Setting::OverlapSteps => self.overlap_steps.to_string(),
            Setting::Mixing => self.mixing.to_string(),
            Setting::SpartaShare => self.sparta_share.to_string(),
            Setting::Staleness => self.staleness.to_string(),
        }
    }

    /// Whether `kind` can work with those that it takes.
    ///
    /// # Errors
    /// `InvalidArgument`, which names the option as a user types it.
    pub fn check(&self, kind: StrategyKind) -> comm_core::Result<()> {
        let wrong = kind.spec().settings.iter().find_map(|setting| Some((setting, self.wrong(*setting)?)));
        match wrong {
            Some((setting, rule)) => Err(Error::invalid(format!("--{setting} {} must {rule}", self.value(*setting)))),
            None => Ok(()),
        }
    }

    /// What a setting must do that it does not.
    fn wrong(&self, setting: Setting) -> Option<&'static str> {
        let (holds, rule) = match setting {
            Setting::SyncEvery => (self.sync_every > 0, "be at least 1"),
            Setting::OuterRate => (self.outer_rate > 0.0 && self.outer_rate.is_finite(), "be a positive number"),
            Setting::OuterMomentum => ((0.0..1.0).contains(&self.outer_momentum), "be in [0, 1)"),
            Setting::Fragments => (
                self.fragments > 0 && self.sync_every.is_multiple_of(self.fragments as u64),
                "be at least 1, and divide --sync-every",
            ),
            Setting::OverlapSteps => (
                self.overlap_steps < self.sync_every / (self.fragments as u64).max(1),
                "be less than --sync-every divided by --fragments, the steps between two synchronisations",
            ),
            Setting::Mixing => ((0.0..=1.0).contains(&self.mixing), "be in [0, 1]"),
            Setting::Staleness => (self.staleness <= MOST_STALENESS, "be at most 1000"),
            Setting::SpartaShare => (self.sparta_share > 0.0 && self.sparta_share <= 1.0, "be in (0, 1]"),
        };
        (!holds).then_some(rule)
    }
}
