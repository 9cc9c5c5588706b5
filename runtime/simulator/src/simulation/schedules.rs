//! The order of a step as schedules of all ranks, for the judge.

use std::num::NonZeroU32;

use hsdp_flight::Channel;
use hsdp_sharding::step::Sequences;
use hsdp_sharding::{Axis, Mesh, Rank};

use crate::host::{
    Action, IssuedHandles, Members, ModelPlacement, Order, StepBlock, StepOperation,
};
use crate::{CommunicatorId, Error, Issue, Schedules};

impl Order {
    /// Returns the operations of all ranks in a step, in the order in which their hosts issue them,
    /// with a wait where a host, or what it computes, needs a result. A device has at most so many
    /// `kernels` under way.
    ///
    /// In host memory an all-reduce is issued as late as it can be: where the host waits for its
    /// reduce-scatter. It has a stream of its own there, so that an earlier issue keeps nothing
    /// from completing.
    ///
    /// # Errors
    /// [`Error::Schedules`] for more actions than a judge takes.
    pub fn schedules(
        &self,
        kernels: Option<NonZeroU32>,
        sequences: Sequences,
    ) -> Result<Schedules, Error> {
        let mut schedules = Schedules::new(self.mesh.world_size(), kernels)?;
        let groups = MeshCommunicators::of(self.mesh, &mut schedules)?;
        for rank in self.mesh.ranks() {
            let mut host = HostList { schedules: &mut schedules, groups: &groups, rank, sequences };
            let mut issued = IssuedHandles::default();
            for block in &self.blocks {
                for _ in 0..block.times {
                    issued.begin(block);
                    host.block(self.placement, block, &mut issued)?;
                    issued.end(block);
                }
            }
        }
        Ok(schedules)
    }
}

/// The communicators of a mesh, by channel: calls of one channel meet no calls of another.
struct MeshCommunicators {
    mesh: Mesh,
    /// Communicators by index along the other axis, for gathers and for reductions.
    shard: Vec<[CommunicatorId; 2]>,
    replicate: Vec<CommunicatorId>,
    /// Communicators of all ranks: for gathers into one copy, for exchanges, and for statistics.
    world: [CommunicatorId; 3],
}

impl MeshCommunicators {
    fn of(mesh: Mesh, schedules: &mut Schedules) -> Result<Self, Error> {
        let mut of_axis = |axis, channel: Channel, index: usize, first: usize| {
            let ranks = mesh.group(axis, Rank::new(first));
            schedules.communicator(&format!("{channel} {axis} {index}"), &ranks)
        };
        let mut shard = Vec::new();
        let mut replicate = Vec::new();
        for index in 0..mesh.replicate_size() {
            let first = index * mesh.shard_size();
            let mut group = |channel| of_axis(Axis::Shard, channel, index, first);
            shard.push([group(Channel::Gather)?, group(Channel::Reduce)?]);
        }
        for index in 0..mesh.shard_size() {
            replicate.push(of_axis(Axis::Replicate, Channel::AllReduce, index, index)?);
        }
        let ranks: Vec<Rank> = mesh.ranks().collect();
        let mut world =
            |channel: Channel| schedules.communicator(&format!("{channel} world"), &ranks);
        let world =
            [world(Channel::Gather)?, world(Channel::Control)?, world(Channel::Statistics)?];
        Ok(Self { mesh, shard, replicate, world })
    }

    fn find(&self, rank: Rank, operation: &StepOperation) -> CommunicatorId {
        let at = self.mesh.coordinate(rank);
        match (operation.members, operation.channel) {
            (Members::Shard, Channel::Gather) => self.shard[at.replicate_index][0],
            (Members::Shard, _) => self.shard[at.replicate_index][1],
            (Members::Replicate, _) => self.replicate[at.shard_index],
            (Members::World, Channel::Gather) => self.world[0],
            (Members::World, Channel::Statistics) => self.world[2],
            (Members::World, _) => self.world[1],
        }
    }
}

/// The list of a rank's host, which is being written.
struct HostList<'a> {
    schedules: &'a mut Schedules,
    groups: &'a MeshCommunicators,
    rank: Rank,
    sequences: Sequences,
}

impl HostList<'_> {
    /// Adds a block.
    fn block(
        &mut self,
        placement: ModelPlacement,
        block: &StepBlock,
        issued: &mut IssuedHandles<usize>,
    ) -> Result<(), Error> {
        for action in &block.actions {
            match *action {
                Action::Issue(index) => issued.set(index, self.issue(&block.operations[index])?),
                Action::Settle(_) if placement == ModelPlacement::Device => {}
                Action::Need(reference) | Action::Settle(reference) => {
                    if let Some(action) = issued.find(reference) {
                        self.schedules.wait(self.rank, *action)?;
                    }
                }
                Action::IssueReady | Action::Read | Action::Compute(_) => {}
            }
        }
        Ok(())
    }

    fn issue(&mut self, operation: &StepOperation) -> Result<usize, Error> {
        let StepOperation { channel, op, dtype, elements, .. } = *operation;
        let stream = match (channel, self.sequences) {
            (Channel::Control, _) => 0,
            (Channel::Gather | Channel::Reduce | Channel::AllReduce, Sequences::One) => 1,
            (channel, _) => 1 + channel as u64,
        };
        let issue = Issue {
            communicator: self.groups.find(self.rank, operation),
            op: op.name(),
            dtype: dtype.name(),
            count: elements as u64,
            stream,
        };
        self.schedules.issue(self.rank, issue)
    }
}
