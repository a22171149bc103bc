//! The collective algorithms, once for every byte transport. Which one runs is the [table](crate::table)'s choice or the caller's,
//! and both sides of a message find it in the header.
//!
//! Each algorithm is a file with its code, its formulas and its [`Entry`]. Everything else reads the entries. A new one takes a file, its
//! two lines here, its code and description in [`Algorithm`], and the rows that a test asks for in `docs/algorithms.md`.

mod direct;
mod halving_doubling;
mod layout;
mod recursive_doubling;
mod ring;
mod scatter_all_gather;
mod sharded;
mod task;
mod tree;
mod workload;

use super::round::Rounds;
use super::scratch::Scratch;
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::names;
use crate::op::{Algorithm, Extents, Op, OpKind};
use layout::Layout;
use task::Task;
use workload::Workload;

/// Lists the algorithms, each with the file of its entry.
macro_rules! entries {
    ($($algorithm:ident => $file:ident,)*) => {
        names!(pub Algorithm, "algorithm" by Algorithm::entry_name: $($algorithm),*);

        impl Algorithm {
            const fn entry(self) -> &'static Entry {
                match self {
                    $(Algorithm::$algorithm => &$file::ENTRY,)*
                }
            }
        }
    };
}

entries! {
    Direct => direct,
    Ring => ring,
    Tree => tree,
    Sharded => sharded,
    RecursiveDoubling => recursive_doubling,
    HalvingDoubling => halving_doubling,
    ScatterAllGather => scatter_all_gather,
}

/// One algorithm.
struct Entry {
    /// As users write it.
    name: &'static str,
    /// Whether all contributions meet in one place, so that a sum is rounded once. The 16-bit floats are reduced by no other ones.
    rounds_once: bool,
    /// The operations that it runs, each once.
    methods: &'static [Method],
}

/// How an algorithm runs one operation.
struct Method {
    kind: OpKind,
    ranks: Ranks,
    /// Whether it runs where no rule of a table says otherwise; of several the first in [`Algorithm::ALL`].
    is_fallback: bool,
    /// Messages that a rank sends.
    messages: Formula,
    /// Payload bytes that a rank sends.
    payload: Formula,
    run: fn(Task<'_, '_>) -> Result<()>,
}

/// A number for each rank, on two or more ranks with even shards.
struct Formula {
    /// For people, in the symbols of `docs/algorithms.md`.
    text: &'static str,
    value: fn(&Workload<'_>) -> u64,
}

/// On how many ranks a method runs.
#[derive(Clone, Copy, PartialEq)]
enum Ranks {
    Any,
    PowersOfTwo,
    /// Any, but tables choose it for powers of two alone: with other numbers some ranks only hand their part to another one and wait. One
    /// that has called something else may then keep all others waiting without ever being sent what would show it.
    AnyOnRequest,
}

impl Entry {
    /// How it runs an operation of this kind on elements of this type, if it can.
    fn method(&self, kind: OpKind, dtype: DType, ranks: usize) -> Option<&Method> {
        let reduces = matches!(kind, OpKind::AllReduce | OpKind::Reduce | OpKind::ReduceScatter);
        if reduces && dtype.accumulates_in_f32() && !self.rounds_once {
            return None;
        }
        let fits =
            |method: &&Method| method.kind == kind && (method.ranks != Ranks::PowersOfTwo || ranks.is_power_of_two());
        self.methods.iter().find(fits)
    }
}

impl Algorithm {
    /// The algorithm with this code in a header.
    pub fn from_code(code: u8) -> Option<Algorithm> {
        Algorithm::ALL.into_iter().find(|algorithm| *algorithm as u8 == code)
    }

    const fn entry_name(self) -> &'static str {
        self.entry().name
    }

    /// How many messages and payload bytes a rank sends in an operation, as formulas in the symbols of [`table`](crate::table); `None` for an
    /// operation that it never runs.
    pub fn formulas(self, kind: OpKind) -> Option<(&'static str, &'static str)> {
        let method = self.entry().methods.iter().find(|method| method.kind == kind)?;
        Some((method.messages.text, method.payload.text))
    }
}

/// Whether `algorithm` can run an operation.
pub(crate) fn supports(algorithm: Algorithm, kind: OpKind, dtype: DType, ranks: usize) -> bool {
    algorithm.entry().method(kind, dtype, ranks).is_some()
}

/// Whether a table may choose `algorithm` for an operation.
pub(crate) fn is_eligible(algorithm: Algorithm, kind: OpKind, dtype: DType, ranks: usize) -> bool {
    let method = algorithm.entry().method(kind, dtype, ranks);
    method.is_some_and(|method| method.ranks != Ranks::AnyOnRequest || ranks.is_power_of_two())
}

/// The algorithms that run where a table has no rule, the preferred one first.
pub(crate) fn fallbacks(kind: OpKind) -> impl Iterator<Item = Algorithm> {
    let is_fallback = move |algorithm: &Algorithm| {
        algorithm.entry().methods.iter().any(|method| method.kind == kind && method.is_fallback)
    };
    Algorithm::ALL.into_iter().filter(is_fallback)
}

/// What a rank sends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Volume {
    pub(crate) messages: u64,
    /// Bytes.
    pub(crate) payload: u64,
}

/// What `rank` of `ranks` sends in an operation over `count` elements in even shards; nothing in one that the algorithm cannot run.
pub(crate) fn volume(
    algorithm: Algorithm,
    op: &Op,
    dtype: DType,
    count: usize,
    ranks: usize,
    rank: usize,
    piece: usize,
) -> Volume {
    match algorithm.entry().method(op.kind(), dtype, ranks) {
        Some(method) if ranks > 1 => {
            let work = Workload { op, dtype, count, ranks, rank, piece };
            Volume { messages: (method.messages.value)(&work), payload: (method.payload.value)(&work) }
        }
        _ => Volume { messages: 0, payload: 0 },
    }
}

/// The buffers that an operation works on and with.
pub(super) struct Data<'a> {
    /// The buffer; in place, it holds what goes in.
    pub(super) bytes: &'a mut [u8],
    /// The input, out of place.
    pub(super) input: Option<&'a [u8]>,
    pub(super) extents: &'a Extents,
    pub(super) scratch: &'a mut Scratch,
    /// Most bytes of a message in a ring.
    pub(super) piece: usize,
}

/// Runs `op`, whose arguments have been checked.
pub(super) fn run(op: &Op, rounds: &mut Rounds<'_>, data: Data<'_>) -> Result<()> {
    let (header, ranks) = (*rounds.header(), rounds.ranks());
    let Some(method) = header.algorithm.entry().method(op.kind(), header.dtype, ranks) else {
        return Err(Error::invalid(format!(
            "the algorithm {} cannot run {} of {} on {ranks} ranks",
            header.algorithm, header.kind, header.dtype
        )));
    };
    let Data { bytes, input, extents, scratch, piece } = data;
    let layout = Layout { dtype: header.dtype, ranks, shards: &extents.shards, piece: piece.max(1) };
    if input.is_some() && op.reduce_op().is_none() {
        extents.copy_own(bytes, input);
    }
    (method.run)(Task { op: *op, rounds, layout, bytes, input, extents, scratch })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entries_agree_with_the_enum() {
        let mut codes: Vec<u8> = Algorithm::ALL.map(|algorithm| algorithm as u8).to_vec();
        codes.sort_unstable();
        codes.dedup();
        assert_eq!(codes.len(), Algorithm::ALL.len(), "each code stands for one algorithm");
        for algorithm in Algorithm::ALL {
            assert_eq!(Algorithm::from_code(algorithm as u8), Some(algorithm));
            assert_eq!(algorithm.name().parse::<Algorithm>().unwrap(), algorithm);
            assert_eq!(
                serde_json::to_value(algorithm).unwrap(),
                algorithm.name(),
                "one name in files and on command lines"
            );
            for kind in OpKind::ALL {
                let methods = algorithm.entry().methods.iter().filter(|method| method.kind == kind).count();
                assert!(methods <= 1, "{algorithm} runs {kind} in {methods} ways");
            }
        }
    }

    #[test]
    fn the_documented_table_is_that_of_the_entries() {
        let mut table = String::from("| operation | algorithm | messages | payload bytes |\n|---|---|---|---|\n");
        for kind in OpKind::ALL {
            for algorithm in Algorithm::ALL {
                if let Some((messages, payload)) = algorithm.formulas(kind) {
                    table += &format!("| {kind} | {algorithm} | {messages} | {payload} |\n");
                }
            }
        }
        let documented = include_str!("../../../docs/algorithms.md");
        assert!(documented.contains(&table), "docs/algorithms.md should have this table:\n{table}");
    }
}
