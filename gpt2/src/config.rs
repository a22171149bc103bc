//! The shape of a GPT-2 model and the named presets.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// The shape of a GPT-2 model. Everything else about the architecture is fixed: pre-norm blocks, biases everywhere, tanh GELU,
/// learned positions, layer norm with epsilon 1e-5, a four times wider feed-forward layer and a head tied to the token embedding.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ModelConfig {
    /// Number of transformer blocks (L).
    pub n_layer: usize,
    /// Number of attention heads (H); divides `n_embd`.
    pub n_head: usize,
    /// Width of the residual stream (C).
    pub n_embd: usize,
    /// Longest sequence the positions cover (T).
    pub block_size: usize,
    /// Number of tokens (V).
    pub vocab_size: usize,
}

/// Epsilon of every layer norm.
pub const LAYER_NORM_EPSILON: f64 = 1e-5;

/// Why a [`ModelConfig`] or a preset's name is refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ConfigError {
    /// A size is zero or beyond what the trainer addresses.
    #[error("model config: {name} is {value}; it must be from 1 to {max}")]
    OutOfRange {
        /// Which size.
        name: &'static str,
        /// What it was.
        value: usize,
        /// The largest accepted value.
        max: usize,
    },
    /// The heads do not share the width evenly.
    #[error(
        "model config: a width (n_embd) of {n_embd} cannot be divided evenly among {n_head} heads; make n_embd a multiple of n_head"
    )]
    HeadsDoNotDivideWidth {
        /// Width of the residual stream.
        n_embd: usize,
        /// Number of heads.
        n_head: usize,
    },
    /// No preset has this name.
    #[error("unknown model preset '{name}', expected one of {}", Preset::names())]
    UnknownPreset {
        /// The name that was asked for.
        name: String,
    },
}

impl ModelConfig {
    /// Checks that every size is usable.
    ///
    /// # Errors
    /// [`ConfigError::OutOfRange`] for a size that is zero or absurdly large (a config may come from a file, and allocations follow
    /// it), [`ConfigError::HeadsDoNotDivideWidth`] if `n_embd` is no multiple of `n_head`.
    pub fn validate(&self) -> Result<(), ConfigError> {
        // Loose bounds: they keep every product of two sizes far from overflow and a foreign file from asking for terabytes.
        let bounded = [
            ("n_layer", self.n_layer, 1 << 10),
            ("n_head", self.n_head, 1 << 10),
            ("n_embd", self.n_embd, 1 << 16),
            ("block_size", self.block_size, 1 << 20),
            ("vocab_size", self.vocab_size, 1 << 24),
        ];
        for (name, value, max) in bounded {
            if value == 0 || value > max {
                return Err(ConfigError::OutOfRange { name, value, max });
            }
        }
        if !self.n_embd.is_multiple_of(self.n_head) {
            return Err(ConfigError::HeadsDoNotDivideWidth { n_embd: self.n_embd, n_head: self.n_head });
        }
        Ok(())
    }

    /// Width of one attention head (Q).
    pub fn head_dim(&self) -> usize {
        self.n_embd / self.n_head
    }

    /// Exact number of trainable parameters; the tied head counts once.
    pub fn parameter_count(&self) -> usize {
        let c = self.n_embd;
        // Per block: two layer norms (4C), attention in and out (4C² + 4C), feed-forward in and out (8C² + 5C).
        let block = 12 * c * c + 13 * c;
        (self.vocab_size + self.block_size) * c + self.n_layer * block + 2 * c
    }

    /// Floating-point operations of one training step (forward and backward) for one token of a sequence of `t` tokens:
    /// `6·N + 12·L·H·Q·t`, where N counts all parameters but the position embeddings.
    ///
    /// This is nanoGPT's count, after appendix B of the PaLM paper: six operations a parameter, plus attention's two products over
    /// the full (not halved) `t × t` square. Another usual count, `6·N + 6·L·C·t`, takes half the square.
    pub fn flops_per_token(&self, t: usize) -> f64 {
        let n = (self.parameter_count() - self.block_size * self.n_embd) as f64;
        6.0 * n + 12.0 * (self.n_layer * self.n_embd) as f64 * t as f64
    }
}

/// A named model size.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Preset {
    /// 2 layers, 2 heads, 32 wide, 32 positions: for tests.
    #[serde(rename = "micro")]
    Micro,
    /// 4 layers, 4 heads, 128 wide, 64 positions: the size nanoGPT suggests for a CPU.
    #[serde(rename = "tiny")]
    Tiny,
    /// 4 layers, 4 heads, 256 wide, 128 positions.
    #[serde(rename = "mini")]
    Mini,
    /// 6 layers, 6 heads, 384 wide, 256 positions.
    #[serde(rename = "small")]
    Small,
    /// GPT-2 itself: 12 layers, 12 heads, 768 wide, 1024 positions.
    #[serde(rename = "124m")]
    Gpt2,
    /// GPT-2 medium: 24 layers, 16 heads, 1024 wide.
    #[serde(rename = "350m")]
    Gpt2Medium,
    /// GPT-2 large: 36 layers, 20 heads, 1280 wide.
    #[serde(rename = "774m")]
    Gpt2Large,
    /// GPT-2 XL: 48 layers, 25 heads, 1600 wide.
    #[serde(rename = "1558m")]
    Gpt2Xl,
}

impl Preset {
    /// Every preset, smallest first.
    pub const ALL: [Self; 8] =
        [Self::Micro, Self::Tiny, Self::Mini, Self::Small, Self::Gpt2, Self::Gpt2Medium, Self::Gpt2Large, Self::Gpt2Xl];

    /// The name used on the command line and in files.
    pub fn name(self) -> &'static str {
        match self {
            Self::Micro => "micro",
            Self::Tiny => "tiny",
            Self::Mini => "mini",
            Self::Small => "small",
            Self::Gpt2 => "124m",
            Self::Gpt2Medium => "350m",
            Self::Gpt2Large => "774m",
            Self::Gpt2Xl => "1558m",
        }
    }

    /// All names, comma-separated, for messages.
    pub fn names() -> String {
        Self::ALL.map(Self::name).join(", ")
    }

    /// The model of this size for a tokenizer of `vocab_size` tokens.
    pub fn config(self, vocab_size: usize) -> ModelConfig {
        let (n_layer, n_head, n_embd, block_size) = match self {
            Self::Micro => (2, 2, 32, 32),
            Self::Tiny => (4, 4, 128, 64),
            Self::Mini => (4, 4, 256, 128),
            Self::Small => (6, 6, 384, 256),
            Self::Gpt2 => (12, 12, 768, 1024),
            Self::Gpt2Medium => (24, 16, 1024, 1024),
            Self::Gpt2Large => (36, 20, 1280, 1024),
            Self::Gpt2Xl => (48, 25, 1600, 1024),
        };
        ModelConfig { n_layer, n_head, n_embd, block_size, vocab_size }
    }
}

impl fmt::Display for Preset {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for Preset {
    type Err = ConfigError;

    fn from_str(name: &str) -> Result<Self, Self::Err> {
        Self::ALL
            .into_iter()
            .find(|preset| preset.name().eq_ignore_ascii_case(name))
            .ok_or_else(|| ConfigError::UnknownPreset { name: name.into() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parameter_counts_are_those_of_the_published_models() {
        let count = |preset: Preset| preset.config(50257).parameter_count();
        assert_eq!(count(Preset::Gpt2), 124_439_808);
        assert_eq!(count(Preset::Gpt2Medium), 354_823_168);
        assert_eq!(count(Preset::Gpt2Large), 774_030_080);
        assert_eq!(count(Preset::Gpt2Xl), 1_557_611_200);
    }

    #[test]
    fn flops_follow_the_documented_formula() {
        let flops = Preset::Gpt2.config(50257).flops_per_token(1024);
        assert!((flops / 1e6 - 855.2).abs() < 0.1, "{flops}");
    }

    #[test]
    fn presets_round_trip_through_their_names() {
        for preset in Preset::ALL {
            assert_eq!(preset.to_string().parse(), Ok(preset));
            preset.config(256).validate().unwrap();
            let json = serde_json::to_string(&preset).unwrap();
            assert_eq!(json, format!("\"{preset}\""));
        }
        let message = "gpt5".parse::<Preset>().unwrap_err().to_string();
        assert!(message.contains("gpt5") && message.contains("124m"), "{message}");
    }

    #[test]
    fn unusable_sizes_are_named() {
        let good = Preset::Micro.config(256);
        for spoil in [
            |c: &mut ModelConfig| c.n_layer = 0,
            |c: &mut ModelConfig| c.n_head = 0,
            |c: &mut ModelConfig| c.n_embd = usize::MAX,
            |c: &mut ModelConfig| c.block_size = 0,
            |c: &mut ModelConfig| c.vocab_size = 0,
            |c: &mut ModelConfig| c.n_head = 3,
        ] {
            let mut config = good.clone();
            spoil(&mut config);
            assert!(config.validate().is_err(), "{config:?}");
        }
    }
}
