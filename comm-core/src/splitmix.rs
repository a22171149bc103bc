//! A small, fully specified random generator, so that the order of the data is the same on every machine and in every
//! build.
//!
//! SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014, figure 15): the
//! state advances by the golden ratio and each output is a mix of the state. All arithmetic is on integers modulo 2^64,
//! so there is no rounding to differ.

const GOLDEN_GAMMA: u64 = 0x9E37_79B9_7F4A_7C15;

/// A stream of 64-bit numbers.
#[derive(Clone, Debug)]
pub struct SplitMix64 {
    state: u64,
}

impl SplitMix64 {
    /// The generator with `seed` as its state, as in the paper.
    #[must_use]
    pub fn new(seed: u64) -> Self {
        Self { state: seed }
    }

    /// A stream that is a function of `seed` and of the numbers in `path` (a purpose, an epoch, …), unrelated to the
    /// stream of any other path: the state begins as `mix(seed + γ)` and becomes `mix(state + γ + part)` for each part,
    /// with the generator's own increment `γ`.
    #[must_use]
    pub fn stream(seed: u64, path: &[u64]) -> Self {
        let derive = |state: u64, part: u64| mix(state.wrapping_add(GOLDEN_GAMMA).wrapping_add(part));
        Self { state: path.iter().fold(derive(seed, 0), |state, &part| derive(state, part)) }
    }

    /// Number `index` of the generator that starts at `seed`.
    pub fn at(seed: u64, index: u64) -> u64 {
        mix(seed.wrapping_add(GOLDEN_GAMMA.wrapping_mul(index.wrapping_add(1))))
    }

    /// The next number, uniform over all 64-bit values.
    pub fn next_u64(&mut self) -> u64 {
        self.state = self.state.wrapping_add(GOLDEN_GAMMA);
        mix(self.state)
    }

    /// The next number from 0 (included) to 1 (excluded), a multiple of 2⁻⁵³.
    pub fn unit(&mut self) -> f64 {
        (self.next_u64() >> 11) as f64 * (0.5f64).powi(53)
    }

    /// A number uniform over `0..bound` without bias, by multiplication and rejection (Lemire, "Fast random integer
    /// generation in an interval", 2019); 0 where `bound` is 0.
    pub fn below(&mut self, bound: u64) -> u64 {
        if bound == 0 {
            return 0;
        }
        let rejected = bound.wrapping_neg() % bound;
        loop {
            let product = u128::from(self.next_u64()) * u128::from(bound);
            if product as u64 >= rejected {
                return (product >> 64) as u64;
            }
        }
    }

    /// A uniformly drawn permutation of `0..len` (Fisher–Yates, from the last place to the first).
    #[must_use]
    pub fn permutation(&mut self, len: usize) -> Vec<usize> {
        let mut order: Vec<usize> = (0..len).collect();
        for last in (1..len).rev() {
            let chosen = self.below(last as u64 + 1) as usize;
            order.swap(last, chosen);
        }
        order
    }
}

/// The output function of SplitMix64 (variant 13 of Stafford's mixers), a bijection.
pub fn mix(mut z: u64) -> u64 {
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_numbers_are_those_of_the_published_generator() {
        // The widely published outputs for seed 1234567.
        let mut generator = SplitMix64::new(1_234_567);
        let first: Vec<u64> = (0..5).map(|_| generator.next_u64()).collect();
        assert_eq!(first, [0, 1, 2, 3, 4].map(|index| SplitMix64::at(1_234_567, index)));
        assert_eq!(
            first,
            [
                6_457_827_717_110_365_317,
                3_203_168_211_198_807_973,
                9_817_491_932_198_370_423,
                4_593_380_528_125_082_431,
                16_408_922_859_458_223_821
            ]
        );
    }

    #[test]
    fn below_stays_below_and_reaches_every_value_evenly() {
        let mut generator = SplitMix64::new(3);
        let mut seen = [0_u32; 7];
        for _ in 0..70_000 {
            seen[generator.below(7) as usize] += 1;
        }
        // Five standard deviations of a binomial count of 10,000 are about 463.
        assert!(seen.iter().all(|&count| count.abs_diff(10_000) < 463), "{seen:?}");
        assert_eq!(generator.below(1), 0);
        assert_eq!(generator.below(0), 0);
    }

    #[test]
    fn a_permutation_holds_each_number_once_and_every_order_occurs() {
        let mut generator = SplitMix64::new(5);
        let mut sorted = generator.permutation(1_000);
        assert_ne!(sorted, (0..1_000).collect::<Vec<_>>());
        sorted.sort_unstable();
        assert_eq!(sorted, (0..1_000).collect::<Vec<_>>());

        let mut orders = std::collections::HashMap::new();
        for _ in 0..6_000 {
            *orders.entry(generator.permutation(3)).or_insert(0_u32) += 1;
        }
        assert_eq!(orders.len(), 6);
        assert!(orders.values().all(|&count| count.abs_diff(1_000) < 145), "{orders:?}");
        assert!(generator.permutation(0).is_empty());
    }

    #[test]
    fn streams_differ_by_seed_and_by_path() {
        let first = |seed, path: &[u64]| SplitMix64::stream(seed, path).next_u64();
        let all = [first(0, &[0]), first(1, &[0]), first(0, &[1]), first(0, &[0, 1]), first(0, &[1, 0])];
        for (index, value) in all.iter().enumerate() {
            assert!(!all[..index].contains(value), "{all:?}");
        }
        assert_eq!(first(9, &[4, 2]), first(9, &[4, 2]));
    }
}
