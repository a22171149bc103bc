//! Conversions between f32 and the 16-bit floating-point types, many values at a time.

use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};

use crate::buffer::Element;
use crate::sys::{Kernel, vectorised};

/// A 16-bit floating-point type.
pub trait Float16: Element {
    /// Writes `values` in f32, which holds them all.
    ///
    /// # Panics
    /// If the lengths differ.
    fn widen(values: &[Self], into: &mut [f32]);

    /// Writes `values` rounded to the nearest value of this type, to the even one of two.
    ///
    /// # Panics
    /// If the lengths differ.
    fn narrow(values: &[f32], into: &mut [Self]);
}

impl Float16 for f16 {
    // The library has the processor's own instruction for these.
    fn widen(values: &[Self], into: &mut [f32]) {
        values.convert_to_f32_slice(into);
    }

    fn narrow(values: &[f32], into: &mut [Self]) {
        into.convert_from_f32_slice(values);
    }
}

impl Float16 for bf16 {
    fn widen(values: &[Self], into: &mut [f32]) {
        assert_eq!(values.len(), into.len(), "conversion between unequal lengths");
        vectorised(Widen { values, into });
    }

    fn narrow(values: &[f32], into: &mut [Self]) {
        assert_eq!(values.len(), into.len(), "conversion between unequal lengths");
        vectorised(Narrow { values, into });
    }
}

struct Widen<'a> {
    values: &'a [bf16],
    into: &'a mut [f32],
}

impl Kernel for Widen<'_> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        for (wide, value) in self.into.iter_mut().zip(self.values) {
            *wide = f32::from_bits(u32::from(value.to_bits()) << 16);
        }
    }
}

struct Narrow<'a> {
    values: &'a [f32],
    into: &'a mut [bf16],
}

impl Kernel for Narrow<'_> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        for (narrow, value) in self.into.iter_mut().zip(self.values) {
            let bits = value.to_bits();
            // Half of the last bit that stays, less the least where that bit is even: a tie then goes to the even value.
            let rounded = bits.wrapping_add(0x7fff + (bits >> 16 & 1)) >> 16;
            // The quiet bit keeps what is not a number from becoming an infinity.
            let not_a_number = bits >> 16 | 0x40;
            *narrow = bf16::from_bits(if value.is_nan() { not_a_number } else { rounded } as u16);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn compare<T: Float16>(one: impl Fn(f32) -> T, widened: impl Fn(T) -> f32) {
        // Every upper half of an f32 with lower halves around all ties, so every 16-bit value, each neighbour, infinities and NaN.
        let lower = [0u32, 1, 0x0fff, 0x1000, 0x1001, 0x2fff, 0x3000, 0x7fff, 0x8000, 0x8001, 0xffff];
        for lower in lower {
            let values: Vec<f32> = (0..=0xffffu32).map(|upper| f32::from_bits(upper << 16 | lower)).collect();
            let mut narrow = vec![T::zeroed(); values.len()];
            T::narrow(&values, &mut narrow);
            let mut wide = vec![0.0; values.len()];
            T::widen(&narrow, &mut wide);
            for ((value, narrow), wide) in values.iter().zip(&narrow).zip(&wide) {
                assert_eq!(bytemuck::bytes_of(narrow), bytemuck::bytes_of(&one(*value)), "{value:e}");
                assert_eq!(wide.to_bits(), widened(*narrow).to_bits(), "{value:e}");
            }
        }
    }

    #[test]
    fn many_at_a_time_are_as_one_by_one() {
        compare(bf16::from_f32, bf16::to_f32);
        compare(f16::from_f32, f16::to_f32);
    }

    #[test]
    fn every_length_is_converted_to_its_end() {
        for count in [0, 1, 15, 16, 17, 33, 1025] {
            let values: Vec<f32> = (0..count).map(|i| i as f32).collect();
            let mut narrow = vec![bf16::ZERO; count];
            bf16::narrow(&values, &mut narrow);
            assert!(narrow.iter().zip(&values).all(|(narrow, value)| *narrow == bf16::from_f32(*value)), "{count}");
        }
    }
}
