//! A step as execution traces of MLCommons Chakra, schema 0.0.4: a file a rank, and the list of groups that ASTRA-sim reads beside them.

mod after;
mod messages;
mod nodes;
mod prepared;
mod walk;

use std::collections::BTreeMap;
use std::io::{self, Write};

use hsdp_flight::Channel;
use hsdp_sharding::{Axis, Rank};

use self::nodes::Nodes;
use self::walk::Walk;
use super::Traces;
use crate::host::{Members, Placement};

/// The channels whose groups are axes of the mesh.
const CHANNELS: [(Channel, Axis, Members); 3] = [
    (Channel::Gather, Axis::Shard, Members::Shard),
    (Channel::Reduce, Axis::Shard, Members::Shard),
    (Channel::AllReduce, Axis::Replicate, Members::Replicate),
];

impl Traces<'_> {
    /// Writes the trace of a rank: its nodes in the order in which the host makes them, each after the nodes that it depends on. The memory
    /// that it takes does not depend on the number of microbatches. ASTRA-sim expects the file to be called `NAME.RANK.et`.
    ///
    /// # Errors
    /// Errors of the sink, which is written node by node; [`io::ErrorKind::InvalidInput`] for an
    /// operation that no step has.
    ///
    /// # Panics
    /// If the mesh does not [contain](hsdp_sharding::Mesh::contains) the rank.
    pub fn write_chakra(&self, rank: Rank, sink: &mut impl Write) -> io::Result<()> {
        let mut nodes = Nodes::begin(sink)?;
        let mut walk = Walk::new(self.orders.placement);
        for block in &self.orders.of[&self.orders.data(rank)].blocks {
            let mut prepared = self.prepare(rank, block)?;
            for _ in 0..block.times {
                walk.block(block, &mut prepared, &mut nodes)?;
            }
        }
        Ok(())
    }

    /// Writes the groups that the traces name, as ASTRA-sim's `--comm-group-configuration` expects them: numbers with lists of ranks.
    /// Group 0 has all ranks, and is not listed, as ASTRA-sim demands. A group stands for one sequence of operations, so where the model is in host
    /// memory, ranks that gather and reduce are two groups.
    ///
    /// # Errors
    /// Errors of the sink.
    pub fn write_chakra_groups(&self, sink: &mut impl Write) -> io::Result<()> {
        let mesh = self.orders.mesh;
        let mut groups: BTreeMap<usize, Vec<u32>> = BTreeMap::new();
        for (channel, axis, members) in CHANNELS {
            for rank in mesh.ranks().filter(|_| mesh.axis_size(axis) > 1) {
                let ranks = mesh.members(axis, rank).map(Rank::get);
                groups.insert(self.group(channel, members, rank), ranks.collect());
            }
        }
        serde_json::to_writer(sink, &groups).map_err(io::Error::from)
    }

    /// The number of a rank's group for operations of a channel.
    fn group(&self, channel: Channel, members: Members, rank: Rank) -> usize {
        let (mesh, at) = (self.orders.mesh, self.orders.mesh.coordinate(rank));
        let [replicate, shard] = [mesh.replicate_size(), mesh.shard_size()];
        match (members, channel, self.orders.placement) {
            (Members::World, ..) => 0,
            (Members::Replicate, ..) => 1 + replicate + at.shard_index,
            (Members::Shard, Channel::Reduce, Placement::Host) => {
                1 + replicate + shard + at.replicate_index
            }
            (Members::Shard, ..) => 1 + at.replicate_index,
        }
    }
}
