//! One operation: where its members meet, and where their outputs lie. PROTOCOL.md, "States of an operation".

use std::fmt;
use std::mem;
use std::sync::{Arc, OnceLock};
use std::time::Instant;

use hsdp_sharding::Rank;

use super::identity::{Company, Key, Number};
use super::phase::{Disagreement, Phase};
use super::running::discard;
use super::slots::{AnySlots, Slots};
use crate::flight::Ending;
use crate::sync::atomic::{AtomicUsize, Ordering};
use crate::sync::{self, Condvar, Mutex, MutexGuard};
use crate::work::{PerMember, Work};
use crate::{Descriptor, Error};

/// One operation of one group.
pub(crate) struct Operation {
    company: Arc<Company>,
    number: Number,
    /// Written when the phase is `Done` or `Failed`, so that nobody needs the lock to see that it is not.
    ending: Arc<Ending>,
    pub(super) meeting: Mutex<Meeting>,
    changed: Condvar,
    /// When it is through, if it was held back: written when it is.
    due: OnceLock<Instant>,
    /// How many threads are in the code that lends what a member brought, by its slot.
    readers: PerMember<AtomicUsize>,
}

pub(super) struct Meeting {
    pub(super) phase: Phase,
    /// Members that sleep on `changed`.
    parked: usize,
}

/// What became of an arrival.
#[must_use]
pub(crate) enum Arrived<D, W: Work> {
    /// Others are missing.
    Waiting,
    /// This was the last: the work is this member's to start.
    Last(Box<Slots<D, W>>),
    /// It, or a member before it, wants something else than the first: see [`Operation::wanted`].
    Disagrees(Disagreement),
    /// The operation had ended early.
    Refused(Error),
}

impl Operation {
    /// One at which nobody has arrived, with slots for members that bring a `D` for a `W`; if the first brings something else, it gets
    /// others.
    pub(crate) fn new<D: Send + 'static, W: Work>(company: &Arc<Company>, number: Number) -> Self {
        let members = company.ranks.len();
        let readers = (0..members).map(|_| AtomicUsize::new(0)).collect();
        let phase = Phase::Gathering { slots: Slots::<D, W>::new(members), missing: members };
        Self {
            company: Arc::clone(company),
            number,
            ending: Arc::default(),
            meeting: Mutex::new(Meeting { phase, parked: 0 }),
            changed: Condvar::new(),
            due: OnceLock::new(),
            readers,
        }
    }

    /// Whether all members have their outputs.
    pub(crate) fn is_over(&mut self) -> bool {
        matches!(self.meeting.get_mut().phase, Phase::Done { untaken: 0, .. })
    }

    /// The same in the memory of one that is over, of the same group.
    pub(crate) fn renew<D: Send + 'static, W: Work>(&mut self, number: Number) {
        let missing = self.company.ranks.len();
        let meeting = self.meeting.get_mut();
        let slots = match mem::replace(&mut meeting.phase, Phase::Running) {
            Phase::Done { slots, .. } => Slots::<D, W>::cleared(slots),
            _ => None,
        };
        let slots = slots.unwrap_or_else(|| Slots::<D, W>::new(missing));
        meeting.phase = Phase::Gathering { slots, missing };
        match Arc::get_mut(&mut self.ending) {
            Some(ending) => *ending = Ending::default(),
            // A member has not looked at how it ended.
            None => self.ending = Arc::default(),
        }
        self.due = OnceLock::new();
        self.number = number;
    }

    pub(crate) fn key(&self) -> Key {
        Key { group: self.company.group, number: self.number }
    }

    pub(crate) fn number(&self) -> Number {
        self.number
    }

    pub(crate) fn ranks(&self) -> &Arc<[Rank]> {
        &self.company.ranks
    }

    /// How it ends.
    pub(crate) fn ending(&self) -> &Arc<Ending> {
        &self.ending
    }

    pub(crate) fn is_settled(&self) -> bool {
        self.ending.is_written() || self.is_let_through()
    }

    /// Whether it was held back and its time has come: whoever sees that settles it.
    fn is_let_through(&self) -> bool {
        if self.due.get().is_none_or(|due| sync::now() < *due) {
            return false;
        }
        let mut meeting = self.meeting.lock();
        match mem::replace(&mut meeting.phase, Phase::Running) {
            Phase::Held { slots } => self.settle(meeting, self.done(slots)),
            other => meeting.phase = other,
        }
        true
    }

    /// A member comes to its slot. Each does so once: its sequence number is its own.
    pub(crate) fn arrive<D: Send + 'static, W: Work>(
        &self,
        slot: usize,
        descriptor: Arc<Descriptor>,
        deposit: D,
    ) -> Arrived<D, W> {
        let mut deposit = Some(deposit);
        let arrived = self.come(slot, descriptor, &mut deposit);
        // What is not let in is dropped without the lock.
        deposit.into_iter().for_each(discard);
        arrived
    }

    fn come<D: Send + 'static, W: Work>(
        &self,
        slot: usize,
        descriptor: Arc<Descriptor>,
        deposit: &mut Option<D>,
    ) -> Arrived<D, W> {
        let mut meeting = self.meeting.lock();
        if let Phase::Failed(error) = &meeting.phase {
            return Arrived::Refused(Error::clone(error));
        }
        let (slots, missing) = match &mut meeting.phase {
            Phase::Gathering { slots, missing } => (slots, missing),
            Phase::Disagreeing { slots, about } => {
                slots.arrivals()[slot] = Some(descriptor);
                return Arrived::Disagrees(*about);
            }
            _ => unreachable!("a member arrives once, before the work"),
        };
        let about = lay_down::<D, W>(slots, (slot, &descriptor), deposit);
        slots.arrivals()[slot] = Some(descriptor);
        *missing -= 1;
        if about.is_none() && *missing > 0 {
            return Arrived::Waiting;
        }
        Self::gathered(&mut meeting.phase, about)
    }

    /// Ends the gathering: all have come, or two of them disagree.
    fn gathered<D: Send + 'static, W: Work>(
        phase: &mut Phase,
        about: Option<Disagreement>,
    ) -> Arrived<D, W> {
        let Phase::Gathering { slots, .. } = mem::replace(phase, Phase::Running) else {
            unreachable!("it was gathering, and nobody else has the lock")
        };
        match about {
            None => Arrived::Last(Slots::typed(slots).expect("the last has just found them so")),
            Some(about) => {
                *phase = Phase::Disagreeing { slots, about };
                Arrived::Disagrees(about)
            }
        }
    }

    /// The threads that are in the code that lends what a member brought, counted by its slot.
    pub(crate) fn readers(&self) -> &[AtomicUsize] {
        &self.readers
    }

    /// The first member, in slot order, whose code is lending what it brought.
    pub(crate) fn lender(&self) -> Option<Rank> {
        let lends = |readers: &AtomicUsize| readers.load(Ordering::Relaxed) > 0;
        self.readers.iter().position(lends).map(|slot| self.ranks()[slot])
    }

    /// What the operation failed with, if it has failed.
    pub(crate) fn failure(&self) -> Option<Error> {
        match &self.meeting.lock().phase {
            Phase::Failed(error) => Some(Error::clone(error)),
            _ => None,
        }
    }

    /// The work is done; its members get the outputs in `slots` at `due`, or now.
    pub(crate) fn succeed(&self, slots: Box<dyn AnySlots>, due: Option<Instant>) {
        let meeting = self.meeting.lock();
        if !matches!(meeting.phase, Phase::Running) {
            return;
        }
        match due.filter(|due| sync::now() < *due) {
            Some(due) => self.hold(meeting, slots, due),
            None => self.settle(meeting, self.done(slots)),
        }
    }

    /// The members bring something to another round; `slots` have what those brought that have come to it.
    pub(crate) fn gather_again(&self, slots: Box<dyn AnySlots>) {
        let (mut meeting, mut slots) = (self.meeting.lock(), slots);
        if !matches!(meeting.phase, Phase::Running) {
            drop(meeting);
            return discard(slots);
        }
        let missing = slots.arrivals().iter().filter(|arrival| arrival.is_none()).count();
        meeting.phase = Phase::Gathering { slots, missing };
    }

    fn done(&self, slots: Box<dyn AnySlots>) -> Phase {
        Phase::Done { slots, untaken: self.ranks().len() }
    }

    /// Keeps the outputs back. Nobody is put to sleep for it: members that wait sleep until then, and no longer.
    fn hold(&self, mut meeting: MutexGuard<'_, Meeting>, slots: Box<dyn AnySlots>, due: Instant) {
        meeting.phase = Phase::Held { slots };
        self.due.get_or_init(|| due);
        self.changed.notify_all();
    }

    /// Ends the operation if members are missing: work that has begun is left to complete.
    pub(crate) fn fail_gathering(&self, error: &Error) {
        let mut meeting = self.meeting.lock();
        if meeting.phase.arrivals().is_some() {
            self.settle(meeting, Phase::Failed(Box::new(error.clone())));
        }
    }

    /// Ends the operation unless it is done: its work panicked, or missed the deadline.
    pub(crate) fn fail(&self, error: &Error) {
        let meeting = self.meeting.lock();
        if !matches!(meeting.phase, Phase::Done { .. } | Phase::Failed(_)) {
            self.settle(meeting, Phase::Failed(Box::new(error.clone())));
        }
    }

    /// Enters a last phase and wakes everybody. What users deposited is dropped without the lock.
    fn settle(&self, mut meeting: MutexGuard<'_, Meeting>, last: Phase) {
        let former = mem::replace(&mut meeting.phase, last);
        self.write_end(&meeting.phase);
        self.changed.notify_all();
        drop(meeting);
        discard(former);
    }

    fn write_end(&self, last: &Phase) {
        let is_done = matches!(last, Phase::Done { .. });
        // Who lets it through may come late: that is no part of it.
        let due = self.due.get().filter(|_| is_done);
        let ended = self.company.origin.until(due.copied().unwrap_or_else(Instant::now));
        if is_done { self.ending.complete(ended) } else { self.ending.fail(ended) }
    }

    /// Takes a member's output out of a settled operation.
    pub(crate) fn take<O: 'static>(&self, slot: usize) -> Result<O, Error> {
        match &mut self.meeting.lock().phase {
            Phase::Done { slots, untaken } => {
                let output = slots.output(slot).downcast_mut::<Option<O>>();
                let output = output.expect("the work makes outputs of this type");
                *untaken -= 1;
                Ok(output.take().expect("a member waits once"))
            }
            Phase::Failed(error) => Err(Error::clone(error)),
            _ => unreachable!("the operation is settled"),
        }
    }

    /// Whether a member sleeps for this operation. It goes on waiting until the operation is settled, so it does work that is queued.
    pub(crate) fn has_sleepers(&self) -> bool {
        self.meeting.lock().parked > 0
    }

    /// Wakes up to `useful` members that sleep, to help with the work; how many there are of them.
    ///
    /// One that has just been woken by its alarm counts, though it is no longer there to be woken: it looks for work anyway.
    pub(crate) fn call_for_help(&self, useful: usize) -> usize {
        let meeting = self.meeting.lock();
        let helpers = meeting.parked.min(useful);
        (0..helpers).for_each(|_| {
            self.changed.notify_one();
        });
        helpers
    }

    /// Sleeps until something changes or the moment comes. Spurious wakes are possible.
    pub(crate) fn park_until(&self, moment: Instant) {
        let mut meeting = self.meeting.lock();
        if self.ending.is_written() {
            return;
        }
        let moment = self.due.get().map_or(moment, |due| moment.min(*due));
        meeting.parked += 1;
        self.changed.wait_until(&mut meeting, moment);
        meeting.parked -= 1;
    }
}

/// Lays what a member brings into its slot, unless it disagrees with the first that has come.
fn lay_down<D: Send + 'static, W: Work>(
    slots: &mut Box<dyn AnySlots>,
    (slot, descriptor): (usize, &Descriptor),
    deposit: &mut Option<D>,
) -> Option<Disagreement> {
    match slots.arrivals().iter().flatten().next() {
        // Who has made the operation may mean other work, and not have come yet: then it is the one that disagrees.
        None => Slots::<D, W>::make_fit(slots),
        Some(first) if first.agrees_with(descriptor) => {}
        Some(_) => return Some(Disagreement::Said),
    }
    let Some(slots) = Slots::<D, W>::typed_mut(&mut **slots) else {
        return Some(Disagreement::Meant);
    };
    slots.put(slot, deposit.take());
    None
}

impl fmt::Debug for Operation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Operation")
            .field("key", &self.key())
            .field("ranks", &self.ranks())
            .field("settled", &self.is_settled())
            .finish_non_exhaustive()
    }
}
