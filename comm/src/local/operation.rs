//! One operation: where its members meet, and where their outputs lie. PROTOCOL.md, "States of an operation".

use std::any::Any;
use std::fmt;
use std::mem;
use std::sync::{Arc, OnceLock};
use std::time::Instant;

use hsdp_sharding::Rank;

use super::record::Roster;
use super::running::discard;
use super::table::Key;
use crate::flight::{EntryNumber, FlightState};
use crate::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use crate::sync::{self, Condvar, Mutex, MutexGuard};
use crate::work::PerMember;
use crate::{Descriptor, Error};

/// What a member deposits, and what it takes out, with its type erased.
pub(crate) type Erased = Box<dyn Any + Send>;

/// One operation of one group.
pub(crate) struct Operation {
    key: Key,
    /// The members, by slot.
    ranks: Arc<[Rank]>,
    roster: Arc<Roster>,
    /// What its members have noted of it, by slot.
    entries: PerMember<AtomicU64>,
    /// Whether the phase is `Done` or `Failed`, so that nobody needs the lock to see that it is not.
    settled: AtomicBool,
    meeting: Mutex<Meeting>,
    changed: Condvar,
    /// When it is through, if it was held back: written when it is.
    due: OnceLock<Instant>,
    /// How many threads are in the code that lends what a member brought, by its slot.
    readers: PerMember<AtomicUsize>,
}

struct Meeting {
    phase: Phase,
    /// Members that sleep on `changed`.
    parked: usize,
}

/// Where the operation is. It only goes forward.
enum Phase {
    /// Members arrive, each in its slot.
    Gathering { arrivals: PerMember<Option<Arrival>>, missing: usize },
    /// Two of them want different things. Whoever comes now is told so too, until the end of the world gets here:
    /// nobody is ever the last.
    Disagreeing { arrivals: PerMember<Option<Arrival>> },
    /// All are there; the last one has taken the arrivals, and blocks are being run.
    Running,
    /// The blocks are done, and the outputs kept back: its channel is slow.
    Held { outputs: PerMember<Option<Erased>> },
    /// The outputs, by slot, until their members take them.
    Done { outputs: PerMember<Option<Erased>> },
    /// It ended early, for all members alike.
    Failed(Error),
}

/// What one member brought.
pub(crate) struct Arrival {
    pub(crate) descriptor: Arc<Descriptor>,
    pub(crate) deposit: Erased,
    /// What its rank has noted of it.
    pub(crate) entry: EntryNumber,
}

/// What became of an arrival.
#[must_use]
pub(crate) enum Arrived {
    /// Others are missing.
    Waiting,
    /// This was the last: the work is this member's to start.
    Last(PerMember<Arrival>),
    /// It, or a member before it, wants something else than the first: see [`Operation::wanted`].
    Disagrees,
    /// The operation had ended early.
    Refused(Error),
}

/// Who is there and who is not, while members are missing.
pub(crate) struct Attendance {
    pub(crate) arrived: Vec<Rank>,
    pub(crate) missing: Vec<Rank>,
}

impl Attendance {
    /// Whether another rank waits for `rank`: one that was to send to itself is awaited by nobody.
    pub(crate) fn others_await(&self, rank: Rank) -> bool {
        self.missing.contains(&rank) && self.arrived.iter().any(|other| *other != rank)
    }
}

impl Operation {
    pub(crate) fn new(key: Key, ranks: Arc<[Rank]>, roster: Arc<Roster>) -> Self {
        let missing = ranks.len();
        let arrivals = ranks.iter().map(|_| None).collect();
        let entries = ranks.iter().map(|_| AtomicU64::new(EntryNumber::NONE.get())).collect();
        let readers = ranks.iter().map(|_| AtomicUsize::new(0)).collect();
        let phase = Phase::Gathering { arrivals, missing };
        Self {
            key,
            ranks,
            roster,
            entries,
            settled: AtomicBool::new(false),
            meeting: Mutex::new(Meeting { phase, parked: 0 }),
            changed: Condvar::new(),
            due: OnceLock::new(),
            readers,
        }
    }

    pub(crate) fn ranks(&self) -> &Arc<[Rank]> {
        &self.ranks
    }

    pub(crate) fn is_settled(&self) -> bool {
        self.settled.load(Ordering::Acquire) || self.is_let_through()
    }

    /// Whether it was held back and its time has come: whoever sees that settles it.
    fn is_let_through(&self) -> bool {
        if self.due.get().is_none_or(|due| sync::now() < *due) {
            return false;
        }
        let mut meeting = self.meeting.lock();
        if let Phase::Held { outputs } = &mut meeting.phase {
            let outputs = mem::take(outputs);
            self.settle(meeting, Phase::Done { outputs });
        }
        true
    }

    /// A member comes to its slot. Each does so once: its sequence number is its own.
    pub(crate) fn arrive(&self, slot: usize, arrival: Arrival) -> Arrived {
        let mut meeting = self.meeting.lock();
        let (arrivals, missing) = match &mut meeting.phase {
            Phase::Gathering { arrivals, missing } => (arrivals, missing),
            Phase::Disagreeing { arrivals } => {
                self.entries[slot].store(arrival.entry.get(), Ordering::Relaxed);
                arrivals[slot] = Some(arrival);
                return Arrived::Disagrees;
            }
            Phase::Failed(error) => return Arrived::Refused(error.clone()),
            Phase::Running | Phase::Held { .. } | Phase::Done { .. } => {
                unreachable!("a member arrives once, before the work")
            }
        };
        let first = arrivals.iter().flatten().next();
        let agrees = first.is_none_or(|first| first.descriptor.agrees_with(&arrival.descriptor));
        self.entries[slot].store(arrival.entry.get(), Ordering::Relaxed);
        arrivals[slot] = Some(arrival);
        *missing -= 1;
        if agrees && *missing > 0 {
            return Arrived::Waiting;
        }
        let arrivals = mem::take(arrivals);
        if !agrees {
            meeting.phase = Phase::Disagreeing { arrivals };
            return Arrived::Disagrees;
        }
        meeting.phase = Phase::Running;
        Arrived::Last(arrivals.into_iter().flatten().collect())
    }

    /// What each member wants that has come, by slot; `None` once the work has begun or the operation is settled.
    pub(crate) fn wanted(&self) -> Option<Vec<Option<Arc<Descriptor>>>> {
        let wanted =
            |arrival: &Option<Arrival>| arrival.as_ref().map(|it| Arc::clone(&it.descriptor));
        let meeting = self.meeting.lock();
        Some(meeting.phase.arrivals()?.iter().map(wanted).collect())
    }

    /// Who is there and who is not; `None` once the work has begun or the operation failed.
    pub(crate) fn attendance(&self) -> Option<Attendance> {
        let meeting = self.meeting.lock();
        let arrivals = meeting.phase.arrivals()?;
        let ranks_where = |there: bool| {
            let slots = self.ranks.iter().zip(arrivals);
            slots.filter(|(_, slot)| slot.is_some() == there).map(|(rank, _)| *rank).collect()
        };
        Some(Attendance { arrived: ranks_where(true), missing: ranks_where(false) })
    }

    /// What `rank` brought and who is missing; `None` if `rank` is not there, or nobody is missing, or members disagree.
    pub(crate) fn gathering(&self, rank: Rank) -> Option<(Arc<Descriptor>, Vec<Rank>)> {
        let meeting = self.meeting.lock();
        let Phase::Gathering { arrivals, .. } = &meeting.phase else { return None };
        let (mut brought, mut missing) = (None, Vec::new());
        for (member, arrival) in self.ranks.iter().zip(arrivals) {
            match arrival {
                None => missing.push(*member),
                Some(arrival) if *member == rank => brought = Some(Arc::clone(&arrival.descriptor)),
                Some(_) => {}
            }
        }
        Some((brought?, missing))
    }

    /// A descriptor that a member brought; `None` if nobody came, or the work has begun.
    pub(crate) fn awaited(&self) -> Option<Arc<Descriptor>> {
        self.wanted()?.into_iter().flatten().next()
    }

    /// The threads that are in the code that lends what a member brought, counted by its slot.
    pub(crate) fn readers(&self) -> &[AtomicUsize] {
        &self.readers
    }

    /// The first member, in slot order, whose code is lending what it brought.
    pub(crate) fn lender(&self) -> Option<Rank> {
        let lends = |readers: &AtomicUsize| readers.load(Ordering::Relaxed) > 0;
        self.readers.iter().position(lends).map(|slot| self.ranks[slot])
    }

    /// What the operation failed with, if it has failed.
    pub(crate) fn failure(&self) -> Option<Error> {
        match &self.meeting.lock().phase {
            Phase::Failed(error) => Some(error.clone()),
            _ => None,
        }
    }

    /// The work is done; its members get the outputs at `due`, or now.
    pub(crate) fn succeed(&self, outputs: PerMember<Erased>, due: Option<Instant>) {
        let outputs = outputs.into_iter().map(Some).collect();
        let meeting = self.meeting.lock();
        if !matches!(meeting.phase, Phase::Running) {
            return;
        }
        match due.filter(|due| sync::now() < *due) {
            Some(due) => self.hold(meeting, outputs, due),
            None => self.settle(meeting, Phase::Done { outputs }),
        }
    }

    /// Keeps the outputs back. Nobody is put to sleep for it: members that wait sleep until then, and no longer.
    fn hold(
        &self,
        mut meeting: MutexGuard<'_, Meeting>,
        outputs: PerMember<Option<Erased>>,
        due: Instant,
    ) {
        meeting.phase = Phase::Held { outputs };
        self.due.get_or_init(|| due);
        self.changed.notify_all();
    }

    /// Ends the operation if members are missing: work that has begun is left to complete.
    pub(crate) fn fail_gathering(&self, error: &Error) {
        let meeting = self.meeting.lock();
        if meeting.phase.arrivals().is_some() {
            self.settle(meeting, Phase::Failed(error.clone()));
        }
    }

    /// Ends the operation unless it is done: its work panicked, or missed the deadline.
    pub(crate) fn fail(&self, error: &Error) {
        let meeting = self.meeting.lock();
        if !matches!(meeting.phase, Phase::Done { .. } | Phase::Failed(_)) {
            self.settle(meeting, Phase::Failed(error.clone()));
        }
    }

    /// Enters a last phase and wakes everybody. What users deposited is dropped without the lock.
    fn settle(&self, mut meeting: MutexGuard<'_, Meeting>, last: Phase) {
        // Under the lock and before the flag: what a member has waited for is settled in its ring.
        self.settle_entries(&last);
        let former = mem::replace(&mut meeting.phase, last);
        self.settled.store(true, Ordering::Release);
        self.changed.notify_all();
        drop(meeting);
        discard(former);
    }

    fn settle_entries(&self, last: &Phase) {
        let done = matches!(last, Phase::Done { .. });
        let state = if done { FlightState::Complete } else { FlightState::Failed };
        let recorder = |rank: &Rank| &self.roster.0[rank.index()].flight;
        let Some(first) = self.ranks.first().map(recorder) else { return };
        // Who lets it through may come late: that is no part of it.
        let due = self.due.get().filter(|_| done);
        let ended = due.map_or_else(|| first.now(), |due| first.at(*due));
        for (rank, entry) in self.ranks.iter().zip(&self.entries) {
            let entry = EntryNumber::new(entry.load(Ordering::Relaxed));
            recorder(rank).settle_at(entry, state, ended);
        }
    }

    /// Takes a member's output out of a settled operation.
    pub(crate) fn take(&self, slot: usize) -> Result<Erased, Error> {
        match &mut self.meeting.lock().phase {
            Phase::Done { outputs } => Ok(outputs[slot].take().expect("a member waits once")),
            Phase::Failed(error) => Err(error.clone()),
            _ => unreachable!("the operation is settled"),
        }
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
        if self.settled.load(Ordering::Acquire) {
            return;
        }
        let moment = self.due.get().map_or(moment, |due| moment.min(*due));
        meeting.parked += 1;
        self.changed.wait_until(&mut meeting, moment);
        meeting.parked -= 1;
    }
}

impl Phase {
    /// Who has come, by slot, while members are missing.
    fn arrivals(&self) -> Option<&[Option<Arrival>]> {
        match self {
            Self::Gathering { arrivals, .. } | Self::Disagreeing { arrivals } => Some(arrivals),
            _ => None,
        }
    }
}

impl fmt::Debug for Operation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Operation")
            .field("key", &self.key)
            .field("ranks", &self.ranks)
            .field("settled", &self.is_settled())
            .finish_non_exhaustive()
    }
}
