//! Descriptors as bytes.
//!
//! Enums go by their places in their lists of all, numbers by their values: so nothing of the public types is promised
//! to a format, and whatever comes is checked on its way back.

use std::sync::Arc;

use hsdp_kernels::{Divisor, Wire};
use hsdp_sharding::{DType, Rank, UnitId};
use serde::{Deserialize, Serialize};

use crate::{Channel, Counts, Descriptor, GroupId, Op, Reduction, Scaling, Stage, Tag};

/// A descriptor.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Encoded {
    group: u64,
    channel: u8,
    epoch: u64,
    sequence: u64,
    pub(crate) op: u8,
    reduction: Option<u8>,
    dtype: Option<u8>,
    counts: EncodedCounts,
    root: Option<u32>,
    peer: Option<u32>,
    pub(crate) scaling: Option<(u8, f32, f32)>,
    unit: Option<u32>,
    stage: u8,
    step: u64,
    microbatch: u64,
}

#[derive(Debug, Serialize, Deserialize)]
enum EncodedCounts {
    Each(u64),
    Splits { send: Vec<u64>, receive: Vec<u64> },
}

#[expect(clippy::cast_possible_truncation, reason = "the lists are short")]
pub(crate) fn place<T: PartialEq>(all: &[T], it: T) -> u8 {
    all.iter().position(|other| *other == it).expect("all are in the list") as u8
}

pub(crate) fn at<T: Copy>(all: &[T], place: u8, what: &str) -> Result<T, String> {
    all.get(usize::from(place)).copied().ok_or_else(|| format!("there is no {what} {place}"))
}

pub(crate) fn rank(number: u32) -> Rank {
    Rank::new(number as usize)
}

pub(crate) fn size(number: u64) -> Result<usize, String> {
    usize::try_from(number).map_err(|_| format!("{number} elements are too many"))
}

fn sizes(numbers: Vec<u64>) -> Result<Vec<usize>, String> {
    numbers.into_iter().map(size).collect()
}

impl From<&Descriptor> for Encoded {
    fn from(it: &Descriptor) -> Self {
        let wide = |counts: &[usize]| counts.iter().map(|count| *count as u64).collect();
        let counts = match &it.counts {
            Counts::Each(count) => EncodedCounts::Each(*count as u64),
            Counts::Splits { send, receive } => {
                EncodedCounts::Splits { send: wide(send), receive: wide(receive) }
            }
        };
        let Tag { unit, stage, step, microbatch } = it.tag;
        let scaling = it.scaling.map(|Scaling { wire, pre, post }| {
            (place(&DType::ALL, wire.dtype()), pre.value(), post.value())
        });
        Self {
            group: it.group.get(),
            channel: place(&Channel::ALL, it.channel),
            epoch: it.epoch,
            sequence: it.sequence,
            op: place(&Op::ALL, it.op),
            reduction: it.reduction.map(|it| place(&Reduction::ALL, it)),
            dtype: it.dtype.map(|it| place(&DType::ALL, it)),
            counts,
            root: it.root.map(Rank::get),
            peer: it.peer.map(Rank::get),
            scaling,
            unit: unit.map(UnitId::get),
            stage: place(&Stage::ALL, stage),
            step,
            microbatch: microbatch as u64,
        }
    }
}

impl TryFrom<Encoded> for Descriptor {
    type Error = String;

    fn try_from(it: Encoded) -> Result<Self, String> {
        let counts = match it.counts {
            EncodedCounts::Each(count) => Counts::Each(size(count)?),
            EncodedCounts::Splits { send, receive } => {
                Counts::Splits { send: sizes(send)?, receive: sizes(receive)? }
            }
        };
        let dtype = |place| at(&DType::ALL, place, "dtype");
        let reduction = it.reduction.map(|it| at(&Reduction::ALL, it, "reduction")).transpose()?;
        let tag = Tag {
            unit: it.unit.map(|unit| UnitId::new(unit as usize)),
            stage: at(&Stage::ALL, it.stage, "stage")?,
            step: it.step,
            microbatch: size(it.microbatch)?,
        };
        let scaling = |(wire, pre, post)| {
            let divisor = |value| Divisor::new(value).map_err(|error| error.to_string());
            let wire = Wire::try_from(dtype(wire)?).map_err(|error| error.to_string())?;
            Ok::<_, String>(Scaling { wire, pre: divisor(pre)?, post: divisor(post)? })
        };
        Ok(Self {
            group: GroupId::from_hash(it.group),
            channel: at(&Channel::ALL, it.channel, "channel")?,
            epoch: it.epoch,
            sequence: it.sequence,
            op: at(&Op::ALL, it.op, "operation")?,
            reduction,
            dtype: it.dtype.map(dtype).transpose()?,
            counts,
            root: it.root.map(rank),
            peer: it.peer.map(rank),
            scaling: it.scaling.map(scaling).transpose()?,
            tag,
        })
    }
}

pub(crate) fn shared(encoded: Encoded) -> Result<Arc<Descriptor>, String> {
    encoded.try_into().map(Arc::new)
}

/// For fields of other headers that are a descriptor.
pub(crate) mod described {
    use serde::de::Error as _;
    use serde::{Deserializer, Serializer};

    use super::{Arc, Descriptor, Deserialize as _, Encoded, Serialize as _, shared};

    pub(crate) fn serialize<S: Serializer>(
        it: &Arc<Descriptor>,
        serializer: S,
    ) -> Result<S::Ok, S::Error> {
        Encoded::from(&**it).serialize(serializer)
    }

    pub(crate) fn deserialize<'a, D: Deserializer<'a>>(
        deserializer: D,
    ) -> Result<Arc<Descriptor>, D::Error> {
        shared(Encoded::deserialize(deserializer)?).map_err(D::Error::custom)
    }
}

/// For fields that are a descriptor or none.
pub(crate) mod maybe_described {
    use serde::de::Error as _;
    use serde::{Deserializer, Serializer};

    use super::{Arc, Descriptor, Deserialize as _, Encoded, Serialize as _, shared};

    pub(crate) fn serialize<S: Serializer>(
        it: &Option<Arc<Descriptor>>,
        serializer: S,
    ) -> Result<S::Ok, S::Error> {
        it.as_deref().map(Encoded::from).serialize(serializer)
    }

    pub(crate) fn deserialize<'a, D: Deserializer<'a>>(
        deserializer: D,
    ) -> Result<Option<Arc<Descriptor>>, D::Error> {
        let encoded = Option::<Encoded>::deserialize(deserializer)?;
        encoded.map(shared).transpose().map_err(D::Error::custom)
    }
}
