//! In which order strategies and transports are told of.

use isocomm::Rung;
use rig::record::NOBODY;

/// One rank alone first; those that do not compute what one device computes last.
pub(crate) const STRATEGIES: [&str; 15] = [
    "single",
    "ps",
    "sharded-ps",
    "ring",
    "ddp",
    "zero1",
    "zero2",
    "fsdp",
    "hierarchical",
    "hsdp",
    "async-ps",
    "local-sgd",
    "diloco",
    "streaming-diloco",
    "sparta",
];

/// From what costs least to what does most.
pub(crate) fn transports() -> Vec<String> {
    [NOBODY.to_string()].into_iter().chain(Rung::all_names()).collect()
}

/// Place in an order that is known; what is not in it comes last.
pub(crate) fn known<S: AsRef<str>>(order: &[S], name: &str) -> usize {
    order.iter().position(|known| known.as_ref() == name).unwrap_or(order.len())
}
