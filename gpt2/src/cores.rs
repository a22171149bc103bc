//! The cores that ranks may use. A launcher may have bound each rank to some of its own.

use std::fs;
use std::thread;

use comm_core::control::ControlExt;
use comm_core::{Control, Deadline, Result, job};
use serde::{Deserialize, Serialize};

/// Most cores that a list may name.
const MOST_CORES: usize = 1 << 16;

/// The cores that this process may use, by number; numbers from 0 where the system does not say which.
pub fn allowed() -> Vec<usize> {
    let status = fs::read_to_string("/proc/self/status").ok();
    status.and_then(|status| of_status(&status)).unwrap_or_else(|| (0..count()).collect())
}

/// How many cores' time this process may use: fewer than [`allowed`] where a quota says so.
pub fn count() -> usize {
    thread::available_parallelism().map_or(1, usize::from)
}

/// What a rank tells of itself.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Told {
    machine: String,
    cores: Vec<u32>,
    count: u32,
}

/// How many threads each rank can compute with, in order: of each core that it may use, its share among the ranks that may use that core; at
/// least one. All ranks call it together.
///
/// # Errors
/// Those of [`Control::all_gather`].
pub(crate) fn share(control: &dyn Control, deadline: Deadline) -> Result<Vec<usize>> {
    let cores = allowed().into_iter().map(|core| core as u32).collect();
    let mine = Told { machine: job::kernel(), cores, count: count() as u32 };
    Ok(shares(&control.gather("the cores of the ranks", &mine, deadline)?))
}

fn shares(all: &[Told]) -> Vec<usize> {
    let share = |rank: &Told| {
        let beside = all.iter().filter(|other| other.machine == rank.machine);
        let beside: Vec<&Told> = beside.collect();
        let users = |core: &u32| beside.iter().filter(|other| other.cores.contains(core)).count();
        let part: f64 = rank.cores.iter().map(|core| 1.0 / users(core) as f64).sum();
        let quota = f64::from(rank.count) / rank.cores.len().max(1) as f64;
        // Thirds of three cores are one.
        ((part * quota.min(1.0) + 1e-6) as usize).max(1)
    };
    all.iter().map(share).collect()
}

/// The cores of `Cpus_allowed_list` in `/proc/self/status`: `0-1,4`.
pub fn of_status(status: &str) -> Option<Vec<usize>> {
    let list = status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:"))?.trim();
    let mut cores = Vec::new();
    for part in list.split(',') {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let (first, last) = (first.trim().parse::<usize>().ok()?, last.trim().parse::<usize>().ok()?);
        if last >= MOST_CORES {
            return None;
        }
        cores.extend(first..=last);
    }
    Some(cores)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_of_cores_are_read() {
        let of = |list: &str| of_status(&format!("Name:\tx\nCpus_allowed_list:\t{list}\nMems_allowed_list:\t0\n"));
        assert_eq!(of("0-1,4"), Some(vec![0, 1, 4]));
        assert_eq!(of("7"), Some(vec![7]));
        for odd in ["0-99999999", "0-99999999999", "a-b", "a", ""] {
            assert_eq!(of(odd), None, "{odd}");
        }
        assert_eq!(of_status(""), None);
        assert!(!allowed().is_empty() && count() >= 1);
    }

    #[test]
    fn a_core_is_shared_by_those_who_may_use_it() {
        let told = |machine: &str, cores: std::ops::Range<u32>, count: u32| Told {
            machine: machine.into(),
            cores: cores.collect(),
            count,
        };
        // Nobody is bound: all share all cores, as many as there are.
        assert_eq!(shares(&[told("a", 0..8, 8), told("a", 0..8, 8)]), [4, 4]);
        assert_eq!(shares(&vec![told("a", 0..3, 3); 3]), [1, 1, 1]);
        assert_eq!(shares(&vec![told("a", 0..2, 2); 4]), [1; 4]);
        // Each is bound to cores of its own.
        assert_eq!(shares(&[told("a", 0..4, 4), told("a", 4..8, 4)]), [4, 4]);
        // To one of two sockets, two ranks each; on another machine to the same numbers.
        let sockets = [told("a", 0..8, 8), told("a", 0..8, 8), told("a", 8..16, 8), told("b", 0..8, 8)];
        assert_eq!(shares(&sockets), [4, 4, 8, 8]);
        // A quota of two cores on a machine of 64.
        assert_eq!(shares(&[told("a", 0..64, 2)]), [2]);
        assert_eq!(shares(&[told("a", 0..64, 2), told("a", 0..64, 2)]), [1, 1]);
        assert_eq!(shares(&[told("a", 0..0, 1)]), [1]);
    }
}
