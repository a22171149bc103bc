//! What an operation reads, writes and copies on one rank: the meaning of in place and out of place, of roots and of shards.

use std::ops::Range;
use std::sync::Arc;

use super::{Counts, Op, OpKind, shard_range};
use crate::dtype::{DType, ReduceOp};
use crate::error::{Error, Result};

/// Elements, by type and number.
#[derive(Clone, Copy, Debug)]
pub struct Elements {
    /// Their type.
    pub dtype: DType,
    /// How many.
    pub count: usize,
}

/// How a whole lies in its shards, one for each rank, one after the other in rank order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Shards {
    whole: usize,
    ranks: usize,
    /// Where each shard begins, and where the last one ends; `None` for even shards.
    offsets: Option<Arc<[usize]>>,
}

impl Shards {
    /// Shards of a whole of `whole` elements, as [`shard_range`] divides it among `ranks`.
    pub fn even(whole: usize, ranks: usize) -> Self {
        Shards { whole, ranks, offsets: None }
    }

    /// Shards of these lengths, in elements. `None` where they add up to more than can be counted.
    pub fn of(counts: &[usize]) -> Option<Self> {
        let mut whole = 0usize;
        let mut offsets = Vec::with_capacity(counts.len() + 1);
        offsets.push(0);
        for count in counts {
            whole = whole.checked_add(*count)?;
            offsets.push(whole);
        }
        Some(Shards { whole, ranks: counts.len(), offsets: Some(offsets.into()) })
    }

    /// Elements of all shards together.
    pub fn whole(&self) -> usize {
        self.whole
    }

    /// Number of shards.
    pub fn ranks(&self) -> usize {
        self.ranks
    }

    /// Elements of rank `rank`'s shard.
    ///
    /// # Panics
    /// If there is no such rank.
    pub fn range(&self, rank: usize) -> Range<usize> {
        match &self.offsets {
            None => shard_range(self.whole, self.ranks, rank),
            Some(offsets) => offsets[rank]..offsets[rank + 1],
        }
    }

    /// Elements of the longest shard.
    pub fn longest(&self) -> usize {
        match &self.offsets {
            None => self.whole.div_ceil(self.ranks),
            Some(_) => (0..self.ranks).map(|rank| self.range(rank).len()).max().unwrap_or(0),
        }
    }

    /// Whether all shards are equally long.
    pub fn are_equal(&self) -> bool {
        (0..self.ranks).all(|rank| self.range(rank).len() == self.range(0).len())
    }

    /// Elements of the whole before and after rank `rank`'s shard.
    fn without(&self, rank: usize) -> [Range<usize>; 2] {
        let own = self.range(rank);
        [0..own.start, own.end..self.whole]
    }
}

/// What an operation whose arguments make sense reads, writes and copies on one rank. All ranges are in elements.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Extents {
    /// Type of the elements.
    pub dtype: DType,
    /// Elements of the whole, on which all ranks have to agree; 0 for an all-to-all with counts, where each rank has its own.
    pub count: usize,
    /// The division of the whole. Of an all-to-all, what this rank sends to each.
    pub shards: Shards,
    /// Of an all-to-all, what this rank gets from each, as it lies in the buffer; else the same as `shards`.
    pub received: Shards,
    /// What this rank contributes: elements of the input if there is one, else of the buffer.
    pub reads: Range<usize>,
    /// Elements of the buffer that get a result. The rest stays as it was, but for a reduce-scatter in place, after which
    /// the other ranks' shards hold anything.
    pub writes: [Range<usize>; 2],
    /// The part of the own contribution that the result holds at another place, as if there were no other ranks.
    pub own_copy: Option<OwnCopy>,
}

/// A copy of a rank's own contribution to where the result has it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OwnCopy {
    /// Elements of the input if there is one, else of the buffer.
    pub from: Range<usize>,
    /// The first element in the buffer.
    pub to: usize,
}

impl Extents {
    /// The bytes of these elements.
    pub fn bytes(&self, elements: Range<usize>) -> Range<usize> {
        let size = self.dtype.size();
        elements.start * size..elements.end * size
    }

    /// Copies this rank's own contribution to where the result has it.
    ///
    /// # Panics
    /// If the memory is not as long as was checked.
    pub fn copy_own(&self, buffer: &mut [u8], input: Option<&[u8]>) {
        let Some(OwnCopy { from, to }) = self.own_copy.clone() else { return };
        let into = self.bytes(to..to + from.len());
        let from = self.bytes(from);
        match input {
            Some(input) => crate::copy(&mut buffer[into], &input[from]),
            None => buffer.copy_within(from, into.start),
        }
    }

    /// Of an operation whose counts are for so many ranks. `input` and `buffer` are numbers of elements, and say how long the whole is
    /// where nothing else does.
    fn of(op: &Op, rank: usize, ranks: usize, buffer: Elements, input: Option<usize>, division: Division) -> Self {
        let Division { shards, received, agreed } = division;
        let is_root = op.root() == Some(rank);
        let is_out_of_place = input.is_some();
        let (whole, own) = (0..shards.whole(), shards.range(rank));
        let own_alone = 0..own.len();
        const NONE: Range<usize> = 0..0;
        let copy = |from: &Range<usize>, to: usize| is_out_of_place.then(|| OwnCopy { from: from.clone(), to });
        // The whole is collected around the own shard.
        let collect = || match is_out_of_place {
            true => (own_alone.clone(), [whole.clone(), NONE], copy(&own_alone, own.start)),
            false => (own.clone(), shards.without(rank), None),
        };
        let (reads, writes, own_copy) = match *op {
            Op::AllReduce(_) => (whole.clone(), [whole.clone(), NONE], copy(&whole, 0)),
            Op::Reduce { .. } if is_root => (whole.clone(), [whole.clone(), NONE], copy(&whole, 0)),
            Op::Reduce { .. } => (whole, [NONE, NONE], None),
            Op::Broadcast { .. } if is_root && is_out_of_place => {
                (whole.clone(), [whole.clone(), NONE], copy(&whole, 0))
            }
            Op::Broadcast { .. } if is_root => (whole, [NONE, NONE], None),
            Op::Broadcast { .. } => (NONE, [whole, NONE], None),
            Op::Scatter { .. } if is_root && is_out_of_place => (whole, [own_alone, NONE], copy(&own, 0)),
            Op::Scatter { .. } if is_root => (whole, [NONE, NONE], None),
            Op::Scatter { .. } => (NONE, [own_alone, NONE], None),
            Op::Gather { .. } if is_root => collect(),
            Op::Gather { .. } => (own_alone, [NONE, NONE], None),
            Op::AllGather => collect(),
            Op::ReduceScatter(_) if is_out_of_place => (whole, [own_alone, NONE], copy(&own, 0)),
            Op::ReduceScatter(_) => (whole, [own, NONE], None),
            Op::AllToAll => {
                let place = received.range(rank).start;
                if is_out_of_place || own.start != place {
                    (whole, [0..received.whole(), NONE], Some(OwnCopy { from: own, to: place }))
                } else {
                    (whole, received.without(rank), None)
                }
            }
            Op::Send { .. } => (whole, [NONE, NONE], None),
            Op::Recv { .. } => (NONE, [whole, NONE], None),
            Op::Barrier => (NONE, [NONE, NONE], None),
        };
        debug_assert_eq!(shards.ranks(), ranks);
        // No element, no type.
        let dtype = if op.kind() == OpKind::Barrier { DType::U8 } else { buffer.dtype };
        Extents { dtype, count: agreed, shards, received, reads, writes, own_copy }
    }
}

/// How an operation divides its whole.
struct Division {
    shards: Shards,
    received: Shards,
    /// Elements on which ranks have to agree.
    agreed: usize,
}

impl Division {
    fn of(op: &Op, ranks: usize, buffer: usize, input: Option<usize>, counts: Option<&Counts>) -> Result<Self> {
        let too_many =
            || Error::invalid(format!("{}: the counts add up to more elements than memory can hold", op.kind()));
        if let Some(counts) = counts {
            let shards = Shards::of(counts.send()).ok_or_else(too_many)?;
            return Ok(match &counts.receive {
                // Differs from rank to rank, so it is nothing to agree on.
                Some(receive) => Division { shards, received: Shards::of(receive).ok_or_else(too_many)?, agreed: 0 },
                None => Division { received: shards.clone(), agreed: shards.whole(), shards },
            });
        }
        let whole = match *op {
            Op::Scatter { total, .. } | Op::Gather { total, .. } => total,
            Op::AllReduce(_) | Op::Reduce { .. } | Op::Broadcast { .. } | Op::ReduceScatter(_) | Op::Send { .. } => {
                input.unwrap_or(buffer)
            }
            Op::AllGather | Op::AllToAll | Op::Recv { .. } => buffer,
            Op::Barrier => 0,
        };
        let shards = Shards::even(whole, ranks);
        Ok(Division { received: shards.clone(), shards, agreed: whole })
    }
}

/// Checks the arguments that `rank` of `ranks` passes, and says what the operation does with them.
///
/// # Errors
/// `InvalidArgument` that says which argument is wrong and what it should be.
pub fn check(
    op: &Op,
    rank: usize,
    ranks: usize,
    buffer: Elements,
    input: Option<Elements>,
    counts: Option<&Counts>,
) -> Result<Extents> {
    let kind = op.kind();
    check_ranks(op, rank, ranks)?;
    check_types(op, buffer, input)?;
    if let Some(counts) = counts {
        check_counts(kind, ranks, counts)?;
    }
    if input.is_some() && !takes_input(op, rank) {
        return Err(Error::invalid(format!("{kind} on rank {rank} takes no input, since it reads none")));
    }
    let input = input.map(|input| input.count);
    let division = Division::of(op, ranks, buffer.count, input, counts)?;
    let extents = Extents::of(op, rank, ranks, buffer, input, division);
    if let Op::Scatter { total, .. } | Op::Gather { total, .. } = *op
        && extents.shards.whole() != total
    {
        let sum = extents.shards.whole();
        return Err(Error::invalid(format!("{kind} of {total} elements whose counts add up to {sum}")));
    }
    let Lengths { of_input, of_buffer } = Lengths::of(op, rank, &extents, input, counts.is_some());
    for (length, is) in [(of_input, input), (of_buffer, Some(buffer.count))] {
        if let (Some(Length { what, should }), Some(is)) = (length, is)
            && is != should
        {
            let what = format!("{kind} on rank {rank}: a buffer of {is} elements where {what} has {should}");
            return Err(Error::invalid(what));
        }
    }
    if *op == Op::AllToAll {
        check_blocks(rank, &extents, counts.is_some())?;
    }
    Ok(extents)
}

/// How long a buffer has to be.
struct Length {
    what: &'static str,
    should: usize,
}

/// How long input and buffer have to be; `None` where that is for the caller to say, or nobody looks.
struct Lengths {
    of_input: Option<Length>,
    of_buffer: Option<Length>,
}

impl Lengths {
    fn of(op: &Op, rank: usize, extents: &Extents, input: Option<usize>, has_counts: bool) -> Self {
        let Extents { shards, received, .. } = extents;
        let is_root = op.root() == Some(rank);
        let length = |what, should| Some(Length { what, should });
        let whole = length("the whole", shards.whole());
        let by_counts = length("the whole, by its counts,", shards.whole());
        let shard = length("its shard", shards.range(rank).len());
        let (of_input, of_buffer) = match *op {
            Op::AllReduce(_) | Op::Broadcast { .. } => (None, whole),
            Op::Reduce { .. } if is_root => (None, whole),
            Op::Reduce { .. } => (None, None),
            Op::Scatter { .. } if is_root && input.is_none() => (None, whole),
            Op::Scatter { .. } => (whole, shard),
            Op::Gather { .. } if is_root => (shard, whole),
            Op::Gather { .. } if input.is_none() => (None, shard),
            Op::Gather { .. } => (shard, None),
            Op::AllGather => (shard, by_counts),
            Op::ReduceScatter(_) if input.is_some() => (by_counts, shard),
            Op::ReduceScatter(_) => (None, by_counts),
            Op::AllToAll if !has_counts => (whole, None),
            Op::AllToAll if input.is_some() => {
                (length("what is sent", shards.whole()), length("what is received", received.whole()))
            }
            Op::AllToAll => {
                let longer = shards.whole().max(received.whole());
                (None, length("the longer of what is sent and received", longer))
            }
            Op::Barrier => (None, length("a barrier", 0)),
            Op::Send { .. } if input.is_some() => (None, length("a send from an input", 0)),
            Op::Send { .. } | Op::Recv { .. } => (None, None),
        };
        Lengths { of_input, of_buffer }
    }
}

/// Whether there is anything that the operation reads on this rank.
fn takes_input(op: &Op, rank: usize) -> bool {
    match *op {
        Op::Barrier | Op::Recv { .. } => false,
        Op::Broadcast { root } | Op::Scatter { root, .. } => root == rank,
        Op::AllReduce(_)
        | Op::Reduce { .. }
        | Op::Gather { .. }
        | Op::AllGather
        | Op::ReduceScatter(_)
        | Op::AllToAll
        | Op::Send { .. } => true,
    }
}

fn check_ranks(op: &Op, rank: usize, ranks: usize) -> Result<()> {
    let kind = op.kind();
    let check = |name: &str, other: usize| {
        if other < ranks {
            return Ok(());
        }
        Err(Error::invalid(format!("{kind} names {name} {other}, but there are {ranks} ranks")))
    };
    if let Some(root) = op.root() {
        check("root", root)?;
    }
    if let Op::Send { to: peer } | Op::Recv { from: peer } = *op {
        check("rank", peer)?;
        if peer == rank {
            return Err(Error::invalid(format!("{kind} between rank {peer} and itself")));
        }
    }
    Ok(())
}

fn check_types(op: &Op, buffer: Elements, input: Option<Elements>) -> Result<()> {
    let kind = op.kind();
    if let Some(ReduceOp::ScaledSum(factor)) = op.reduce_op()
        && !buffer.dtype.is_float()
        && (factor.value().fract() != 0.0 || factor.value().abs() > 2f64.powi(64))
    {
        return Err(Error::invalid(format!(
            "{kind}: the factor {} of a scaled sum of {} must be a whole number",
            factor.value(),
            buffer.dtype
        )));
    }
    if let Some(input) = input
        && input.dtype != buffer.dtype
    {
        return Err(Error::invalid(format!("{kind} from a buffer of {} into one of {}", input.dtype, buffer.dtype)));
    }
    Ok(())
}

fn check_counts(kind: OpKind, ranks: usize, counts: &Counts) -> Result<()> {
    let takes =
        matches!(kind, OpKind::Scatter | OpKind::Gather | OpKind::AllGather | OpKind::ReduceScatter | OpKind::AllToAll);
    if !takes {
        return Err(Error::invalid(format!("{kind} divides nothing, so it takes no counts")));
    }
    if counts.receive.is_some() != (kind == OpKind::AllToAll) {
        return Err(Error::invalid(format!(
            "{kind}: Counts::all_to_all is for all-to-all, Counts::new for the others"
        )));
    }
    for counts in [counts.send(), counts.receive()] {
        if counts.len() != ranks {
            return Err(Error::invalid(format!("{kind}: {} counts for {ranks} ranks", counts.len())));
        }
    }
    Ok(())
}

/// The blocks of an all-to-all: equal ones without counts, and in any case one that a rank can keep.
fn check_blocks(rank: usize, extents: &Extents, has_counts: bool) -> Result<()> {
    let kind = OpKind::AllToAll;
    let (shards, ranks) = (&extents.shards, extents.shards.ranks());
    if !has_counts && !shards.whole().is_multiple_of(ranks) {
        return Err(Error::invalid(format!(
            "{kind} of {} elements, which {ranks} ranks cannot share equally; pass counts",
            shards.whole()
        )));
    }
    let (to_me, from_me) = (shards.range(rank).len(), extents.received.range(rank).len());
    if to_me != from_me {
        return Err(Error::invalid(format!(
            "{kind} on rank {rank}: it sends {to_me} elements to itself and expects {from_me} from itself"
        )));
    }
    Ok(())
}

#[cfg(test)]
mod tests;
