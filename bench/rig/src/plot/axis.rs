//! Axes: which values stand where, and what is written beside them.

/// The values that an axis covers, and the pixels at its ends.
#[derive(Clone, Copy, Debug)]
pub(super) struct Axis {
    low: f64,
    high: f64,
    pub(super) from: f64,
    pub(super) to: f64,
    log: bool,
}

impl Axis {
    /// An axis on which equal distances are equal differences.
    pub(super) fn linear((low, high): (f64, f64), (from, to): (f64, f64)) -> Self {
        // Of one value alone, too, an axis is made.
        let high = high.max(low + (1e-9 * low.abs()).max(1e-9));
        Axis { low, high, from, to, log: false }
    }

    /// An axis on which equal distances are equal ratios; `low` is more than 0.
    pub(super) fn log((low, high): (f64, f64), (from, to): (f64, f64)) -> Self {
        let low = low.max(f64::MIN_POSITIVE);
        Axis { low, high: high.max(low * 1.000_001), from, to, log: true }
    }

    pub(super) fn place(&self, value: f64) -> f64 {
        let share = if self.log {
            (value.max(f64::MIN_POSITIVE) / self.low).ln() / (self.high / self.low).ln()
        } else {
            (value - self.low) / (self.high - self.low)
        };
        self.from + share * (self.to - self.from)
    }

    /// About `count` round values on the axis, with what is written beside them.
    pub(super) fn ticks(&self, count: u32) -> Vec<(f64, String)> {
        if self.log {
            return self.log_ticks(count);
        }
        let rough = (self.high - self.low) / f64::from(count);
        let power = 10f64.powf(rough.log10().floor());
        let step = [1.0, 2.0, 5.0, 10.0].map(|factor| factor * power).into_iter().find(|step| *step >= rough);
        let step = step.unwrap_or(10.0 * power);
        let first = (self.low / step).ceil();
        // Twice as many as asked for would be a mistake, and no reason to go on for ever.
        (0..2 * count)
            .map(|index| (first + f64::from(index)) * step)
            .take_while(|value| *value <= self.high)
            .map(|value| (value, digits(value, step)))
            .collect()
    }

    /// Powers of ten, with 2 and 5 between them where there are few.
    fn log_ticks(&self, count: u32) -> Vec<(f64, String)> {
        let decades = (self.high / self.low).log10();
        let factors: &[f64] = match decades {
            few if few * 3.0 <= f64::from(count) => &[1.0, 2.0, 5.0],
            _ => &[1.0],
        };
        let first = self.low.log10().floor() as i32;
        let every = (decades / f64::from(count)).ceil().max(1.0) as usize;
        (first..=self.high.log10().ceil() as i32)
            .step_by(every)
            .flat_map(|power| factors.iter().map(move |factor| factor * 10f64.powi(power)))
            .filter(|value| *value >= self.low * 0.999 && *value <= self.high * 1.001)
            .map(|value| (value, digits(value, value)))
            .collect()
    }
}

/// The least and the largest.
pub(super) fn range(values: impl Iterator<Item = f64>) -> (f64, f64) {
    values.fold((f64::INFINITY, f64::NEG_INFINITY), |(low, high), value| (low.min(value), high.max(value)))
}

/// The whole numbers of a range, a dozen at most.
pub(super) fn whole_numbers(low: f64, high: f64) -> Vec<(f64, String)> {
    let (first, last) = (low.ceil(), high.floor());
    let step = ((last - first) / 12.0).ceil().max(1.0);
    (0..=12)
        .map(|index| first + f64::from(index) * step)
        .take_while(|value| *value <= last)
        .map(|value| (value, digits(value, 1.0)))
        .collect()
}

/// A number with as many digits as steps of this size need, thousands apart.
pub(super) fn digits(value: f64, step: f64) -> String {
    // A step of 0.1 is a little less in binary.
    let decimals = (-(step.abs() * 1.000_001).log10().floor()).clamp(0.0, 6.0) as usize;
    let plain = format!("{value:.decimals$}");
    let (whole, rest) = plain.split_once('.').map_or((plain.as_str(), None), |(whole, rest)| (whole, Some(rest)));
    let (sign, whole) = whole.strip_prefix('-').map_or(("", whole), |whole| ("-", whole));
    let mut grouped = String::new();
    for (index, digit) in whole.chars().enumerate() {
        if index > 0 && (whole.len() - index).is_multiple_of(3) {
            grouped.push(' ');
        }
        grouped.push(digit);
    }
    rest.map_or(format!("{sign}{grouped}"), |rest| format!("{sign}{grouped}.{rest}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_have_the_digits_that_their_scale_needs() {
        assert_eq!(digits(12_345.6, 1_000.0), "12 346");
        assert_eq!(digits(-1_234_567.0, 1.0), "-1 234 567");
        assert_eq!(digits(0.123_456, 0.01), "0.12");
        assert_eq!(digits(5.0, 0.25), "5.0");
        assert_eq!(digits(0.3, 0.1), "0.3");
        assert_eq!(digits(999.0, 0.0), "999.000000");
    }

    #[test]
    fn axes_are_labelled_with_round_numbers() {
        let labels = |axis: Axis| axis.ticks(5).into_iter().map(|(_, label)| label).collect::<Vec<_>>();
        let linear = |low, high| Axis::linear((low, high), (0.0, 100.0));
        assert_eq!(labels(linear(0.0, 1.0)), ["0.0", "0.2", "0.4", "0.6", "0.8", "1.0"]);
        assert_eq!(labels(linear(2.9, 5.6)), ["3", "4", "5"]);
        assert_eq!(labels(linear(0.0, 23_000.0)), ["0", "5 000", "10 000", "15 000", "20 000"]);
        assert_eq!(linear(0.0, 4.0).place(1.0), 25.0);
        assert_eq!(whole_numbers(1.0, 3.0).len(), 3);
        assert!(whole_numbers(1.0, 1000.0).len() <= 13);
    }

    #[test]
    fn logarithmic_axes_have_powers_of_ten() {
        let log = |low, high| Axis::log((low, high), (0.0, 100.0));
        let labels = |axis: Axis| axis.ticks(6).into_iter().map(|(_, label)| label).collect::<Vec<_>>();
        assert_eq!(labels(log(1.0, 10_000.0)), ["1", "10", "100", "1 000", "10 000"]);
        assert_eq!(labels(log(3.0, 60.0)), ["5", "10", "20", "50"]);
        assert_eq!(labels(log(1.0, 1e12)).len(), 7);
        assert!((log(1.0, 100.0).place(10.0) - 50.0).abs() < 1e-9);
        assert!(log(0.0, 0.0).place(0.0).is_finite());
    }
}
