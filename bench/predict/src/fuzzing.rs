//! Entry points for fuzzing (feature `fuzzing`): see [`comm_core::fuzzing`].

use std::path::Path;

use comm_core::OpKind;
pub use comm_core::fuzzing::{Target, Verdict};

use crate::chakra;
use crate::network::{Costs, Link, Network, Processors};
use crate::simulate::{Detail, simulate};
use crate::trace::{Collective, Message, Node, RankTrace, Trace, Work};

/// The decoders of this crate.
pub fn targets() -> Vec<Target> {
    vec![Target::new("Chakra trace", chakra_trace, seeds).memory(4 << 20, 2048)]
}

/// The files of a Chakra execution trace of two ranks, after the length of the first in four bytes: what they say is written as it was read, and
/// can be simulated or is refused.
pub fn chakra_trace(bytes: &[u8]) -> Verdict {
    let Some((length, both)) = bytes.split_first_chunk() else { return Verdict::Rejected };
    let (first, second) = both.split_at(both.len().min(u32::from_le_bytes(*length) as usize));
    let path = Path::new("trace");
    let trace = match chakra::of_bytes(path, &[first, second]) {
        Ok(trace) => trace,
        Err(why) => {
            let why = why.to_string();
            assert!(why.starts_with("trace") && why.lines().count() == 1, "{why}");
            return Verdict::Rejected;
        }
    };
    let written = files(&trace);
    let again = chakra::of_bytes(path, &[&written[0], &written[1]]);
    assert_eq!(again.ok().as_ref(), Some(&trace));
    let is_small = |node: &Node| match &node.work {
        Work::Collective(collective) => collective.bytes() < 1 << 20,
        Work::Compute { .. } | Work::Send(_) | Work::Receive(_) => true,
    };
    if trace.ranks.iter().flat_map(|rank| &rank.nodes).all(is_small) {
        let network = Network {
            link: Link::even("link", Some(1e9), 1e-4),
            costs: Costs::default(),
            processors: Processors::Own { cores: 1.0 },
            threads: 1.0,
        };
        // Ranks that wait for each other for ever are refused.
        if let Ok(outcome) = simulate(&trace, &network, Detail::EveryRank) {
            assert!(outcome.step_s.is_finite() && outcome.step_s >= 0.0, "{}", outcome.step_s);
        }
    }
    Verdict::Accepted
}

fn files(trace: &Trace) -> Vec<Vec<u8>> {
    let groups = trace.groups();
    trace.ranks.iter().enumerate().map(|(rank, of_rank)| chakra::encode(trace, rank, of_rank, &groups)).collect()
}

fn seeds() -> Vec<Vec<u8>> {
    let mut rank = RankTrace::default();
    let forward = rank.push("forward", vec![], Work::Compute { ns: 1_234_567 });
    let bucket = Collective { lane: 3, background: true, ..Collective::of_all(OpKind::AllReduce, 1001) };
    let bucket = rank.push("gradients", vec![forward], Work::Collective(bucket));
    rank.push("gather", vec![forward, bucket], Work::Collective(Collective::of_all(OpKind::AllGather, 10)));
    let of_all = Trace { name: "of all".into(), steps: 2, ranks: vec![rank.clone(), rank] };
    let mut sender = RankTrace::default();
    let message = Message { peer: 1, bytes: 77, lane: 1, background: false };
    sender.push("parameters", vec![], Work::Send(message.clone()));
    let mut receiver = RankTrace::default();
    receiver.push("parameters", vec![], Work::Receive(Message { peer: 0, ..message }));
    let messages = Trace { name: "messages".into(), steps: 1, ranks: vec![sender, receiver] };
    let joined = |trace| {
        let files = files(trace);
        [&(files[0].len() as u32).to_le_bytes()[..], &files.concat()].concat()
    };
    [&of_all, &messages].map(joined).to_vec()
}
