//! Loss scaling: keeps small gradients of 16-bit computation from vanishing, by a factor that overflow finds the limit of.
//!
//! Micikevicius et al. 2018, "Mixed Precision Training" (arXiv 1710.03740), section 3.2; the dynamic rule and its constants are those of
//! PyTorch's `GradScaler`. Every scale is a power of two, so a gradient that stays within its type's normal range is unscaled to the very
//! bits that it would have had: scaling changes what would have vanished or overflowed, and nothing else.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// By what the loss is multiplied before the backward pass. All factors are powers of two.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "kebab-case", deny_unknown_fields)]
pub enum LossScaling {
    /// By nothing; a gradient that is not finite ends the run.
    #[default]
    Off,
    /// Always by the same; a step whose gradients or loss are not finite is skipped, unless too many were before it: see
    /// [`LossScaler::MOST_SKIPPED`].
    Fixed {
        /// The scale.
        scale: f32,
    },
    /// By a scale that shrinks with every step whose gradients or loss are not finite, which is skipped, and grows after a number of good
    /// ones.
    Dynamic {
        /// The first scale, at least [`LossScaler::MIN_SCALE`].
        initial: f32,
        /// Factor of growth, at least 2.
        growth: f32,
        /// Factor of a step that was skipped, at most a half.
        backoff: f32,
        /// Good steps in a row before the scale grows.
        interval: u64,
    },
}

impl LossScaling {
    /// Dynamic, with the constants of PyTorch's `GradScaler`: from 65536, twice as much after 2000 good steps, half as much after a bad one.
    pub const DYNAMIC: Self = Self::Dynamic { initial: 65_536.0, growth: 2.0, backoff: 0.5, interval: 2_000 };

    /// Whether the constants make a scaler.
    ///
    /// # Errors
    /// [`ScalingError::Constant`].
    pub fn validate(&self) -> Result<(), ScalingError> {
        const MIN: f32 = LossScaler::MIN_SCALE;
        const MAX: f32 = LossScaler::MAX_SCALE;
        let checks = match *self {
            Self::Off => return Ok(()),
            Self::Fixed { scale } => {
                let fits = is_power_of_two(scale) && scale <= MAX;
                vec![("fixed scale", f64::from(scale), "a power of two from 2^-126 to 2^126", fits)]
            }
            Self::Dynamic { initial, growth, backoff, interval } => vec![
                (
                    "initial scale",
                    f64::from(initial),
                    "a power of two from 1 to 2^126",
                    is_power_of_two(initial) && (MIN..=MAX).contains(&initial),
                ),
                ("growth", f64::from(growth), "a power of two, at least 2", is_power_of_two(growth) && growth > 1.0),
                (
                    "backoff",
                    f64::from(backoff),
                    "a power of two, at most 0.5",
                    is_power_of_two(backoff) && backoff < 1.0,
                ),
                ("interval", interval as f64, "at least 1", interval > 0),
            ],
        };
        match checks.into_iter().find(|(.., holds)| !holds) {
            Some((what, value, rule, _)) => Err(ScalingError::Constant { what, value, rule }),
            None => Ok(()),
        }
    }
}

/// `off`, `dynamic`, or a number; constants of a dynamic scale that are not the default follow as in `dynamic:initial=1024,interval=100`.
impl fmt::Display for LossScaling {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::Off => f.pad("off"),
            // Exactly: as f32, a large one would be written with fewer digits than it was given with.
            Self::Fixed { scale } => f.pad(&f64::from(scale).to_string()),
            Self::DYNAMIC => f.pad("dynamic"),
            Self::Dynamic { initial, growth, backoff, interval } => {
                let [initial, growth, backoff] = [initial, growth, backoff].map(f64::from);
                f.pad(&format!("dynamic:initial={initial},growth={growth},backoff={backoff},interval={interval}"))
            }
        }
    }
}

/// Reads what [`Display`](fmt::Display) writes; after `dynamic:` any of the constants, in any order.
impl FromStr for LossScaling {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        const CHOICES: &str = "one of off, dynamic (with constants: \
                               dynamic:initial=1024,growth=2,backoff=0.5,interval=100) or a power of two";
        let unknown = |what: &str| format!("unknown loss scaling '{what}', expected {CHOICES}");
        let number = |text: &str| text.parse::<f32>().map_err(|_| unknown(text));
        let scaling = match text.split_once(':') {
            None if text == "off" => Self::Off,
            None if text == "dynamic" => Self::DYNAMIC,
            None => Self::Fixed { scale: number(text)? },
            Some(("dynamic", constants)) => {
                let Self::Dynamic { mut initial, mut growth, mut backoff, mut interval } = Self::DYNAMIC else {
                    return Err(unknown(text));
                };
                for constant in constants.split(',') {
                    match constant.split_once('=') {
                        Some(("initial", value)) => initial = number(value)?,
                        Some(("growth", value)) => growth = number(value)?,
                        Some(("backoff", value)) => backoff = number(value)?,
                        Some(("interval", value)) => interval = value.parse().map_err(|_| unknown(value))?,
                        _ => return Err(unknown(constant)),
                    }
                }
                Self::Dynamic { initial, growth, backoff, interval }
            }
            Some(_) => return Err(unknown(text)),
        };
        scaling.validate().map_err(|error| error.to_string())?;
        Ok(scaling)
    }
}

/// What was not finite in a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Overflow {
    /// The loss, and with it every gradient.
    Loss,
    /// Gradients alone.
    Gradient,
}

impl fmt::Display for Overflow {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Loss => "the loss",
            Self::Gradient => "a gradient",
        })
    }
}

/// The scale of the current step, and what becomes of it.
///
/// Every rank has one and tells it the same after each backward pass, what was not finite on *any* rank, so all have the same scale at
/// every step.
#[derive(Clone, Debug, PartialEq)]
pub struct LossScaler {
    scaling: LossScaling,
    scale: f32,
    good_steps: u64,
    skipped: u64,
    /// Steps skipped since the last one that was not.
    skipped_in_row: u64,
}

impl LossScaler {
    /// So many steps in a row are skipped at a fixed scale, and the run ends. A skipped step changes nothing but the data of the next one: if
    /// that were what makes gradients overflow, another step would soon be taken.
    pub const MOST_SKIPPED: u64 = 10;

    /// A dynamic scale shrinks no further: what overflows at 1 overflows without scaling as well.
    pub const MIN_SCALE: f32 = 1.0;

    /// 2^126: no scale is larger, so that its inverse is a normal f32 too.
    pub const MAX_SCALE: f32 = 1.0 / f32::MIN_POSITIVE;

    /// A scaler before the first step.
    ///
    /// # Errors
    /// [`ScalingError::Constant`].
    pub fn new(scaling: LossScaling) -> Result<Self, ScalingError> {
        scaling.validate()?;
        let scale = match scaling {
            LossScaling::Off => 1.0,
            LossScaling::Fixed { scale } => scale,
            LossScaling::Dynamic { initial, .. } => initial,
        };
        Ok(Self { scaling, scale, good_steps: 0, skipped: 0, skipped_in_row: 0 })
    }

    /// What this step's loss is to be multiplied by.
    pub fn scale(&self) -> f32 {
        self.scale
    }

    /// What this step's gradients are to be multiplied by: the inverse of [`scale`](Self::scale), which is exact.
    pub fn unscale(&self) -> f32 {
        1.0 / self.scale
    }

    /// Number of steps skipped so far.
    pub fn skipped(&self) -> u64 {
        self.skipped
    }

    /// Ends a step, given what was not finite on any rank; true where the step is to be skipped, with parameters and optimizers left as
    /// they are.
    ///
    /// A dynamic scale is multiplied by `backoff` where the step is skipped, though not to less than [`MIN_SCALE`](Self::MIN_SCALE), and
    /// by `growth` after `interval` good steps since its last change, though not to more than [`MAX_SCALE`](Self::MAX_SCALE).
    ///
    /// # Errors
    /// If something was not finite: [`ScalingError::NotScaled`] where scaling is off, [`ScalingError::AtMinimum`] where a dynamic scale
    /// cannot shrink, and [`ScalingError::Fixed`] where this is the last of [`MOST_SKIPPED`](Self::MOST_SKIPPED) steps in a row at a fixed
    /// one. Nothing has changed then.
    pub fn update(&mut self, overflow: Option<Overflow>) -> Result<bool, ScalingError> {
        match (self.scaling, overflow) {
            (LossScaling::Off, Some(what)) => return Err(ScalingError::NotScaled { what }),
            (LossScaling::Fixed { scale }, Some(what)) if self.skipped_in_row + 1 >= Self::MOST_SKIPPED => {
                return Err(ScalingError::Fixed { what, scale, steps: Self::MOST_SKIPPED });
            }
            (LossScaling::Off | LossScaling::Fixed { .. }, _) => {}
            (LossScaling::Dynamic { backoff, .. }, Some(what)) => {
                if self.scale <= Self::MIN_SCALE {
                    return Err(ScalingError::AtMinimum { what });
                }
                self.scale = (self.scale * backoff).max(Self::MIN_SCALE);
                self.good_steps = 0;
            }
            (LossScaling::Dynamic { growth, interval, .. }, None) => {
                self.good_steps += 1;
                if self.good_steps >= interval {
                    self.scale = (self.scale * growth).min(Self::MAX_SCALE);
                    self.good_steps = 0;
                }
            }
        }
        let is_skipped = overflow.is_some();
        self.skipped += u64::from(is_skipped);
        self.skipped_in_row = if is_skipped { self.skipped_in_row + 1 } else { 0 };
        Ok(is_skipped)
    }

    /// Looks back on a run of `steps` steps, which should have taken one.
    ///
    /// # Errors
    /// [`ScalingError::AllSkipped`].
    pub fn finish(&self, steps: u64) -> Result<(), ScalingError> {
        if steps > 0 && self.skipped >= steps {
            return Err(ScalingError::AllSkipped { steps, scale: self.scale });
        }
        Ok(())
    }

    /// The state for a checkpoint.
    pub fn state(&self) -> ScalerState {
        let Self { scaling, scale, good_steps, skipped, skipped_in_row } = *self;
        ScalerState { scaling, scale, good_steps, skipped, skipped_in_row }
    }

    /// Continues from a saved [`state`](Self::state). Of one of another configuration only the number of steps that were skipped is taken: what
    /// makes gradients overflow may be another scale now.
    ///
    /// # Errors
    /// [`ScalingError::Constant`] if the scale is none that a dynamic scaler can have; nothing has changed then.
    pub fn restore(&mut self, state: &ScalerState) -> Result<(), ScalingError> {
        let ScalerState { scaling, scale, good_steps, skipped, skipped_in_row } = *state;
        if scaling != self.scaling {
            self.skipped = skipped;
            return Ok(());
        }
        if let LossScaling::Dynamic { growth, backoff, interval, .. } = self.scaling {
            LossScaling::Dynamic { initial: scale, growth, backoff, interval }.validate()?;
            (self.scale, self.good_steps) = (scale, good_steps.min(interval - 1));
        }
        (self.skipped, self.skipped_in_row) = (skipped, skipped_in_row);
        Ok(())
    }
}

/// A scaler's state between steps, as checkpoints have it.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ScalerState {
    /// How it was configured.
    pub scaling: LossScaling,
    /// What the next step's loss is multiplied by.
    pub scale: f32,
    /// Good steps since the scale last changed.
    pub good_steps: u64,
    /// Steps skipped so far.
    pub skipped: u64,
    /// Of these, since the last one that was not.
    pub skipped_in_row: u64,
}

/// Why there is no scale, or none that helps.
#[derive(Clone, Copy, Debug, PartialEq, thiserror::Error)]
pub enum ScalingError {
    /// A constant that makes no scaler.
    #[error("loss scaling: the {what} is {value}; it must be {rule}")]
    Constant {
        /// Which constant.
        what: &'static str,
        /// Its value.
        value: f64,
        /// What it must be.
        rule: &'static str,
    },
    /// Something is not finite, and the loss is not scaled.
    #[error(
        "{what} is not finite, and loss scaling is off; lower the learning rate or clip gradients; with f16 give --loss-scale dynamic"
    )]
    NotScaled {
        /// What is not finite.
        what: Overflow,
    },
    /// Something is not finite at the smallest scale.
    #[error(
        "{what} is not finite although the loss scale is at its minimum, {}; lower the learning rate, clip gradients, or compute in bf16 \
         or f32",
        LossScaler::MIN_SCALE
    )]
    AtMinimum {
        /// What is not finite.
        what: Overflow,
    },
    /// Something was not finite too often at a scale that stays.
    #[error(
        "{what} is not finite, as in the {} steps before, which were skipped, and the loss scale is fixed at {}; {}", steps - 1,
        f64::from(*scale),
        match what {
            Overflow::Gradient => "give a smaller --loss-scale, or --loss-scale dynamic",
            // It is not what is scaled.
            Overflow::Loss => "lower the learning rate, or compute in bf16 or f32",
        }
    )]
    Fixed {
        /// What is not finite.
        what: Overflow,
        /// The scale.
        scale: f32,
        /// Steps in a row, this one included.
        steps: u64,
    },
    /// A run without a step.
    #[error(
        "all {steps} steps of the run were skipped, because gradients or the loss were not finite, so the weights have not changed; the \
         loss scale is now {}: give a smaller --loss-scale, or more --steps, in which a dynamic scale can shrink",
        f64::from(*scale)
    )]
    AllSkipped {
        /// Steps of the run.
        steps: u64,
        /// The scale after the last.
        scale: f32,
    },
}

fn is_power_of_two(x: f32) -> bool {
    const MANTISSA: u32 = (1 << (f32::MANTISSA_DIGITS - 1)) - 1;
    x > 0.0 && x.is_normal() && x.to_bits() & MANTISSA == 0
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What becomes of a step whose gradients are finite or not.
    fn end_step(scaler: &mut LossScaler, bad: bool) -> Result<bool, ScalingError> {
        scaler.update(bad.then_some(Overflow::Gradient))
    }

    fn dynamic(initial: f32, interval: u64) -> LossScaler {
        LossScaler::new(LossScaling::Dynamic { initial, growth: 2.0, backoff: 0.5, interval }).unwrap()
    }

    #[test]
    fn a_dynamic_scale_halves_at_once_and_doubles_after_an_interval() {
        let mut scaler = dynamic(1024.0, 3);
        // (not finite, skipped, the next scale)
        for (step, (bad, scale)) in [
            (false, 1024.0),
            (false, 1024.0),
            (false, 2048.0),
            (false, 2048.0),
            (true, 1024.0),
            (false, 1024.0),
            (true, 512.0),
            (true, 256.0),
            (false, 256.0),
            (false, 256.0),
            (false, 512.0),
            (false, 512.0),
        ]
        .into_iter()
        .enumerate()
        {
            assert_eq!(end_step(&mut scaler, bad), Ok(bad), "{step}");
            assert_eq!((scaler.scale(), scaler.unscale()), (scale, 1.0 / scale), "{step}");
        }
        assert_eq!((scaler.skipped(), scaler.scale(), scaler.state().good_steps), (3, 512.0, 1));
    }

    #[test]
    fn the_default_constants_are_those_of_pytorch() {
        let mut scaler = LossScaler::new(LossScaling::DYNAMIC).unwrap();
        assert_eq!(scaler.scale(), 65_536.0);
        for _ in 0..1_999 {
            assert_eq!(end_step(&mut scaler, false), Ok(false));
        }
        assert_eq!(scaler.scale(), 65_536.0);
        end_step(&mut scaler, false).unwrap();
        assert_eq!(scaler.scale(), 131_072.0);
        end_step(&mut scaler, true).unwrap();
        end_step(&mut scaler, true).unwrap();
        assert_eq!(scaler.scale(), 32_768.0);
    }

    #[test]
    fn a_scale_stays_between_its_limits() {
        let mut scaler = dynamic(1.0, 1);
        for _ in 0..300 {
            end_step(&mut scaler, false).unwrap();
            assert!(scaler.scale().is_finite() && scaler.unscale().is_normal());
        }
        assert_eq!((scaler.scale(), scaler.unscale()), (LossScaler::MAX_SCALE, f32::MIN_POSITIVE));
        for _ in 0..126 {
            assert_eq!(end_step(&mut scaler, true), Ok(true));
        }
        assert_eq!(scaler.scale(), LossScaler::MIN_SCALE);
        let before = scaler.clone();
        let error = end_step(&mut scaler, true).unwrap_err();
        assert_eq!((error, &scaler), (ScalingError::AtMinimum { what: Overflow::Gradient }, &before));
        assert!(
            error.to_string().contains("a gradient is not finite although the loss scale is at its minimum, 1"),
            "{error}"
        );
        let error = scaler.update(Some(Overflow::Loss)).unwrap_err();
        assert!(error.to_string().starts_with("the loss is not finite"), "{error}");
        assert_eq!(end_step(&mut scaler, false), Ok(false), "a good step goes on");

        // A factor may jump over the limits but not beyond them.
        let mut coarse =
            LossScaler::new(LossScaling::Dynamic { initial: 4.0, growth: 1024.0, backoff: 0.125, interval: 1 })
                .unwrap();
        end_step(&mut coarse, true).unwrap();
        assert_eq!(coarse.scale(), 1.0);
        for _ in 0..20 {
            end_step(&mut coarse, false).unwrap();
        }
        assert_eq!(coarse.scale(), LossScaler::MAX_SCALE);
    }

    #[test]
    fn scaling_and_unscaling_are_exact() {
        let mut scaler = dynamic(1.0, 1);
        let values = crate::init::normal(3, "values", 1_000, 1.0);
        for _ in 0..100 {
            let (scale, unscale) = (scaler.scale(), scaler.unscale());
            assert!(values.iter().all(|x| (x * scale * unscale).to_bits() == x.to_bits()), "{scale}");
            end_step(&mut scaler, false).unwrap();
        }
    }

    #[test]
    fn a_fixed_scale_skips_and_none_fails() {
        let mut fixed = LossScaler::new(LossScaling::Fixed { scale: 128.0 }).unwrap();
        assert_eq!([true, false, true].map(|bad| end_step(&mut fixed, bad).unwrap()), [true, false, true]);
        assert_eq!((fixed.scale(), fixed.skipped()), (128.0, 2));
        let mut off = LossScaler::new(LossScaling::Off).unwrap();
        assert_eq!((off.scale(), off.unscale()), (1.0, 1.0));
        assert_eq!(end_step(&mut off, false), Ok(false));
        assert_eq!(end_step(&mut off, true), Err(ScalingError::NotScaled { what: Overflow::Gradient }));
        assert_eq!(off.skipped(), 0);
        let mut again = LossScaler::new(LossScaling::Fixed { scale: 128.0 }).unwrap();
        again.restore(&fixed.state()).unwrap();
        assert_eq!(again, fixed);
        off.restore(&fixed.state()).unwrap();
        assert_eq!((off.scale(), off.skipped()), (1.0, 2));
    }

    #[test]
    fn a_fixed_scale_that_is_too_large_is_an_error_and_a_bad_step_now_and_then_is_none() {
        let mut fixed = LossScaler::new(LossScaling::Fixed { scale: 1024.0 }).unwrap();
        for round in 0..5 {
            for _ in 1..LossScaler::MOST_SKIPPED {
                assert_eq!(end_step(&mut fixed, true), Ok(true), "{round}");
            }
            if round < 4 {
                assert_eq!(end_step(&mut fixed, false), Ok(false), "{round}");
            }
        }
        let before = fixed.clone();
        let error = end_step(&mut fixed, true).unwrap_err();
        assert_eq!(error, ScalingError::Fixed { what: Overflow::Gradient, scale: 1024.0, steps: 10 });
        let said = error.to_string();
        assert!(said.contains("as in the 9 steps before") && said.contains("fixed at 1024"), "{said}");
        assert!(said.contains("smaller") && said.contains("dynamic"), "{said}");
        let said = fixed.update(Some(Overflow::Loss)).unwrap_err().to_string();
        assert!(said.starts_with("the loss") && said.contains("learning rate") && !said.contains("smaller"), "{said}");
        assert_eq!(fixed, before);
    }

    #[test]
    fn a_run_has_to_take_a_step() {
        let mut scaler = dynamic(1024.0, 100);
        assert_eq!(scaler.finish(0), Ok(()));
        for _ in 0..3 {
            end_step(&mut scaler, true).unwrap();
        }
        let error = scaler.finish(3).unwrap_err();
        assert_eq!(error, ScalingError::AllSkipped { steps: 3, scale: 128.0 });
        assert!(error.to_string().contains("all 3 steps"), "{error}");
        end_step(&mut scaler, false).unwrap();
        end_step(&mut scaler, true).unwrap();
        assert_eq!(scaler.finish(5), Ok(()));
    }

    #[test]
    fn state_can_be_saved_and_restored() {
        let mut scaler = dynamic(8.0, 4);
        for bad in [false, true, false, false, false] {
            end_step(&mut scaler, bad).unwrap();
        }
        let state = scaler.state();
        assert_eq!((state.scale, state.good_steps, state.skipped), (4.0, 3, 1));
        let text = serde_json::to_string(&state).unwrap();
        assert_eq!(serde_json::from_str::<ScalerState>(&text).unwrap(), state);
        let mut copy = dynamic(8.0, 4);
        copy.restore(&state).unwrap();
        assert_eq!(copy, scaler);
        for bad in [false, true, false] {
            assert_eq!((end_step(&mut copy, bad), copy.scale()), (end_step(&mut scaler, bad), scaler.scale()));
        }
        for scale in [3.0, f32::NAN, 0.5] {
            assert!(copy.restore(&ScalerState { scale, ..state }).is_err());
        }
        copy.restore(&ScalerState { good_steps: u64::MAX, ..state }).unwrap();
        end_step(&mut copy, false).unwrap();
        assert_eq!(copy.scale(), 8.0, "it grows with the next good step");
        // Of another configuration only what was skipped is known.
        let mut other = dynamic(1024.0, 2);
        other.restore(&state).unwrap();
        assert_eq!((other.scale(), other.skipped()), (1024.0, 1));
    }

    #[test]
    fn scalings_are_read_as_they_are_written() {
        let custom = LossScaling::Dynamic { initial: 1024.0, growth: 4.0, backoff: 0.25, interval: 7 };
        let fixed = |scale| LossScaling::Fixed { scale };
        for scaling in
            [LossScaling::Off, LossScaling::DYNAMIC, custom, fixed(128.0), fixed(0.125), fixed(2f32.powi(126))]
        {
            assert_eq!(scaling.to_string().parse(), Ok(scaling));
            let text = serde_json::to_string(&scaling).unwrap();
            assert_eq!(serde_json::from_str::<LossScaling>(&text).unwrap(), scaling, "{text}");
        }
        assert_eq!(LossScaling::DYNAMIC.to_string(), "dynamic");
        assert_eq!("1024".parse(), Ok(fixed(1024.0)));
        assert_eq!(fixed(1_073_741_824.0).to_string(), "1073741824");
        let partial = LossScaling::Dynamic { initial: 65_536.0, growth: 2.0, backoff: 0.5, interval: 100 };
        assert_eq!("dynamic:interval=100".parse(), Ok(partial));
        for bad in
            ["", "on", "dynamic:", "dynamic:initial", "dynamic:speed=2", "static:8", "1024x", "dynamic:interval=-1"]
        {
            let error = bad.parse::<LossScaling>().unwrap_err();
            assert!(error.contains("one of off"), "{bad}: {error}");
        }
        for (bad, rule) in [
            ("0", "a power of two"),
            ("-8", "a power of two"),
            ("1000", "a power of two"),
            ("inf", "a power of two"),
            ("NaN", "a power of two"),
            ("1e-45", "a power of two"),
            ("dynamic:initial=0.5", "from 1 to"),
            ("dynamic:growth=1", "at least 2"),
            ("dynamic:growth=3", "at least 2"),
            ("dynamic:backoff=1", "at most 0.5"),
            ("dynamic:interval=0", "at least 1"),
        ] {
            let error = bad.parse::<LossScaling>().unwrap_err();
            assert!(error.contains(rule), "{bad}: {error}");
        }
    }
}
