//! What is measured: an operation on a number of elements, with the conventions of nccl-tests for sizes and bandwidths.

use std::fmt;
use std::str::FromStr;

use comm_core::{DType, Op};
use rig::samples::Reduction;
use serde::{Deserialize, Serialize};

/// What the ranks do together.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Operation {
    AllReduce,
    Broadcast,
    Reduce,
    Scatter,
    Gather,
    AllGather,
    ReduceScatter,
    AllToAll,
    /// Every rank sends to the next and receives from the one before.
    SendRecv,
    /// Rank 0 sends one message after another to rank 1, which answers the last.
    OneWay,
    /// Rank 0 sends a message to rank 1, which sends one back.
    RoundTrip,
}

impl Operation {
    /// Those that `--ops` offers.
    pub(crate) const OFFERED: [Operation; 9] = [
        Operation::AllReduce,
        Operation::Broadcast,
        Operation::Reduce,
        Operation::Scatter,
        Operation::Gather,
        Operation::AllGather,
        Operation::ReduceScatter,
        Operation::AllToAll,
        Operation::SendRecv,
    ];

    /// Its name on the command line and in results.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Operation::AllReduce => "all-reduce",
            Operation::Broadcast => "broadcast",
            Operation::Reduce => "reduce",
            Operation::Scatter => "scatter",
            Operation::Gather => "gather",
            Operation::AllGather => "all-gather",
            Operation::ReduceScatter => "reduce-scatter",
            Operation::AllToAll => "all-to-all",
            Operation::SendRecv => "send-recv",
            Operation::OneWay => "one-way",
            Operation::RoundTrip => "round-trip",
        }
    }

    /// Whether elements are combined.
    pub(crate) fn reduces(self) -> bool {
        matches!(self, Operation::AllReduce | Operation::Reduce | Operation::ReduceScatter)
    }

    /// Whether one rank is special.
    pub(crate) fn has_root(self) -> bool {
        matches!(self, Operation::Broadcast | Operation::Reduce | Operation::Scatter | Operation::Gather)
    }

    /// Whether the size is that of all ranks' shards together, and not what each rank has.
    pub(crate) fn is_sharded(self) -> bool {
        matches!(
            self,
            Operation::Scatter
                | Operation::Gather
                | Operation::AllGather
                | Operation::ReduceScatter
                | Operation::AllToAll
        )
    }

    /// By what `size / time` is multiplied to get the bus bandwidth, which does not depend on the number of ranks where a
    /// link is the limit. With n ranks: 2(n−1)/n for an all-reduce, (n−1)/n for what moves shards, 1 for the rest.
    pub(crate) fn bus_factor(self, ranks: usize) -> f64 {
        let ranks = ranks as f64;
        match self {
            Operation::AllReduce => 2.0 * (ranks - 1.0) / ranks,
            _ if self.is_sharded() => (ranks - 1.0) / ranks,
            _ => 1.0,
        }
    }
}

impl fmt::Display for Operation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for Operation {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        Operation::OFFERED.into_iter().find(|operation| operation.name() == name).ok_or_else(|| {
            let names = Operation::OFFERED.map(Operation::name).join(", ");
            format!("unknown collective '{name}', expected one of {names}")
        })
    }
}

/// Where the result goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum ResultPlacement {
    /// Into memory of its own.
    OutOfPlace,
    /// Where the input was.
    InPlace,
}

impl ResultPlacement {
    pub(crate) const BOTH: [ResultPlacement; 2] = [ResultPlacement::OutOfPlace, ResultPlacement::InPlace];

    pub(crate) fn other(self) -> Self {
        match self {
            ResultPlacement::OutOfPlace => ResultPlacement::InPlace,
            ResultPlacement::InPlace => ResultPlacement::OutOfPlace,
        }
    }
}

impl fmt::Display for ResultPlacement {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            ResultPlacement::OutOfPlace => "out of place",
            ResultPlacement::InPlace => "in place",
        })
    }
}

/// One line of the table, whatever it runs on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Case {
    pub(crate) operation: Operation,
    #[serde(with = "as_text")]
    pub(crate) dtype: DType,
    /// For those that reduce.
    pub(crate) reduction: Option<Reduction>,
    /// For those that have one.
    pub(crate) root: Option<usize>,
    /// Elements of each rank, or of all ranks' shards together (see [`Operation::is_sharded`]).
    pub(crate) count: usize,
}

impl Case {
    /// The case of `size` bytes on `ranks` ranks, rounded to whole elements, and to equal shards where there are shards: the
    /// peers know no others. At least one element of each.
    pub(crate) fn new(
        operation: Operation,
        dtype: DType,
        reduction: Option<Reduction>,
        root: usize,
        size: u64,
        ranks: usize,
    ) -> Self {
        let elements = usize::try_from(size).unwrap_or(usize::MAX) / dtype.size();
        let count = if operation.is_sharded() { (elements / ranks).max(1) * ranks } else { elements.max(1) };
        let reduction = reduction.filter(|_| operation.reduces());
        Case { operation, dtype, reduction, root: operation.has_root().then_some(root), count }
    }

    /// What a communicator runs; for messages, which are several operations, what the first rank begins with.
    pub(crate) fn op(&self) -> Op {
        let (root, total) = (self.root.unwrap_or(0), self.count);
        let op = self.reduction.unwrap_or(Reduction::Sum).op();
        match self.operation {
            Operation::AllReduce => Op::AllReduce(op),
            Operation::Broadcast => Op::Broadcast { root },
            Operation::Reduce => Op::Reduce { root, op },
            Operation::Scatter => Op::Scatter { root, total },
            Operation::Gather => Op::Gather { root, total },
            Operation::AllGather => Op::AllGather,
            Operation::ReduceScatter => Op::ReduceScatter(op),
            Operation::AllToAll => Op::AllToAll,
            Operation::SendRecv | Operation::OneWay | Operation::RoundTrip => Op::Send { to: 1 },
        }
    }

    /// Bytes as nccl-tests counts them.
    pub(crate) fn bytes(&self) -> usize {
        self.count * self.dtype.size()
    }

    /// Name for messages: `all-reduce of 4096 B (f32, sum)`.
    pub(crate) fn name(&self) -> String {
        let reduction = self.reduction.map_or(String::new(), |reduction| format!(", {reduction}"));
        format!("{} of {} B ({}{reduction})", self.operation, self.bytes(), self.dtype)
    }
}

/// An element type from its own name or the one that nccl-tests uses.
pub(crate) fn parse_dtype(name: &str) -> Result<DType, String> {
    let own = match name {
        "float" => "f32",
        "double" => "f64",
        "half" => "f16",
        "bfloat16" => "bf16",
        "int8" => "i8",
        "int32" => "i32",
        "int64" => "i64",
        "uint8" => "u8",
        "uint32" => "u32",
        "uint64" => "u64",
        other => other,
    };
    own.parse().map_err(|error: comm_core::UnknownName| error.to_string())
}

/// An element type as its name.
mod as_text {
    use comm_core::DType;
    use serde::de::Error;
    use serde::{Deserialize, Deserializer, Serializer};

    pub(super) fn serialize<S: Serializer>(dtype: &DType, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(dtype)
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<DType, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(D::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bus_factors_are_those_of_nccl_tests() {
        assert_eq!(Operation::AllReduce.bus_factor(2), 1.0);
        assert_eq!(Operation::AllReduce.bus_factor(4), 1.5);
        for operation in
            [Operation::AllGather, Operation::ReduceScatter, Operation::Scatter, Operation::Gather, Operation::AllToAll]
        {
            assert_eq!(operation.bus_factor(4), 0.75, "{operation}");
        }
        for operation in [Operation::Broadcast, Operation::Reduce, Operation::SendRecv] {
            assert_eq!(operation.bus_factor(4), 1.0, "{operation}");
        }
    }

    #[test]
    fn shards_are_equal_and_never_empty() {
        let gather = |size| Case::new(Operation::AllGather, DType::F32, None, 0, size, 3);
        assert_eq!(gather(1).count, 3);
        assert_eq!(gather(4 * 10).count, 9);
        let reduce = Case::new(Operation::AllReduce, DType::F64, Some(Reduction::Sum), 5, 20, 3);
        assert_eq!((reduce.count, reduce.bytes(), reduce.root), (2, 16, None));
    }

    #[test]
    fn names_read_as_they_print() {
        for operation in Operation::OFFERED {
            assert_eq!(operation.to_string().parse::<Operation>().unwrap(), operation);
        }
        for reduction in Reduction::ALL {
            assert_eq!(reduction.to_string().parse::<Reduction>().unwrap(), reduction);
        }
        assert_eq!(parse_dtype("half").unwrap(), DType::F16);
        assert!(parse_dtype("quad").unwrap_err().contains("quad"));
        let case = Case::new(Operation::Broadcast, DType::Bf16, Some(Reduction::Sum), 1, 64, 2);
        let text = serde_json::to_string(&case).unwrap();
        assert!(text.contains(r#""dtype":"bf16""#), "{text}");
        assert_eq!(serde_json::from_str::<Case>(&text).unwrap(), case);
    }
}
