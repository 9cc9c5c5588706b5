//! The ring of a rank: its last operations, written while it runs; and the end of an operation, for
//! the rings of all its members.
//!
//! An entry costs a reading of the clock, and a copy under a lock that only readers of records take
//! besides. Nothing is allocated after the world was made, except for a group that the rank issues
//! on for the first time.
//!
//! Under `--cfg shuttle` the lock and the atomics are those of a model checker.

use std::collections::{BTreeSet, HashMap};
use std::fmt;
use std::sync::Arc;
#[cfg(not(shuttle))]
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use hsdp_sharding::Rank;
#[cfg(not(shuttle))]
use parking_lot::Mutex;
#[cfg(shuttle)]
use shuttle::sync::atomic::{AtomicU64, Ordering};

use crate::{Channel, Descriptor, FlightEntry, FlightGroup, FlightRecord, FlightState, GroupId};

/// The most entries of a ring, whatever the options say: a record of them is still a file that can
/// be read.
const MAX_ENTRIES: usize = 1 << 16;

/// The moment from which a world counts its time: on the monotonic clock, and on the calendar.
#[derive(Clone, Copy, Debug)]
pub struct Origin {
    moment: Instant,
    unix_us: u64,
}

impl Origin {
    /// This moment.
    #[must_use]
    pub fn now() -> Self {
        let unix = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let unix_us = u64::try_from(unix.as_micros()).unwrap_or(u64::MAX);
        Self { moment: Instant::now(), unix_us }
    }

    /// Nanoseconds from then until `moment`.
    #[inline]
    #[must_use]
    pub fn until(&self, moment: Instant) -> u64 {
        let since = moment.saturating_duration_since(self.moment);
        u64::try_from(since.as_nanos()).unwrap_or(u64::MAX)
    }
}

/// The number of an entry, for later changes; they have no effect if the entry was overwritten
/// meanwhile.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EntryNumber(u64);

/// The last operations of a rank, as it writes them.
pub struct Recorder {
    origin: Origin,
    capacity: usize,
    ring: Mutex<Ring>,
    /// The groups that this rank has issued on, or made.
    groups: Mutex<HashMap<GroupId, Known>>,
}

/// A group's channel and members.
type Known = (Channel, Arc<[Rank]>);

struct Ring {
    /// The entry of number `n` is at `n % capacity`. Beside each is its end, until the entry has it
    /// itself.
    entries: Vec<(FlightEntry, Option<Arc<Ending>>)>,
    issued: u64,
}

impl Recorder {
    /// A ring of so many entries, of a world that began at `origin`. With 0 entries it keeps
    /// nothing, and reads no clock.
    #[must_use]
    pub fn new(entries: usize, origin: Origin) -> Self {
        let capacity = entries.min(MAX_ENTRIES);
        let ring = Ring { entries: Vec::with_capacity(capacity), issued: 0 };
        Self { origin, capacity, ring: Mutex::new(ring), groups: Mutex::default() }
    }

    /// Nanoseconds since the world began.
    #[inline]
    #[must_use]
    pub fn now(&self) -> u64 {
        self.origin.until(Instant::now())
    }

    /// Notes the members of a group.
    pub fn know(&self, group: GroupId, channel: Channel, ranks: &Arc<[Rank]>) {
        let former = self.groups.lock().insert(group, (channel, Arc::clone(ranks)));
        drop(former);
    }

    /// Writes an entry for an operation that is about to be issued.
    #[inline]
    pub fn issue(&self, descriptor: &Descriptor) -> EntryNumber {
        if self.capacity == 0 {
            return EntryNumber(u64::MAX);
        }
        let now = self.now();
        let mut ring = self.ring.lock();
        let number = ring.issued;
        ring.issued += 1;
        let entry = (FlightEntry::issued(number, descriptor, now), None);
        match ring.entries.get_mut(self.index(number)) {
            Some(oldest) => *oldest = entry,
            None => ring.entries.push(entry),
        }
        EntryNumber(number)
    }

    /// From now on the entry ends as the operation does, which others settle.
    pub fn ends_with(&self, number: EntryNumber, ending: &Arc<Ending>) {
        self.change(number, |_, own| *own = Some(Arc::clone(ending)));
    }

    /// Notes the end of the operation, and lets go of it.
    pub fn close(&self, number: EntryNumber) {
        self.change(number, close);
    }

    /// Notes that the rank begins to wait. The first wait counts.
    pub fn wait(&self, number: EntryNumber) {
        self.change(number, |entry, _| {
            entry.waited_ns = entry.waited_ns.or_else(|| Some(self.now()));
        });
    }

    /// Notes the end of an operation that no other thread settles, or that refused the rank. The
    /// first end counts.
    pub fn settle(&self, number: EntryNumber, state: FlightState) {
        self.change(number, |entry, ending| {
            close(entry, ending);
            if entry.state == FlightState::Issued {
                (entry.state, entry.settled_ns) = (state, Some(self.now()));
            }
        });
    }

    /// Notes the end of an operation that took no time worth a reading of the clock: it ended when
    /// it was issued.
    pub fn settle_at_once(&self, number: EntryNumber, state: FlightState) {
        self.change(number, |entry, _| {
            (entry.state, entry.settled_ns) = (state, Some(entry.issued_ns));
        });
    }

    fn change(
        &self,
        number: EntryNumber,
        change: impl FnOnce(&mut FlightEntry, &mut Option<Arc<Ending>>),
    ) {
        if self.capacity == 0 {
            return;
        }
        let mut ring = self.ring.lock();
        match ring.entries.get_mut(self.index(number.0)) {
            Some((entry, ending)) if entry.number == number.0 => change(entry, ending),
            // Another entry is there meanwhile.
            _ => {}
        }
    }

    #[inline]
    fn index(&self, number: u64) -> usize {
        #[expect(clippy::cast_possible_truncation, reason = "the remainder is below the capacity")]
        let index = (number % self.capacity as u64) as usize;
        index
    }

    /// A record of the ring, of rank `rank` of `size`: in step 0 and epoch 0 of a world that has
    /// not ended.
    #[must_use]
    pub fn record(&self, rank: Rank, size: usize) -> FlightRecord {
        let (entries, overwritten) = self.entries();
        FlightRecord {
            rank,
            size,
            step: 0,
            epoch: 0,
            began_unix_us: self.origin.unix_us,
            taken_ns: self.now(),
            end: None,
            overwritten,
            groups: self.groups_of(&entries),
            entries,
        }
    }

    /// The entries of the ring, oldest first, and the number of older ones that were overwritten.
    fn entries(&self) -> (Vec<FlightEntry>, u64) {
        let mut copy = Vec::with_capacity(self.capacity);
        let ring = self.ring.lock();
        copy.extend(ring.entries.iter().map(|(entry, ending)| {
            let mut entry = *entry;
            note_end(&mut entry, ending.as_deref());
            entry
        }));
        let overwritten = ring.issued - copy.len() as u64;
        drop(ring);
        if !copy.is_empty() {
            copy.rotate_left(self.index(overwritten));
        }
        (copy, overwritten)
    }

    /// The groups of these entries.
    fn groups_of(&self, entries: &[FlightEntry]) -> Vec<FlightGroup> {
        let ids: BTreeSet<GroupId> = entries.iter().map(|entry| entry.group).collect();
        let groups = self.groups.lock();
        let group = |id| {
            let (channel, ranks) = groups.get(&id)?;
            Some(FlightGroup { id, channel: *channel, ranks: ranks.to_vec() })
        };
        ids.into_iter().filter_map(group).collect()
    }
}

fn close(entry: &mut FlightEntry, ending: &mut Option<Arc<Ending>>) {
    note_end(entry, ending.take().as_deref());
}

fn note_end(entry: &mut FlightEntry, ending: Option<&Ending>) {
    if let Some((state, settled)) = ending.and_then(Ending::read) {
        (entry.state, entry.settled_ns) = (state, Some(settled));
    }
}

/// One that keeps nothing.
impl Default for Recorder {
    fn default() -> Self {
        Self::new(0, Origin::now())
    }
}

impl fmt::Debug for Recorder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Recorder").field("capacity", &self.capacity).finish_non_exhaustive()
    }
}

/// A lock that does not remember panics, as `parking_lot`'s.
#[cfg(shuttle)]
#[derive(Default)]
pub(crate) struct Mutex<T>(shuttle::sync::Mutex<T>);

#[cfg(shuttle)]
impl<T> Mutex<T> {
    #[track_caller]
    pub(crate) fn new(value: T) -> Self {
        Self(shuttle::sync::Mutex::new(value))
    }

    pub(crate) fn lock(&self) -> shuttle::sync::MutexGuard<'_, T> {
        self.0.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }
}

/// The state in which an operation ended, and the time: written once, by the thread that settles
/// it, and read where the members' entries are.
///
/// Both are in one word, so that a reader who sees the end sees the state: the time above, the
/// state in the two lowest bits.
#[derive(Debug, Default)]
pub struct Ending(AtomicU64);

/// The bits of a state. Those of [`FlightState::Issued`] are zero, as is the word before the end.
const STATE_BITS: u32 = 2;

impl Ending {
    /// The operation has ended in this state, which is not `Issued`, at `now`. A thread that sees
    /// the end sees all that the settling thread did before.
    #[inline]
    pub fn write(&self, state: FlightState, now: u64) {
        debug_assert_ne!(state, FlightState::Issued, "an end");
        self.0.store((now << STATE_BITS) | state as u64, Ordering::Release);
    }

    /// Whether the operation has ended.
    #[inline]
    #[must_use]
    pub fn is_written(&self) -> bool {
        self.0.load(Ordering::Acquire) != FlightState::Issued as u64
    }

    /// The state and the time, once they are written.
    #[inline]
    pub(crate) fn read(&self) -> Option<(FlightState, u64)> {
        let word = self.0.load(Ordering::Acquire);
        let bits = word & ((1 << STATE_BITS) - 1);
        let state = FlightState::ALL.into_iter().find(|state| *state as u64 == bits)?;
        (state != FlightState::Issued).then_some((state, word >> STATE_BITS))
    }
}

#[cfg(test)]
mod tests;
