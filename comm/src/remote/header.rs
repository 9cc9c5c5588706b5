//! What messages say besides elements, as bytes: descriptors, and in `ends` how steps and worlds ended.
//!
//! Enums go by their places in their lists of all, numbers by their values: so nothing of the crate's own types is promised
//! to a format, and whatever comes is checked on its way back.

use std::sync::Arc;

use hsdp_kernels::{Divisor, Wire};
use hsdp_sharding::{DType, Rank, UnitId};
use postcard::ser_flavors::Flavor;
use serde::{Deserialize, Serialize};

use self::ends::EncodedWanted;
pub(crate) use self::ends::{end_bytes, end_of};
use crate::mismatch::MismatchRow;
use crate::{Channel, Counts, Descriptor, GroupId, Op, Reduction, Scaling, Stage, Tag};

mod ends;

/// A descriptor.
#[derive(Debug, Serialize, Deserialize)]
struct Encoded {
    group: u64,
    channel: u8,
    epoch: u64,
    sequence: u64,
    op: u8,
    reduction: Option<u8>,
    dtype: Option<u8>,
    counts: EncodedCounts,
    root: Option<u32>,
    peer: Option<u32>,
    scaling: Option<(u8, f32, f32)>,
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

/// What a message says.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct DataHeader {
    pub(crate) descriptor: Arc<Descriptor>,
    /// The step that its sender is in.
    pub(crate) step: u64,
    pub(crate) form: Form,
}

/// What tells operations from each other that are described alike.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Form {
    /// The function that was called.
    pub(crate) function: u8,
    /// A hash of the layout that it was called with; 0 without one.
    pub(crate) layout: u64,
    /// What its sender alone has to say.
    pub(crate) note: u64,
}

/// What a message says, as bytes.
pub(crate) fn data_header_bytes(data_header: &DataHeader) -> Vec<u8> {
    bytes(&(Encoded::from(&*data_header.descriptor), data_header.step, data_header.form))
}

/// What these bytes of a message say.
///
/// # Errors
/// What is wrong with them.
pub(crate) fn data_header_of(bytes: &[u8]) -> Result<DataHeader, String> {
    let (encoded, step, form) = read::<(Encoded, u64, Form)>(bytes)?;
    Ok(DataHeader { descriptor: shared(encoded)?, step, form })
}

/// Who waits, in what, for whom: one after the other, as bytes.
pub(crate) fn probe_bytes(path: &[MismatchRow]) -> Vec<u8> {
    let row = |row: &MismatchRow| (row.rank.get(), EncodedWanted::from(&row.wanted));
    bytes(&path.iter().map(row).collect::<Vec<_>>())
}

/// The path that these bytes say.
///
/// # Errors
/// What is wrong with them.
pub(crate) fn probe_of(bytes: &[u8]) -> Result<Vec<MismatchRow>, String> {
    read::<Vec<(u32, EncodedWanted)>>(bytes)?.into_iter().map(row).collect()
}

fn row((number, wanted): (u32, EncodedWanted)) -> Result<MismatchRow, String> {
    Ok(MismatchRow { rank: rank(number), wanted: wanted.try_into()? })
}

/// Any header as bytes.
pub(crate) fn bytes(header: &impl Serialize) -> Vec<u8> {
    postcard::to_allocvec(header).expect("numbers, texts and lists are written into memory")
}

/// Any header of bytes, which must be all of it, and as it is written here: a number has one form.
///
/// # Errors
/// What is wrong with them.
pub(crate) fn read<'a, T: Deserialize<'a> + Serialize>(encoded: &'a [u8]) -> Result<T, String> {
    let (header, rest) = postcard::take_from_bytes(encoded)
        .map_err(|error| format!("its header cannot be read: {error}"))?;
    if !rest.is_empty() {
        return Err(format!("{} bytes follow its header", rest.len()));
    }
    match postcard::serialize_with_flavor(&header, Written(encoded)) {
        Ok(()) => Ok(header),
        Err(_) => Err("its header is not in canonical form".to_owned()),
    }
}

/// What is written must be this, and goes nowhere.
struct Written<'a>(&'a [u8]);

impl Flavor for Written<'_> {
    type Output = ();

    fn try_extend(&mut self, bytes: &[u8]) -> postcard::Result<()> {
        self.0 = self.0.strip_prefix(bytes).ok_or(postcard::Error::SerializeBufferFull)?;
        Ok(())
    }

    fn try_push(&mut self, byte: u8) -> postcard::Result<()> {
        self.try_extend(&[byte])
    }

    fn finalize(self) -> postcard::Result<()> {
        if self.0.is_empty() { Ok(()) } else { Err(postcard::Error::SerializeBufferFull) }
    }
}

#[expect(clippy::cast_possible_truncation, reason = "the lists are short")]
fn place<T: PartialEq>(all: &[T], it: T) -> u8 {
    all.iter().position(|other| *other == it).expect("all are in the list") as u8
}

fn at<T: Copy>(all: &[T], place: u8, what: &str) -> Result<T, String> {
    all.get(usize::from(place)).copied().ok_or_else(|| format!("there is no {what} {place}"))
}

fn rank(number: u32) -> Rank {
    Rank::new(number as usize)
}

fn size(number: u64) -> Result<usize, String> {
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

fn shared(encoded: Encoded) -> Result<Arc<Descriptor>, String> {
    encoded.try_into().map(Arc::new)
}

#[cfg(test)]
mod tests;
