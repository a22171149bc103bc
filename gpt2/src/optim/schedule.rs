//! Learning-rate schedules.

use serde::{Deserialize, Serialize};

use crate::math;

/// The learning rate as a function of the step.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "kebab-case", deny_unknown_fields)]
pub enum LearningRate {
    /// The same at every step.
    Constant {
        /// The rate.
        rate: f64,
    },
    /// Linear warm-up from 0, then the same at every step.
    WarmupConstant {
        /// The rate after the warm-up.
        peak: f64,
        /// Number of warm-up steps.
        warmup: u64,
    },
    /// Linear warm-up from 0, then half a cosine down to a floor, then the floor (nanoGPT's schedule).
    WarmupCosine {
        /// The highest rate.
        peak: f64,
        /// The lowest rate, kept after the descent.
        floor: f64,
        /// Number of warm-up steps.
        warmup: u64,
        /// Step at which the floor is reached.
        total: u64,
    },
    /// Linear warm-up from 0, then a straight line down to a floor, then the floor (BERT's schedule, and LAMB's).
    WarmupLinear {
        /// The highest rate.
        peak: f64,
        /// The lowest rate, kept after the descent.
        floor: f64,
        /// Number of warm-up steps.
        warmup: u64,
        /// Step at which the floor is reached.
        total: u64,
    },
}

impl LearningRate {
    /// The rate of step `step`, counted from 0. Step `s` of a warm-up of `w` steps has (s+1)/(w+1) of the peak.
    pub fn at(&self, step: u64) -> f64 {
        let rising = |peak: f64, warmup: u64| peak * (step as f64 + 1.0) / (warmup as f64 + 1.0);
        let progress = |warmup: u64, total: u64| (step - warmup) as f64 / (total - warmup) as f64;
        match *self {
            Self::Constant { rate } => rate,
            Self::WarmupConstant { peak, warmup }
            | Self::WarmupCosine { peak, warmup, .. }
            | Self::WarmupLinear { peak, warmup, .. }
                if step < warmup =>
            {
                rising(peak, warmup)
            }
            Self::WarmupConstant { peak, .. } => peak,
            Self::WarmupCosine { floor, total, .. } | Self::WarmupLinear { floor, total, .. } if step >= total => floor,
            Self::WarmupCosine { peak, floor, warmup, total } => {
                let (_, cos) = math::sin_cos_turns(0.5 * progress(warmup, total));
                floor + (peak - floor) * 0.5 * (1.0 + cos)
            }
            Self::WarmupLinear { peak, floor, warmup, total } => {
                floor + (peak - floor) * (1.0 - progress(warmup, total))
            }
        }
    }
}

/// The shape of a schedule after its warm-up; written as in [`ScheduleKind::name`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ScheduleKind {
    /// Half a cosine down to the floor.
    #[default]
    Cosine,
    /// A straight line down to the floor.
    Linear,
    /// The peak throughout.
    Constant,
}

impl ScheduleKind {
    /// The schedule of this shape: from 0 to `peak` in `warmup` steps, down to `floor` at step `total`. A constant one has no use
    /// for the floor and the total; a warm-up at least as long as the total is followed by the floor.
    pub const fn learning_rate(self, peak: f64, floor: f64, warmup: u64, total: u64) -> LearningRate {
        match self {
            Self::Cosine => LearningRate::WarmupCosine { peak, floor, warmup, total },
            Self::Linear => LearningRate::WarmupLinear { peak, floor, warmup, total },
            Self::Constant if warmup == 0 => LearningRate::Constant { rate: peak },
            Self::Constant => LearningRate::WarmupConstant { peak, warmup },
        }
    }
}

comm_core::names!(pub ScheduleKind, "schedule": Cosine = "cosine", Linear = "linear", Constant = "constant");

#[cfg(test)]
mod tests {
    use std::f64::consts::PI;

    use super::*;

    #[test]
    fn the_schedule_rises_falls_and_stays() {
        let schedule = LearningRate::WarmupCosine { peak: 1.0, floor: 0.1, warmup: 9, total: 109 };
        assert!((schedule.at(0) - 0.1).abs() < 1e-12);
        assert!((schedule.at(8) - 0.9).abs() < 1e-12);
        assert!((schedule.at(9) - 1.0).abs() < 1e-12);
        assert!((schedule.at(59) - 0.55).abs() < 1e-12);
        for step in 10..200 {
            let reference = 0.1 + 0.45 * (1.0 + (PI * (step.min(109) - 9) as f64 / 100.0).cos());
            assert!((schedule.at(step) - reference).abs() < 1e-12, "{step}");
        }
        assert_eq!(schedule.at(1_000_000), 0.1);
        assert_eq!(LearningRate::Constant { rate: 0.3 }.at(77), 0.3);
        let only_warmup = LearningRate::WarmupCosine { peak: 1.0, floor: 0.1, warmup: 5, total: 5 };
        assert_eq!(only_warmup.at(5), 0.1);
    }

    #[test]
    fn the_linear_schedule_rises_falls_and_stays() {
        let schedule = ScheduleKind::Linear.learning_rate(1.0, 0.2, 9, 109);
        for (step, expected) in
            [(0, 0.1), (8, 0.9), (9, 1.0), (34, 0.8), (59, 0.6), (108, 0.208), (109, 0.2), (110, 0.2)]
        {
            assert!((schedule.at(step) - expected).abs() < 1e-12, "{step}: {}", schedule.at(step));
        }
        assert_eq!(schedule.at(u64::MAX), 0.2);
        let only_warmup = ScheduleKind::Linear.learning_rate(1.0, 0.1, 5, 3);
        assert_eq!((only_warmup.at(4), only_warmup.at(5)), (5.0 / 6.0, 0.1));
    }

    #[test]
    fn a_constant_rate_may_be_warmed_up() {
        let schedule = ScheduleKind::Constant.learning_rate(0.5, 0.0, 4, 10);
        let rates: Vec<f64> = [0, 3, 4, 10, 1_000].map(|step| schedule.at(step)).into();
        assert_eq!(rates, [0.1, 0.4, 0.5, 0.5, 0.5]);
        assert_eq!(ScheduleKind::Constant.learning_rate(0.5, 0.0, 0, 10), LearningRate::Constant { rate: 0.5 });
    }

    #[test]
    fn no_step_and_no_length_is_too_large() {
        for kind in ScheduleKind::ALL {
            for (warmup, total) in [(0, 0), (0, u64::MAX), (u64::MAX, 0), (u64::MAX, u64::MAX)] {
                for step in [0, 1, u64::MAX - 1, u64::MAX] {
                    let rate = kind.learning_rate(1.0, 0.1, warmup, total).at(step);
                    assert!((0.0..=1.0).contains(&rate), "{kind}, {warmup}, {total}, {step}: {rate}");
                }
            }
        }
    }

    #[test]
    fn kinds_and_schedules_are_read_as_they_are_written() {
        for kind in ScheduleKind::ALL {
            assert_eq!(kind.to_string().parse(), Ok(kind));
            assert_eq!(serde_json::to_string(&kind).unwrap(), format!("\"{kind}\""));
            for warmup in [0, 3] {
                let schedule = kind.learning_rate(1.0, 0.1, warmup, 9);
                let text = serde_json::to_string(&schedule).unwrap();
                assert_eq!(serde_json::from_str::<LearningRate>(&text).unwrap(), schedule, "{text}");
            }
        }
        let error = "step".parse::<ScheduleKind>().unwrap_err().to_string();
        assert!(error.contains("cosine, linear, constant"), "{error}");
    }
}
