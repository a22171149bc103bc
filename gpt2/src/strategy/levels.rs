//! Two levels: a communicator inside each node, another between nodes.

use comm_core::{Error, Result};

use super::channels::{Channel, Channels};
use super::{Setup, StrategyKind};
use crate::flat::Packer;
use crate::memory::Category;
use crate::record::EVERYONE;

/// Among whom parameters travel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Parameters {
    /// All ranks, if at all.
    Everywhere,
    /// The ranks of a node.
    InNode,
}

/// The channels of a rank whose strategy, `kind`, tells nodes apart: for gradients inside its node, and between nodes, among the ranks of its place. One
/// that does not `speak` between nodes has no use for the latter. All ranks call it together.
///
/// # Errors
/// `InvalidArgument` where the session's node has other ranks; those of [`Communicator::split`](comm_core::Communicator::split).
pub(super) fn channels(
    setup: &Setup<'_>,
    kind: StrategyKind,
    speaks: bool,
    parameters: Parameters,
) -> Result<Channels> {
    let Setup { comms, options, precision, .. } = *setup;
    let (world, nodes) = (&comms.world, &comms.nodes);
    let (number, place) = nodes.place(world.rank());
    let between = world.split(speaks.then_some(place as u64), world.rank() as i64)?;
    let node = match &comms.node {
        Some(own) if own.world_size() != nodes.size(number) => {
            return Err(Error::invalid(format!(
                "the job has {nodes}, but the communicator of this rank's node has {} ranks",
                own.world_size()
            )));
        }
        Some(own) => own.clone(),
        None => {
            let part = world.split(Some(number as u64), world.rank() as i64)?;
            part.ok_or_else(|| Error::Internal("a split with a colour gave no communicator".into()))?
        }
    };
    let native = comms.lender(kind);
    // Groups have numbers other than those of all others.
    let of_node = EVERYONE + 1 + number as u64;
    let of_place = EVERYONE + 1 + (world.world_size() + place) as u64;
    let gradients = Packer::new(options.wire, native.clone());
    let outside = Packer::new(options.wire, comms.native.clone());
    let (owners, group) = match parameters {
        Parameters::Everywhere => (world.clone(), EVERYONE),
        Parameters::InNode => (node.clone(), of_node),
    };
    Ok(Channels {
        gradients: Channel::new(node, of_node, gradients, Category::Gradients),
        between: Channel::new(between.unwrap_or_else(|| world.clone()), of_place, outside, Category::Gradients),
        parameters: Channel::new(owners, group, Packer::new(precision, native), Category::Parameters),
    })
}
