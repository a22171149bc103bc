//! Elementary functions from additions, multiplications, divisions and square roots alone, so that their last bit does not depend
//! on the C library of the machine.

use std::f64::consts::{LN_2, PI, SQRT_2};

/// Natural logarithm of a finite, normal, positive `x`, to about one unit in the last place.
pub(crate) fn ln(x: f64) -> f64 {
    let bits = x.to_bits();
    let mut exponent = ((bits >> 52) & 0x7ff) as i64 - 1023;
    let mut mantissa = f64::from_bits((bits & 0x000f_ffff_ffff_ffff) | (1023 << 52));
    if mantissa > SQRT_2 {
        mantissa *= 0.5;
        exponent += 1;
    }
    // ln m = 2 atanh((m-1)/(m+1)); |s| < 0.172, so the series is exhausted after s²¹.
    let s = (mantissa - 1.0) / (mantissa + 1.0);
    let s2 = s * s;
    let mut sum = 0.0;
    for k in (0..=10).rev() {
        sum = sum * s2 + 1.0 / (2 * k + 1) as f64;
    }
    2.0 * s * sum + exponent as f64 * LN_2
}

/// `(sin, cos)` of `turns` full turns, for `turns` in [0, 1).
pub(crate) fn sin_cos_turns(turns: f64) -> (f64, f64) {
    // The nearest quarter turn is exact; what remains lies within an eighth of a turn.
    let quarter = (turns * 4.0 + 0.5).floor();
    let angle = (turns - quarter * 0.25) * (2.0 * PI);
    let a2 = angle * angle;
    let (mut sin, mut cos) = (0.0, 0.0);
    for k in (0..=9).rev() {
        let k = f64::from(k);
        // Horner from the highest term: each step divides by the next two factors of the factorial.
        sin = 1.0 - a2 / ((2.0 * k + 2.0) * (2.0 * k + 3.0)) * sin;
        cos = 1.0 - a2 / ((2.0 * k + 1.0) * (2.0 * k + 2.0)) * cos;
    }
    sin *= angle;
    match quarter as i64 & 3 {
        0 => (sin, cos),
        1 => (cos, -sin),
        2 => (-sin, -cos),
        _ => (-cos, sin),
    }
}

/// `e^x` in f32 to within two units in the last place, without branches, so that a loop over it becomes vector code. Arguments below
/// -87 (where e^x leaves the normal f32 range) give about 1e-38, those above 88 give e^88.
#[inline(always)]
pub(crate) fn exp(x: f32) -> f32 {
    const LOG2_E: f32 = std::f32::consts::LOG2_E;
    // ln 2 in two parts (Cody and Waite): n times the first is exact for every n that occurs.
    const LN_2_HIGH: f32 = 0.693_359_4;
    const LN_2_LOW: f32 = -2.121_944_4e-4;
    // Adding and subtracting 1.5·2²³ rounds to the nearest integer.
    const ROUND: f32 = 12_582_912.0;
    let x = x.clamp(-87.0, 88.0);
    let shifted = x * LOG2_E + ROUND;
    let n = shifted - ROUND;
    let r = x - n * LN_2_HIGH - n * LN_2_LOW;
    // Taylor coefficients up to r⁷: with |r| <= 0.347 the rest is below 6e-9.
    let mut p = 1.0 / 5040.0;
    p = p * r + 1.0 / 720.0;
    p = p * r + 1.0 / 120.0;
    p = p * r + 1.0 / 24.0;
    p = p * r + 1.0 / 6.0;
    p = p * r + 0.5;
    p = p * r + 1.0;
    p = p * r + 1.0;
    // The low bits of `shifted` hold n: move them into the exponent.
    let scale = f32::from_bits((shifted.to_bits() << 23).wrapping_add(127 << 23));
    p * scale
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn logarithm_and_circle_agree_with_the_standard_library() {
        for i in 1..20_000 {
            let u = f64::from(i) / 20_000.0;
            assert!((ln(u) - u.ln()).abs() <= 4e-16 * (1.0 + u.ln().abs()), "{u}");
            let (sin, cos) = sin_cos_turns(u);
            let (s, c) = (2.0 * PI * u).sin_cos();
            assert!((sin - s).abs() < 2e-15 && (cos - c).abs() < 2e-15, "{u}");
        }
        assert!((ln(1e-300) - 1e-300f64.ln()).abs() < 1e-12);
    }

    #[test]
    fn exponential_is_within_two_units_in_the_last_place() {
        let mut worst = 0.0f64;
        for i in -87_000..88_000 {
            let x = i as f32 / 1000.0;
            let exact = f64::from(x).exp();
            worst = worst.max((f64::from(exp(x)) - exact).abs() / exact);
        }
        assert!(worst < 2.4e-7, "{worst}");
        assert_eq!(exp(0.0), 1.0);
        assert!(exp(f32::NEG_INFINITY) < 1.7e-38);
        assert!(exp(f32::NAN).is_nan());
    }
}
