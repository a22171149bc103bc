//! Dropout: which elements a training pass sets to zero, as a pure function of the seed, the step, the sequence's place in the global batch,
//! the layer, and the element.
//!
//! Nothing is drawn in order, so nothing depends on who computes a sequence, in which micro-step, with how many threads, by which kernels, or
//! whether a pass is computed again. The random bits are those of Philox 4x32-10 (Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as
//! easy as 1, 2, 3", SC 2011), which takes 32-bit operations alone, so every device has the same. Its key comes from the seed; its counter is
//! (four elements of a line, sequence, layer and place, step), and each of its four words decides about one element.

use burn::tensor::{Device, FloatDType, Tensor, TensorData};
use comm_core::splitmix::SplitMix64;
use comm_core::{Kernel, vectorised};

/// Names the stream of the key among the streams of a seed.
pub const DROPOUT_STREAM: u64 = 0x6472_6f70;

/// What a training pass over some sequences drops.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Dropout {
    pub(crate) key: [u32; 2],
    /// The step, as far as the counter has room for it.
    pub(crate) step: u32,
    /// The place of the pass's first sequence in the step's global batch; the others follow.
    pub(crate) first: u32,
    /// An element whose word is below this is dropped.
    pub(crate) threshold: u32,
    /// What the others are multiplied by, so that the mean stays.
    pub(crate) factor: f32,
}

impl Dropout {
    /// Drops this share of the elements, from 0 up to, but not including, 1; `None` where that is 0. `step` counts from 0, and `first` is
    /// the place of the first sequence in the step's global batch.
    pub fn new(share: f64, seed: u64, step: u64, first: usize) -> Option<Self> {
        let threshold = (share * 2f64.powi(32)).round().clamp(0.0, f64::from(u32::MAX)) as u32;
        if threshold == 0 {
            return None;
        }
        let key = SplitMix64::stream(seed, &[DROPOUT_STREAM]).next_u64();
        Some(Dropout {
            key: [key as u32, (key >> 32) as u32],
            step: step as u32,
            first: first as u32,
            threshold,
            factor: (1.0 / (1.0 - f64::from(threshold) / 2f64.powi(32))) as f32,
        })
    }

    pub(crate) fn at(self, segment: usize, place: Place) -> Site {
        Site { dropout: self, layer: 4 * segment as u32 + place as u32 }
    }
}

/// Where in a segment elements are dropped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Place {
    /// The sum of token and position.
    Embedding = 0,
    /// The weights by which attention mixes values.
    Attention = 1,
    /// What attention adds to the residual stream.
    AttentionOutput = 2,
    /// What the feed-forward layer adds to it.
    MlpOutput = 3,
}

/// One tensor in which elements are dropped. Each sequence has lines of equal length there: of activations a line for each position, of attention
/// weights one for each head and query, in that order.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Site {
    pub(crate) dropout: Dropout,
    /// Segment and place in it.
    pub(crate) layer: u32,
}

impl Site {
    /// Fills `factors` with what the first elements of a line of `width` are multiplied by, which is 0 for those that are dropped. `row` is
    /// the sequence's place in the pass, and `line` the line's in the sequence.
    pub(crate) fn factors(&self, row: usize, line: usize, width: usize, factors: &mut [f32]) {
        vectorised(Factors { site: self, row, line, width, factors });
    }

    /// The factors of all elements of a tensor of this shape, whose first axis is that of sequences and whose last is that of a line.
    pub(crate) fn tensor<const D: usize>(&self, shape: [usize; D], device: &Device) -> Tensor<D> {
        let (rows, width) = (shape[0], shape[D - 1]);
        let lines = shape[1..D - 1].iter().product::<usize>();
        let mut factors = vec![0.0; rows * lines * width];
        for (index, factors) in factors.chunks_mut(width.max(1)).enumerate() {
            self.factors(index / lines, index % lines, width, factors);
        }
        Tensor::from_data(TensorData::new(factors, shape), device)
    }
}

/// The elements of a tensor times its factors, composed of tensor operations, in the tensor's type.
pub(crate) fn composed<const D: usize>(x: Tensor<D>, site: &Site) -> Tensor<D> {
    let dtype = FloatDType::from(x.dtype());
    let factors = site.tensor(x.dims(), &x.device().without_autodiff());
    (x.cast(FloatDType::F32) * factors).cast(dtype)
}

/// Philox 4x32-10's multipliers and the increments of its key.
pub(crate) const MULTIPLIERS: [u32; 2] = [0xD251_1F53, 0xCD9E_8D57];
pub(crate) const INCREMENTS: [u32; 2] = [0x9E37_79B9, 0xBB67_AE85];
pub(crate) const ROUNDS: usize = 10;

/// Counters that go through the rounds side by side, which makes vector code of them.
const SIDE_BY_SIDE: usize = 16;

/// The words of [`SIDE_BY_SIDE`] counters, word by word.
#[inline(always)]
fn philox(mut counters: [[u32; SIDE_BY_SIDE]; 4], [mut key_0, mut key_1]: [u32; 2]) -> [[u32; SIDE_BY_SIDE]; 4] {
    for _ in 0..ROUNDS {
        let [a, b, c, d] = counters;
        for lane in 0..SIDE_BY_SIDE {
            let first = u64::from(MULTIPLIERS[0]) * u64::from(a[lane]);
            let second = u64::from(MULTIPLIERS[1]) * u64::from(c[lane]);
            counters[0][lane] = (second >> 32) as u32 ^ b[lane] ^ key_0;
            counters[1][lane] = second as u32;
            counters[2][lane] = (first >> 32) as u32 ^ d[lane] ^ key_1;
            counters[3][lane] = first as u32;
        }
        key_0 = key_0.wrapping_add(INCREMENTS[0]);
        key_1 = key_1.wrapping_add(INCREMENTS[1]);
    }
    counters
}

struct Factors<'a> {
    site: &'a Site,
    row: usize,
    line: usize,
    width: usize,
    factors: &'a mut [f32],
}

impl Kernel for Factors<'_> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let Self { site, row, line, width, factors } = self;
        let Dropout { key, step, first, threshold, factor } = site.dropout;
        // Lines begin with a counter of their own, so that whoever has a part of them need not know the rest.
        let begin = (line as u32).wrapping_mul(width.div_ceil(4) as u32);
        let others = [first.wrapping_add(row as u32), site.layer, step].map(|word| [word; SIDE_BY_SIDE]);
        let words = |index: usize| {
            let start = begin.wrapping_add((index * SIDE_BY_SIDE) as u32);
            let counters = std::array::from_fn(|lane| start.wrapping_add(lane as u32));
            philox([counters, others[0], others[1], others[2]], key)
        };
        let of = |word: u32| if word < threshold { 0.0 } else { factor };
        let (whole, rest) = factors.as_chunks_mut::<{ 4 * SIDE_BY_SIDE }>();
        let count = whole.len();
        for (index, factors) in whole.iter_mut().enumerate() {
            let words = words(index);
            for (lane, four) in factors.as_chunks_mut::<4>().0.iter_mut().enumerate() {
                *four = std::array::from_fn(|word| of(words[word][lane]));
            }
        }
        if !rest.is_empty() {
            let words = words(count);
            for (place, factor) in rest.iter_mut().enumerate() {
                *factor = of(words[place % 4][place / 4]);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_generator_is_philox() {
        // Its authors' known answers (Random123, kat_vectors).
        for (counter, key, expected) in [
            ([0; 4], [0; 2], [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8]),
            ([u32::MAX; 4], [u32::MAX; 2], [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd]),
            (
                [0x243f_6a88, 0x85a3_08d3, 0x1319_8a2e, 0x0370_7344],
                [0xa409_3822, 0x299f_31d0],
                [0xd16c_fe09, 0x94fd_cceb, 0x5001_e420, 0x2412_6ea1],
            ),
        ] {
            let words = philox(counter.map(|word| [word; SIDE_BY_SIDE]), key);
            assert_eq!(words, expected.map(|word| [word; SIDE_BY_SIDE]));
        }
    }

    fn line(site: &Site, row: usize, line: usize, width: usize) -> Vec<f32> {
        let mut factors = vec![f32::NAN; width];
        site.factors(row, line, width, &mut factors);
        factors
    }

    #[test]
    fn the_share_is_dropped_and_the_mean_stays() {
        for share in [0.1, 0.5, 0.9] {
            let site = Dropout::new(share, 1, 2, 3).unwrap().at(4, Place::Attention);
            let all: Vec<f32> = (0..100).flat_map(|at| line(&site, 1, at, 1_000)).collect();
            let dropped = all.iter().filter(|factor| **factor == 0.0).count() as f64 / all.len() as f64;
            // Six standard deviations of 100,000 draws.
            assert!((dropped - share).abs() < 6.0 * (share * (1.0 - share) / 1e5).sqrt(), "{dropped} of {share}");
            assert!(all.iter().all(|factor| *factor == 0.0 || *factor == (1.0 / (1.0 - share)) as f32));
        }
        assert_eq!(Dropout::new(0.0, 1, 2, 3), None);
    }

    #[test]
    fn every_part_of_the_place_decides() {
        let usual = Dropout::new(0.5, 1, 2, 3).unwrap();
        let other = |seed, step, first| Dropout::new(0.5, seed, step, first).unwrap();
        let of = |dropout: Dropout, segment, place, row, at| line(&dropout.at(segment, place), row, at, 130);
        let lines = [
            of(usual, 1, Place::MlpOutput, 0, 0),
            of(other(9, 2, 3), 1, Place::MlpOutput, 0, 0),
            of(other(1, 9, 3), 1, Place::MlpOutput, 0, 0),
            of(other(1, 2, 9), 1, Place::MlpOutput, 0, 0),
            of(usual, 2, Place::MlpOutput, 0, 0),
            of(usual, 1, Place::AttentionOutput, 0, 0),
            of(usual, 1, Place::MlpOutput, 1, 0),
            of(usual, 1, Place::MlpOutput, 0, 1),
        ];
        for (index, line) in lines.iter().enumerate() {
            assert!(lines[..index].iter().all(|other| other != line), "{index}");
        }
        // A sequence is the same wherever a pass begins.
        assert_eq!(of(usual, 1, Place::Embedding, 4, 7), of(other(1, 2, 6), 1, Place::Embedding, 1, 7));
    }

    #[test]
    fn part_of_a_line_is_part_of_all_of_it() {
        let site = Dropout::new(0.3, 5, 0, 0).unwrap().at(0, Place::Embedding);
        let whole = line(&site, 2, 3, 201);
        for length in [1, 3, 4, 64, 65, 200] {
            let mut part = vec![f32::NAN; length];
            site.factors(2, 3, 201, &mut part);
            assert_eq!(part, whole[..length]);
        }
        let all = site.tensor([3, 5, 201], &Device::flex()).into_data().try_into_vec::<f32>().unwrap();
        assert_eq!(all[(2 * 5 + 3) * 201..][..201], whole);
    }
}
