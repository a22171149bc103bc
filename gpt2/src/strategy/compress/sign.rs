//! Signs, in blocks with a magnitude each.

use rayon::prelude::*;

use super::encoding::{Encoding, check_length, each_block};

/// Elements of a block.
const BLOCK: usize = 256;

/// Bytes of a magnitude, an f32.
const MAGNITUDE: usize = 4;

/// Of each block the mean magnitude, then a bit for each element, set where it is negative (EF-SignSGD, Karimireddy et al. 2019, arXiv
/// 1901.09847). What is left is the value less what is sent: exactly where the f32 between them has it, as between half and twice the
/// magnitude, and otherwise to the nearest f32. A block with a value that is not finite is sent as one of values that are none, and left as it is.
#[derive(Clone, Copy, Debug)]
pub(super) struct Sign;

impl Encoding for Sign {
    fn bytes(&self, count: usize) -> usize {
        count.div_ceil(BLOCK) * MAGNITUDE + count.div_ceil(8)
    }

    fn encode(&self, values: &mut [f32], out: &mut [u8]) {
        values.par_chunks_mut(BLOCK).zip(out.par_chunks_mut(MAGNITUDE + BLOCK / 8)).for_each(|(values, out)| {
            let (magnitude, signs) = out.split_at_mut(MAGNITUDE);
            signs.fill(0);
            let sum: f64 = values.iter().map(|value| f64::from(value.abs())).sum();
            if !sum.is_finite() {
                magnitude.copy_from_slice(&f32::NAN.to_le_bytes());
                return;
            }
            let mean = (sum / values.len() as f64) as f32;
            magnitude.copy_from_slice(&mean.to_le_bytes());
            for (values, signs) in values.chunks_mut(8).zip(signs) {
                for (place, value) in values.iter_mut().enumerate() {
                    *signs |= u8::from(value.is_sign_negative()) << place;
                    *value -= mean.copysign(*value);
                }
            }
        });
    }

    fn add(&self, bytes: &[u8], sums: &mut [f32], from: usize) -> comm_core::Result<()> {
        check_length(self, bytes, sums.len(), from)?;
        each_block(sums, BLOCK, bytes, MAGNITUDE + BLOCK / 8, |sums, bytes| {
            let (magnitude, signs) = bytes.split_at(MAGNITUDE);
            let mean = f32::from_le_bytes([magnitude[0], magnitude[1], magnitude[2], magnitude[3]]);
            for (sums, signs) in sums.chunks_mut(8).zip(signs) {
                for (place, sum) in sums.iter_mut().enumerate() {
                    *sum += if signs >> place & 1 == 1 { -mean } else { mean };
                }
            }
        });
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use comm_core::splitmix::SplitMix64;

    fn sent(values: &[f32]) -> (Vec<f32>, Vec<f32>) {
        let (mut left, mut bytes) = (values.to_vec(), vec![0xff; Sign.bytes(values.len())]);
        Sign.encode(&mut left, &mut bytes);
        let mut sent = vec![0.0; values.len()];
        Sign.add(&bytes, &mut sent, 0).unwrap();
        (sent, left)
    }

    #[test]
    fn what_is_sent_has_the_signs_and_the_mean_magnitude_and_the_rest_is_left() {
        let mut random = SplitMix64::new(3);
        for count in [0, 1, 7, 8, 9, 255, 256, 257, 1000] {
            for scale in [1e-44, 1e-30, 1.0, 1e3, 3e38] {
                let mut value = || (random.unit() as f32 - 0.5) * 2.0 * scale * (1e-3f32).powf(random.unit() as f32);
                let values: Vec<f32> = (0..count).map(|_| value()).collect();
                let (sent, left) = sent(&values);
                for ((values, sent), left) in values.chunks(BLOCK).zip(sent.chunks(BLOCK)).zip(left.chunks(BLOCK)) {
                    let mean = values.iter().map(|value| f64::from(value.abs())).sum::<f64>() / values.len() as f64;
                    for ((value, sent), left) in values.iter().zip(sent).zip(left) {
                        assert_eq!(sent.abs(), mean as f32);
                        assert!(*sent == 0.0 || sent.is_sign_negative() == value.is_sign_negative());
                        let (whole, both) = (f64::from(*value), f64::from(*sent) + f64::from(*left));
                        let halves = sent.abs() / 2.0 <= value.abs() && value.abs() <= sent.abs() * 2.0;
                        // The nearest number is off by half of its last digit.
                        let off = if halves { 0.0 } else { f64::from(left.abs()) * 2f64.powi(-24) };
                        assert!((both - whole).abs() <= off, "{sent} + {left} = {both:e}, of {value}");
                    }
                }
            }
        }
        assert_eq!([0, 1, 8, 256, 257].map(|count| Sign.bytes(count)), [0, 5, 5, 36, 41]);
        assert_eq!(sent(&[0.0; 3]), (vec![0.0; 3], vec![0.0; 3]));
    }

    #[test]
    fn what_is_sent_and_what_is_left_are_integers_exactly() {
        let mut random = SplitMix64::new(4);
        // Of a whole block the mean has 8 digits behind the point, and so has the rest.
        let values: Vec<f32> = (0..4 * BLOCK).map(|_| random.below(4001) as f32 - 2000.0).collect();
        let (sent, left) = sent(&values);
        assert!(left.iter().any(|left| left.fract() != 0.0));
        for ((value, sent), left) in values.iter().zip(&sent).zip(&left) {
            assert_eq!(f64::from(*sent) + f64::from(*left), f64::from(*value));
        }
    }

    #[test]
    fn what_is_left_is_sent_in_the_end() {
        // The same gradient again and again: the mean of what is sent comes to it.
        let gradient: Vec<f32> = (0..300).map(|place| (place as f32 - 150.0) / 100.0).collect();
        let (mut left, mut total) = (vec![0.0; 300], vec![0.0f32; 300]);
        let mut bytes = vec![0; Sign.bytes(300)];
        let steps = 4000;
        for _ in 0..steps {
            left.iter_mut().zip(&gradient).for_each(|(left, own)| *left += own);
            Sign.encode(&mut left, &mut bytes);
            Sign.add(&bytes, &mut total, 0).unwrap();
        }
        for (own, total) in gradient.iter().zip(&total) {
            assert!((total / steps as f32 - own).abs() < 0.03, "{total} of {own}");
        }
    }

    #[test]
    fn a_block_that_is_not_finite_arrives_as_one_and_spoils_no_other() {
        for spoilt in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let mut values = vec![1.0; 3 * BLOCK];
            values[BLOCK + 17] = spoilt;
            let (sent, left) = sent(&values);
            assert!(sent[..BLOCK].iter().chain(&sent[2 * BLOCK..]).all(|value| *value == 1.0));
            assert!(sent[BLOCK..2 * BLOCK].iter().all(|value| value.is_nan()));
            assert!(left[..BLOCK].iter().all(|value| value.is_finite()));
        }
    }
}
