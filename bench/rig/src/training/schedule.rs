//! Learning rates by step, as plans write them.

use gpt2::optim::LearningRate;

/// The schedule in a text: `constant RATE`, `cosine PEAK FLOOR WARMUP TOTAL` or `linear PEAK FLOOR WARMUP TOTAL`, with a linear warm-up of
/// `WARMUP` steps and the floor from step `TOTAL` on.
///
/// # Errors
/// It is none of these, for the user.
pub fn schedule(text: &str) -> Result<LearningRate, String> {
    let words: Vec<&str> = text.split_whitespace().collect();
    parse(&words).ok_or_else(|| {
        format!(
            "`{text}` is not a schedule; write \"constant 1e-3\", or \"cosine 1e-3 1e-4 5 100\" or \"linear 1e-3 0 5 100\" with peak, floor, \
             steps of warm-up and the step at which the floor is reached"
        )
    })
}

fn parse(words: &[&str]) -> Option<LearningRate> {
    let rate = |text: &str| text.parse::<f64>().ok().filter(|rate| rate.is_finite() && *rate >= 0.0);
    match words {
        ["constant", value] => Some(LearningRate::Constant { rate: rate(value)? }),
        [kind @ ("cosine" | "linear"), peak, floor, warmup, total] => {
            let (peak, floor) = (rate(peak)?, rate(floor)?);
            let (warmup, total) = (warmup.parse().ok()?, total.parse().ok()?);
            Some(match *kind {
                "cosine" => LearningRate::WarmupCosine { peak, floor, warmup, total },
                _ => LearningRate::WarmupLinear { peak, floor, warmup, total },
            })
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn schedules_are_read_or_refused() {
        assert_eq!(schedule("constant 3e-4"), Ok(LearningRate::Constant { rate: 3e-4 }));
        assert_eq!(
            schedule("linear 1.5e-4 0 6 120"),
            Ok(LearningRate::WarmupLinear { peak: 1.5e-4, floor: 0.0, warmup: 6, total: 120 })
        );
        for wrong in ["", "constant", "constant nan", "constant -1", "cosine 1e-3 1e-4 5", "cosine 1 1 1.5 2", "step 1"]
        {
            assert!(schedule(wrong).unwrap_err().contains(wrong), "{wrong}");
        }
    }
}
