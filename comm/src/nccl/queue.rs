//! The calls of NCCL of a rank whose peers are processes: in one order over all communicators, on
//! one stream, and watched until they are done. `NCCL.md`, "Between processes".

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use hsdp_flight::{EntryNumber, FlightState};
use hsdp_kernels::cuda::{CudaError, Moment, Stream};
use hsdp_sharding::Rank;

use super::connected::NcclGroups;
use crate::call::Issuing;
use crate::engine::{Alarm, EarlyEnds, Record, WaitClock, from_now};
use crate::remote::{CallNumber, CallShape, Calls, DeviceCall};
use crate::rolling::RolledCall;
use crate::sync::{Condvar, Mutex, MutexGuard};
use crate::threads::OwnRank;
use crate::{AbortReason, Descriptor, Error, GroupId, WorldError};

/// The most calls of a rank that are not done.
const MOST: usize = 64;

/// The rest of a waiting rank between two looks at its calls.
const LOOK: Duration = Duration::from_micros(200);

/// The calls of a rank.
#[derive(Debug)]
pub(super) struct CallQueue {
    early_ends: Arc<EarlyEnds>,
    pub(super) stream: Arc<Stream>,
    /// Held while a call is made: it may be in progress for some time.
    turn: Mutex<()>,
    state: Mutex<CallsUnderWay>,
    /// Rung when an epoch is drained.
    changed: Condvar,
}

#[derive(Debug, Default)]
struct CallsUnderWay {
    /// Those that are not known to be done, in the order of the stream.
    calls: VecDeque<QueuedCall>,
    /// The number of the next one.
    next: CallNumber,
    /// All epochs before this one are over, and drained.
    drained: u64,
    /// The ranks whose calls of that epoch are not known, if it is over.
    awaited: Vec<Rank>,
    /// The rank that left without saying them: nothing can be drained any more.
    left: Option<Rank>,
}

#[derive(Debug)]
struct QueuedCall {
    call: DeviceCall,
    /// `None` for a call that was drained: this rank was not asked for it.
    issuing: Option<(Arc<Descriptor>, EntryNumber)>,
    /// `None` while NCCL has it in progress.
    done: Option<Moment>,
}

/// The group of a call, and its number there.
pub(super) type CallKey = (GroupId, u64);

impl CallQueue {
    pub(super) fn new(own: &OwnRank, stream: Arc<Stream>) -> Self {
        let epoch = own.record.epoch();
        let state = CallsUnderWay { drained: epoch, next: (epoch, 0), ..CallsUnderWay::default() };
        Self {
            early_ends: Arc::clone(own.early_ends()),
            stream,
            turn: Mutex::default(),
            state: Mutex::new(state),
            changed: Condvar::new(),
        }
    }

    /// Begins the turn of a call. Waits until all epochs before its own are drained, for the calls
    /// that other threads of the rank make, and until few enough calls are not done.
    ///
    /// # Errors
    /// The end of its epoch or of the world, also that by the deadline of this wait.
    pub(super) fn begin(
        &self,
        own: &OwnRank,
        descriptor: &Arc<Descriptor>,
    ) -> Result<MutexGuard<'_, ()>, Error> {
        let epoch = descriptor.epoch;
        // A thread that drains makes calls, too.
        self.wait(own, epoch, descriptor, |state| state.drained >= epoch)?;
        let turn = self.turn.lock();
        self.wait(own, epoch, descriptor, |state| state.calls.len() < MOST)?;
        Ok(turn)
    }

    /// A turn without a wait, for a drain; `None` while a call is made.
    pub(super) fn try_turn(&self) -> Option<MutexGuard<'_, ()>> {
        self.turn.try_lock()
    }

    /// Waits until all epochs before this one are drained.
    ///
    /// # Errors
    /// The end of the epoch or of the world, also that by the deadline of this wait.
    pub(super) fn await_drained(&self, own: &OwnRank, epoch: u64) -> Result<(), Error> {
        // A rank that has issued nothing has connected nothing.
        let Some(descriptor) = &own.record.last() else { return Ok(()) };
        self.wait(own, epoch, descriptor, |state| state.drained >= epoch)
    }

    /// Waits until `is_over`, or until an epoch is over. The operation is one that cannot be issued
    /// meanwhile, or that was issued last.
    fn wait(
        &self,
        own: &OwnRank,
        epoch: u64,
        operation: &Arc<Descriptor>,
        is_over: impl Fn(&CallsUnderWay) -> bool,
    ) -> Result<(), Error> {
        let mut clock = WaitClock::start(own.options());
        loop {
            // Without the lock: it may warn, and a subscriber of warnings may run any code.
            let alarm = clock.alarm();
            let mut state = self.state.lock();
            state.forget_done(&own.record);
            self.early_ends.check(epoch)?;
            let left = state.left;
            if left.is_none() && is_over(&state) {
                return Ok(());
            }
            if let (None, Alarm::None(rest)) = (left, &alarm) {
                self.changed.wait_until(&mut state, from_now((*rest).min(LOOK)));
                continue;
            }
            let missing = state.awaited.clone();
            drop(state);
            match (left, alarm) {
                (Some(rank), _) => return Err(own.core.end(left_before(own, rank, operation))),
                (None, Alarm::Deadline) => return Err(end_late(own, operation, missing)),
                (None, Alarm::Late(lateness)) => warn_late(own.rank, operation, None, lateness),
                (None, Alarm::None(_) | Alarm::Circle) => {}
            }
        }
    }

    /// The error that says that a rank has left without the last call of this one, if one has; or
    /// without its calls of a step that was given up.
    pub(super) fn left(&self, own: &OwnRank, descriptor: &Arc<Descriptor>) -> Option<Error> {
        let (left, last) = {
            let state = self.state.lock();
            (state.left, state.calls.back().map(|it| (it.call.group, it.call.index)))
        };
        let left_before_last = || {
            let (group, index) = last?;
            own.endpoint()?.drains().left_before(group, index)
        };
        let rank = left.or_else(left_before_last)?;
        Some(left_before(own, rank, descriptor))
    }

    /// Counts a call, which is made now.
    ///
    /// # Errors
    /// The end of its epoch or of the world: then it is not to be made.
    pub(super) fn note(
        &self,
        own: &OwnRank,
        issuing: &Issuing,
        shape: CallShape,
    ) -> Result<(), Error> {
        let mut state = self.state.lock();
        let Issuing { compared, signature, entry } = issuing;
        self.early_ends.check(compared.epoch)?;
        let RolledCall { group, index, hash, .. } = own.record.rolling.note(compared, *signature);
        let number =
            (compared.epoch, if state.next.0 == compared.epoch { state.next.1 } else { 0 });
        state.next = (number.0, number.1 + 1);
        let call = DeviceCall { group, index, number, hash, shape };
        let issuing = Some((Arc::clone(compared), *entry));
        state.calls.push_back(QueuedCall { call, issuing, done: None });
        Ok(())
    }

    /// Counts a call that this rank makes because others have made it.
    pub(super) fn adopt(&self, own: &OwnRank, call: DeviceCall) {
        let mut state = self.state.lock();
        let DeviceCall { group, index, hash, .. } = call;
        let rolling = &own.record.rolling;
        rolling.adopt(RolledCall { group, index, hash, descriptor: None });
        state.calls.push_back(QueuedCall { call, issuing: None, done: None });
    }

    /// The last call is on the stream.
    ///
    /// # Errors
    /// Errors of the device.
    pub(super) fn issued(&self) -> Result<(), CudaError> {
        let done = Some(self.stream.moment()?);
        if let Some(last) = self.state.lock().calls.back_mut() {
            last.done = done;
        }
        Ok(())
    }

    /// The oldest call that is not done, and its operation, if this rank was asked for it.
    pub(super) fn head(&self, record: &Record) -> Option<(CallKey, Option<Arc<Descriptor>>)> {
        let mut state = self.state.lock();
        state.forget_done(record);
        let QueuedCall { call, issuing, .. } = state.calls.front()?;
        let descriptor = issuing.as_ref().map(|(descriptor, _)| Arc::clone(descriptor));
        Some(((call.group, call.index), descriptor))
    }

    /// The epoch that is over and not drained, if there is one.
    pub(super) fn owed(&self) -> Option<u64> {
        let CallsUnderWay { drained, left, .. } = *self.state.lock();
        (left.is_none() && self.early_ends.check(drained).is_err()).then_some(drained)
    }

    /// Whether nothing can be drained any more.
    pub(super) fn has_failed(&self) -> bool {
        self.state.lock().left.is_some()
    }

    /// The calls of this rank, of an epoch that is over: it makes no more of them.
    pub(super) fn calls(&self, record: &Record, groups: &NcclGroups) -> Calls {
        let state = self.state.lock();
        let counts = groups.keys().map(|group| (*group, record.rolling.count(*group)));
        let unfinished = state.calls.iter().map(|call| call.call.clone()).collect();
        Calls { counts: counts.collect(), unfinished }
    }

    /// The calls of this rank, which leaves: without those that may never be done, if it owes a
    /// drain.
    pub(super) fn last_calls(&self, record: &Record, groups: &NcclGroups) -> Calls {
        self.state.lock().forget_done(record);
        let calls = self.calls(record, groups);
        if self.owed().is_some() { calls.done() } else { calls }
    }

    /// The calls of these ranks are not known, until which nothing is drained.
    pub(super) fn await_calls(&self, ranks: Vec<Rank>) {
        self.state.lock().awaited = ranks;
    }

    /// The oldest epoch that was not drained is.
    pub(super) fn has_drained(&self) {
        let mut state = self.state.lock();
        (state.drained, state.awaited) = (state.drained + 1, Vec::new());
        self.changed.notify_all();
    }

    /// A rank has left before it said its calls.
    pub(super) fn fail(&self, left: Rank) {
        self.state.lock().left = Some(left);
        self.changed.notify_all();
    }
}

impl CallsUnderWay {
    /// Forgets the calls that are done.
    fn forget_done(&mut self, record: &Record) {
        while let Some(QueuedCall { done: Some(moment), .. }) = self.calls.front() {
            // An error here ends the next operation, or the next read: those have a name.
            if !moment.has_come().unwrap_or(true) {
                break;
            }
            let Some(QueuedCall { issuing: Some((_, entry)), .. }) = self.calls.pop_front() else {
                continue;
            };
            let is_same =
                |call: &QueuedCall| call.issuing.as_ref().is_some_and(|(_, it)| *it == entry);
            if !self.calls.iter().any(is_same) {
                record.flight.settle(entry, FlightState::Complete);
            }
        }
    }
}

/// Ends the world since the deadline has passed: by the first of the ranks that are known to be
/// missing, or by the rank that keeps the device waiting.
fn end_late(own: &OwnRank, awaited: &Arc<Descriptor>, missing: Vec<Rank>) -> Error {
    if let (true, Some(wait)) = (missing.is_empty(), own.record.device_wait()) {
        own.core.end_late_on_device(own.rank, &wait);
        if let Some(end) = own.early_ends().world_end() {
            return end;
        }
    }
    let operation = Arc::clone(awaited);
    let deadline = own.options().deadline;
    let awaited = Arc::clone(awaited);
    let culprit = missing.first().copied();
    let reason =
        AbortReason::Deadline { awaited, deadline, arrived: [].into(), missing: missing.into() };
    own.core.end(match culprit {
        Some(rank) => own.core.state.ended_by(rank, reason),
        None => WorldError::WorkFailed { operation, reason }.into(),
    })
}

/// The error that says that a rank has left without an operation that others wait for.
pub(super) fn left_before(own: &OwnRank, rank: Rank, awaited: &Arc<Descriptor>) -> Error {
    own.core.state.ended_by(rank, AbortReason::Left { awaited: Arc::clone(awaited) })
}

pub(super) fn warn_late(
    rank: Rank,
    operation: &Descriptor,
    culprit: Option<Rank>,
    lateness: Duration,
) {
    let rank = rank.get();
    let culprit = culprit.map(Rank::get);
    hsdp_warnings::warn!(rank, %operation, culprit, ?lateness, "an operation on a device is late: other ranks may not have issued it");
}
