//! GPT-2's initial weights as a pure function of (seed, tensor path, element index).
//!
//! Nothing else enters: no generator state, no thread count, no backend and no C library, so every rank of every job starts from the
//! same bits without exchanging them.

use comm_core::splitmix::SplitMix64;
use rayon::prelude::*;
use sha2::{Digest, Sha256};

use crate::config::ModelConfig;
use crate::math;

/// Standard deviation of GPT-2's embeddings and weight matrices.
pub const INIT_STD: f64 = 0.02;

/// The initial values of the tensor at `path` (Hugging Face's names, such as `h.0.attn.c_attn.weight`) with `len` elements in
/// row-major order.
///
/// Biases are 0, layer norm weights 1, everything else is normal with mean 0 and standard deviation 0.02, except that the two
/// projections into the residual stream of each block (`c_proj.weight`) have 0.02 / √(2·L) (Radford et al. 2019, section 2.3).
pub fn initial_values(config: &ModelConfig, seed: u64, path: &str, len: usize) -> Vec<f32> {
    if path.ends_with(".bias") {
        vec![0.0; len]
    } else if is_norm_weight(path) {
        vec![1.0; len]
    } else if path.ends_with(".c_proj.weight") {
        normal(seed, path, len, INIT_STD / (2.0 * config.n_layer as f64).sqrt())
    } else {
        normal(seed, path, len, INIT_STD)
    }
}

/// `len` values of a normal distribution with mean 0 and standard deviation `std`; element `i` depends on (seed, path, i) alone.
///
/// The pair (2k, 2k+1) comes by Box and Muller from two 53-bit uniform numbers, themselves words 2k and 2k+1 of the SplitMix64
/// sequence whose start is the first eight bytes of SHA-256(seed, path).
pub fn normal(seed: u64, path: &str, len: usize, std: f64) -> Vec<f32> {
    const PAIRS_PER_TASK: usize = 1 << 14;
    let key = stream_key(seed, path);
    let mut values = vec![0.0f32; len];
    values.par_chunks_mut(2 * PAIRS_PER_TASK).enumerate().for_each(|(task, chunk)| {
        for (k, pair) in chunk.chunks_mut(2).enumerate() {
            let word = 2 * (task * PAIRS_PER_TASK + k) as u64;
            // (0, 1], so that the logarithm is finite.
            let u = ((SplitMix64::at(key, word) >> 11) + 1) as f64 / (1u64 << 53) as f64;
            let turns = (SplitMix64::at(key, word + 1) >> 11) as f64 / (1u64 << 53) as f64;
            let radius = std * (-2.0 * math::ln(u)).sqrt();
            let (sin, cos) = math::sin_cos_turns(turns);
            for (value, direction) in pair.iter_mut().zip([cos, sin]) {
                *value = (radius * direction) as f32;
            }
        }
    });
    values
}

fn is_norm_weight(path: &str) -> bool {
    ["ln_1.weight", "ln_2.weight", "ln_f.weight"].iter().any(|name| path.ends_with(name))
}

fn stream_key(seed: u64, path: &str) -> u64 {
    let digest = Sha256::new().chain_update(seed.to_le_bytes()).chain_update(path.as_bytes()).finalize();
    digest.iter().take(8).rev().fold(0, |key, byte| key << 8 | u64::from(*byte))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Preset;

    #[test]
    fn values_depend_on_seed_path_and_index_alone() {
        let long = normal(7, "wte.weight", 100_001, 0.02);
        let short = normal(7, "wte.weight", 33_333, 0.02);
        assert_eq!(long[..33_333], short[..]);
        assert_ne!(short, normal(8, "wte.weight", 33_333, 0.02));
        assert_ne!(short, normal(7, "wpe.weight", 33_333, 0.02));
        for threads in [1, 3] {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
            assert_eq!(long, pool.install(|| normal(7, "wte.weight", 100_001, 0.02)));
        }
    }

    #[test]
    fn the_stream_never_changes() {
        // Recorded once: a change here means that old runs cannot be repeated.
        let bits: Vec<u32> = normal(1337, "h.0.attn.c_attn.weight", 4, 0.02).iter().map(|v| v.to_bits()).collect();
        assert_eq!(bits, RECORDED);
    }
    /// The same as an independent computation in Python gives.
    const RECORDED: [u32; 4] = [3_151_713_243, 3_171_615_389, 1_022_534_547, 3_138_806_180];

    #[test]
    fn moments_are_those_of_the_distribution() {
        let values = normal(3, "wte.weight", 400_000, 0.02);
        let n = values.len() as f64;
        let moment = |p: i32| values.iter().map(|v| f64::from(*v).powi(p)).sum::<f64>() / n;
        let std = moment(2).sqrt();
        assert!(moment(1).abs() < 4.0 * 0.02 / n.sqrt(), "{}", moment(1));
        assert!((std / 0.02 - 1.0).abs() < 5e-3, "{std}");
        assert!((moment(4) / std.powi(4) - 3.0).abs() < 0.05);
        let neighbours: f64 = values.windows(2).map(|w| f64::from(w[0]) * f64::from(w[1])).sum();
        assert!((neighbours / n / (std * std)).abs() < 4.0 / n.sqrt());
    }

    #[test]
    fn each_kind_of_tensor_gets_its_own_rule() {
        let config = Preset::Tiny.config(256);
        let values = |path: &str| initial_values(&config, 1, path, 10_000);
        let std = |v: &[f32]| (v.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>() / 10_000.0).sqrt();
        assert!(values("h.1.attn.c_attn.bias").iter().all(|v| *v == 0.0));
        assert!(values("h.1.ln_2.weight").iter().all(|v| *v == 1.0));
        assert!(values("ln_f.weight").iter().all(|v| *v == 1.0));
        assert!((std(&values("wpe.weight")) / 0.02 - 1.0).abs() < 0.03);
        assert!((std(&values("h.3.mlp.c_proj.weight")) / (0.02 / 8f64.sqrt()) - 1.0).abs() < 0.03);
    }
}
