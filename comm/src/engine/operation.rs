//! One operation, from its beginning to the moment at which members take their outputs from it:
//! members arrive, and the last of them takes the contributions. Also the operations for which
//! members are missing, by their keys. PROTOCOL.md, "States of an operation".

use std::any::Any;
use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::mem::ManuallyDrop;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, OnceLock};
use std::time::Instant;
use std::{fmt, mem};

use crossbeam::utils::CachePadded;
use hsdp_flight::{Ending, Origin};
use hsdp_sharding::Rank;
use serde::{Deserialize, Serialize};
use smallvec::SmallVec;

use crate::sync::atomic::{AtomicUsize, Ordering};
use crate::sync::{self, Condvar, Mutex, MutexGuard};
use crate::{Descriptor, Error, GroupId};

/// The identity of an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub(crate) struct Key {
    pub(crate) group: GroupId,
    pub(crate) epoch: u64,
    pub(crate) sequence: u64,
}

impl From<&Descriptor> for Key {
    fn from(descriptor: &Descriptor) -> Self {
        let Descriptor { group, epoch, sequence, .. } = *descriptor;
        Self { group, epoch, sequence }
    }
}

/// The phase of an operation. It only goes forward, but for work that has another round.
pub(super) enum OperationPhase {
    /// Members arrive, each in its slot.
    Gathering(Gathering),
    /// All have arrived. The last of them took the contributions, and blocks are run.
    Running,
    /// The outputs wait for their members; until it is due, they are held back, and the operation
    /// has no end.
    Done(Box<dyn Any + Send>),
    /// It ended early, for all members alike.
    Failed(Box<Error>),
}

impl OperationPhase {
    /// The descriptors of the members that have arrived, while members are missing or differ.
    pub(super) fn arrivals(&self) -> Option<&Arrivals> {
        match self {
            Self::Gathering(Gathering { arrivals, .. }) => Some(arrivals),
            _ => None,
        }
    }
}

/// One operation of one group.
pub(crate) struct SharedOperation {
    pub(crate) key: Key,
    /// The members, by slot.
    pub(crate) ranks: Arc<[Rank]>,
    /// The moment from which its end is timed.
    origin: Origin,
    /// Written when members can take their outputs or the error, so that a look at it needs no
    /// lock.
    pub(crate) ending: Arc<Ending>,
    pub(super) state: Mutex<OperationState>,
    changed: Condvar,
    /// When its outputs are published, if they are held back: written when they are.
    due: OnceLock<Instant>,
    /// By slot: the number of threads that are in the code that lends its member's contribution.
    pub(crate) readers: PerMember<AtomicUsize>,
}

pub(super) struct OperationState {
    pub(super) phase: OperationPhase,
    /// Members that sleep on `changed`.
    sleepers: usize,
}

impl SharedOperation {
    /// An operation at which no member has arrived.
    pub(crate) fn new(key: Key, ranks: &Arc<[Rank]>, origin: Origin) -> Self {
        let members = ranks.len();
        let phase = OperationPhase::Gathering(Gathering::new(members));
        Self {
            key,
            ranks: Arc::clone(ranks),
            origin,
            ending: Arc::default(),
            state: Mutex::new(OperationState { phase, sleepers: 0 }),
            changed: Condvar::new(),
            due: OnceLock::new(),
            readers: (0..members).map(|_| AtomicUsize::new(0)).collect(),
        }
    }

    pub(crate) fn is_settled(&self) -> bool {
        self.ending.is_written() || self.settle_if_due()
    }

    /// Publishes outputs that were held back, if they are due; whether they are.
    fn settle_if_due(&self) -> bool {
        if self.due.get().is_none_or(|due| sync::now() < *due) {
            return false;
        }
        let state = self.state.lock();
        if !self.ending.is_written() {
            self.write_end(&state.phase);
            self.changed.notify_all();
        }
        true
    }

    /// The first member, in slot order, whose code is lending its contribution.
    pub(crate) fn lender(&self) -> Option<Rank> {
        let lends = |readers: &AtomicUsize| readers.load(Ordering::Relaxed) > 0;
        self.readers.iter().position(lends).map(|slot| self.ranks[slot])
    }

    /// The error of the operation, if it has failed.
    pub(crate) fn failure(&self) -> Option<Error> {
        match &self.state.lock().phase {
            OperationPhase::Failed(error) => Some(Error::clone(error)),
            _ => None,
        }
    }

    /// The work is done: publishes the outputs, at `due` or now.
    pub(crate) fn succeed(&self, outputs: Box<dyn Any + Send>, due: Option<Instant>) {
        let mut state = self.state.lock();
        if !matches!(state.phase, OperationPhase::Running) {
            return;
        }
        let Some(due) = due.filter(|due| sync::now() < *due) else {
            return self.settle(state, OperationPhase::Done(outputs));
        };
        // No thread sleeps for outputs that are held back: members that wait sleep until then, and
        // no longer.
        state.phase = OperationPhase::Done(outputs);
        self.due.get_or_init(|| due);
        self.changed.notify_all();
    }

    /// Ends the operation if members are missing: work that has begun completes.
    pub(crate) fn fail_gathering(&self, error: &Error) {
        let state = self.state.lock();
        if state.phase.arrivals().is_some() {
            self.settle(state, OperationPhase::Failed(Box::new(error.clone())));
        }
    }

    /// Ends the operation unless it is done: its work panicked, or missed the deadline.
    pub(crate) fn fail(&self, error: &Error) {
        let state = self.state.lock();
        if !self.ending.is_written() {
            self.settle(state, OperationPhase::Failed(Box::new(error.clone())));
        }
    }

    /// Enters a last phase and wakes all members. Contributions are dropped without the lock.
    fn settle(&self, mut state: MutexGuard<'_, OperationState>, last: OperationPhase) {
        let former = mem::replace(&mut state.phase, last);
        self.write_end(&state.phase);
        self.changed.notify_all();
        drop(state);
        discard(former);
    }

    fn write_end(&self, last: &OperationPhase) {
        let is_done = matches!(last, OperationPhase::Done(_));
        // A thread that publishes what was held back may be late: that time is no part of the
        // operation.
        let due = self.due.get().filter(|_| is_done);
        let ended = self.origin.until(due.copied().unwrap_or_else(Instant::now));
        let state = if is_done { crate::FlightState::Complete } else { crate::FlightState::Failed };
        self.ending.write(state, ended);
    }

    /// Takes a member's output out of a settled operation.
    pub(crate) fn take<O: 'static>(&self, slot: usize) -> Result<O, Error> {
        match &mut self.state.lock().phase {
            OperationPhase::Done(outputs) => {
                let outputs = outputs.downcast_mut::<Outputs<O>>();
                let outputs = outputs.expect("the work makes outputs of this type");
                Ok(outputs.take(slot).expect("a member waits once"))
            }
            OperationPhase::Failed(error) => Err(Error::clone(error)),
            _ => unreachable!("the operation is settled"),
        }
    }

    /// Whether a member sleeps for this operation. It waits until the operation is settled, so it
    /// does work that is queued.
    pub(crate) fn has_sleepers(&self) -> bool {
        self.state.lock().sleepers > 0
    }

    /// Wakes up to `useful` members that sleep, to help with the work; the number of them.
    ///
    /// A member that its alarm has just woken counts, though it no longer sleeps: it looks for work
    /// anyway.
    pub(crate) fn wake_helpers(&self, useful: usize) -> usize {
        let state = self.state.lock();
        let helpers = state.sleepers.min(useful);
        (0..helpers).for_each(|_| {
            self.changed.notify_one();
        });
        helpers
    }

    /// Sleeps until something changes or the moment comes. Spurious wakes are possible.
    pub(crate) fn sleep_until(&self, moment: Instant) {
        let mut state = self.state.lock();
        if self.ending.is_written() {
            return;
        }
        let moment = self.due.get().map_or(moment, |due| moment.min(*due));
        state.sleepers += 1;
        self.changed.wait_until(&mut state, moment);
        state.sleepers -= 1;
    }
}

impl fmt::Debug for SharedOperation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "SharedOperation({:?})", self.key)
    }
}

/// The descriptors of the members that have arrived, by slot.
pub(crate) type Arrivals = PerMember<Option<Arc<Descriptor>>>;

/// Members that have arrived, and their contributions.
pub(super) struct Gathering {
    pub(super) arrivals: Arrivals,
    missing: usize,
    /// [`Contributions`] of the type that the first member brings. Contributions of one type make
    /// work of one type.
    contributions: Option<Box<dyn Any + Send>>,
    /// The first difference between two of them. Each later member is told of it, until the end of
    /// the world fails the operation: the work never begins.
    pub(super) difference: Option<Difference>,
}

/// Contributions of type `D`, by slot.
type Contributions<D> = Vec<Option<D>>;

/// The difference between two members.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Difference {
    /// Their descriptors differ.
    Descriptor,
    /// Their descriptors are equal, and their contributions are of different types.
    Work,
}

/// The result of an arrival.
#[must_use]
pub(crate) enum Arrived<D> {
    /// Other members are missing.
    Waiting,
    /// This was the last member, which makes the work of all contributions, in slot order.
    Last(Vec<D>, Arrivals),
    /// It, or a member before it, differs from the first: see [`SharedOperation::wanted`].
    Differs(Difference),
    /// The operation had ended early.
    Refused(Error),
}

impl SharedOperation {
    /// Puts a member's contribution into its slot. Each member arrives once: its number is its own.
    pub(crate) fn arrive<D: Send + 'static>(
        &self,
        slot: usize,
        descriptor: &Arc<Descriptor>,
        contribution: D,
    ) -> Arrived<D> {
        let mut state = self.state.lock();
        let mut contribution = Some(contribution);
        let mut useless = None;
        let arrived = match &mut state.phase {
            OperationPhase::Failed(error) => Arrived::Refused(Error::clone(error)),
            OperationPhase::Gathering(gathering) => {
                gathering.put(slot, descriptor, &mut contribution);
                match gathering.difference {
                    Some(difference) => {
                        useless = gathering.contributions.take();
                        Arrived::Differs(difference)
                    }
                    None if gathering.missing == 0 => return end_gathering(state),
                    None => Arrived::Waiting,
                }
            }
            _ => unreachable!("a member arrives once, before the work"),
        };
        drop(state);
        // Contributions are the users': those that are of no use are dropped without the lock.
        discard((useless, contribution));
        arrived
    }

    /// Begins another round with the first contribution to it.
    pub(crate) fn gather_again<D: Send + 'static>(
        &self,
        slot: usize,
        descriptor: &Arc<Descriptor>,
        contribution: D,
    ) {
        let mut gathering = Gathering::new(self.ranks.len());
        let mut contribution = Some(contribution);
        gathering.put(slot, descriptor, &mut contribution);
        let mut state = self.state.lock();
        if matches!(state.phase, OperationPhase::Running) {
            state.phase = OperationPhase::Gathering(gathering);
            return;
        }
        drop(state);
        discard(gathering);
    }
}

/// Takes the contributions when all members have arrived.
fn end_gathering<D: Send + 'static>(mut state: MutexGuard<'_, OperationState>) -> Arrived<D> {
    let OperationPhase::Gathering(gathering) =
        mem::replace(&mut state.phase, OperationPhase::Running)
    else {
        unreachable!("it was gathering, and this thread has the lock")
    };
    drop(state);
    let all = gathering.contributions.and_then(|it| it.downcast::<Contributions<D>>().ok());
    let by_slot = *all.expect("the last member has put a contribution of this type");
    let there = |contribution: Option<D>| contribution.expect("no member is missing");
    Arrived::Last(by_slot.into_iter().map(there).collect(), gathering.arrivals)
}

impl Gathering {
    pub(super) fn new(members: usize) -> Self {
        let arrivals = (0..members).map(|_| None).collect();
        Self { arrivals, missing: members, contributions: None, difference: None }
    }

    /// Puts a contribution into its slot, unless its member, or one before it, differs from the
    /// first that has arrived: it is left in `contribution` then.
    fn put<D: Send + 'static>(
        &mut self,
        slot: usize,
        descriptor: &Arc<Descriptor>,
        contribution: &mut Option<D>,
    ) {
        let members = self.arrivals.len();
        let first = self.arrivals.iter().flatten().next();
        let agrees = first.is_none_or(|first| first.agrees_with(descriptor));
        self.missing -= 1;
        self.arrivals[slot] = Some(Arc::clone(descriptor));
        if self.difference.is_none() && !agrees {
            self.difference = Some(Difference::Descriptor);
        }
        if self.difference.is_some() {
            return;
        }
        let all = self.contributions.get_or_insert_with(|| Box::new(Contributions::<D>::new()));
        match all.downcast_mut::<Contributions<D>>() {
            Some(by_slot) => {
                by_slot.resize_with(members, || None);
                by_slot[slot] = contribution.take();
            }
            None => self.difference = Some(Difference::Work),
        }
    }
}

/// The members of an operation, while some are missing.
pub(crate) struct Attendance {
    pub(crate) arrived: Vec<Rank>,
    pub(crate) missing: Vec<Rank>,
}

impl Attendance {
    fn of(ranks: &[Rank], arrivals: &Arrivals) -> Self {
        let ranks_where = |there: bool| {
            let slots = ranks.iter().zip(arrivals);
            slots.filter(|(_, slot)| slot.is_some() == there).map(|(rank, _)| *rank).collect()
        };
        Self { arrived: ranks_where(true), missing: ranks_where(false) }
    }

    /// Whether another rank waits for `rank`: no other waits for one that was to send to itself.
    pub(crate) fn others_await(&self, rank: Rank) -> bool {
        self.missing.contains(&rank) && self.arrived.iter().any(|other| *other != rank)
    }
}

impl SharedOperation {
    /// The descriptors of the members that have arrived, by slot; `None` once the work has begun or
    /// the operation is settled.
    pub(crate) fn wanted(&self) -> Option<Arrivals> {
        self.state.lock().phase.arrivals().cloned()
    }

    /// The members that have arrived, and those that are missing; `None` once the work has begun or
    /// the operation is settled.
    pub(crate) fn attendance(&self) -> Option<Attendance> {
        let state = self.state.lock();
        Some(Attendance::of(&self.ranks, state.phase.arrivals()?))
    }

    /// The descriptor of `rank`, and the members that are missing; `None` if `rank` has not
    /// arrived, or no member is missing, or members differ.
    pub(crate) fn gathering(&self, rank: Rank) -> Option<(Arc<Descriptor>, Vec<Rank>)> {
        let state = self.state.lock();
        let OperationPhase::Gathering(gathering) = &state.phase else { return None };
        if gathering.difference.is_some() {
            return None;
        }
        let slots = self.ranks.iter().zip(&gathering.arrivals);
        let own = slots.filter(|(member, _)| **member == rank).find_map(|(_, own)| own.clone())?;
        Some((own, Attendance::of(&self.ranks, &gathering.arrivals).missing))
    }

    /// The first descriptor of a member that has arrived; `None` if there is none, or the work has
    /// begun.
    pub(crate) fn awaited(&self) -> Option<Arc<Descriptor>> {
        self.wanted()?.into_iter().flatten().next()
    }
}

/// A small value for each member, by slot. Those of few members need no allocation.
pub(crate) type PerMember<T> = SmallVec<[T; 4]>;

/// The members' outputs, by slot.
pub(crate) struct Outputs<O>(pub(crate) Vec<Option<O>>);

impl<O> Outputs<O> {
    /// Makes the list with the output of one slot alone: the other members get theirs elsewhere.
    pub(crate) fn only(slot: usize, output: O) -> Self {
        let mut outputs: Vec<_> = (0..slot).map(|_| None).collect();
        outputs.push(Some(output));
        Self(outputs)
    }

    /// Takes the output of a member; `None` if it was taken before.
    pub(crate) fn take(&mut self, slot: usize) -> Option<O> {
        self.0[slot].take()
    }
}

impl<O> FromIterator<O> for Outputs<O> {
    fn from_iter<I: IntoIterator<Item = O>>(outputs: I) -> Self {
        Self(outputs.into_iter().map(Some).collect())
    }
}

/// Drops contributions, where no caller can be told that this panicked. The value of the panic is
/// leaked: it might panic again.
pub(crate) fn discard<T>(contributions: T) {
    if let Err(panic) = catch_unwind(AssertUnwindSafe(|| drop(contributions))) {
        let panic = ManuallyDrop::new(panic);
        hsdp_warnings::warn!(
            panic = %panic_message(&**panic),
            "a buffer or gradient that a rank had lent panicked when it was dropped"
        );
    }
}

/// The message of a panic, as far as it has one.
pub(crate) fn panic_message(payload: &(dyn Any + Send)) -> Arc<str> {
    let text = payload.downcast_ref::<&str>().copied();
    let text = text.or_else(|| payload.downcast_ref::<String>().map(String::as_str));
    text.unwrap_or("(a panic without a message)").into()
}

/// The operations of a world for which members are missing.
///
/// While a thread holds its lock, it takes no other, except that of the early ends.
///
/// Each operation writes here, so the fields beside it in a world, which are only read, have cache
/// lines of their own.
#[derive(Debug, Default)]
pub(crate) struct Gatherings(CachePadded<Mutex<BTreeMap<Key, Arc<SharedOperation>>>>);

impl Gatherings {
    /// The operation of a key. `make` makes it for its first member, unless the step or the world
    /// has ended.
    ///
    /// `make` runs under the lock: it sees an early end that was written before, and a later one
    /// finds the operation here.
    pub(crate) fn enter(
        &self,
        key: Key,
        make: impl FnOnce() -> Result<Arc<SharedOperation>, Error>,
    ) -> Result<Arc<SharedOperation>, Error> {
        match self.0.lock().entry(key) {
            Entry::Occupied(found) => Ok(Arc::clone(found.get())),
            Entry::Vacant(entry) => Ok(Arc::clone(entry.insert(make()?))),
        }
    }

    /// Removes an operation at which all members have arrived, or no other will.
    pub(crate) fn remove(&self, key: Key) {
        let removed = self.0.lock().remove(&key);
        drop(removed);
    }

    /// Takes out the operations of `epoch`, or of all epochs, in the order of their keys: an error
    /// may name the first of them.
    pub(crate) fn take_out(&self, epoch: Option<u64>) -> Vec<Arc<SharedOperation>> {
        let mut operations = self.0.lock();
        let of_epoch = |key: &Key, _: &mut _| epoch.is_none_or(|epoch| key.epoch == epoch);
        operations.extract_if(.., of_epoch).map(|(_, operation)| operation).collect()
    }

    /// All operations that are there now, in the order of their keys.
    pub(crate) fn snapshot(&self) -> Vec<Arc<SharedOperation>> {
        self.0.lock().values().cloned().collect()
    }
}
