//! Which ranks share a node.

use std::collections::HashMap;
use std::fmt;
use std::hash::Hash;

use comm_core::control::ControlExt;
use comm_core::{Control, Deadline, Result, job};

/// The nodes of a job: parts of its ranks, each with ranks that share a machine. Nodes and places are numbered by their lowest rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Nodes {
    /// Of each rank, its node and its place there.
    places: Vec<(usize, usize)>,
    /// Ranks of each node.
    sizes: Vec<usize>,
}

impl Nodes {
    /// `ranks` ranks of one machine in nodes of `size` that follow one another, the last perhaps with fewer; with 0 in one node.
    pub fn of_size(ranks: usize, size: usize) -> Self {
        Nodes::of_machines(&vec![(); ranks], &vec![size; ranks])
    }

    /// The ranks of each machine, which `machines` names for each rank, in nodes of that machine's `sizes`, in rank order; the last perhaps with
    /// fewer. With 0 the machine is one node. No node spans machines, wherever a launcher has placed the ranks.
    pub fn of_machines<M: Eq + Hash>(machines: &[M], sizes: &[usize]) -> Self {
        // Ranks of each machine so far, and its newest node.
        let mut known: HashMap<&M, (usize, usize)> = HashMap::new();
        let (mut places, mut nodes) = (Vec::with_capacity(machines.len()), Vec::new());
        for (machine, size) in machines.iter().zip(sizes) {
            let entry = known.entry(machine);
            let (ranks, node) = entry.or_insert((0, 0));
            if *ranks == 0 || (*size > 0 && nodes[*node] >= *size) {
                nodes.push(0);
                *node = nodes.len() - 1;
            }
            *ranks += 1;
            places.push((*node, nodes[*node]));
            nodes[*node] += 1;
        }
        Nodes { places, sizes: nodes }
    }

    /// Those of a job of processes, by the machines that its ranks are on, in nodes of `ranks_per_node`, which may be in containers of their own;
    /// with 0, where containers count as machines, of as many as each rank's launcher says that it has started on its machine, and where that does not
    /// say, of all that are there. All ranks call it together, with the same number.
    ///
    /// # Errors
    /// Those of [`Control::all_gather`].
    pub fn of_job(control: &dyn Control, ranks_per_node: usize, deadline: Deadline) -> Result<Self> {
        let (machine, size) = match ranks_per_node {
            0 => (job::machine(), job::ranks_on_this_machine().unwrap_or(0)),
            given => (job::kernel(), given),
        };
        let told = control.gather("the machines of the ranks", &(machine, size as u64), deadline)?;
        let (machines, sizes): (Vec<String>, Vec<usize>) =
            told.into_iter().map(|(machine, size)| (machine, usize::try_from(size).unwrap_or(0))).unzip();
        Ok(Nodes::of_machines(&machines, &sizes))
    }

    /// Number of nodes.
    pub fn count(&self) -> usize {
        self.sizes.len()
    }

    /// The node of a rank, and its place there.
    pub fn place(&self, rank: usize) -> (usize, usize) {
        self.places[rank]
    }

    /// The node of each rank.
    pub fn by_rank(&self) -> Vec<usize> {
        self.places.iter().map(|(node, _)| *node).collect()
    }

    /// Number of ranks of all nodes.
    pub fn ranks(&self) -> usize {
        self.places.len()
    }

    /// Ranks of a node.
    pub fn size(&self, node: usize) -> usize {
        self.sizes[node]
    }

    /// Ranks of every node, where all have as many.
    pub fn even_size(&self) -> Option<usize> {
        let first = *self.sizes.first()?;
        self.sizes.iter().all(|size| *size == first).then_some(first)
    }
}

/// Such as `2 nodes of 4 ranks`, or `nodes of 2, 2, 1 ranks`.
impl fmt::Display for Nodes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        /// Of hundreds of nodes not each is named.
        const SHOWN: usize = 8;
        if let Some(size) = self.even_size() {
            return write!(f, "{} nodes of {size} ranks", self.count());
        }
        let shown: Vec<String> = self.sizes.iter().take(SHOWN).map(usize::to_string).collect();
        let rest = if self.count() > SHOWN { ", …" } else { "" };
        write!(f, "nodes of {}{rest} ranks", shown.join(", "))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn nodes(machines: &str, size: usize) -> (Vec<usize>, Vec<usize>) {
        let machines: Vec<char> = machines.chars().collect();
        let nodes = Nodes::of_machines(&machines, &vec![size; machines.len()]);
        for rank in 0..machines.len() {
            let (node, place) = nodes.place(rank);
            assert_eq!(nodes.by_rank()[..rank].iter().filter(|other| **other == node).count(), place);
        }
        (nodes.by_rank(), nodes.sizes)
    }

    #[test]
    fn no_node_spans_machines() {
        assert_eq!(nodes("aabb", 0), (vec![0, 0, 1, 1], vec![2, 2]));
        assert_eq!(nodes("abab", 0), (vec![0, 1, 0, 1], vec![2, 2]));
        assert_eq!(nodes("abab", 1), (vec![0, 1, 2, 3], vec![1; 4]));
        assert_eq!(nodes("abaab", 2), (vec![0, 1, 0, 2, 1], vec![2, 2, 1]));
        assert_eq!(nodes("aaaaab", 2), (vec![0, 0, 1, 1, 2, 3], vec![2, 2, 1, 1]));
        assert_eq!(nodes("baa", 0), (vec![0, 1, 1], vec![1, 2]));
        assert_eq!(Nodes::of_machines(&['a', 'b', 'a'], &[1, 2, 1]).by_rank(), [0, 1, 2]);
    }

    #[test]
    fn nodes_of_one_machine_follow_one_another() {
        assert_eq!(Nodes::of_size(5, 2).by_rank(), [0, 0, 1, 1, 2]);
        assert_eq!((Nodes::of_size(5, 2).even_size(), Nodes::of_size(4, 2).even_size()), (None, Some(2)));
        assert_eq!(Nodes::of_size(5, 2).to_string(), "nodes of 2, 2, 1 ranks");
        assert_eq!(Nodes::of_size(4, 2).to_string(), "2 nodes of 2 ranks");
        assert_eq!((Nodes::of_size(3, 0).count(), Nodes::of_size(3, 9).even_size()), (1, Some(3)));
    }
}
