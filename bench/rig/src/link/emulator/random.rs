//! Numbers by chance that are the same on every machine and in every version.

use comm_core::splitmix::{SplitMix64, mix};

/// One stream of numbers.
#[derive(Clone, Debug)]
pub(super) struct Random(SplitMix64);

/// The golden ratio in 64 bits.
const STEP: u64 = 0x9e37_79b9_7f4a_7c15;

impl Random {
    /// The stream that `seed` and `path` name; others are independent of it.
    pub(super) fn new(seed: u64, path: [u64; 2]) -> Self {
        let derive = |state: u64, part| mix(state.wrapping_add(STEP) ^ mix(part));
        Random(SplitMix64::new(path.into_iter().fold(mix(seed), derive)))
    }

    /// Whether something of this probability happens.
    pub(super) fn happens(&mut self, probability: f64) -> bool {
        // In [0, 1), so that 1 always happens and 0 never.
        self.0.unit() < probability
    }

    /// A number from 0 to `most`.
    pub(super) fn up_to(&mut self, most: u64) -> u64 {
        let product = u128::from(self.0.next_u64()) * (u128::from(most) + 1);
        // Less than 2^64, as it is at most `most`.
        (product >> 64) as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_numbers_of_a_link_stay_what_they_are() {
        let mut random = Random::new(7, [3, 1]);
        assert_eq!([random.up_to(u64::MAX - 1), random.up_to(99)], [8_914_079_843_109_918_921, 28]);
    }

    #[test]
    fn streams_differ_and_repeat() {
        let first = |seed, path| Random::new(seed, path).0.next_u64();
        assert_eq!(first(1, [2, 3]), first(1, [2, 3]));
        let firsts = [first(1, [2, 3]), first(1, [3, 2]), first(2, [1, 3]), first(1, [2, 4]), first(0, [0, 0])];
        let mut different = firsts.to_vec();
        different.sort_unstable();
        different.dedup();
        assert_eq!(different.len(), firsts.len());
    }

    #[test]
    fn bounds_are_kept_and_reached() {
        let mut random = Random::new(7, [0, 0]);
        let mut seen = [0; 4];
        (0..4000).for_each(|_| seen[random.up_to(3) as usize] += 1);
        assert!(seen.iter().all(|count| (850..1150).contains(count)), "{seen:?}");
        assert_eq!(random.up_to(0), 0);
        assert!((0..1000).all(|_| random.happens(1.0) && !random.happens(0.0)));
    }
}
