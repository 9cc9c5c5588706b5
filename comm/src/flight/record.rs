//! What a record says: a copy of a rank's ring, and where the rank is.

use std::fmt;

use hsdp_sharding::{DType, Rank};
use serde::{Deserialize, Serialize};

use super::json::{group_id, name, optional_name, rank, ranks, scaling, tag};
use super::ring::Recorder;
use crate::backend::thread::Record;
use crate::engine::Status;
use crate::{Channel, Counts, Descriptor, GroupId, Op, Reduction, Scaling, Tag};

/// The last operations of one rank: from [`World::flight_record`](crate::World::flight_record), or from a file that a rank of
/// [`launch`](crate::launch) has written.
///
/// Times are nanoseconds since the world began, on one monotonic clock for all ranks of a process.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct FlightRecord {
    /// The rank.
    #[serde(with = "rank")]
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

/// The members of a group.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FlightGroup {
    /// Its identity.
    #[serde(with = "group_id")]
    pub id: GroupId,
    /// Its channel.
    #[serde(with = "name")]
    pub channel: Channel,
    /// Its members, in order; of a transfer, the sender and the receiver.
    #[serde(with = "ranks")]
    pub ranks: Vec<Rank>,
}

/// One operation of one rank: its [`Descriptor`] without lists, and its outcome.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct FlightEntry {
    /// The running number of the rank's entries, from 0.
    pub number: u64,
    /// The group; for send and recv, the pair within it.
    #[serde(with = "group_id")]
    pub group: GroupId,
    /// The channel of the group.
    #[serde(with = "name")]
    pub channel: Channel,
    /// The epoch in which it was issued.
    pub epoch: u64,
    /// The number of the operation in its group and epoch.
    pub sequence: u64,
    /// The kind of operation.
    #[serde(with = "name")]
    pub op: Op,
    /// How elements are combined, if they are.
    #[serde(default, skip_serializing_if = "Option::is_none", with = "optional_name")]
    pub reduction: Option<Reduction>,
    /// The dtype of the elements; a barrier has none.
    #[serde(default, skip_serializing_if = "Option::is_none", with = "optional_name")]
    pub dtype: Option<DType>,
    /// The number of elements that this rank sends, or expects.
    pub elements: usize,
    /// Whether each rank has a number of elements of its own, as in an all_to_all.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub uneven: bool,
    /// The bytes of these elements.
    pub bytes: u64,
    /// The root, of an operation that has one.
    #[serde(default, skip_serializing_if = "Option::is_none", with = "rank::optional")]
    pub root: Option<Rank>,
    /// The other end of a send or recv.
    #[serde(default, skip_serializing_if = "Option::is_none", with = "rank::optional")]
    pub peer: Option<Rank>,
    /// Divisors and wire dtype, of a reduction of gradients.
    #[serde(default, skip_serializing_if = "Option::is_none", with = "scaling")]
    pub scaling: Option<Scaling>,
    /// The tag that the caller gave.
    #[serde(with = "tag")]
    pub tag: Tag,
    /// The state when the record was taken.
    #[serde(with = "name")]
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

/// The state of an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum FlightState {
    /// It is in progress: members are missing, or its work is not done.
    Issued,
    /// It is complete.
    Complete,
    /// It ended early, or was refused because its step or its world had ended.
    Failed,
}

impl FlightState {
    /// Every state.
    pub const ALL: [Self; 3] = [Self::Issued, Self::Complete, Self::Failed];

    /// Its name: `issued`, `complete`, `failed`.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Issued => "issued",
            Self::Complete => "complete",
            Self::Failed => "failed",
        }
    }
}

impl FlightRecord {
    pub(crate) fn of(rank: Rank, size: usize, record: &Record, status: &Status) -> Self {
        let recorder: &Recorder = &record.flight;
        let end = status.world_end().map(|end| end.to_string());
        let (entries, overwritten) = recorder.entries();
        Self {
            rank,
            size,
            step: record.step(),
            epoch: record.epoch(),
            began_unix_us: recorder.began_unix_us(),
            taken_ns: recorder.now(),
            end,
            overwritten,
            groups: recorder.groups_of(&entries),
            entries,
        }
    }
}

impl FlightEntry {
    /// The entry of what is issued at `now`.
    pub(super) fn issued(number: u64, descriptor: &Descriptor, now: u64) -> Self {
        let Descriptor { group, channel, epoch, sequence, op, reduction, dtype, .. } = *descriptor;
        let Descriptor { root, peer, scaling, tag, .. } = *descriptor;
        let elements = descriptor.counts.total();
        let bytes = elements.saturating_mul(dtype.map_or(0, DType::size_bytes));
        Self {
            number,
            group,
            channel,
            epoch,
            sequence,
            op,
            reduction,
            dtype,
            elements,
            uneven: matches!(descriptor.counts, Counts::Splits { .. }),
            bytes: bytes as u64,
            root,
            peer,
            scaling,
            tag,
            state: FlightState::Issued,
            issued_ns: now,
            waited_ns: None,
            settled_ns: None,
        }
    }

    /// Whether two members issued the same call, as [`Descriptor::agrees_with`] compares it.
    #[must_use]
    pub fn agrees_with(&self, other: &Self) -> bool {
        let transfer = |op| matches!(op, Op::Send | Op::Recv);
        let both_transfer = transfer(self.op) && transfer(other.op);
        (self.op == other.op || both_transfer)
            && self.reduction == other.reduction
            && self.dtype == other.dtype
            && self.uneven == other.uneven
            && (self.uneven || self.elements == other.elements)
            && self.root == other.root
            && self.scaling == other.scaling
            && self.tag == other.tag
    }

    /// Whether the rank waits for it, or waited until it failed.
    #[must_use]
    pub fn is_waited_for(&self) -> bool {
        self.waited_ns.is_some() && self.state != FlightState::Complete
    }
}

/// Displayed as its [`Descriptor`]; if each rank has a number of elements of its own, with the total.
impl fmt::Display for FlightEntry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let counts = Counts::Each(self.elements);
        let Self { group, channel, epoch, sequence, op, reduction, dtype, .. } = *self;
        let Self { root, peer, scaling, tag, .. } = *self;
        let descriptor = Descriptor {
            group,
            channel,
            epoch,
            sequence,
            op,
            reduction,
            dtype,
            counts,
            root,
            peer,
            scaling,
            tag,
        };
        descriptor.fmt(f)
    }
}
