//! The description of an operation: the part that all members must agree on.

use std::fmt;

use hsdp_kernels::Scaling;
use hsdp_sharding::{DType, Rank};
use serde::de::Error as _;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use xxhash_rust::xxh3::xxh3_64;

use crate::tag::WholeTag;
use crate::{Channel, Op, Reduction, Tag};

#[cfg(test)]
mod tests;

/// The identity of a group: a hash of its ranks in order, and of its channel.
///
/// Two ranks that list the same members in different orders have different groups, and never meet.
///
/// In JSON as it is displayed, in hexadecimal: readers in other languages would round a number of
/// 64 bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct GroupId(u64);

impl GroupId {
    /// The identity of the group of `ranks`, in this order, on `channel`.
    #[must_use]
    pub fn of(ranks: &[Rank], channel: Channel) -> Self {
        let ranks = ranks.iter().flat_map(|rank| rank.get().to_le_bytes());
        Self(xxh3_64(&channel.name().bytes().chain([0]).chain(ranks).collect::<Vec<_>>()))
    }

    /// The identity of the transfers from member `from` to member `to` of this group.
    #[must_use]
    pub fn pair(self, from: Rank, to: Rank) -> Self {
        let words = [self.0, u64::from(from.get()), u64::from(to.get())];
        Self(xxh3_64(words.map(u64::to_le_bytes).as_flattened()))
    }

    /// The identity of this group without `absent`, as long as they are.
    #[must_use]
    pub fn without(self, absent: &[Rank]) -> Self {
        let absent = absent.iter().flat_map(|rank| rank.get().to_le_bytes());
        let bytes = b"without".iter().copied().chain(self.0.to_le_bytes()).chain(absent);
        Self(xxh3_64(&bytes.collect::<Vec<_>>()))
    }

    /// The identity of this group for the operations of the model with this number, which are a
    /// sequence of their own. The first model has the group itself.
    #[must_use]
    pub fn of_model(self, number: u32) -> Self {
        if number == 0 {
            return self;
        }
        let bytes = b"model".iter().copied().chain(self.0.to_le_bytes());
        Self(xxh3_64(&bytes.chain(number.to_le_bytes()).collect::<Vec<_>>()))
    }

    /// The identity whose hash this is, as a record has it.
    #[must_use]
    pub const fn from_hash(hash: u64) -> Self {
        Self(hash)
    }

    /// The hash itself.
    #[must_use]
    pub const fn get(self) -> u64 {
        self.0
    }
}

impl fmt::Display for GroupId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}", self.0)
    }
}

impl Serialize for GroupId {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        if serializer.is_human_readable() {
            return serializer.collect_str(self);
        }
        serializer.serialize_u64(self.0)
    }
}

impl<'de> Deserialize<'de> for GroupId {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        if !deserializer.is_human_readable() {
            return u64::deserialize(deserializer).map(Self);
        }
        let text = String::deserialize(deserializer)?;
        let expected = |_| format!("{text:?}, expected a group as 16 hexadecimal digits");
        u64::from_str_radix(&text, 16).map(Self).map_err(expected).map_err(D::Error::custom)
    }
}

/// The number of elements that a member sends.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Counts {
    /// This many; the same on all members.
    Each(usize),
    /// A number to and from each member, for an all_to_all. The number that `a` sends to `b` must
    /// be the number that `b` expects from `a`.
    Splits {
        /// Elements for each member.
        send: Vec<usize>,
        /// Elements from each member.
        receive: Vec<usize>,
    },
}

impl Counts {
    /// The number of elements that the member sends in total; `usize::MAX` if they are more.
    #[inline]
    #[must_use]
    pub fn total(&self) -> usize {
        match self {
            Self::Each(count) => *count,
            Self::Splits { send, .. } => {
                send.iter().fold(0, |sum, count| sum.saturating_add(*count))
            }
        }
    }

    #[inline]
    fn agree(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Each(one), Self::Each(other)) => one == other,
            // Whether the splits fit together is known when all are there.
            (Self::Splits { .. }, Self::Splits { .. }) => true,
            _ => false,
        }
    }
}

impl fmt::Display for Counts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Each(1) => f.write_str("1 element"),
            Self::Each(count) => write!(f, "{count} elements"),
            Self::Splits { send, receive } => {
                write!(f, "sends {send:?} receives {receive:?} elements")
            }
        }
    }
}

/// The description of an operation: its place in its group's sequence, and all that its members
/// must agree on.
///
/// Displayed as one line, such as
/// `reduce_scatter sum f32 1003 elements, unit 3, reduce, step 7, microbatch 0`. The alternate form
/// always shows the model and its part, like that of a [`Tag`].
///
/// Members send it to each other as bytes, in which every field has its place. A flight record has
/// a part of it, by names.
#[derive(Clone, PartialEq, Serialize, Deserialize)]
pub struct Descriptor {
    /// The group; for send and recv, the pair within it.
    pub group: GroupId,
    /// The channel of the group.
    pub channel: Channel,
    /// The epoch: the number of aborted steps that this rank has left behind.
    pub epoch: u64,
    /// The number of the operation in its group and epoch.
    pub sequence: u64,
    /// The kind of operation.
    pub op: Op,
    /// The reduction of the elements, if they are combined.
    pub reduction: Option<Reduction>,
    /// The dtype of the elements; a barrier has none.
    pub dtype: Option<DType>,
    /// The number of elements that this member sends, or expects.
    pub counts: Counts,
    /// The root, of an operation that has one.
    pub root: Option<Rank>,
    /// The other end of a send or recv.
    pub peer: Option<Rank>,
    /// Divisors and wire dtype, of a reduction of gradients.
    pub scaling: Option<Scaling>,
    /// The tag that the caller gave.
    #[serde(with = "WholeTag")]
    pub tag: Tag,
}

impl Descriptor {
    /// Whether two members issued the same call. Does not compare group, epoch and sequence, which
    /// are equal where members meet.
    #[inline]
    #[must_use]
    pub fn agrees_with(&self, other: &Self) -> bool {
        // All fields, so that a new one is not forgotten here.
        let Self {
            op,
            reduction,
            dtype,
            counts,
            root,
            scaling,
            tag,
            group: _,
            channel: _,
            epoch: _,
            sequence: _,
            peer: _,
        } = self;
        let transfer = |op| matches!(op, Op::Send | Op::Recv);
        let both_transfer = transfer(*op) && transfer(other.op);
        (*op == other.op || both_transfer)
            && *reduction == other.reduction
            && *dtype == other.dtype
            && counts.agree(&other.counts)
            && *root == other.root
            && *scaling == other.scaling
            && *tag == other.tag
    }

    /// The place of the operation in its sequence, in words.
    #[must_use]
    pub fn place(&self) -> String {
        format!("operation {} on channel {}, epoch {}", self.sequence, self.channel, self.epoch)
    }
}

impl fmt::Display for Descriptor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.op)?;
        if let Some(reduction) = self.reduction {
            write!(f, " {reduction}")?;
        }
        if let Some(dtype) = self.dtype {
            write!(f, " {dtype} {}", self.counts)?;
        }
        if let Some(root) = self.root {
            write!(f, ", root rank {root}")?;
        }
        match (self.op, self.peer) {
            (Op::Send, Some(peer)) => write!(f, " to rank {peer}")?,
            (_, Some(peer)) => write!(f, " from rank {peer}")?,
            (_, None) => {}
        }
        if let Some(scaling) = self.scaling {
            write!(f, ", {scaling}")?;
        }
        f.write_str(", ")?;
        fmt::Display::fmt(&self.tag, f)
    }
}

/// The displayed form with its place in the sequence, for short messages of failed tests.
impl fmt::Debug for Descriptor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Descriptor({}: {self})", self.place())
    }
}
