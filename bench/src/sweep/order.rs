//! In which order cells run.

use comm_core::splitmix::{SplitMix64, mix};
use rig::record::Cell;

/// The cells of a round, by index. Cells that go over the same link with as many ranks run one after the other, so that they can be
/// compared in pairs while the machine is the same; among them, and among the links, chance decides, the same in every sweep of the
/// plan.
pub(super) fn order(cells: &[Cell], seed: u64, round: u32) -> Vec<usize> {
    let mut shuffler = Shuffler(SplitMix64::new(mix(seed ^ u64::from(round).rotate_left(32))));
    let mut groups: Vec<((&str, usize), Vec<usize>)> = Vec::new();
    for (index, cell) in cells.iter().enumerate() {
        let key = (cell.link.as_str(), cell.ranks);
        match groups.iter_mut().find(|(other, _)| *other == key) {
            Some((_, members)) => members.push(index),
            None => groups.push((key, vec![index])),
        }
    }
    shuffler.shuffle(&mut groups);
    groups
        .into_iter()
        .flat_map(|(_, mut members)| {
            shuffler.shuffle(&mut members);
            members
        })
        .collect()
}

/// A seed from a plan's name.
pub(super) fn seed(name: &str) -> u64 {
    // FNV-1a
    name.bytes().fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3))
}

struct Shuffler(SplitMix64);

impl Shuffler {
    fn shuffle<T>(&mut self, items: &mut [T]) {
        for last in (1..items.len()).rev() {
            items.swap(last, (self.0.next_u64() % (last as u64 + 1)) as usize);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::Plan;

    #[test]
    fn every_cell_runs_once_a_round_beside_its_like() {
        let text = "name = \"x\"\nrounds = 1\n[axes]\nstrategy = [\"ps\", \"ring\", \"ddp\"]\nlink = [\"loopback\", \"wan\"]\n\
                    ranks = [2, 4]";
        let cells = Plan::parse(text).unwrap().cells;
        let rounds: Vec<Vec<usize>> = (1..=5).map(|round| order(&cells, seed("x"), round)).collect();
        for round in &rounds {
            let mut sorted = round.clone();
            sorted.sort_unstable();
            assert_eq!(sorted, (0..cells.len()).collect::<Vec<_>>());
            let switches = round.windows(2).filter(|pair| {
                let key = |index: usize| (&cells[index].link, cells[index].ranks);
                key(pair[0]) != key(pair[1])
            });
            assert_eq!(switches.count(), 3);
        }
        assert!(rounds.windows(2).any(|pair| pair[0] != pair[1]), "every round in the same order");
        assert_eq!(rounds[0], order(&cells, seed("x"), 1));
    }
}
