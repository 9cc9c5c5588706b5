//! Flight records as schedules: what would have become of a world that was cut off. CHECK.md,
//! "Flight records".

use std::collections::{BTreeMap, HashMap, HashSet};

use hsdp_flight::{FlightEntry, FlightGroup, FlightRecord, FlightState, GroupId, Op, Tag};
use hsdp_sharding::Rank;

use super::judge::ranges;
use super::schedules::{CommunicatorId, Issue, ListEnd, Schedules};
use crate::Error;

impl Schedules {
    /// Returns the schedules of a world that was cut off, from the flight records of its ranks: the
    /// operations of its last epoch that are not complete, and the waits for them, in the order in
    /// which each rank came to them. Each channel of a group is a communicator; each operation has
    /// a stream of its own, since it meets others by its number.
    ///
    /// A list ends where its record ends, though the rank might have gone on. A rank without a
    /// record has an empty list.
    ///
    /// # Errors
    /// [`Error::Records`] if there is no record, if two are of one rank or of worlds of different
    /// sizes, if one was taken before the world of the newest one began, if they do not agree about
    /// the members of a group, if one has two entries of an operation, or if a rank has overwritten
    /// entries that matter. [`Error::Schedules`] as for any schedules.
    pub fn from_records(records: &[FlightRecord]) -> Result<Self, Error> {
        let world = RecordedWorld::of(records)?;
        world.check_overwritten()?;
        let mut schedules = Self::new(records[0].size, None)?;
        schedules.hosts.iter_mut().for_each(|host| host.end = ListEnd::Unknown);
        let mut made = MadeSchedules::default();
        for record in records {
            schedules.hosts[record.rank.index()].end = ListEnd::CutOff;
            world.add(record, &mut schedules, &mut made)?;
        }
        Ok(schedules)
    }
}

/// The group and the number of an operation of the last epoch.
type RecordKey = (GroupId, u64);

/// Nanoseconds since 1970, which can be compared across processes.
type RecordTime = u128;

/// The records of some ranks, of which each has one.
struct RecordedWorld<'a> {
    records: BTreeMap<Rank, &'a FlightRecord>,
    epoch: u64,
    groups: BTreeMap<GroupId, &'a FlightGroup>,
    /// The operations that some rank knows to be complete: they are so on all ranks.
    complete: HashSet<RecordKey>,
}

/// The communicators and operations of the schedules so far.
#[derive(Default)]
struct MadeSchedules {
    communicators: HashMap<GroupId, CommunicatorId>,
    operations: HashMap<RecordKey, u32>,
}

/// An event of a rank.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum HostEvent {
    Issue,
    Wait,
}

impl<'a> RecordedWorld<'a> {
    fn of(records: &'a [FlightRecord]) -> Result<Self, Error> {
        let size = records.first().ok_or_else(|| refused("there is no record"))?.size;
        let newest = records.iter().max_by_key(|record| record.unix_ns(record.taken_ns));
        let mut by_rank = BTreeMap::new();
        let mut groups = BTreeMap::new();
        for record in records {
            let rank = record.rank;
            if record.size != size || rank.index() >= size {
                let other = record.size;
                return Err(refused(format!(
                    "a record of rank {rank} is of a world of {other} ranks, another of a world of {size}"
                )));
            }
            newest.map_or(Ok(()), |newest| check_world(record, newest))?;
            if by_rank.insert(rank, record).is_some() {
                return Err(refused(format!("there are two records of rank {rank}")));
            }
            for group in &record.groups {
                if groups.insert(group.id, group).is_some_and(|other| other != group) {
                    let id = group.id;
                    return Err(refused(format!("two records differ about the members of {id}")));
                }
            }
        }
        let epoch = records.iter().map(|record| record.epoch).max().unwrap_or(0);
        let entries = records.iter().flat_map(|record| &record.entries);
        let complete = entries.filter(|it| it.epoch == epoch && it.state == FlightState::Complete);
        let complete = complete.map(key).collect();
        Ok(Self { records: by_rank, epoch, groups, complete })
    }

    /// Returns the entries of a record that are not complete, of the last epoch.
    ///
    /// A call that was refused before it got a number meets no other, and a transfer of a rank to
    /// itself meets no other rank.
    fn pending(&self, record: &'a FlightRecord) -> impl Iterator<Item = &'a FlightEntry> {
        record.entries.iter().filter(|entry| {
            let group = self.groups.get(&entry.group);
            let to_itself = group.is_some_and(|it| matches!(*it.ranks, [from, to] if from == to));
            let is_pending = entry.epoch == self.epoch && !self.complete.contains(&key(entry));
            is_pending && entry.sequence != u64::MAX && !to_itself
        })
    }

    /// Adds the list of a rank.
    fn add(
        &self,
        record: &FlightRecord,
        schedules: &mut Schedules,
        made: &mut MadeSchedules,
    ) -> Result<(), Error> {
        let mut events = Vec::new();
        for entry in self.pending(record) {
            events.push((entry.issued_ns, HostEvent::Issue, entry));
            let waited = entry.waited_ns.filter(|_| entry.is_waited_for());
            events.extend(waited.map(|time| (time, HostEvent::Wait, entry)));
        }
        events.sort_by_key(|(time, event, entry)| (*time, *event, entry.number));
        let rank = record.rank;
        let mut issued = HashMap::new();
        for (_, event, entry) in events {
            match (event, issued.get(&key(entry))) {
                (HostEvent::Issue, None) => {
                    let index = self.issue(rank, entry, schedules, made)?;
                    issued.insert(key(entry), index);
                }
                (HostEvent::Issue, Some(_)) => {
                    let (group, number) = key(entry);
                    return Err(refused(format!(
                        "the record of rank {rank} has two entries of #{number} of group {group}"
                    )));
                }
                (HostEvent::Wait, Some(index)) => schedules.wait(rank, *index)?,
                (HostEvent::Wait, None) => {}
            }
        }
        Ok(())
    }

    fn issue(
        &self,
        rank: Rank,
        entry: &FlightEntry,
        schedules: &mut Schedules,
        made: &mut MadeSchedules,
    ) -> Result<usize, Error> {
        let communicator = match made.communicators.get(&entry.group) {
            Some(known) => *known,
            None => {
                let group = self.group(entry.group)?;
                let name =
                    [name(group, entry), format!("{}, group {}", name(group, entry), group.id)];
                let name = name.iter().find(|name| schedules.find(name).is_none());
                let new = schedules.communicator(name.map_or("", |it| it), &group.ranks)?;
                *made.communicators.entry(entry.group).or_insert(new)
            }
        };
        let operation = made.operations.entry(key(entry));
        let operation =
            *operation.or_insert_with(|| schedules.operation(communicator, entry.sequence));
        let op = call(entry);
        let dtype = entry.dtype.map_or("", |dtype| dtype.name());
        let count = if entry.uneven { 0 } else { entry.elements as u64 };
        let stream = u64::from(operation);
        schedules.issue_of(rank, operation, Issue { communicator, op: &op, dtype, count, stream })
    }

    fn group(&self, id: GroupId) -> Result<&'a FlightGroup, Error> {
        let unknown = || refused(format!("no record has the members of group {id}"));
        self.groups.get(&id).copied().ok_or_else(unknown)
    }

    /// Refuses records if a rank that has no entry of a pending operation may have overwritten it:
    /// as in FLIGHT.md, "Explanations".
    fn check_overwritten(&self) -> Result<(), Error> {
        let mut first: BTreeMap<GroupId, (u64, RecordTime)> = BTreeMap::new();
        let mut lowest: HashMap<(Rank, GroupId), u64> = HashMap::new();
        for (rank, record) in &self.records {
            for entry in self.pending(record) {
                let number = entry.sequence;
                let began = record.unix_ns(entry.issued_ns);
                let known = first.entry(entry.group).or_insert((number, began));
                *known = (known.0.min(number), known.1.min(began));
            }
            for entry in record.entries.iter().filter(|entry| entry.epoch == self.epoch) {
                let known = lowest.entry((*rank, entry.group)).or_insert(entry.sequence);
                *known = entry.sequence.min(*known);
            }
        }
        for (id, (number, began)) in first {
            for rank in &self.group(id)?.ranks {
                let Some(record) = self.records.get(rank) else { continue };
                let may_be_older = match (lowest.get(&(*rank, id)), record.entries.first()) {
                    (Some(lowest), _) => number < *lowest,
                    (None, Some(oldest)) => began < record.unix_ns(oldest.issued_ns),
                    (None, None) => true,
                };
                if record.overwritten > 0 && may_be_older {
                    let count = record.overwritten;
                    let group = self.group(id)?;
                    let group =
                        format!("channel {} of ranks {}", group.channel, ranges(&group.ranks));
                    return Err(refused(format!(
                        "rank {rank} has overwritten {count} entries: its record does not show whether it issued #{number} of {group}; WorldOptions::flight_entries is too small"
                    )));
                }
            }
        }
        Ok(())
    }
}

/// Refuses the record of an earlier world, as an earlier attempt of the job leaves it in its
/// folder.
fn check_world(record: &FlightRecord, newest: &FlightRecord) -> Result<(), Error> {
    let Some(before) = record.time_until_world_of(newest) else { return Ok(()) };
    let rank = record.rank;
    let newest = newest.rank;
    Err(refused(format!(
        "the record of rank {rank} is of an earlier world: it was taken {before:?} before the world of rank {newest}'s record began"
    )))
}

fn key(entry: &FlightEntry) -> RecordKey {
    (entry.group, entry.sequence)
}

/// Returns the name of a group: `channel gather of ranks 0-3`.
fn name(group: &FlightGroup, entry: &FlightEntry) -> String {
    let FlightGroup { channel, ranks, .. } = group;
    match (entry.op, &**ranks) {
        (Op::Send | Op::Recv, [from, to]) => {
            format!("channel {channel} from rank {from} to rank {to}")
        }
        _ => {
            let model = entry
                .tag
                .model
                .filter(|it| it.number > 0 && *channel != hsdp_flight::Channel::Control);
            let model = model.map(|it| format!(" of {it}")).unwrap_or_default();
            format!("channel {channel} of ranks {}{model}", ranges(ranks))
        }
    }
}

/// Returns the parts that members compare, but dtype and count: `all_gather (unit 3, gather, step
/// 7, microbatch 0)`. The two halves of a transfer are one operation.
fn call(entry: &FlightEntry) -> String {
    let FlightEntry { op, reduction, root, scaling, uneven, tag, .. } = entry;
    let op = if matches!(op, Op::Send | Op::Recv) { "transfer" } else { op.name() };
    let details = [
        reduction.map(|it| it.to_string()),
        root.map(|root| format!("root rank {root}")),
        scaling.map(|it| it.to_string()),
        uneven.then(|| "uneven".to_owned()),
        (*tag != Tag::default()).then(|| match tag.part {
            None => tag.to_string(),
            Some(_) => format!("{tag:#}"),
        }),
    ];
    let details: Vec<String> = details.into_iter().flatten().collect();
    if details.is_empty() { op.to_owned() } else { format!("{op} ({})", details.join(", ")) }
}

fn refused(problem: impl Into<String>) -> Error {
    Error::Records { problem: problem.into() }
}
