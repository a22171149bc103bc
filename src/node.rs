//! Nodes: parts of a job that have a transport of their own.

use std::fmt;
use std::sync::Arc;

use comm_core::Counters;
use comm_core::control::Subgroup;
use comm_core::local::{self, LocalRank};
use comm_core::{Communicator, Control, Deadline, Error, Result};

use crate::connect::{in_part, threads};
use crate::entry::{Connected, Properties, TransportKind};
use crate::nodes::Nodes;
use crate::options::TransportOptions;

/// The ranks of this rank's node, with a transport of their own. It is still one job: any failure ends all nodes, and errors name ranks of
/// the job.
#[non_exhaustive]
pub struct Node {
    /// The communicator of the node's ranks, in the order of the job. To be finished before the job's is.
    pub comm: Arc<dyn Communicator>,
    /// Counts what passes inside the node, unless [`TransportOptions::counted`] is off.
    pub counters: Option<Arc<Counters>>,
    /// What is known of its transport.
    pub properties: Properties,
    /// Number of ranks of the node.
    pub size: usize,
}

/// Connects the ranks of this rank's node. All ranks of the job call it together, with the same arguments; where it fails, the job has been
/// told.
///
/// # Errors
/// `InvalidArgument` unless `nodes` are those of as many ranks; those of [`TransportKind::connect`], whose ranks are ranks of the job.
pub fn connect_node(
    kind: TransportKind,
    control: &Arc<dyn Control>,
    nodes: &Nodes,
    options: &TransportOptions,
) -> Result<Node> {
    let connect = || {
        check(nodes, control.world_size())?;
        let (node, _) = nodes.place(control.rank());
        let deadline = Deadline::after(options.timeout);
        let group = Subgroup::split(control.clone(), &nodes.to_string(), node as u64, deadline)?;
        Ok(Node::new(in_part(kind, &group, options)?, nodes.size(node)))
    };
    // The other nodes would wait for this one.
    connect().inspect_err(|error| control.poison(error))
}

/// A job whose ranks are threads of this process, in rank order, with the [`Node`] of each, whose ranks are threads too.
///
/// # Errors
/// Those of [`threads`].
pub fn threads_in_nodes(nodes: &Nodes, options: &TransportOptions) -> Result<Vec<(Connected, Node)>> {
    let by_rank = nodes.by_rank();
    let colors: Vec<u64> = by_rank.iter().map(|node| *node as u64).collect();
    let world = threads(nodes.ranks(), options)?;
    let groups = world.iter().map(|rank| Subgroup::of_colors(rank.control.clone(), &nodes.to_string(), &colors));
    let groups: Vec<Arc<Subgroup>> = groups.collect::<Result<_>>()?;
    let mut transports: Vec<_> =
        (0..nodes.count()).map(|node| local::group(nodes.size(node), options.lanes).into_iter()).collect();
    let node = |(group, node): (Arc<Subgroup>, usize)| {
        let rank = transports[node].next();
        let LocalRank { transport, .. } =
            rank.ok_or_else(|| Error::Internal(format!("node {node} of the {nodes} has more ranks")))?;
        Ok(Node::new(Connected::over(TransportKind::LOCAL, transport, group, options)?, nodes.size(node)))
    };
    let connected = groups.into_iter().zip(by_rank).map(node).collect::<Result<Vec<Node>>>()?;
    Ok(world.into_iter().zip(connected).collect())
}

/// Refuses the nodes of another number of ranks.
fn check(nodes: &Nodes, ranks: usize) -> Result<()> {
    if nodes.ranks() == ranks {
        return Ok(());
    }
    Err(Error::invalid(format!("{nodes} have {} ranks in all, and the job has {ranks}", nodes.ranks())))
}

impl Node {
    fn new(Connected { comm, counters, properties, .. }: Connected, size: usize) -> Self {
        Node { comm, counters, properties, size }
    }
}

impl fmt::Debug for Node {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Node { comm, properties, size, .. } = self;
        f.debug_struct("Node")
            .field("rank", &comm.rank())
            .field("size", size)
            .field("properties", properties)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use std::thread;
    use std::time::Duration;

    use comm_core::{CommunicatorExt, ReduceOp};

    use super::*;
    use crate::entry::Medium;

    const TIMEOUT: Duration = Duration::from_secs(30);

    fn options() -> TransportOptions {
        TransportOptions { timeout: TIMEOUT, ..TransportOptions::default() }
    }

    /// Runs `body` on four ranks in nodes of two, whose node is connected by `kind`.
    fn in_nodes<R: Send>(kind: TransportKind, body: impl Fn(&Connected, &Node) -> R + Sync) -> Vec<R> {
        let (mut worlds, mut nodes): (Vec<_>, Vec<_>) = if kind == TransportKind::LOCAL {
            let both = threads_in_nodes(&Nodes::of_size(4, 2), &options()).unwrap();
            both.into_iter().map(|(world, node)| (world, Some(node))).unzip()
        } else {
            threads(4, &options()).unwrap().into_iter().map(|world| (world, None)).unzip()
        };
        let body = &body;
        thread::scope(|scope| {
            let threads: Vec<_> = worlds
                .drain(..)
                .zip(nodes.drain(..))
                .map(|(world, node)| {
                    scope.spawn(move || {
                        let nodes = Nodes::of_size(4, 2);
                        let node =
                            node.unwrap_or_else(|| connect_node(kind, &world.control, &nodes, &options()).unwrap());
                        body(&world, &node)
                    })
                })
                .collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        })
    }

    /// What ends a communicator. The word may be on its way when another one of the job has ended already.
    fn until_failed(comm: &dyn Communicator) -> Error {
        let deadline = Deadline::after(TIMEOUT);
        loop {
            match comm.barrier() {
                Err(error) => return error,
                Ok(()) => assert!(!deadline.has_passed(), "the communicator goes on"),
            }
        }
    }

    fn kinds() -> impl Iterator<Item = TransportKind> {
        let usable = |kind: &TransportKind| kind.medium() != Medium::Devices && kind.missing().is_none();
        TransportKind::all().into_iter().filter(usable)
    }

    #[test]
    fn nodes_reduce_apart() {
        for kind in kinds() {
            let sums = in_nodes(kind, |world, node| {
                let rank = world.comm.rank();
                let mut inside = [rank as f32; 1000];
                node.comm.all_reduce(&mut inside, ReduceOp::Sum).unwrap();
                let mut among_all = [rank as f32; 1000];
                world.comm.all_reduce(&mut among_all, ReduceOp::Sum).unwrap();
                let sent = |counters: &Option<Arc<Counters>>, id: u64| {
                    counters.as_ref().unwrap().snapshot().payload_sent(Some(id))
                };
                assert_eq!(sent(&node.counters, node.comm.id()), 4000, "{kind}");
                assert_eq!(sent(&world.counters, world.comm.id()), 8000, "{kind}");
                assert_eq!((node.comm.rank(), node.comm.world_size(), node.size), (rank % 2, 2, 2));
                node.comm.finish(TIMEOUT).unwrap();
                world.comm.barrier().unwrap();
                world.comm.finish(TIMEOUT).unwrap();
                (inside[999], among_all[999])
            });
            assert_eq!(sums, [(1.0, 6.0), (1.0, 6.0), (5.0, 6.0), (5.0, 6.0)], "{kind}");
        }
    }

    #[test]
    fn what_ends_a_node_ends_the_job_and_is_told_in_its_numbers() {
        for kind in kinds() {
            let errors = in_nodes(kind, |world, node| {
                // All have connected. The word of the end may come to some before they are out of this.
                let _ = world.comm.barrier();
                if world.comm.rank() == 3 {
                    node.comm.abort("had enough");
                }
                [until_failed(&*world.comm), until_failed(&*node.comm)]
            });
            for error in errors.iter().flatten() {
                assert!(matches!(error, Error::Aborted { by: 3, .. }), "{kind}: {error}");
            }
        }
    }

    #[test]
    fn nodes_may_be_uneven_and_of_ranks_that_do_not_follow_one_another() {
        let nodes = Nodes::of_machines(&["a", "b", "a", "a"], &[0; 4]);
        let ranks = threads_in_nodes(&nodes, &options()).unwrap();
        let sums: Vec<(f32, usize)> = thread::scope(|scope| {
            let threads: Vec<_> = ranks
                .into_iter()
                .map(|(world, node)| {
                    scope.spawn(move || {
                        let sum = node.comm.all_reduce_scalar(world.comm.rank() as f32, ReduceOp::Sum).unwrap();
                        node.comm.finish(TIMEOUT).unwrap();
                        world.comm.finish(TIMEOUT).unwrap();
                        (sum, node.size)
                    })
                })
                .collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        assert_eq!(sums, [(5.0, 3), (1.0, 1), (5.0, 3), (5.0, 3)]);
    }

    #[test]
    fn nodes_of_another_number_of_ranks_are_refused() {
        let control: Arc<dyn Control> = local::group(4, 1).remove(0).control;
        let refused = connect_node(TransportKind::SHM, &control, &Nodes::of_size(5, 2), &options());
        let text = refused.err().unwrap().to_string();
        assert!(text.contains("nodes of 2, 2, 1 ranks have 5 ranks in all, and the job has 4"), "{text}");
    }

    #[test]
    fn ranks_that_divide_otherwise_learn_of_it() {
        let threads: Vec<_> = local::group(4, 1)
            .into_iter()
            .enumerate()
            .map(|(number, rank)| {
                thread::spawn(move || {
                    let control: Arc<dyn Control> = rank.control;
                    let nodes = Nodes::of_size(4, if number == 2 { 4 } else { 2 });
                    connect_node(TransportKind::SHM, &control, &nodes, &options()).err().unwrap().to_string()
                })
            })
            .collect();
        for text in threads.into_iter().map(|thread| thread.join().unwrap()) {
            assert!(text.contains("2 nodes of 2 ranks") && text.contains("1 nodes of 4 ranks"), "{text}");
        }
    }
}
