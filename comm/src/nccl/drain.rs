//! The end of the calls of a step that is given up. `NCCL.md`, "A step that is given up".

use std::collections::BTreeSet;

use hsdp_kernels::cuda::{DeviceBuffer, Stream};
use hsdp_sharding::{DType, Rank};

use super::NcclError;
use super::connected::{Connected, Groups, Member};
use super::queue::Queue;
use super::transfer::Transfer;
use crate::Op;
use crate::backend::thread::Access;
use crate::remote::{CallShape, Calls, DeviceCall, Endpoint};

/// The drain of a rank that is under way.
#[derive(Debug, Default)]
pub(super) struct Drain {
    /// The calls that this rank has told, and the peers that it told them.
    told: Option<(Calls, BTreeSet<Rank>)>,
}

/// The parts of a rank that its drain uses.
pub(super) struct Drained<'a> {
    pub(super) rank: Rank,
    pub(super) access: &'a Access,
    pub(super) connected: &'a Connected,
    pub(super) queue: &'a Queue,
}

impl Drain {
    /// Goes on with the oldest epoch that is over and not drained, as far as the calls of the others are known.
    ///
    /// # Errors
    /// The error that ends the world.
    pub(super) fn go_on(&mut self, of: &Drained<'_>) -> Result<(), String> {
        let (Some(epoch), Some(endpoint)) = (of.queue.owed(), of.access.endpoint()) else {
            return Ok(());
        };
        let Some(groups) = of.connected.groups() else { return Ok(()) };
        let own = of.access.record(of.rank);
        let tell = || tell((endpoint, of.rank, epoch), of.queue.calls(own, &groups), &groups);
        let (own, peers) = self.told.get_or_insert_with(tell);
        let missing = endpoint.drains().missing(epoch, peers);
        let has_left = |rank: &&Rank| of.access.record(**rank).has_left();
        if let Some(left) = missing.iter().find(has_left) {
            of.queue.fail(*left);
            of.connected.abort();
            return Ok(());
        }
        let is_complete = missing.is_empty();
        of.queue.await_calls(missing);
        // A thread of the rank that is in the midst of a call is not waited for: the watchdog looks again.
        let Some(turn) = of.queue.try_turn().filter(|_| is_complete) else { return Ok(()) };
        let others = endpoint.drains().take(epoch);
        of.fill_up(&groups, own.owed(&others.iter().collect::<Vec<_>>())?)?;
        drop(turn);
        of.queue.has_drained();
        self.told = None;
        Ok(())
    }
}

/// Tells the members of a rank's groups which calls it has made until the end of an epoch, or of all: the calls, and the ranks that are told.
pub(super) fn tell(
    (endpoint, rank, epoch): (&Endpoint, Rank, u64),
    calls: Calls,
    groups: &Groups,
) -> (Calls, BTreeSet<Rank>) {
    let ranks = groups.values().flat_map(|member| member.ranks.iter().copied());
    let peers: BTreeSet<_> = ranks.filter(|other| *other != rank).collect();
    endpoint.tell_calls(epoch, &calls, peers.iter().copied().collect());
    (calls, peers)
}

impl Drained<'_> {
    /// Makes the calls that others have made, in a turn.
    fn fill_up(&self, groups: &Groups, owed: Vec<DeviceCall>) -> Result<(), String> {
        for call in owed {
            let member = groups
                .get(&call.group)
                .ok_or("a step that was given up is not drained: its communicators are gone")?;
            let shape = call.shape;
            self.queue.adopt(self.access, call);
            let filled = self.fill(member, shape);
            filled.map_err(|error| format!("a step that was given up is not drained: {error}"))?;
        }
        Ok(())
    }

    /// Makes one call, of zeros, whose result is not read.
    fn fill(&self, member: &Member, shape: CallShape) -> Result<(), NcclError> {
        let (comm, stream) = (member.comm.lock(), &self.queue.stream);
        let CallShape { op, dtype, count } = shape;
        let zeros = |len| zeros(stream, dtype, len);
        // There is no memory for a length that has no number.
        let of = |scatters| if op == scatters { count.saturating_mul(comm.size()) } else { count };
        let input = match op {
            Op::AllReduce => None,
            _ => Some(zeros(of(Op::ReduceScatter))?),
        };
        let mut output = zeros(of(Op::AllGather))?;
        comm.issue(op, stream, Transfer::whole(input.as_ref(), &mut output))?;
        Ok(self.queue.issued()?)
    }
}

fn zeros(stream: &Stream, dtype: DType, len: usize) -> Result<DeviceBuffer, NcclError> {
    let mut zeros =
        DeviceBuffer::new(stream.device(), dtype, len, "a call of a step that was given up")?;
    zeros.fill(stream, 0)?;
    Ok(zeros)
}
