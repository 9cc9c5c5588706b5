//! The places of a unit's parameters, and the elements that each shard holds.

mod pieces;
mod place;
mod search;

use std::ops::Range;

use self::pieces::PieceWindow;
pub use self::pieces::{Piece, Pieces};
use self::place::{Extent, ParamPlacing};
use crate::check::MAX_ELEMENTS;
use crate::{DType, ElemCount, Error, Role, Unit};

/// Starts of parameters and lengths of shards are multiples of this number of elements: 64 bytes in
/// a 16-bit dtype, 128 in f32. So no two ranks share a cache line, and vector loads are aligned.
pub const ALIGNMENT: usize = 32;

/// A part of a unit's flat index space that is cut evenly over the shard group.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Region {
    /// Its first element in `full`.
    pub start: usize,
    /// The number of its elements, padding included: `shard_len` times the ranks of the shard
    /// group.
    pub len: usize,
    /// The number of elements of each rank's slice: a multiple of [`ALIGNMENT`], 0 if the region
    /// has no parameter.
    pub shard_len: usize,
}

impl Region {
    /// The range of elements of `full` that it takes.
    #[must_use]
    pub const fn range(&self) -> Range<usize> {
        self.start..self.start + self.len
    }
}

/// The place of a parameter in its unit. [`UnitLayout::params`] has them in declared order.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct ParamSlot {
    /// Its full name.
    pub name: String,
    /// The region in which it lies: the trainable or the frozen one.
    pub role: Role,
    /// Its first element in `full`: a multiple of [`ALIGNMENT`].
    pub start: usize,
    /// The number of its elements, without padding.
    pub len: usize,
}

impl ParamSlot {
    /// The range of elements of `full` that it takes.
    #[must_use]
    pub const fn range(&self) -> Range<usize> {
        self.start..self.start + self.len
    }
}

/// The layout of one unit over a shard group.
///
/// `full`, the unit's flat index space, consists of the trainable region and then the frozen one.
/// In each region the parameters lie one after the other in declared order. The shard group divides
/// each region evenly, so a parameter may lie in several shards. Padding comes only before the
/// start of a parameter and after the last one:
///
/// ```text
/// full    |<-------------------- trainable -------------------->|<--------- frozen ---------->|
///         | weight 0       | bias 0  | weight 1           | pad | table                 | pad |
///         | slice 0         | slice 1         | slice 2         | slice 0 | slice 1 | slice 2 |
///
/// shard 1 = trainable slice 1 | frozen slice 1
///         = [end of bias 0, start of weight 1 | middle of table]
/// ```
///
/// All places and lengths are in elements, so the layout is the same in every dtype.
///
/// ```
/// use hsdp_sharding::{Param, Unit, UnitLayout};
/// let weight = Param::new("weight", [10, 10]);
/// let bias = Param::new("bias", [10]);
/// let unit = Unit::new("h.0").param(weight).param(bias);
/// let layout = UnitLayout::new(&unit, 3)?;
/// assert_eq!(layout.params()[1].start, 128); // 100 elements, padded to a multiple of 32
/// assert_eq!(layout.shard_len(), 64); // 138 elements on three ranks, likewise
/// let held: Vec<_> = layout.pieces(1).map(|piece| (piece.param, piece.param_range())).collect();
/// assert_eq!(held, [(0, 64..100)]); // rank 1 holds the last 36 elements of the weight
/// # Ok::<(), hsdp_sharding::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct UnitLayout {
    shard_size: usize,
    trainable: Region,
    frozen: Region,
    slots: Vec<ParamSlot>,
    /// Indices into `slots` in the order of `full`: the first `trainable_count` are trainable.
    order: Vec<usize>,
    trainable_count: usize,
    stored: Option<DType>,
}

impl UnitLayout {
    /// Lays `unit` out over a shard group of `shard_size` ranks.
    ///
    /// Without granularity of rows or blocks this takes one pass over the parameters. With it, the
    /// layout searches for the smallest shard length at which every parameter is cut only where it
    /// may be: see [`padding`](Self::padding).
    ///
    /// # Errors
    /// - [`Error::EmptyShardGroup`] if `shard_size` is 0.
    /// - [`Error::EmptyUnit`], [`Error::ZeroDim`], [`Error::InvalidRows`],
    ///   [`Error::InvalidBlocks`], [`Error::InvalidMatrices`], [`Error::NoMatrices`],
    ///   [`Error::InvalidState`], [`Error::InvalidStorage`] if the unit cannot be laid out.
    /// - [`Error::TooLarge`] if it takes more than 2^48 elements, or than a `usize` counts.
    pub fn new(unit: &Unit, shard_size: usize) -> Result<Self, Error> {
        if shard_size == 0 {
            return Err(Error::EmptyShardGroup { unit: unit.name.clone() });
        }
        unit.check()?;
        let mut slots = empty_slots(unit);
        let (trainable, mut order) = region(unit, Role::Trainable, shard_size, &mut slots)?;
        let trainable_count = order.len();
        let (mut frozen, frozen_order) = region(unit, Role::Frozen, shard_size, &mut slots)?;
        check_size(unit, trainable.len as u64 + frozen.len as u64)?;
        frozen.start = trainable.len;
        for &index in &frozen_order {
            slots[index].start += frozen.start;
        }
        order.extend(frozen_order);
        let stored = unit.params.iter().find_map(|param| param.stored);
        Ok(Self { shard_size, trainable, frozen, slots, order, trainable_count, stored })
    }

    /// The number of ranks of the shard group.
    #[must_use]
    pub const fn shard_size(&self) -> usize {
        self.shard_size
    }

    /// The region of the trainable parameters, at the start of `full`.
    #[must_use]
    pub const fn trainable(&self) -> Region {
        self.trainable
    }

    /// The region of the frozen parameters, behind the trainable one.
    #[must_use]
    pub const fn frozen(&self) -> Region {
        self.frozen
    }

    /// The number of elements of `full`, padding included.
    #[must_use]
    pub const fn full_len(&self) -> usize {
        self.trainable.len + self.frozen.len
    }

    /// The number of elements of one rank's `shard`, padding included: its slice of the trainable
    /// region, then its slice of the frozen one.
    #[must_use]
    pub const fn shard_len(&self) -> usize {
        self.trainable.shard_len + self.frozen.shard_len
    }

    /// The dtype in which the frozen region is [stored](crate::Param::stored_in), if that is its
    /// only copy.
    #[must_use]
    pub const fn stored(&self) -> Option<DType> {
        self.stored
    }

    /// The number of elements of one rank's `shard` that have an f32 master, padding included:
    /// those of the trainable slice alone if the frozen region is [stored](Self::stored) in the
    /// compute dtype, and otherwise all.
    #[must_use]
    pub const fn master_len(&self) -> usize {
        match self.stored {
            Some(_) => self.trainable.shard_len,
            None => self.shard_len(),
        }
    }

    /// The place of each parameter in `full`, by its index in the unit.
    #[must_use]
    pub fn params(&self) -> &[ParamSlot] {
        &self.slots
    }

    /// The pieces that the shard of the rank at `shard_index` holds, in the order of its buffer:
    /// the trainable pieces, then the frozen ones. A shard that consists of padding has no pieces.
    ///
    /// The call makes two binary searches per region. The layout stores nothing per shard.
    ///
    /// # Panics
    /// If `shard_index` is not below [`shard_size`](Self::shard_size).
    #[must_use]
    pub fn pieces(&self, shard_index: usize) -> Pieces<'_> {
        assert!(
            shard_index < self.shard_size,
            "shard {shard_index} of a unit that is cut into {} shards",
            self.shard_size
        );
        let (trainable, frozen) = self.order.split_at(self.trainable_count);
        let slice = |region: Region| {
            let start = region.start + shard_index * region.shard_len;
            start..start + region.shard_len
        };
        let slots = &self.slots;
        let frozen_start = self.trainable.shard_len;
        Pieces::new(
            slots,
            PieceWindow::new(slots, trainable, slice(self.trainable), 0),
            PieceWindow::new(slots, frozen, slice(self.frozen), frozen_start),
        )
    }

    /// The number of elements of `full` that belong to no parameter.
    ///
    /// With element granularity this is at most 31 per parameter, and at each region's end less
    /// than 32 per rank. Granularity of rows or blocks needs more: a parameter that spans three
    /// shards or more forces the shard length to a multiple of its group of rows or block, and a
    /// parameter that spans two is shifted. The layout takes the smallest possible shard length.
    /// Only where thousands of candidates in a row have failed does it skip some of the later ones,
    /// and may then take a slightly larger length.
    #[must_use]
    pub fn padding(&self) -> ElemCount {
        let used: usize = self.slots.iter().map(|slot| slot.len).sum();
        ElemCount::of(self.full_len() - used)
    }
}

fn empty_slots(unit: &Unit) -> Vec<ParamSlot> {
    let slot = |param: &crate::Param| ParamSlot {
        name: param.name.clone(),
        role: param.role,
        start: 0,
        len: param.numel(),
    };
    unit.params.iter().map(slot).collect()
}

/// Lays out the parameters of one role from 0, writes their starts, and returns the region with the
/// order of the parameters in it.
fn region(
    unit: &Unit,
    role: Role,
    shard_size: usize,
    slots: &mut [ParamSlot],
) -> Result<(Region, Vec<usize>), Error> {
    let order: Vec<usize> =
        (0..slots.len()).filter(|&index| unit.params[index].role == role).collect();
    let extents: Vec<Extent> = order.iter().map(|&index| Extent::of(&unit.params[index])).collect();
    let blocks = extents.iter().fold(0u64, |sum, extent| sum.saturating_add(extent.blocks));
    check_size(unit, elements(blocks))?;

    let shards = shard_size as u64;
    let ParamPlacing { shard_blocks, starts } = search::smallest(&extents, shards);
    let len = check_size(unit, elements(shard_blocks.saturating_mul(shards)))?;
    for (&index, start) in order.iter().zip(starts) {
        slots[index].start = check_size(unit, elements(start))?;
    }
    Ok((Region { start: 0, len, shard_len: len / shard_size }, order))
}

fn elements(blocks: u64) -> u64 {
    blocks.saturating_mul(ALIGNMENT as u64)
}

/// `elements` as a `usize`, if a unit may have that many.
fn check_size(unit: &Unit, elements: u64) -> Result<usize, Error> {
    let limit = MAX_ELEMENTS.min(usize::MAX as u64);
    match usize::try_from(elements) {
        Ok(size) if elements <= limit => Ok(size),
        _ => Err(Error::TooLarge { what: format!("unit `{}`", unit.name), elements, limit }),
    }
}
