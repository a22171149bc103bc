//! Compression of gradients on their way, with error feedback: what a rank's message leaves out is kept, and added to its next gradient.

mod averaged;
mod encoding;
mod int8;
mod keeping;
mod power_sgd;
mod push;
mod sign;
mod strategy;
mod top_k;

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

use comm_core::Error;
use serde::{Deserialize, Serialize};

use super::{StrategyKind, StrategyOptions};
use crate::precision::Precision;

pub(super) use push::{Push, Pushed, pushed_bytes};
pub(super) use strategy::{built, expected, in_host_memory};

/// How gradients are compressed, as `none`, `int8`, `sign`, `topk:FRACTION` and `powersgd:RANK` are written.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(into = "String", try_from = "String")]
pub enum Compression {
    /// Not at all.
    #[default]
    None,
    /// Blocks of integers of 8 bits with a scale each. Every rank averages a shard of all ranks' and sends that compressed again: values are
    /// rounded twice, however many ranks there are, and what either rounding loses is kept.
    Int8,
    /// A bit for each element, its sign, and the mean magnitude of each block of 256 (EF-SignSGD, Karimireddy et al. 2019, arXiv 1901.09847);
    /// on the same way as integers.
    Sign,
    /// Of each bucket the elements of largest magnitude: values and places.
    TopK {
        /// The part of all elements, in (0, 1].
        fraction: f64,
    },
    /// PowerSGD (Vogels et al. 2019, arXiv 1905.13727): of each matrix two factors, by one step of a power iteration that goes on from the
    /// step before. Vectors, and matrices whose factors would not be smaller, are sent as they are.
    PowerSgd {
        /// Columns of a factor, at least 1.
        rank: usize,
    },
}

impl fmt::Display for Compression {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Compression::None => f.pad("none"),
            Compression::Int8 => f.pad("int8"),
            Compression::Sign => f.pad("sign"),
            Compression::TopK { fraction } => f.pad(&format!("topk:{fraction}")),
            Compression::PowerSgd { rank } => f.pad(&format!("powersgd:{rank}")),
        }
    }
}

impl FromStr for Compression {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (name, number) = text.split_once(':').map_or((text, None), |(name, number)| (name, Some(number)));
        match (name, number) {
            ("none", None) => Ok(Compression::None),
            ("int8", None) => Ok(Compression::Int8),
            ("sign", None) => Ok(Compression::Sign),
            ("topk", Some(number)) => match number.parse() {
                Ok(fraction) if fraction > 0.0 && fraction <= 1.0 => Ok(Compression::TopK { fraction }),
                _ => Err(format!("topk:{number}: the fraction of elements must be in (0, 1], as in topk:0.01")),
            },
            ("powersgd", Some(number)) => match number.parse() {
                Ok(rank) if rank > 0 => Ok(Compression::PowerSgd { rank }),
                _ => Err(format!("powersgd:{number}: the rank must be a number of at least 1, as in powersgd:4")),
            },
            _ => Err(format!(
                "unknown compression '{text}', expected one of none, int8, sign, topk:FRACTION, powersgd:RANK"
            )),
        }
    }
}

impl From<Compression> for String {
    fn from(compression: Compression) -> String {
        compression.to_string()
    }
}

impl TryFrom<String> for Compression {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        text.parse()
    }
}

impl StrategyKind {
    /// Whether its gradients may be compressed in some way: those of all ranks meet in one average, of which every rank gets all, or on one
    /// server.
    pub fn compresses(self) -> bool {
        matches!(self, StrategyKind::Ps | StrategyKind::Ring | StrategyKind::Ddp)
    }
}

impl Compression {
    /// Whether gradients are compressed at all.
    pub fn is_on(self) -> bool {
        self != Compression::None
    }

    /// Whether gradients of `kind` can be compressed in this way. A server gets each worker's by themselves, and PowerSGD's factors are averages
    /// of all ranks'.
    pub fn suits(self, kind: StrategyKind) -> bool {
        kind.compresses() && !(kind == StrategyKind::Ps && matches!(self, Compression::PowerSgd { .. }))
    }

    /// How one rank's gradients are written by themselves, where they are.
    fn encoding(self) -> Option<Arc<dyn encoding::Encoding>> {
        match self {
            Compression::None | Compression::PowerSgd { .. } => None,
            Compression::Int8 => Some(Arc::new(int8::Int8)),
            Compression::Sign => Some(Arc::new(sign::Sign)),
            Compression::TopK { fraction } => Some(Arc::new(top_k::Largest { fraction })),
        }
    }

    /// Whether a run of `kind` with these options can compress its gradients.
    ///
    /// # Errors
    /// `InvalidArgument`, which names the option as a user types it.
    pub fn check(self, kind: StrategyKind, options: &StrategyOptions, ranks: usize) -> comm_core::Result<()> {
        if !self.is_on() {
            return Ok(());
        }
        if !self.suits(kind) {
            let names: Vec<&str> =
                StrategyKind::ALL.into_iter().filter(|kind| self.suits(*kind)).map(StrategyKind::name).collect();
            let why = match kind.compresses() {
                true => {
                    ": its factors are averages over all ranks, and a server receives each worker's gradients separately"
                }
                false => "",
            };
            return Err(Error::invalid(format!(
                "--compress {self} is for --strategy {}, which average whole gradients, not {kind}{why}",
                names.join(", ")
            )));
        }
        if ranks == 1 {
            return Err(Error::invalid(format!(
                "--compress {self} is for gradients that are sent, and one rank sends none; leave it out"
            )));
        }
        if options.wire != Precision::F32 {
            return Err(Error::invalid(format!(
                "--compress {self} cannot be combined with --wire {}, because each compression has a format of its own; leave out --wire",
                options.wire
            )));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_is_read() {
        for text in ["none", "int8", "sign", "topk:0.01", "topk:1", "powersgd:4"] {
            let compression: Compression = text.parse().unwrap();
            assert_eq!(compression.to_string(), text);
            assert_eq!(serde_json::to_value(compression).unwrap(), text);
            assert_eq!(serde_json::from_value::<Compression>(text.into()).unwrap(), compression);
        }
        for text in [
            "int4",
            "int8:2",
            "sign:2",
            "topk",
            "topk:0",
            "topk:1.5",
            "topk:NaN",
            "powersgd",
            "powersgd:0",
            "none:1",
            "",
        ] {
            assert!(text.parse::<Compression>().is_err(), "{text}");
        }
    }
}
