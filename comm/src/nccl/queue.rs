//! The calls of NCCL of a rank whose peers are processes: in one order over all communicators, on one stream, and watched until they are
//! done. `NCCL.md`, "Between processes".

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use hsdp_kernels::cuda::Moment;
use hsdp_sharding::Rank;

use super::connected::Members;
use crate::backend::thread::Access;
use crate::call::Issuing;
use crate::engine::{Alarm, Clock, Record, Status, from_now};
use crate::remote::{Calls, DeviceCall, Place, Wire};
use crate::rolling::Entry;
use crate::sync::{Condvar, Mutex, MutexGuard};
use crate::{AbortReason, Descriptor, Error, GroupId};
use hsdp_flight::{EntryNumber, FlightState};

/// The most calls of a rank that are not done.
const MOST: usize = 64;

/// The rest of a waiting rank between two looks at its calls.
const LOOK: Duration = Duration::from_micros(200);

/// The calls of a rank.
#[derive(Debug)]
pub(super) struct Queue {
    rank: Rank,
    status: Arc<Status>,
    /// Held while a call is made: it may be in progress for some time.
    turn: Mutex<()>,
    state: Mutex<State>,
    /// Rung when an epoch is drained.
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    /// Those that are not known to be done, in the order of the stream.
    calls: VecDeque<Call>,
    /// The place of the next one.
    next: Place,
    /// All epochs before this one are over, and drained.
    drained: u64,
    /// The ranks whose calls of that epoch are not known, if it is over.
    awaited: Vec<Rank>,
    /// The rank that left without saying them: nothing can be drained any more.
    left: Option<Rank>,
}

#[derive(Debug)]
struct Call {
    call: DeviceCall,
    /// `None` for a call that was drained: this rank was not asked for it.
    issuing: Option<(Arc<Descriptor>, EntryNumber)>,
    /// `None` while NCCL has it in progress.
    done: Option<Moment>,
}

/// The oldest call that is not known to be done.
pub(super) struct Head {
    /// The group, and its number there.
    pub(super) call: (GroupId, u64),
    pub(super) descriptor: Option<Arc<Descriptor>>,
}

impl Queue {
    pub(super) fn new(access: &Access, rank: Rank) -> Self {
        let epoch = access.record(rank).epoch();
        let state = State { drained: epoch, next: (epoch, 0), ..State::default() };
        let status = Arc::clone(access.status());
        Self {
            rank,
            status,
            turn: Mutex::default(),
            state: Mutex::new(state),
            changed: Condvar::new(),
        }
    }

    /// Begins the turn of a call. Waits until all epochs before its own are drained, for the calls that other threads of the rank make,
    /// and until few enough calls are not done.
    ///
    /// # Errors
    /// The end of its epoch or of the world, also that by the deadline of this wait.
    pub(super) fn begin(
        &self,
        access: &Access,
        descriptor: &Arc<Descriptor>,
    ) -> Result<MutexGuard<'_, ()>, Error> {
        let (rank, epoch) = (self.rank, descriptor.epoch);
        let wait = Waiting { access, rank, epoch, descriptor };
        // A thread that drains makes calls, too.
        self.wait(&wait, |state| state.drained >= epoch)?;
        let turn = self.turn.lock();
        self.wait(&wait, |state| state.calls.len() < MOST)?;
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
    pub(super) fn await_drained(&self, access: &Access, epoch: u64) -> Result<(), Error> {
        // A rank that has issued nothing has connected nothing.
        let Some(descriptor) = &access.record(self.rank).last() else { return Ok(()) };
        let wait = Waiting { access, rank: self.rank, epoch, descriptor };
        self.wait(&wait, |state| state.drained >= epoch)
    }

    fn wait(&self, wait: &Waiting<'_>, is_over: impl Fn(&State) -> bool) -> Result<(), Error> {
        let mut clock = Clock::start(wait.access.options());
        loop {
            let mut state = self.state.lock();
            state.forget_done(wait.access.record(self.rank));
            self.status.check(wait.epoch)?;
            let (left, alarm) = (state.left, clock.alarm());
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
                (Some(rank), _) => return Err(wait.access.end(wait.left(rank))),
                (None, Alarm::Deadline) => return Err(wait.end_late(missing)),
                (None, Alarm::Late(lateness)) => wait.warn(lateness),
                (None, Alarm::None(_) | Alarm::Circle) => {}
            }
        }
    }

    /// The error that says that a rank has left without the last call of this one, if one has; or without its calls of a step that was
    /// given up.
    pub(super) fn left(&self, access: &Access, descriptor: &Arc<Descriptor>) -> Option<Error> {
        let (left, last) = {
            let state = self.state.lock();
            (state.left, state.calls.back().map(|it| (it.call.group, it.call.index)))
        };
        let rank = left.or_else(|| access.endpoint()?.drains().left_before(last?))?;
        let wait = Waiting { access, rank: self.rank, epoch: descriptor.epoch, descriptor };
        Some(wait.left(rank))
    }

    /// Counts a call, which is made now.
    ///
    /// # Errors
    /// The end of its epoch or of the world: then it is not to be made.
    pub(super) fn note(&self, access: &Access, issuing: &Issuing, wire: Wire) -> Result<(), Error> {
        let mut state = self.state.lock();
        let Issuing { told, called, entry } = issuing;
        self.status.check(told.epoch)?;
        let Entry { group, index, hash, .. } = access.record(self.rank).rolling.note(told, *called);
        let place = (told.epoch, if state.next.0 == told.epoch { state.next.1 } else { 0 });
        state.next = (place.0, place.1 + 1);
        let call = DeviceCall { group, index, place, hash, wire };
        let issuing = Some((Arc::clone(told), *entry));
        state.calls.push_back(Call { call, issuing, done: None });
        Ok(())
    }

    /// Counts a call that this rank makes because others have made it.
    pub(super) fn adopt(&self, access: &Access, call: DeviceCall) {
        let mut state = self.state.lock();
        let DeviceCall { group, index, hash, .. } = call;
        let rolling = &access.record(self.rank).rolling;
        rolling.adopt(Entry { group, index, hash, descriptor: None });
        state.calls.push_back(Call { call, issuing: None, done: None });
    }

    /// The last call is on the stream, and will be done at this moment.
    pub(super) fn issued(&self, moment: Moment) {
        if let Some(last) = self.state.lock().calls.back_mut() {
            last.done = Some(moment);
        }
    }

    /// The oldest call that is not done.
    pub(super) fn head(&self, record: &Record) -> Option<Head> {
        let mut state = self.state.lock();
        state.forget_done(record);
        let Call { call, issuing, .. } = state.calls.front()?;
        let descriptor = issuing.as_ref().map(|(descriptor, _)| Arc::clone(descriptor));
        Some(Head { call: (call.group, call.index), descriptor })
    }

    /// The epoch that is over and not drained, if there is one.
    pub(super) fn owed(&self) -> Option<u64> {
        let State { drained, left, .. } = *self.state.lock();
        (left.is_none() && self.status.check(drained).is_err()).then_some(drained)
    }

    /// Whether nothing can be drained any more.
    pub(super) fn has_failed(&self) -> bool {
        self.state.lock().left.is_some()
    }

    /// The calls of this rank, of an epoch that is over: it makes no more of them.
    pub(super) fn calls(&self, record: &Record, members: &Members) -> Calls {
        let state = self.state.lock();
        let counts = members.iter().map(|(group, _)| (*group, record.rolling.count(*group)));
        let unfinished = state.calls.iter().map(|call| call.call.clone()).collect();
        Calls { counts: counts.collect(), unfinished }
    }

    /// The calls of this rank, which leaves: without those that may never be done, if it owes a drain.
    pub(super) fn last_calls(&self, record: &Record, members: &Members) -> Calls {
        self.state.lock().forget_done(record);
        let calls = self.calls(record, members);
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

impl State {
    /// Forgets the calls that are done.
    fn forget_done(&mut self, record: &Record) {
        while let Some(Call { done: Some(moment), .. }) = self.calls.front() {
            // An error here ends the next operation, or the next read: those have a name.
            if !moment.has_come().unwrap_or(true) {
                break;
            }
            let Some(Call { issuing: Some((_, entry)), .. }) = self.calls.pop_front() else {
                continue;
            };
            let is_same = |call: &Call| call.issuing.as_ref().is_some_and(|(_, it)| *it == entry);
            if !self.calls.iter().any(is_same) {
                record.flight.settle(entry, FlightState::Complete);
            }
        }
    }
}

/// A wait of a thread of the rank.
struct Waiting<'a> {
    access: &'a Access,
    rank: Rank,
    /// The wait is over with this epoch.
    epoch: u64,
    /// The operation that cannot be issued meanwhile, or that was issued last.
    descriptor: &'a Arc<Descriptor>,
}

impl Waiting<'_> {
    /// The error that says that a rank has left.
    fn left(&self, rank: Rank) -> Error {
        let awaited = Arc::clone(self.descriptor);
        self.access.ended_by(rank, AbortReason::Left { awaited })
    }

    /// Ends the world since the deadline has passed: by the first of the ranks that are known to be missing, or by the rank that keeps
    /// the device waiting.
    fn end_late(&self, missing: Vec<Rank>) -> Error {
        let Self { access, rank, descriptor, .. } = *self;
        if let (true, Some(wait)) = (missing.is_empty(), access.record(rank).device_wait()) {
            access.end_late_on_device(rank, &wait);
            if let Some(end) = access.status().world_end() {
                return end;
            }
        }
        let (awaited, deadline) = (Arc::clone(descriptor), access.options().deadline);
        let (operation, culprit) = (Arc::clone(&awaited), missing.first().copied());
        let reason = AbortReason::Deadline { awaited, deadline, arrived: Vec::new(), missing };
        access.end(match culprit {
            Some(rank) => access.ended_by(rank, reason),
            None => Error::WorkFailed { operation, reason },
        })
    }

    fn warn(&self, lateness: Duration) {
        let (rank, operation) = (self.rank.get(), self.descriptor);
        tracing::warn!(rank, %operation, ?lateness, "an operation on a device is late: other ranks may not have issued it");
    }
}
