//! The ring of a rank: its last operations, written while it runs.
//!
//! An entry costs a reading of the clock and a copy under a lock that nobody else takes but who wants a record. Nothing is
//! allocated after the world was made, except for a group that the rank issues on for the first time.

use std::collections::HashMap;
use std::fmt;
use std::sync::Arc;
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use hsdp_sharding::Rank;

use super::ending::Ending;
use super::record::{FlightEntry, FlightGroup, FlightState};
use crate::sync::Mutex;
use crate::{Channel, Descriptor, GroupId};

/// More entries than this are not kept, whatever the options say: a record of them is still a file that can be read.
const MAX_ENTRIES: usize = 1 << 16;

/// The moment from which a world counts its time: on the monotonic clock, and on the calendar.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Origin {
    moment: Instant,
    unix_us: u64,
}

impl Origin {
    pub(crate) fn now() -> Self {
        let unix = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let unix_us = u64::try_from(unix.as_micros()).unwrap_or(u64::MAX);
        Self { moment: Instant::now(), unix_us }
    }

    /// Nanoseconds from then until `moment`.
    pub(crate) fn until(&self, moment: Instant) -> u64 {
        let since = moment.saturating_duration_since(self.moment);
        u64::try_from(since.as_nanos()).unwrap_or(u64::MAX)
    }
}

/// Where an entry lies, and that it is the one that is meant.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct EntryNumber(u64);

impl EntryNumber {
    /// Of nothing that was ever written.
    const NONE: Self = Self(u64::MAX);
}

/// What a rank writes its entries into.
pub(crate) struct Recorder {
    origin: Origin,
    capacity: usize,
    ring: Mutex<Ring>,
    /// The groups that this rank has issued on, or made.
    groups: Mutex<HashMap<GroupId, Members>>,
}

struct Ring {
    /// The entry of number `n` is at `n % capacity`.
    entries: Vec<FlightEntry>,
    /// Beside each: how it ends, as long as the entry does not say so itself.
    endings: Vec<Option<Arc<Ending>>>,
    issued: u64,
}

/// Who meets in a group.
#[derive(Clone, Debug)]
pub(crate) struct Members {
    pub(crate) channel: Channel,
    pub(crate) ranks: Arc<[Rank]>,
}

impl Recorder {
    pub(crate) fn new(entries: usize, origin: Origin) -> Self {
        let capacity = entries.min(MAX_ENTRIES);
        let (entries, endings) = (Vec::with_capacity(capacity), Vec::with_capacity(capacity));
        let ring = Ring { entries, endings, issued: 0 };
        Self { origin, capacity, ring: Mutex::new(ring), groups: Mutex::default() }
    }

    /// Nanoseconds since the world began.
    pub(crate) fn now(&self) -> u64 {
        self.origin.until(Instant::now())
    }

    /// When the world began, in microseconds since 1970.
    pub(super) fn began_unix_us(&self) -> u64 {
        self.origin.unix_us
    }

    /// Notes who meets in a group.
    pub(crate) fn know(&self, group: GroupId, channel: Channel, ranks: &Arc<[Rank]>) {
        let members = Members { channel, ranks: Arc::clone(ranks) };
        let former = self.groups.lock().insert(group, members);
        drop(former);
    }

    /// Writes an entry for what is about to be issued.
    pub(crate) fn issue(&self, descriptor: &Descriptor) -> EntryNumber {
        if self.capacity == 0 {
            return EntryNumber::NONE;
        }
        let now = self.now();
        let mut ring = self.ring.lock();
        let number = ring.issued;
        ring.issued += 1;
        let entry = FlightEntry::issued(number, descriptor, now);
        let at = self.place(number);
        if at < ring.entries.len() {
            (ring.entries[at], ring.endings[at]) = (entry, None);
        } else {
            ring.entries.push(entry);
            ring.endings.push(None);
        }
        EntryNumber(number)
    }

    /// From now on the entry ends as the operation does, which others settle.
    pub(crate) fn ends_with(&self, number: EntryNumber, ending: &Arc<Ending>) {
        self.change(number, |_, own| *own = Some(Arc::clone(ending)));
    }

    /// Notes how the operation has ended, and lets go of it.
    pub(crate) fn close(&self, number: EntryNumber) {
        self.change(number, close);
    }

    /// Notes that the rank begins to wait.
    pub(crate) fn wait(&self, number: EntryNumber) {
        if self.capacity == 0 {
            return;
        }
        let now = self.now();
        self.change(number, |entry, _| entry.waited_ns = entry.waited_ns.or(Some(now)));
    }

    /// Notes how an operation ended that nobody else settles, or to which the rank was not let in. The first end counts.
    pub(crate) fn settle(&self, number: EntryNumber, state: FlightState) {
        if self.capacity == 0 {
            return;
        }
        let now = self.now();
        self.change(number, |entry, ending| {
            close(entry, ending);
            if entry.state == FlightState::Issued {
                (entry.state, entry.settled_ns) = (state, Some(now));
            }
        });
    }

    /// Notes how an operation ended that took no time worth a reading of the clock: when it was issued.
    pub(crate) fn settle_at_once(&self, number: EntryNumber, state: FlightState) {
        self.change(number, |entry, _| {
            (entry.state, entry.settled_ns) = (state, Some(entry.issued_ns))
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
        let at = self.place(number.0);
        let Ring { entries, endings, .. } = &mut *self.ring.lock();
        // Another entry may lie there meanwhile.
        if let Some(entry) = entries.get_mut(at).filter(|entry| entry.number == number.0) {
            change(entry, &mut endings[at]);
        }
    }

    fn place(&self, number: u64) -> usize {
        #[expect(clippy::cast_possible_truncation, reason = "the remainder is below the capacity")]
        let place = (number % self.capacity as u64) as usize;
        place
    }

    /// The entries that are there, oldest first, and how many older ones were overwritten.
    pub(super) fn entries(&self) -> (Vec<FlightEntry>, u64) {
        let mut copy = Vec::with_capacity(self.capacity);
        let ring = self.ring.lock();
        let ended = |(entry, ending): (&FlightEntry, &Option<Arc<Ending>>)| {
            let mut entry = *entry;
            note_end(&mut entry, ending.as_deref());
            entry
        };
        copy.extend(ring.entries.iter().zip(&ring.endings).map(ended));
        let issued = ring.issued;
        drop(ring);
        let overwritten = issued - copy.len() as u64;
        if !copy.is_empty() {
            copy.rotate_left(self.place(overwritten));
        }
        (copy, overwritten)
    }

    /// The groups of these entries.
    pub(super) fn groups_of(&self, entries: &[FlightEntry]) -> Vec<FlightGroup> {
        let mut ids: Vec<GroupId> = entries.iter().map(|entry| entry.group).collect();
        ids.sort_unstable();
        ids.dedup();
        let groups = self.groups.lock();
        let known = |id: &GroupId| {
            let Members { channel, ranks } = groups.get(id)?;
            Some(FlightGroup { id: *id, channel: *channel, ranks: ranks.to_vec() })
        };
        ids.iter().filter_map(known).collect()
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

#[cfg(test)]
mod tests;
