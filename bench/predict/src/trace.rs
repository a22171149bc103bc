//! A step of a job as what its ranks do: computation and communication, and what each waits for.
//!
//! Where a trace comes from, a run of ours or a file of another program, makes no difference to what reads it: [`chakra`](crate::chakra)
//! writes and reads them, [`simulate`](crate::simulate()) predicts what they take on a network.

use std::fmt;

use comm_core::{Algorithm, DType, OpKind};
use serde::{Deserialize, Serialize};

/// What the ranks of a job do in one step, or in several steps that belong together.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Trace {
    /// What it is of, for people.
    pub name: String,
    /// Steps that it spans, at least 1. Strategies that do not communicate in every step are traced over several.
    pub steps: u64,
    /// One for each rank, in order.
    pub ranks: Vec<RankTrace>,
}

/// What one rank does.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct RankTrace {
    /// Each depends on earlier ones only.
    pub nodes: Vec<Node>,
}

/// A piece of work.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Node {
    /// What it is called.
    pub name: String,
    /// Places in [`RankTrace::nodes`] of what must have ended before it begins.
    pub after: Vec<usize>,
    /// What is done.
    pub work: Work,
    /// When it began and how long it took where it was recorded, in nanoseconds from the begin of the trace.
    pub recorded: Option<Recorded>,
}

/// Times of a node in the run that was recorded.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Recorded {
    /// From the begin of the trace, in nanoseconds.
    pub began_ns: u64,
    /// Nanoseconds.
    pub took_ns: u64,
}

/// What a node does.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Work {
    /// Keeps the rank's processor or GPU busy for so many nanoseconds when nothing else runs there.
    Compute {
        /// Nanoseconds.
        ns: u64,
    },
    /// An operation of all ranks of a group.
    Collective(Collective),
    /// A message to another rank.
    Send(Message),
    /// A message from another rank.
    Receive(Message),
}

/// An operation of all ranks of a group.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Collective {
    /// Any operation but send and receive.
    pub kind: OpKind,
    /// Type of the elements.
    pub dtype: DType,
    /// Elements of the whole: of an all-gather those of all shards together.
    pub count: usize,
    /// The rank in the group that it begins or ends at, where it has one.
    pub root: usize,
    /// By what it runs; `None` for the choice of the fixed table.
    pub algorithm: Option<Algorithm>,
    /// The ranks that take part, in order; empty for all.
    pub group: Vec<usize>,
    /// Operations of one lane follow one another; those of different lanes run side by side.
    pub lane: usize,
    /// Whether it was started to run beside the caller, who waits for it later.
    pub background: bool,
}

/// A message.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Message {
    /// The other end.
    pub peer: usize,
    /// Payload.
    pub bytes: u64,
    /// Messages of one lane between two ranks arrive in the order in which they were sent.
    pub lane: usize,
    /// Whether it was started to run beside the caller, who waits for it later.
    pub background: bool,
}

impl Collective {
    /// An operation of all ranks on f32 values, on lane 0, by the table's algorithm, for which its caller waits.
    pub fn of_all(kind: OpKind, count: usize) -> Self {
        Collective {
            kind,
            dtype: DType::F32,
            count,
            root: 0,
            algorithm: None,
            group: Vec::new(),
            lane: 0,
            background: false,
        }
    }

    /// Bytes of the whole.
    pub fn bytes(&self) -> u64 {
        self.count as u64 * self.dtype.size() as u64
    }
}

impl Work {
    /// The lane of an operation.
    pub fn lane(&self) -> Option<usize> {
        match self {
            Work::Compute { .. } => None,
            Work::Collective(collective) => Some(collective.lane),
            Work::Send(message) | Work::Receive(message) => Some(message.lane),
        }
    }

    /// Whether it is an operation.
    pub fn communicates(&self) -> bool {
        !matches!(self, Work::Compute { .. })
    }
}

/// Why a trace cannot be what a job does.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Invalid(String);

impl fmt::Display for Invalid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Invalid {}

/// Most elements of one operation: 2^40.
const MOST_ELEMENTS: usize = 1 << 40;

/// Most bytes of one message, and nanoseconds of one computation (13 days): 2^50.
const MOST_OF_A_NODE: u64 = 1 << 50;

/// Most lanes that a trace may name.
const MOST_LANES: usize = 64;

impl Trace {
    /// Whether every reference leads somewhere: nodes come after what they wait for, and peers, groups and roots are ranks of the job.
    ///
    /// # Errors
    /// The first thing that is wrong, by rank and node.
    pub fn check(&self) -> Result<(), Invalid> {
        if self.ranks.is_empty() || self.steps == 0 {
            return Err(Invalid("a trace must have at least one rank and one step".into()));
        }
        for (rank, trace) in self.ranks.iter().enumerate() {
            for (index, node) in trace.nodes.iter().enumerate() {
                let wrong = |what: String| Err(Invalid(format!("rank {rank}, node {index} ({}): {what}", node.name)));
                if let Some(late) = node.after.iter().find(|after| **after >= index) {
                    return wrong(format!("it waits for node {late}, which does not come before it"));
                }
                if let Err(what) = self.check_work(rank, &node.work) {
                    return wrong(what);
                }
            }
        }
        Ok(())
    }

    fn check_work(&self, rank: usize, work: &Work) -> Result<(), String> {
        let ranks = self.ranks.len();
        if let Some(lane) = work.lane().filter(|lane| *lane >= MOST_LANES) {
            return Err(format!("its lane is {lane}, and at most {MOST_LANES} lanes are possible"));
        }
        match work {
            Work::Compute { ns } if *ns > MOST_OF_A_NODE => {
                Err(format!("its computation has {ns} ns, and at most {MOST_OF_A_NODE} are possible"))
            }
            Work::Compute { .. } => Ok(()),
            Work::Send(message) | Work::Receive(message) if message.bytes > MOST_OF_A_NODE => {
                Err(format!("its message has {} bytes, and at most {MOST_OF_A_NODE} are possible", message.bytes))
            }
            Work::Send(message) | Work::Receive(message) if message.peer >= ranks || message.peer == rank => Err(
                format!("its message is between rank {rank} and rank {}, and there are {ranks} ranks", message.peer),
            ),
            Work::Send(_) | Work::Receive(_) => Ok(()),
            Work::Collective(Collective { kind: OpKind::Send | OpKind::Recv, .. }) => {
                Err("a message is not an operation of all ranks".into())
            }
            Work::Collective(collective) => {
                let Collective { count, root, group, .. } = collective;
                let members = if group.is_empty() { ranks } else { group.len() };
                let sorted = group.windows(2).all(|pair| pair[0] < pair[1]);
                if !group.is_empty() && (!sorted || !group.contains(&rank) || group.iter().any(|rank| *rank >= ranks)) {
                    return Err(format!(
                        "its group {group:?} of {ranks} ranks must be in ascending order and contain rank {rank}"
                    ));
                }
                if *root >= members {
                    return Err(format!("its root is {root}, and its group has {members} ranks"));
                }
                if *count > MOST_ELEMENTS {
                    return Err(format!("it has {count} elements, and at most {MOST_ELEMENTS} are possible"));
                }
                Ok(())
            }
        }
    }

    /// Groups of ranks that are not all, each once, in the order in which they occur.
    pub fn groups(&self) -> Vec<Vec<usize>> {
        let mut groups: Vec<Vec<usize>> = Vec::new();
        for node in self.ranks.iter().flat_map(|rank| &rank.nodes) {
            if let Work::Collective(Collective { group, .. }) = &node.work
                && !group.is_empty()
                && !groups.contains(group)
            {
                groups.push(group.clone());
            }
        }
        groups
    }

    /// The same with every computation `factor` times as long: for another processor, say.
    #[must_use]
    pub fn with_compute_scaled(mut self, factor: f64) -> Self {
        for node in self.ranks.iter_mut().flat_map(|rank| &mut rank.nodes) {
            if let Work::Compute { ns } = &mut node.work {
                *ns = (*ns as f64 * factor).round().max(0.0) as u64;
            }
        }
        self
    }
}

impl RankTrace {
    /// Nanoseconds of computation.
    pub fn compute_ns(&self) -> u64 {
        let compute = self.nodes.iter().map(|node| match node.work {
            Work::Compute { ns } => ns,
            _ => 0,
        });
        compute.sum()
    }

    /// Nanoseconds in which at least one operation was under way where the rank was recorded; none of it where it was not.
    pub fn under_way_ns(&self) -> u64 {
        let operations = self.nodes.iter().filter(|node| node.work.communicates());
        let mut spans: Vec<Recorded> = operations.filter_map(|node| node.recorded).collect();
        spans.sort_unstable_by_key(|span| span.began_ns);
        let (mut total, mut until) = (0, 0);
        for Recorded { began_ns, took_ns } in spans {
            let ended = began_ns.saturating_add(took_ns);
            total += ended.saturating_sub(began_ns.max(until));
            until = until.max(ended);
        }
        total
    }

    /// The same without the times of a recording.
    #[must_use]
    pub fn without_times(mut self) -> Self {
        self.nodes.iter_mut().for_each(|node| node.recorded = None);
        self
    }

    /// Adds a node; its place.
    pub fn push(&mut self, name: impl Into<String>, after: Vec<usize>, work: Work) -> usize {
        self.nodes.push(Node { name: name.into(), after, work, recorded: None });
        self.nodes.len() - 1
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reference_that_leads_nowhere_is_named() {
        let all_reduce = Collective {
            kind: OpKind::AllReduce,
            dtype: DType::F32,
            count: 10,
            root: 0,
            algorithm: None,
            group: Vec::new(),
            lane: 0,
            background: false,
        };
        let message = Message { peer: 1, bytes: 4, lane: 0, background: false };
        let cases = [
            (vec![0], Work::Compute { ns: 1 }, "does not come before it"),
            (vec![], Work::Send(Message { peer: 2, ..message.clone() }), "rank 2, and there are 2 ranks"),
            (
                vec![],
                Work::Send(Message { bytes: u64::MAX, ..message.clone() }),
                "its message has 18446744073709551615 bytes",
            ),
            (vec![], Work::Compute { ns: u64::MAX }, "its computation has"),
            (vec![], Work::Receive(Message { peer: 0, ..message }), "between rank 0 and rank 0"),
            (vec![], Work::Collective(Collective { root: 2, ..all_reduce.clone() }), "its root is 2"),
            (vec![], Work::Collective(Collective { group: vec![1], ..all_reduce.clone() }), "contain rank 0"),
            (vec![], Work::Collective(Collective { lane: 64, ..all_reduce.clone() }), "its lane is 64"),
            (vec![], Work::Collective(Collective { kind: OpKind::Send, ..all_reduce }), "not an operation of all"),
        ];
        for (after, work, expected) in cases {
            let mut rank = RankTrace::default();
            rank.push("x", after, work);
            let trace = Trace { name: "t".into(), steps: 1, ranks: vec![rank, RankTrace::default()] };
            let why = trace.check().unwrap_err().to_string();
            assert!(why.contains(expected) && why.starts_with("rank 0, node 0 (x): "), "{why}");
        }
        assert!(Trace::default().check().is_err());
    }

    #[test]
    fn computation_is_scaled_and_communication_is_not() {
        let mut rank = RankTrace::default();
        let first = rank.push("forward", vec![], Work::Compute { ns: 1000 });
        rank.push("send", vec![first], Work::Send(Message { peer: 1, bytes: 1000, lane: 0, background: true }));
        let trace = Trace { name: "t".into(), steps: 1, ranks: vec![rank, RankTrace::default()] };
        let slower = trace.with_compute_scaled(2.5);
        assert_eq!((slower.ranks[0].compute_ns(), slower.ranks[1].compute_ns()), (2500, 0));
        assert!(matches!(&slower.ranks[0].nodes[1].work, Work::Send(Message { bytes: 1000, .. })));
    }
}
