//! Against a model that is made of single elements: where each element of each result comes from.

use super::*;
use crate::op::Op;

/// A result's element: which (rank, element of what it contributes from) are combined in it.
type Origin = Vec<(usize, usize)>;

/// An operation on all ranks at once.
struct Model {
    /// By rank, whether it passes an input.
    out_of_place: Vec<bool>,
    /// By rank, elements of the input and of the buffer.
    lengths: Vec<(Option<usize>, usize)>,
    /// By rank and element of the buffer; `None` where it stays as it was.
    results: Vec<Vec<Option<Origin>>>,
    reduces: bool,
}

/// Where shards of these lengths begin.
fn starts(counts: &[usize]) -> Vec<usize> {
    (0..counts.len()).map(|rank| counts[..rank].iter().sum()).collect()
}

/// Deals elements out in turn.
fn even(whole: usize, ranks: usize) -> Vec<usize> {
    (0..ranks).map(|rank| (0..whole).filter(|element| element % ranks == rank).count()).collect()
}

/// `op` on ranks whose whole is divided by `counts`; of an all-to-all, `counts[r]` is what rank r sends to each.
fn model(op: Op, ranks: usize, counts: &[Vec<usize>], out: bool) -> Model {
    let shards = &counts[0];
    let whole: usize = shards.iter().sum();
    let start = starts(shards);
    let root = op.root();
    let mut model = Model {
        out_of_place: vec![out; ranks],
        lengths: vec![(out.then_some(whole), whole); ranks],
        results: Vec::new(),
        reduces: op.reduce_op().is_some(),
    };
    let untouched = |length: usize| -> Vec<Option<Origin>> { vec![None; length] };
    let of_all = |element: usize| -> Option<Origin> { Some((0..ranks).map(|rank| (rank, element)).collect()) };
    // Element of the contribution of rank `from` that is element `element` of its own shard.
    let in_shard = |from: usize, element: usize, has_whole: bool| -> Option<Origin> {
        Some(vec![(from, if has_whole { start[from] + element } else { element })])
    };
    for rank in 0..ranks {
        let is_root = root == Some(rank);
        let own = shards[rank];
        let gathered = || -> Vec<Option<Origin>> {
            let from = |from: usize| {
                // In place, whoever has the whole has its shard in it.
                let has_whole = !out && (op == Op::AllGather || root == Some(from));
                (0..shards[from]).map(move |element| (from, element, has_whole))
            };
            (0..ranks).flat_map(from).map(|(from, element, has_whole)| in_shard(from, element, has_whole)).collect()
        };
        let result = match op {
            Op::AllReduce(_) => (0..whole).map(of_all).collect(),
            Op::Reduce { .. } if is_root => (0..whole).map(of_all).collect(),
            Op::Reduce { .. } => untouched(whole),
            Op::Broadcast { root } => {
                model.out_of_place[rank] = out && is_root;
                (0..whole).map(|element| Some(vec![(root, element)])).collect()
            }
            Op::Scatter { root, .. } => {
                model.out_of_place[rank] = out && is_root;
                if is_root && !out {
                    // Which it gets back unchanged.
                    (0..whole).map(|element| Some(vec![(root, element)])).collect()
                } else {
                    (0..own).map(|element| Some(vec![(root, start[rank] + element)])).collect()
                }
            }
            Op::Gather { .. } if is_root => gathered(),
            Op::Gather { .. } => untouched(if out { 3 } else { own }),
            Op::AllGather => gathered(),
            Op::ReduceScatter(_) if out => (0..own).map(|element| of_all(start[rank] + element)).collect(),
            Op::ReduceScatter(_) => {
                let mine = start[rank]..start[rank] + own;
                (0..whole).map(|element| mine.contains(&element).then(|| of_all(element)).flatten()).collect()
            }
            Op::AllToAll => {
                let from = |from: usize| {
                    let first = starts(&counts[from])[rank];
                    (0..counts[from][rank]).map(move |element| Some(vec![(from, first + element)]))
                };
                let mut received: Vec<Option<Origin>> = (0..ranks).flat_map(from).collect();
                let sent: usize = counts[rank].iter().sum();
                if !out && received.len() < sent {
                    received.resize(sent, None);
                }
                received
            }
            Op::Barrier => Vec::new(),
            Op::Send { .. } => untouched(if out { 0 } else { whole }),
            Op::Recv { from } => {
                model.out_of_place[rank] = false;
                (0..whole).map(|element| Some(vec![(from, element)])).collect()
            }
        };
        let input = match op {
            _ if !model.out_of_place[rank] => None,
            Op::Gather { .. } | Op::AllGather => Some(own),
            Op::AllToAll => Some(counts[rank].iter().sum()),
            _ => Some(whole),
        };
        model.lengths[rank] = (input, result.len());
        model.results.push(result);
    }
    model
}

fn elements(count: usize) -> Elements {
    Elements { dtype: DType::F32, count }
}

fn all_of(ranges: &[Range<usize>]) -> Vec<usize> {
    ranges.iter().cloned().flatten().collect()
}

/// Compares what `check` says of each rank with the model of the operation as such. Ranks that take part have their `op`s there.
fn compare(ops: &[(usize, Op)], model: &Model, counts: impl Fn(usize) -> Option<Counts>) {
    let ranks = model.results.len();
    for (rank, op) in ops {
        let (rank, counts) = (*rank, counts(*rank));
        let (input, buffer) = model.lengths[rank];
        let what = format!("{op:?} on rank {rank} of {ranks}, input {input:?}, buffer {buffer}, {counts:?}");
        let check = |input: Option<usize>, buffer: usize| {
            check(op, rank, ranks, elements(buffer), input.map(elements), counts.as_ref())
        };
        let extents = check(input, buffer).unwrap_or_else(|error| panic!("{what}: {error}"));
        let is_in_place = input.is_none();

        let mut reads: Vec<usize> = model
            .results
            .iter()
            .flatten()
            .flatten()
            .flatten()
            .filter(|(from, _)| *from == rank)
            .map(|(_, element)| *element)
            .collect();
        reads.sort_unstable();
        reads.dedup();
        assert_eq!(extents.reads.clone().collect::<Vec<_>>(), reads, "{what}: reads");

        let stays = |element: usize, origin: &Origin| is_in_place && !model.reduces && *origin == [(rank, element)];
        let results = || model.results[rank].iter().enumerate().filter_map(|(at, from)| Some((at, from.as_ref()?)));
        let writes: Vec<usize> = results().filter(|(at, from)| !stays(*at, from)).map(|(at, _)| at).collect();
        let said = all_of(&extents.writes);
        // An all-to-all in place whose own block moves writes all that it receives.
        let moves = is_in_place && extents.own_copy.is_some();
        let expected: Vec<usize> = if moves { results().map(|(at, _)| at).collect() } else { writes };
        assert_eq!(said, expected, "{what}: writes");

        let is_own = |at: usize, (from, element): (usize, usize)| from == rank && !(is_in_place && element == at);
        let own: Vec<(usize, usize)> = results()
            .flat_map(|(at, from)| from.iter().filter(move |from| is_own(at, **from)).map(move |(_, from)| (*from, at)))
            .collect();
        let copied = extents.own_copy.iter().flat_map(|copy| copy.from.clone().zip(copy.to..));
        assert_eq!(copied.collect::<Vec<_>>(), own, "{what}: own copy");

        // Lengths that are one off are refused, unless the whole is what the caller says it is.
        let one_off = |input: usize| [input + 1, input, input.saturating_sub(1)].map(Some).to_vec();
        for input in input.map_or(vec![None], one_off) {
            for buffer in [buffer + 1, buffer] {
                let is_right = (input, buffer) == model.lengths[rank];
                if let Ok(extents) = check(input, buffer) {
                    assert!(is_right || may_be(op, rank, &extents, input, buffer), "{what}: takes {input:?}, {buffer}");
                }
            }
        }
    }
}

/// Whether an operation may be of another length on its own, as far as one rank can tell.
fn may_be(op: &Op, rank: usize, extents: &Extents, input: Option<usize>, buffer: usize) -> bool {
    match op {
        Op::AllReduce(_) | Op::Broadcast { .. } => input.is_none_or(|input| input == buffer),
        Op::Reduce { root, .. } => input.is_none_or(|input| input == buffer || *root != rank),
        Op::AllGather | Op::ReduceScatter(_) => {
            let (shard, whole) = (extents.shards.range(rank).len(), extents.shards.whole());
            match (op, input) {
                (_, None) => buffer == whole,
                (Op::AllGather, Some(input)) => (input, buffer) == (shard, whole),
                (_, Some(input)) => (input, buffer) == (whole, shard),
            }
        }
        Op::AllToAll => buffer.is_multiple_of(extents.shards.ranks()) && input.is_none_or(|input| input == buffer),
        Op::Send { .. } => input.is_none() || buffer == 0,
        Op::Recv { .. } => true,
        // Nobody looks at what a rank passes to hold nothing.
        Op::Gather { root, .. } => *root != rank && input == Some(extents.shards.range(rank).len()),
        Op::Scatter { .. } | Op::Barrier => false,
    }
}

const SUM: ReduceOp = ReduceOp::Sum;

#[test]
fn every_operation_on_an_even_whole_is_as_the_model_says() {
    for ranks in 1..=5 {
        for whole in 0..=2 * ranks + 1 {
            let counts = vec![even(whole, ranks); ranks];
            for out in [false, true] {
                let rooted = (0..ranks).flat_map(|root| {
                    [
                        Op::Broadcast { root },
                        Op::Reduce { root, op: SUM },
                        Op::Scatter { root, total: whole },
                        Op::Gather { root, total: whole },
                    ]
                });
                let plain = [Op::AllReduce(SUM), Op::AllGather, Op::ReduceScatter(SUM)];
                for op in rooted.chain(plain) {
                    let ops: Vec<(usize, Op)> = (0..ranks).map(|rank| (rank, op)).collect();
                    compare(&ops, &model(op, ranks, &counts, out), |_| None);
                }
                if whole.is_multiple_of(ranks) {
                    let ops: Vec<(usize, Op)> = (0..ranks).map(|rank| (rank, Op::AllToAll)).collect();
                    compare(&ops, &model(Op::AllToAll, ranks, &counts, out), |_| None);
                }
            }
        }
        let ops: Vec<(usize, Op)> = (0..ranks).map(|rank| (rank, Op::Barrier)).collect();
        compare(&ops, &model(Op::Barrier, ranks, &vec![vec![0; ranks]; ranks], false), |_| None);
    }
}

#[test]
fn every_division_by_counts_is_as_the_model_says() {
    for ranks in 1..=5usize {
        // All shards of zero to two elements.
        for code in 0..3usize.pow(ranks as u32) {
            let shards: Vec<usize> = (0..ranks).map(|rank| code / 3usize.pow(rank as u32) % 3).collect();
            let total = shards.iter().sum();
            let counts = vec![shards.clone(); ranks];
            for out in [false, true] {
                let rooted = (0..ranks).flat_map(|root| [Op::Scatter { root, total }, Op::Gather { root, total }]);
                for op in rooted.chain([Op::AllGather, Op::ReduceScatter(SUM)]) {
                    let ops: Vec<(usize, Op)> = (0..ranks).map(|rank| (rank, op)).collect();
                    compare(&ops, &model(op, ranks, &counts, out), |_| Some(Counts::new(shards.clone())));
                }
                // Rank r sends another rank as much as the shards say, from its own on.
                let sends: Vec<Vec<usize>> =
                    (0..ranks).map(|from| (0..ranks).map(|to| shards[(from + to) % ranks]).collect()).collect();
                let ops: Vec<(usize, Op)> = (0..ranks).map(|rank| (rank, Op::AllToAll)).collect();
                compare(&ops, &model(Op::AllToAll, ranks, &sends, out), |rank| {
                    let receive: Vec<usize> = sends.iter().map(|sends| sends[rank]).collect();
                    Some(Counts::all_to_all(sends[rank].clone(), receive))
                });
            }
        }
    }
}

#[test]
fn both_ends_of_a_message_are_as_the_model_says() {
    for (from, to) in [(0, 1), (1, 0), (2, 1)] {
        for whole in 0..4 {
            for out in [false, true] {
                let counts = vec![even(whole, 3); 3];
                let mut ends = model(Op::Send { to }, 3, &counts, out);
                let receive = model(Op::Recv { from }, 3, &counts, out);
                let untouched = vec![None; whole];
                ends.results = (0..3)
                    .map(|rank| match rank {
                        _ if rank == from => ends.results[from].clone(),
                        _ if rank == to => receive.results[to].clone(),
                        _ => untouched.clone(),
                    })
                    .collect();
                ends.lengths[to] = receive.lengths[to];
                compare(&[(from, Op::Send { to }), (to, Op::Recv { from })], &ends, |_| None);
            }
        }
    }
}

#[test]
fn shards_by_counts_that_are_even_are_those_of_an_even_whole() {
    for ranks in 1..6 {
        for whole in 0..13 {
            let (even, counted) = (Shards::even(whole, ranks), Shards::of(&even(whole, ranks)).unwrap());
            for rank in 0..ranks {
                assert_eq!(even.range(rank), counted.range(rank));
            }
            assert_eq!((even.whole(), even.longest(), even.ranks()), (whole, counted.longest(), counted.ranks()));
            assert_eq!(even.are_equal(), whole.is_multiple_of(ranks));
            assert_eq!(counted.are_equal(), even.are_equal());
        }
    }
    assert_eq!(Shards::of(&[usize::MAX, 1]), None);
}
