//! One operation, from its beginning to the moment at which members take their outputs from it; `arrival` has the arrival of its
//! members. PROTOCOL.md, "States of an operation".

use std::any::Any;
use std::fmt;
use std::mem;
use std::sync::{Arc, OnceLock};
use std::time::Instant;

use hsdp_flight::{Ending, Origin};
use hsdp_sharding::Rank;
use serde::{Deserialize, Serialize};

use super::arrival::{Arrivals, Gathering};
use super::outputs::{Outputs, PerMember, discard};
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
pub(super) enum Phase {
    /// Members arrive, each in its slot.
    Gathering(Gathering),
    /// All have arrived. The last of them took the contributions, and blocks are run.
    Running,
    /// The outputs wait for their members; until it is due, they are held back, and the operation has no end.
    Done(Box<dyn Any + Send>),
    /// It ended early, for all members alike.
    Failed(Box<Error>),
}

impl Phase {
    /// The descriptors of the members that have arrived, while members are missing or differ.
    pub(super) fn arrivals(&self) -> Option<&Arrivals> {
        match self {
            Self::Gathering(Gathering { arrivals, .. }) => Some(arrivals),
            _ => None,
        }
    }
}

/// One operation of one group.
pub(crate) struct Operation {
    pub(crate) key: Key,
    /// The members, by slot.
    pub(crate) ranks: Arc<[Rank]>,
    /// The moment from which its end is timed.
    origin: Origin,
    /// Written when members can take their outputs or the error, so that a look at it needs no lock.
    pub(crate) ending: Arc<Ending>,
    pub(super) state: Mutex<State>,
    changed: Condvar,
    /// When its outputs are published, if they are held back: written when they are.
    due: OnceLock<Instant>,
    /// By slot: the number of threads that are in the code that lends its member's contribution.
    pub(crate) readers: PerMember<AtomicUsize>,
}

pub(super) struct State {
    pub(super) phase: Phase,
    /// Members that sleep on `changed`.
    sleepers: usize,
}

impl Operation {
    /// An operation at which no member has arrived.
    pub(crate) fn new(key: Key, ranks: &Arc<[Rank]>, origin: Origin) -> Self {
        let members = ranks.len();
        let phase = Phase::Gathering(Gathering::new(members));
        Self {
            key,
            ranks: Arc::clone(ranks),
            origin,
            ending: Arc::default(),
            state: Mutex::new(State { phase, sleepers: 0 }),
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
            Phase::Failed(error) => Some(Error::clone(error)),
            _ => None,
        }
    }

    /// The work is done: publishes the outputs, at `due` or now.
    pub(crate) fn succeed(&self, outputs: Box<dyn Any + Send>, due: Option<Instant>) {
        let mut state = self.state.lock();
        if !matches!(state.phase, Phase::Running) {
            return;
        }
        let Some(due) = due.filter(|due| sync::now() < *due) else {
            return self.settle(state, Phase::Done(outputs));
        };
        // No thread sleeps for outputs that are held back: members that wait sleep until then, and no longer.
        state.phase = Phase::Done(outputs);
        self.due.get_or_init(|| due);
        self.changed.notify_all();
    }

    /// Ends the operation if members are missing: work that has begun completes.
    pub(crate) fn fail_gathering(&self, error: &Error) {
        let state = self.state.lock();
        if state.phase.arrivals().is_some() {
            self.settle(state, Phase::Failed(Box::new(error.clone())));
        }
    }

    /// Ends the operation unless it is done: its work panicked, or missed the deadline.
    pub(crate) fn fail(&self, error: &Error) {
        let state = self.state.lock();
        if !self.ending.is_written() {
            self.settle(state, Phase::Failed(Box::new(error.clone())));
        }
    }

    /// Enters a last phase and wakes all members. Contributions are dropped without the lock.
    fn settle(&self, mut state: MutexGuard<'_, State>, last: Phase) {
        let former = mem::replace(&mut state.phase, last);
        self.write_end(&state.phase);
        self.changed.notify_all();
        drop(state);
        discard(former);
    }

    fn write_end(&self, last: &Phase) {
        let is_done = matches!(last, Phase::Done(_));
        // A thread that publishes what was held back may be late: that time is no part of the operation.
        let due = self.due.get().filter(|_| is_done);
        let ended = self.origin.until(due.copied().unwrap_or_else(Instant::now));
        let state = if is_done { crate::FlightState::Complete } else { crate::FlightState::Failed };
        self.ending.write(state, ended);
    }

    /// Takes a member's output out of a settled operation.
    pub(crate) fn take<O: 'static>(&self, slot: usize) -> Result<O, Error> {
        match &mut self.state.lock().phase {
            Phase::Done(outputs) => {
                let outputs = outputs.downcast_mut::<Outputs<O>>();
                let outputs = outputs.expect("the work makes outputs of this type");
                Ok(outputs.take(slot).expect("a member waits once"))
            }
            Phase::Failed(error) => Err(Error::clone(error)),
            _ => unreachable!("the operation is settled"),
        }
    }

    /// Whether a member sleeps for this operation. It waits until the operation is settled, so it does work that is queued.
    pub(crate) fn has_sleepers(&self) -> bool {
        self.state.lock().sleepers > 0
    }

    /// Wakes up to `useful` members that sleep, to help with the work; the number of them.
    ///
    /// A member that its alarm has just woken counts, though it no longer sleeps: it looks for work anyway.
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

impl fmt::Debug for Operation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Operation({:?})", self.key)
    }
}
