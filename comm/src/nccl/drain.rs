//! The end of the calls of a step that is given up. `NCCL.md`, "A step that is given up".

use std::collections::BTreeSet;

use hsdp_kernels::cuda::{DeviceBuffer, Stream};
use hsdp_sharding::{DType, Rank};

use super::NcclError;
use super::connected::{Connected, GroupConnection, Groups};
use super::queue::CallQueue;
use super::transfer::Transfer;
use crate::Op;
use crate::backend::thread::OwnRank;
use crate::remote::{CallShape, Calls, DeviceCall, Endpoint};

/// The drain of a rank that is under way.
#[derive(Debug, Default)]
pub(super) struct Drain {
    /// The calls that this rank has told, and the peers that it told them.
    told: Option<(Calls, BTreeSet<Rank>)>,
}

impl Drain {
    /// Goes on with the oldest epoch that is over and not drained, as far as the calls of the others are known.
    ///
    /// # Errors
    /// The error that ends the world.
    pub(super) fn go_on(
        &mut self,
        own: &OwnRank,
        connected: &Connected,
        queue: &CallQueue,
    ) -> Result<(), String> {
        let (Some(epoch), Some(endpoint)) = (queue.owed(), own.endpoint()) else { return Ok(()) };
        let Some(groups) = connected.groups() else { return Ok(()) };
        let calls = || queue.calls(&own.record, &groups);
        let tell = || tell(endpoint, own.rank, epoch, calls(), &groups);
        let (calls, peers) = self.told.get_or_insert_with(tell);
        let missing = endpoint.drains().missing(epoch, peers);
        let has_left = |rank: &&Rank| own.core.state.record(**rank).has_left();
        if let Some(left) = missing.iter().find(has_left) {
            queue.fail(*left);
            connected.abort();
            return Ok(());
        }
        let is_complete = missing.is_empty();
        queue.await_calls(missing);
        // A thread of the rank that is in the midst of a call is not waited for: the watchdog looks again.
        let Some(turn) = queue.try_turn().filter(|_| is_complete) else { return Ok(()) };
        let others = endpoint.drains().take(epoch);
        fill_up(own, queue, &groups, calls.owed(&others.iter().collect::<Vec<_>>())?)?;
        drop(turn);
        queue.has_drained();
        self.told = None;
        Ok(())
    }
}

/// Tells the members of a rank's groups which calls it has made until the end of an epoch, or of all: the calls, and the ranks that are told.
pub(super) fn tell(
    endpoint: &Endpoint,
    rank: Rank,
    epoch: u64,
    calls: Calls,
    groups: &Groups,
) -> (Calls, BTreeSet<Rank>) {
    let ranks = groups.values().flat_map(|member| member.ranks.iter().copied());
    let peers: BTreeSet<_> = ranks.filter(|other| *other != rank).collect();
    endpoint.tell_calls(epoch, &calls, peers.iter().copied().collect());
    (calls, peers)
}

/// Makes the calls that others have made, in a turn.
fn fill_up(
    own: &OwnRank,
    queue: &CallQueue,
    groups: &Groups,
    owed: Vec<DeviceCall>,
) -> Result<(), String> {
    for call in owed {
        let member = groups
            .get(&call.group)
            .ok_or("a step that was given up is not drained: its communicators are gone")?;
        let shape = call.shape;
        queue.adopt(own, call);
        let filled = fill(queue, member, shape);
        filled.map_err(|error| format!("a step that was given up is not drained: {error}"))?;
    }
    Ok(())
}

/// Makes one call, of zeros, whose result is not read.
fn fill(queue: &CallQueue, member: &GroupConnection, shape: CallShape) -> Result<(), NcclError> {
    let (comm, stream) = (member.comm.lock(), &queue.stream);
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
    Ok(queue.issued()?)
}

fn zeros(stream: &Stream, dtype: DType, len: usize) -> Result<DeviceBuffer, NcclError> {
    let mut zeros =
        DeviceBuffer::new(stream.device(), dtype, len, "a call of a step that was given up")?;
    zeros.fill(stream, 0)?;
    Ok(zeros)
}
