//! Integers of 8 bits, in blocks with a scale each.

use rayon::prelude::*;

use super::encoding::{Encoding, check_length, each_block};

/// Elements of a block.
const BLOCK: usize = 256;

/// Bytes of a scale, an f32.
const SCALE: usize = 4;

/// Of each block the scale, then an integer for each element. What is sent and what is left are together the value, exactly. A block with a value
/// that is not finite is sent as one of values that are none, and left as it is.
#[derive(Clone, Copy, Debug)]
pub(super) struct Int8;

impl Encoding for Int8 {
    fn bytes(&self, count: usize) -> usize {
        count + count.div_ceil(BLOCK) * SCALE
    }

    fn encode(&self, values: &mut [f32], out: &mut [u8]) {
        values.par_chunks_mut(BLOCK).zip(out.par_chunks_mut(SCALE + BLOCK)).for_each(|(values, out)| {
            let (scale, integers) = out.split_at_mut(SCALE);
            let largest = values.iter().fold(0.0f32, |largest, value| largest.max(value.abs()));
            if !values.iter().all(|value| value.is_finite()) {
                scale.copy_from_slice(&f32::NAN.to_le_bytes());
                integers.fill(0);
                return;
            }
            let unit = largest / 127.0;
            scale.copy_from_slice(&unit.to_le_bytes());
            for (value, integer) in values.iter_mut().zip(integers) {
                let whole = rounded(*value / unit) as i8;
                *integer = whole.cast_unsigned();
                // Half of the value to twice the value, or nothing: the difference is exact.
                *value -= f32::from(whole) * unit;
            }
        });
    }

    fn add(&self, bytes: &[u8], sums: &mut [f32], from: usize) -> comm_core::Result<()> {
        check_length(self, bytes, sums.len(), from)?;
        each_block(sums, BLOCK, bytes, SCALE + BLOCK, |sums, bytes| {
            let (scale, integers) = bytes.split_at(SCALE);
            let unit = f32::from_le_bytes([scale[0], scale[1], scale[2], scale[3]]);
            sums.iter_mut().zip(integers).for_each(|(sum, integer)| *sum += f32::from(integer.cast_signed()) * unit);
        });
        Ok(())
    }
}

/// To the nearest integer from -127 to 127; no number gives none.
fn rounded(value: f32) -> f32 {
    // Adding and subtracting 1.5·2²³ rounds.
    const ROUND: f32 = 12_582_912.0;
    value.clamp(-127.0, 127.0) + ROUND - ROUND
}

#[cfg(test)]
mod tests {
    use super::*;
    use comm_core::splitmix::SplitMix64;

    fn sent(values: &[f32]) -> (Vec<f32>, Vec<f32>) {
        let (mut left, mut bytes) = (values.to_vec(), vec![0; Int8.bytes(values.len())]);
        Int8.encode(&mut left, &mut bytes);
        let mut sent = vec![0.0; values.len()];
        Int8.add(&bytes, &mut sent, 0).unwrap();
        (sent, left)
    }

    #[test]
    fn what_is_sent_and_what_is_left_are_the_value_exactly() {
        let mut random = SplitMix64::new(1);
        for count in [0, 1, 255, 256, 257, 1000] {
            for scale in [0, 1, 2, 100, 126, 127, 140, 200, 253, 254] {
                // From numbers below the normal ones to the largest.
                let mut value = |index: usize| {
                    let exponent = (scale as u64).saturating_sub(random.below(12));
                    let bits = (random.next_u64() & 0x807f_ffff) | exponent << 23;
                    if index % 7 == 3 { 0.0 } else { f32::from_bits(bits as u32) }
                };
                let values: Vec<f32> = (0..count).map(&mut value).collect();
                let (sent, left) = sent(&values);
                let largest = values.iter().fold(0.0f32, |largest, value| largest.max(value.abs()));
                for ((value, sent), left) in values.iter().zip(&sent).zip(&left) {
                    assert_eq!(f64::from(*sent) + f64::from(*left), f64::from(*value));
                    // Below the normal numbers a scale has few digits.
                    let half_a_unit = f64::from(largest) / 254.0 * 1.000_001;
                    assert!(f64::from(left.abs()) <= half_a_unit || scale <= 8, "{left} of {largest}");
                }
            }
        }
    }

    #[test]
    fn a_block_that_is_not_finite_arrives_as_one_and_spoils_no_other() {
        for spoilt in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let mut values = vec![1.0; 3 * BLOCK];
            values[BLOCK + 17] = spoilt;
            let (sent, left) = sent(&values);
            assert!(sent[..BLOCK].iter().chain(&sent[2 * BLOCK..]).all(|value| (value - 1.0).abs() < 1e-6));
            assert!(sent[BLOCK..2 * BLOCK].iter().all(|value| value.is_nan()));
            assert!(left[..BLOCK].iter().all(|value| value.is_finite()));
        }
    }
}
