//! The content of a record: a copy of a rank's ring, and the rank's present place.

use std::fmt;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use hsdp_kernels::Scaling;
use hsdp_sharding::{DType, Rank};
use serde::{Deserialize, Serialize};

use crate::{Channel, Counts, Descriptor, GroupId, Op, Reduction, Tag};

/// The last operations of one rank: from `hsdp_comm::World::flight_record`, or from a file that a
/// rank of `hsdp_comm::launch` has written.
///
/// Times are nanoseconds since the world began, on one monotonic clock for all ranks of a process.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct FlightRecord {
    /// The rank.
    pub rank: Rank,
    /// Ranks in the world.
    pub size: usize,
    /// The step that the rank is in.
    pub step: u64,
    /// The rank's epoch: the number of aborted steps that it has left behind.
    pub epoch: u64,
    /// When the world began, in microseconds since 1970. The times of entries count from there.
    pub began_unix_us: u64,
    /// When the record was taken.
    pub taken_ns: u64,
    /// The error that ended the world, in words, if it has ended early.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub end: Option<String>,
    /// The number of entries that later ones have overwritten.
    pub overwritten: u64,
    /// The groups of the entries.
    pub groups: Vec<FlightGroup>,
    /// The operations of the rank, oldest first.
    pub entries: Vec<FlightEntry>,
}

impl FlightRecord {
    /// A time of this record in nanoseconds since 1970, which can be compared with those of other
    /// processes.
    #[must_use]
    pub fn unix_ns(&self, ns: u64) -> u128 {
        u128::from(self.began_unix_us) * 1000 + u128::from(ns)
    }

    /// The time from the moment when this record was taken until the world of `other` began; `None`
    /// if that began before.
    ///
    /// If there is such a time, the two are of different worlds: a rank may leave a record only
    /// when all ranks of its world have begun. Between hosts this needs clocks that differ by less
    /// than the time from the moment when the last rank of a world began until the first one left
    /// its record.
    #[must_use]
    pub fn time_until_world_of(&self, other: &Self) -> Option<Duration> {
        let until = other.unix_ns(0).checked_sub(self.unix_ns(self.taken_ns))?;
        let until = Duration::from_nanos(u64::try_from(until).unwrap_or(u64::MAX));
        Some(until).filter(|until| !until.is_zero())
    }
}

/// The members of a group.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FlightGroup {
    /// Its identity.
    pub id: GroupId,
    /// Its channel.
    pub channel: Channel,
    /// Its members, in order; of a transfer, the sender and the receiver.
    pub ranks: Vec<Rank>,
}

/// One operation of one rank: its [`Descriptor`] without lists, and its outcome.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct FlightEntry {
    /// The running number of the rank's entries, from 0.
    pub number: u64,
    /// The group; for send and recv, the pair within it.
    pub group: GroupId,
    /// The channel of the group.
    pub channel: Channel,
    /// The epoch in which it was issued.
    pub epoch: u64,
    /// The number of the operation in its group and epoch.
    pub sequence: u64,
    /// The kind of operation.
    pub op: Op,
    /// The reduction of the elements, if they are combined.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reduction: Option<Reduction>,
    /// The dtype of the elements; a barrier has none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub dtype: Option<DType>,
    /// The number of elements that this rank sends, or expects.
    pub elements: usize,
    /// Whether each rank has a number of elements of its own, as in an all_to_all.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub uneven: bool,
    /// The bytes of these elements.
    pub bytes: u64,
    /// The root, of an operation that has one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub root: Option<Rank>,
    /// The other end of a send or recv.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub peer: Option<Rank>,
    /// Divisors and wire dtype, of a reduction of gradients.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub scaling: Option<Scaling>,
    /// The tag that the caller gave.
    pub tag: Tag,
    /// The state when the record was taken.
    pub state: FlightState,
    /// When it was issued.
    pub issued_ns: u64,
    /// When the rank began to wait for it, if it had to wait.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub waited_ns: Option<u64>,
    /// When it completed or failed. For a small operation in a group of one, the time of its issue.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub settled_ns: Option<u64>,
}

names! {
    /// The state of an operation.
    FlightState {
        /// It is in progress: members are missing, or its work is not done.
        Issued = "issued",
        /// It is complete.
        Complete = "complete",
        /// It ended early, or was refused because its step or its world had ended.
        Failed = "failed",
    }
}

impl FlightEntry {
    /// The entry of an operation that is issued at `now`.
    #[inline]
    pub(crate) fn issued(number: u64, descriptor: &Descriptor, now: u64) -> Self {
        let Descriptor { group, channel, epoch, sequence, op, reduction, dtype, .. } = *descriptor;
        let Descriptor { root, peer, scaling, tag, .. } = *descriptor;
        let elements = descriptor.counts.total();
        let bytes = elements.saturating_mul(dtype.map_or(0, DType::size_bytes)) as u64;
        let uneven = matches!(descriptor.counts, Counts::Splits { .. });
        let state = FlightState::Issued;
        let issued_ns = now;
        let waited_ns = None;
        let settled_ns = None;
        #[rustfmt::skip]
        let entry = Self {
            number, group, channel, epoch, sequence, op, reduction, dtype, elements, uneven, bytes, root, peer, scaling, tag,
            state, issued_ns, waited_ns, settled_ns,
        };
        entry
    }

    /// Its descriptor; if each rank has a number of elements of its own, with the total.
    fn descriptor(&self) -> Descriptor {
        let Self { group, channel, epoch, sequence, op, reduction, dtype, elements, .. } = *self;
        let Self { root, peer, scaling, tag, .. } = *self;
        let counts = Counts::Each(elements);
        #[rustfmt::skip]
        let descriptor = Descriptor {
            group, channel, epoch, sequence, op, reduction, dtype, counts, root, peer, scaling, tag,
        };
        descriptor
    }

    /// Whether two members issued the same call, as [`Descriptor::agrees_with`] compares it.
    #[must_use]
    pub fn agrees_with(&self, other: &Self) -> bool {
        let elements = if other.uneven { self.elements } else { other.elements };
        let other_call = Descriptor { counts: Counts::Each(elements), ..other.descriptor() };
        self.uneven == other.uneven && self.descriptor().agrees_with(&other_call)
    }

    /// Whether the rank waits for it, or waited until it failed.
    #[must_use]
    pub fn is_waited_for(&self) -> bool {
        self.waited_ns.is_some() && self.state != FlightState::Complete
    }
}

/// Displayed as its [`Descriptor`]; if each rank has a number of elements of its own, with the
/// total.
impl fmt::Display for FlightEntry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.descriptor().fmt(f)
    }
}

/// The version of the text. It goes up when a reader of the former version would misunderstand it.
const VERSION: u64 = 1;

/// Records of larger worlds are refused: an explanation takes memory for each rank.
const MAX_SIZE: usize = 1 << 20;

/// The reason why a text cannot be read as a flight record.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum FlightError {
    /// It is not JSON, or a field is missing or invalid.
    #[error("not a flight record: {problem}")]
    Malformed {
        /// The problem, and where it is.
        problem: String,
    },
    /// It was written by another version of this library.
    #[error("a flight record of version {found}; this library reads version {known}")]
    Version {
        /// Its version.
        found: u64,
        /// The one that can be read.
        known: u64,
    },
}

#[derive(Serialize)]
struct Written<'a> {
    version: u64,
    #[serde(flatten)]
    record: &'a FlightRecord,
}

#[derive(Deserialize)]
struct RecordVersion {
    version: u64,
}

impl FlightRecord {
    /// The record as JSON, with a version.
    ///
    /// # Panics
    /// Never: JSON can represent every record.
    #[must_use]
    pub fn to_json(&self) -> String {
        let written = Written { version: VERSION, record: self };
        serde_json::to_string(&written).expect("numbers, names and lists")
    }

    /// Reads a record that [`to_json`](Self::to_json) has written.
    ///
    /// # Errors
    /// [`FlightError::Version`], or [`FlightError::Malformed`] with line and column, or with the
    /// numbers that do not fit together.
    pub fn from_json(text: &str) -> Result<Self, FlightError> {
        let RecordVersion { version } = parsed(text)?;
        if version != VERSION {
            return Err(FlightError::Version { found: version, known: VERSION });
        }
        let record: Self = parsed(text)?;
        record.check().map_err(|problem| FlightError::Malformed { problem })?;
        Ok(record)
    }

    /// Whether its numbers fit together; if not, the reason.
    fn check(&self) -> Result<(), String> {
        let Self { rank, size, .. } = *self;
        if size > MAX_SIZE {
            return Err(format!("a world of {size} ranks; at most {MAX_SIZE} are read"));
        }
        if rank.index() >= size {
            return Err(format!("rank {rank} of a world of {size}"));
        }
        for FlightGroup { id, ranks, .. } in &self.groups {
            if let Some(member) = ranks.iter().find(|member| member.index() >= size) {
                return Err(format!("group {id} has rank {member} of a world of {size}"));
            }
        }
        let (len, overwritten) = (self.entries.len(), self.overwritten);
        let Some(end) = overwritten.checked_add(len as u64) else {
            return Err(format!("{len} entries after {overwritten} others; u64 cannot count them"));
        };
        let numbers = self.entries.iter().map(|entry| entry.number);
        let mut numbers = numbers.zip(overwritten..end);
        match numbers.find(|(number, expected)| number != expected) {
            Some((number, expected)) => {
                Err(format!("entry {number} stands where {expected} belongs"))
            }
            None => Ok(()),
        }
    }
}

fn parsed<'a, T: Deserialize<'a>>(text: &'a str) -> Result<T, FlightError> {
    let malformed =
        |error: serde_json::Error| FlightError::Malformed { problem: error.to_string() };
    serde_json::from_str(text).map_err(malformed)
}

impl FlightRecord {
    /// Writes the record as `rank-<n>.json` into a folder, and returns the path of the file. The
    /// folder is made if it does not exist.
    ///
    /// The file gets its name when it is complete, and replaces a file of an earlier world.
    ///
    /// # Errors
    /// The error of the system, if the folder or the file cannot be written.
    pub fn write_to(&self, folder: &Path) -> io::Result<PathBuf> {
        fs::create_dir_all(folder)?;
        let path = folder.join(format!("rank-{}.json", self.rank));
        let unfinished = folder.join(format!(".rank-{}.json.{}", self.rank, std::process::id()));
        let written = fs::write(&unfinished, self.to_json());
        let named = written.and_then(|()| fs::rename(&unfinished, &path));
        if named.is_err() {
            let _ = fs::remove_file(&unfinished);
        }
        named.map(|()| path)
    }
}
