//! Binomial tree from the root.

use super::task::Task;
use super::{Entry, Formula, Method, Ranks};
use crate::error::Result;
use crate::mesh::round::{Receive, Send};
use crate::op::OpKind;

pub(super) const ENTRY: Entry = Entry {
    name: "tree",
    rounds_once: false,
    methods: &[Method {
        kind: OpKind::Broadcast,
        ranks: Ranks::Any,
        is_fallback: false,
        messages: Formula {
            text: "1 for each child",
            value: |work| children(work.rank, work.root(), work.ranks).len() as u64,
        },
        payload: Formula {
            text: "S for each child",
            value: |work| work.whole() * children(work.rank, work.root(), work.ranks).len() as u64,
        },
        run: broadcast,
    }],
};

fn broadcast(task: Task<'_, '_>) -> Result<()> {
    let root = task.root()?;
    let Task { rounds, layout, bytes, .. } = task;
    if let Some(from) = parent(rounds.rank, root, layout.ranks) {
        rounds.exchange(0, &[], &mut [Receive { from, into: &mut *bytes, reduce: None }])?;
    }
    let sends: Vec<Send<'_>> =
        children(rounds.rank, root, layout.ranks).into_iter().map(|to| Send { to, bytes }).collect();
    rounds.exchange(0, &sends, &mut [])
}

/// The rank from which `rank` receives, `None` for the root.
fn parent(rank: usize, root: usize, ranks: usize) -> Option<usize> {
    let relative = (rank + ranks - root) % ranks;
    // The parent's number is this one's without its lowest set bit.
    (relative != 0).then(|| ((relative & (relative - 1)) + root) % ranks)
}

/// The ranks to which `rank` sends, those with the largest subtrees first.
fn children(rank: usize, root: usize, ranks: usize) -> Vec<usize> {
    let relative = (rank + ranks - root) % ranks;
    let bits = if relative == 0 { usize::BITS } else { relative.trailing_zeros() };
    (0..bits)
        .map(|bit| 1usize.checked_shl(bit).map_or(usize::MAX, |step| relative.saturating_add(step)))
        .take_while(|child| *child < ranks)
        .map(|child| (child + root) % ranks)
        .collect::<Vec<_>>()
        .into_iter()
        .rev()
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tree_reaches_every_rank_once() {
        for ranks in 1..20 {
            for root in 0..ranks {
                for rank in 0..ranks {
                    for child in children(rank, root, ranks) {
                        assert_eq!(parent(child, root, ranks), Some(rank));
                    }
                }
                let children: usize = (0..ranks).map(|rank| children(rank, root, ranks).len()).sum();
                assert_eq!(children, ranks - 1);
            }
        }
    }
}
