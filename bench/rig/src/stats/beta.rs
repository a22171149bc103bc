//! The beta distribution, from which quantiles of Student's and exact binomial intervals follow.

/// Most terms of the continued fraction. It needs about the root of the larger parameter, so this is enough beyond 10⁹
/// trials.
const MOST_TERMS: u32 = 200_000;

/// The quantile of Student's distribution that leaves `1 - level` outside of `±`; `freedom` may be a fraction.
pub(super) fn student(level: f64, freedom: f64) -> f64 {
    let x = quantile(1.0 - level, freedom / 2.0, 0.5);
    (freedom * (1.0 / x - 1.0)).max(0.0).sqrt()
}

/// Where the distribution function of Beta(a, b) reaches `p`, by bisection.
pub(super) fn quantile(p: f64, a: f64, b: f64) -> f64 {
    let (mut low, mut high) = (0.0, 1.0);
    for _ in 0..100 {
        let middle = f64::midpoint(low, high);
        if distribution(middle, a, b) < p { low = middle } else { high = middle }
    }
    f64::midpoint(low, high)
}

/// The distribution function of Beta(a, b), the regularised incomplete beta function.
fn distribution(x: f64, a: f64, b: f64) -> f64 {
    if x <= 0.0 || x >= 1.0 {
        return x.clamp(0.0, 1.0);
    }
    let front = (ln_gamma(a + b) - ln_gamma(a) - ln_gamma(b) + a * x.ln() + b * (-x).ln_1p()).exp();
    // The fraction converges fast on this side of the mean; the other side is its mirror image.
    if x < (a + 1.0) / (a + b + 2.0) {
        front * fraction(x, a, b) / a
    } else {
        1.0 - front * fraction(1.0 - x, b, a) / b
    }
}

/// The continued fraction of the incomplete beta function (DLMF 8.17.22), by Lentz's method.
fn fraction(x: f64, a: f64, b: f64) -> f64 {
    let away_from_zero = |value: f64| if value.abs() < 1e-300 { 1e-300 } else { value };
    let mut c = 1.0;
    let mut d = 1.0 / away_from_zero(1.0 - (a + b) * x / (a + 1.0));
    let mut result = d;
    for term in 1..=MOST_TERMS {
        let m = f64::from(term);
        let even = m * (b - m) * x / ((a + 2.0 * m - 1.0) * (a + 2.0 * m));
        let odd = -(a + m) * (a + b + m) * x / ((a + 2.0 * m) * (a + 2.0 * m + 1.0));
        for coefficient in [even, odd] {
            d = 1.0 / away_from_zero(1.0 + coefficient * d);
            c = away_from_zero(1.0 + coefficient / c);
            result *= c * d;
        }
        if (c * d - 1.0).abs() < 1e-14 {
            break;
        }
    }
    result
}

/// The logarithm of the gamma function of a positive number: Stirling's series, after steps up to where it is exact to
/// 15 digits.
fn ln_gamma(x: f64) -> f64 {
    let (mut x, mut below) = (x, 0.0);
    while x < 15.0 {
        below += x.ln();
        x += 1.0;
    }
    let inverse = 1.0 / (x * x);
    let series = (1.0 / 12.0 - inverse * (1.0 / 360.0 - inverse * (1.0 / 1260.0 - inverse / 1680.0))) / x;
    (x - 0.5) * x.ln() - x + 0.5 * (2.0 * std::f64::consts::PI).ln() + series - below
}

#[cfg(test)]
mod tests {
    use super::*;

    fn close(found: f64, expected: f64) {
        assert!((found - expected).abs() <= 5e-4 * expected.abs(), "{found}, not {expected}");
    }

    #[test]
    fn students_quantiles_are_those_of_the_tables() {
        let table = [(1.0, 12.706), (2.0, 4.303), (4.0, 2.776), (6.0, 2.447), (30.0, 2.042), (1e6, 1.960)];
        table.into_iter().for_each(|(freedom, expected)| close(student(0.95, freedom), expected));
        close(student(0.99, 4.0), 4.604);
        close(student(0.90, 9.0), 1.833);
    }

    #[test]
    fn gamma_of_whole_numbers_is_a_factorial() {
        close(ln_gamma(1.0) + 1.0, 1.0);
        close(ln_gamma(5.0), 24.0_f64.ln());
        close(ln_gamma(0.5), std::f64::consts::PI.sqrt().ln());
        close(ln_gamma(101.0), 363.739_375_555_563_5);
    }

    #[test]
    fn quantiles_of_known_distributions() {
        // Beta(1, 1) is uniform, Beta(n, 1) has the distribution function x^n.
        close(quantile(0.3, 1.0, 1.0), 0.3);
        close(quantile(0.3, 4.0, 1.0), 0.3_f64.powf(0.25));
        close(quantile(0.5, 7.0, 7.0), 0.5);
    }
}
