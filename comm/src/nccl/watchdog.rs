//! The watchdog: a thread that looks after the communicators of a rank while that computes, or
//! waits elsewhere. It also ends the calls of a step that is given up: `NCCL.md`, "A step that is
//! given up".

use std::collections::BTreeSet;
use std::sync::{Arc, Weak};
use std::thread;
use std::time::Duration;

use hsdp_kernels::cuda::{DeviceBuffer, Stream};
use hsdp_sharding::{DType, Rank};

use super::NcclError;
use super::connected::{Connected, GroupConnection, NcclGroups};
use super::queue::{CallKey, CallQueue, left_before, warn_late};
use super::transfer::Transfer;
use crate::engine::judge::MemberWait;
use crate::engine::{Alarm, EarlyEnds, WaitClock};
use crate::remote::{CallShape, Calls, DeviceCall, Endpoint, Urgency};
use crate::threads::OwnRank;
use crate::{Descriptor, Op};

/// The watchdog's rest between two looks.
const REST: Duration = Duration::from_millis(50);

/// Starts the watchdog of a rank. It waits for the oldest call that is not done, and drains steps
/// that are given up. Where NCCL reports an error of what was issued, it ends the world; and when
/// the world has ended, for whatever reason, it gives the communicators up, so that no stream waits
/// for ranks that will not come. It ends with the communicators, and holds on to nothing whose end
/// is waited for.
///
/// # Errors
/// [`NcclError::Unwatched`] if there is no thread for it.
pub(super) fn start(connected: &Arc<Connected>, own: &Arc<OwnRank>) -> Result<(), NcclError> {
    let mut watch = Watch {
        connected: Arc::downgrade(connected),
        early_ends: Arc::clone(own.early_ends()),
        own: Arc::downgrade(own),
        drain: Drain::default(),
        stall: None,
    };
    let name = format!("hsdp-nccl-watch-{}", own.rank);
    let watch = move || {
        while watch.goes_on() {
            thread::park_timeout(REST);
        }
    };
    let started = thread::Builder::new().name(name).spawn(watch);
    started.map(drop).map_err(|error| NcclError::Unwatched { reason: error.to_string() })
}

/// The objects of a look.
struct Watch {
    connected: Weak<Connected>,
    early_ends: Arc<EarlyEnds>,
    own: Weak<OwnRank>,
    drain: Drain,
    /// The oldest call that was not done when this looked last.
    stall: Option<Stall>,
}

impl Watch {
    /// One look; whether there is to be another.
    fn goes_on(&mut self) -> bool {
        let Some(connected) = self.connected.upgrade() else { return false };
        if let Some(own) = self.own.upgrade()
            && let Err(error) = self.look(&connected, &own)
        {
            own.core.end_requested(own.rank, &error);
        }
        if self.early_ends.world_end().is_some() {
            connected.give_up();
            return false;
        }
        true
    }

    /// # Errors
    /// The error that ends the world.
    fn look(&mut self, connected: &Connected, own: &OwnRank) -> Result<(), String> {
        let queue = connected.queue();
        if queue.as_ref().is_none_or(|queue| !queue.has_failed()) {
            let healthy = connected.check();
            healthy.map_err(|error| format!("NCCL reports an error: {error}"))?;
        }
        let Some(queue) = queue else { return Ok(()) };
        self.look_at_head(&queue, connected, own);
        if self.early_ends.world_end().is_some() {
            return Ok(());
        }
        self.drain.go_on(own, connected, &queue)
    }

    /// The oldest call is waited for, whatever the rank itself does meanwhile.
    fn look_at_head(&mut self, queue: &CallQueue, connected: &Connected, own: &OwnRank) {
        let head = queue.head(&own.record);
        let call = head.as_ref().map(|(call, _)| *call);
        if self.stall.as_ref().map(|stall| stall.call) != call {
            if let Some(stall) = self.stall.take() {
                stall.end(own);
            }
            // A call that was drained has none of its own: this rank was not asked for it.
            let operation =
                head.and_then(|(_, descriptor)| descriptor.or_else(|| own.record.last()));
            let clock = || WaitClock::stall(own.options());
            let begins = |(call, operation)| Stall { call, operation, clock: clock() };
            self.stall = call.zip(operation).map(begins);
            return;
        }
        let Some(stall) = &mut self.stall else { return };
        let (group, index) = stall.call;
        let left = own.endpoint().and_then(|it| it.drains().left_before(group, index));
        if let Some(left) = left {
            own.core.end(left_before(own, left, &stall.operation));
            return;
        }
        let others = connected.ranks(stall.call.0).into_iter().filter(|other| *other != own.rank);
        stall.ring(own, others.collect());
    }
}

/// A device that waits in a call of NCCL.
struct Stall {
    call: CallKey,
    operation: Arc<Descriptor>,
    clock: WaitClock,
}

impl Stall {
    /// Has the judge look for a reason, if it is time.
    fn ring(&mut self, own: &OwnRank, missing: Vec<Rank>) {
        let Some(endpoint) = own.endpoint() else { return };
        let wait = MemberWait {
            operation: Arc::clone(&self.operation),
            index: Some(self.call.1),
            missing,
            is_of_issuer: own.record.has_one_issuer(),
        };
        let key = wait.key();
        own.record.wait_on_device(Some(wait.clone()));
        match self.clock.alarm() {
            Alarm::None(_) => {}
            Alarm::Circle => endpoint.report(self.urgency(own), key),
            Alarm::Late(lateness) => {
                endpoint.report(Urgency::Late, key);
                warn_late(own.rank, &wait.operation, endpoint.culprit(key), lateness);
            }
            Alarm::Deadline => own.core.end_late_on_device(own.rank, &wait),
        }
    }

    /// Before the grace has passed, only calls are compared; then ranks may be found to wait for
    /// each other.
    fn urgency(&self, own: &OwnRank) -> Urgency {
        match self.clock.waited() < own.options().circle_grace {
            true => Urgency::Late,
            false => Urgency::Stalled,
        }
    }

    /// The device goes on.
    fn end(&self, own: &OwnRank) {
        let waited = own.record.device_wait();
        own.record.wait_on_device(None);
        if let (Some(endpoint), Some(waited)) = (own.endpoint(), waited) {
            endpoint.forget_reports(waited.key());
        }
    }
}

/// The drain of a rank that is under way.
#[derive(Debug, Default)]
pub(super) struct Drain {
    /// The calls that this rank has told, and the peers that it told them.
    told: Option<(Calls, BTreeSet<Rank>)>,
}

impl Drain {
    /// Goes on with the oldest epoch that is over and not drained, as far as the calls of the
    /// others are known.
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
        // A thread of the rank that is in the midst of a call is not waited for: the watchdog looks
        // again.
        let Some(turn) = queue.try_turn().filter(|_| is_complete) else { return Ok(()) };
        let others = endpoint.drains().take(epoch);
        fill_up(own, queue, &groups, calls.owed(&others.iter().collect::<Vec<_>>())?)?;
        drop(turn);
        queue.has_drained();
        self.told = None;
        Ok(())
    }
}

/// Tells the members of a rank's groups which calls it has made until the end of an epoch, or of
/// all: the calls, and the ranks that are told.
pub(super) fn tell(
    endpoint: &Endpoint,
    rank: Rank,
    epoch: u64,
    calls: Calls,
    groups: &NcclGroups,
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
    groups: &NcclGroups,
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
    let comm = member.comm.lock();
    let stream = &queue.stream;
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
