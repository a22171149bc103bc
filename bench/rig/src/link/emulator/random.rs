//! Numbers by chance that are the same on every machine and in every version: SplitMix64 (Steele, Lea and Flood, 2014).

/// One stream of numbers.
#[derive(Clone, Debug)]
pub(super) struct Random(u64);

/// The golden ratio in 64 bits, by which the state moves on.
const STEP: u64 = 0x9e37_79b9_7f4a_7c15;

impl Random {
    /// The stream that `seed` and `path` name; others are independent of it.
    pub(super) fn new(seed: u64, path: [u64; 2]) -> Self {
        Random(path.into_iter().fold(mix(seed), |state, part| mix(state.wrapping_add(STEP) ^ mix(part))))
    }

    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(STEP);
        mix(self.0)
    }

    /// Whether something of this probability happens.
    pub(super) fn happens(&mut self, probability: f64) -> bool {
        // 53 bits, as many as an f64 holds: in [0, 1), so that 1 always happens and 0 never.
        (self.next() >> 11) as f64 * (-53_f64).exp2() < probability
    }

    /// A number from 0 to `most`.
    pub(super) fn up_to(&mut self, most: u64) -> u64 {
        let product = u128::from(self.next()) * (u128::from(most) + 1);
        // Less than 2^64, as it is at most `most`.
        (product >> 64) as u64
    }
}

fn mix(value: u64) -> u64 {
    let value = (value ^ value >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let value = (value ^ value >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    value ^ value >> 31
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_those_of_the_paper() {
        // The first outputs for seed 0, as all published implementations have them.
        let mut random = Random(0);
        assert_eq!([random.next(), random.next()], [0xe220_a839_7b1d_cdaf, 0x6e78_9e6a_a1b9_65f4]);
    }

    #[test]
    fn streams_differ_and_repeat() {
        let first = |seed, path| Random::new(seed, path).next();
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
