//! Text of known entropy: a seeded Markov source over a small alphabet.

use comm_core::splitmix::SplitMix64;

/// What the source emits.
const ALPHABET: &[u8; 20] = b"abcdefghijklmnop ,.\n";
const SYMBOLS: usize = ALPHABET.len();

/// A first-order Markov chain: the next symbol depends on the last one alone. Its transition weights are integers drawn
/// from the seed, so the text is the same on every machine; a few successors of each symbol are much likelier than the
/// rest, which leaves a model something to learn.
pub(super) struct MarkovSource {
    /// `weights[i][j]` is proportional to the probability of `j` after `i`; none is zero.
    weights: [[u64; SYMBOLS]; SYMBOLS],
    draws: SplitMix64,
}

impl MarkovSource {
    pub(super) fn new(seed: u64) -> Self {
        let mut generator = SplitMix64::stream(seed, &[0]);
        let mut weights = [[0; SYMBOLS]; SYMBOLS];
        for weight in weights.iter_mut().flatten() {
            // The fourth power of 16 uniform bits, scaled to 24 bits.
            let uniform = generator.next_u64() >> 48;
            *weight = 1 + (uniform.pow(4) >> 40);
        }
        Self { weights, draws: SplitMix64::stream(seed, &[1]) }
    }

    /// `len` bytes, after an unseen first symbol.
    pub(super) fn text(&mut self, len: usize) -> Vec<u8> {
        let mut state = 0;
        (0..len)
            .map(|_| {
                let row = &self.weights[state];
                let mut draw = self.draws.below(row.iter().sum());
                state = row
                    .iter()
                    .position(|&weight| {
                        let here = draw < weight;
                        draw = draw.saturating_sub(weight);
                        here
                    })
                    .unwrap_or(SYMBOLS - 1);
                ALPHABET[state]
            })
            .collect()
    }

    /// The entropy rate in nats per byte, `-Σ_i π_i Σ_j p_ij ln p_ij` with the stationary distribution `π` (Cover and
    /// Thomas, "Elements of Information Theory", theorem 4.2.4): no model of the text can have a lower expected loss.
    pub(super) fn entropy_rate(&self) -> f64 {
        let rows = self.probabilities();
        let entropy = |row: &[f64; SYMBOLS]| -> f64 { row.iter().map(|&p| -p * p.ln()).sum() };
        stationary(&rows).iter().zip(&rows).map(|(pi, row)| pi * entropy(row)).sum()
    }

    fn probabilities(&self) -> [[f64; SYMBOLS]; SYMBOLS] {
        self.weights.map(|row| {
            let total: u64 = row.iter().sum();
            row.map(|weight| weight as f64 / total as f64)
        })
    }
}

/// The distribution that a chain with positive transition probabilities keeps, by power iteration to the precision of
/// `f64`.
fn stationary(rows: &[[f64; SYMBOLS]; SYMBOLS]) -> [f64; SYMBOLS] {
    let mut now = [1.0 / SYMBOLS as f64; SYMBOLS];
    for _ in 0..10_000 {
        let mut next = [0.0; SYMBOLS];
        for (mass, row) in now.iter().zip(rows) {
            for (sum, p) in next.iter_mut().zip(row) {
                *sum += mass * p;
            }
        }
        let moved: f64 = now.iter().zip(&next).map(|(a, b)| (a - b).abs()).sum();
        now = next;
        if moved < 1e-15 {
            break;
        }
    }
    now
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_text_has_the_entropy_rate_that_is_stated() {
        let mut source = MarkovSource::new(1);
        let stated = source.entropy_rate();
        let text = source.text(1 << 20);
        // The plug-in estimate of the conditional entropy from counts of pairs; its bias is about 400 / (2 · 2^20) =
        // 0.0002.
        let mut pairs = vec![[0_u32; 256]; 256];
        for pair in text.windows(2) {
            pairs[usize::from(pair[0])][usize::from(pair[1])] += 1;
        }
        let total = (text.len() - 1) as f64;
        let measured: f64 = pairs
            .iter()
            .map(|row| {
                let sum: f64 = row.iter().map(|&count| f64::from(count)).sum();
                row.iter()
                    .filter(|&&count| count > 0)
                    .map(|&count| -f64::from(count) / total * (f64::from(count) / sum).ln())
                    .sum::<f64>()
            })
            .sum();
        assert!((measured - stated).abs() < 0.004, "stated {stated}, measured {measured}");
        assert!(stated > 1.0 && stated < 2.6, "a rate far from 0 and from ln 20 = 3.0 is worth learning: {stated}");
    }

    #[test]
    fn the_stationary_distribution_stays_put_and_sums_to_one() {
        let rows = MarkovSource::new(9).probabilities();
        let pi = stationary(&rows);
        assert!((pi.iter().sum::<f64>() - 1.0).abs() < 1e-12);
        for (column, kept) in pi.iter().enumerate() {
            let next: f64 = pi.iter().zip(&rows).map(|(mass, row)| mass * row[column]).sum();
            assert!((next - kept).abs() < 1e-12);
        }
    }

    #[test]
    fn the_seed_decides_the_text() {
        let text = |seed| MarkovSource::new(seed).text(500);
        assert_eq!(text(4), text(4));
        assert_ne!(text(4), text(5));
        assert!(text(4).iter().all(|byte| ALPHABET.contains(byte)));
    }
}
