//! The runtime's all-gather: shards of a unit in f32 become whole parameters in the compute dtype, in one pass.

use std::ops::Range;
use std::sync::Arc;

use hsdp_kernels::{DisjointBuffer, HostBuffer, ValuesMut, cast, cast_past_caches};
use hsdp_sharding::{Piece, UnitLayout};

use super::{BLOCK_ELEMENTS, Meter, Work, owned_blocks, pieces_in, take_values};

/// What a member brings: its shard, to be read where it lies, and its parameters' buffers, to be filled.
pub(crate) struct UnitGatherDeposit {
    pub(crate) layout: Arc<UnitLayout>,
    pub(crate) shard: Arc<Vec<f32>>,
    pub(crate) targets: Vec<HostBuffer>,
}

/// Every member's shard, cast into every member's parameters.
pub(crate) struct UnitGather {
    shards: Vec<Arc<Vec<f32>>>,
    targets: Vec<Vec<DisjointBuffer>>,
    /// What each shard holds.
    pieces: Vec<Vec<Piece>>,
    /// Whose shard, and which elements of it. They cover all shards once.
    blocks: Vec<(usize, Range<usize>)>,
    /// How elements are written.
    cast: fn(ValuesMut<'_>, &[f32]),
}

/// What all members get together, in bytes, above which it is written past the caches: little of it would still be there
/// when the next unit comes.
const PAST_CACHES: usize = 4 << 20;

impl UnitGather {
    /// # Errors
    /// If the members do not have the same layout.
    pub(crate) fn new(members: Vec<UnitGatherDeposit>) -> Result<Self, String> {
        let layout = Arc::clone(&members[0].layout);
        if members.iter().any(|member| member.layout != layout) {
            return Err("ranks have different layouts of one unit".to_owned());
        }
        let owned = (0..layout.shard_size()).map(|from| (from, 0..layout.shard_len()));
        let blocks = owned_blocks(owned, BLOCK_ELEMENTS);
        let pieces = (0..layout.shard_size()).map(|slot| layout.pieces(slot).collect()).collect();
        let disjoint = |targets: Vec<_>| targets.into_iter().map(DisjointBuffer::from).collect();
        let members = members.into_iter().map(|member| (member.shard, disjoint(member.targets)));
        let (shards, targets): (_, Vec<_>) = members.unzip();
        let mut work = Self { shards, targets, pieces, blocks, cast };
        if work.bytes() > PAST_CACHES {
            work.cast = cast_past_caches;
        }
        Ok(work)
    }

    /// Only into the first member's buffers, and from as many members as there are shards: those behind them hold the same.
    ///
    /// # Errors
    /// If the members do not have the same layout.
    pub(crate) fn into_first(members: Vec<UnitGatherDeposit>) -> Result<Self, String> {
        let shards = members[0].layout.shard_size();
        let mut work = Self::new(members)?;
        work.shards.truncate(shards);
        work.targets.truncate(1);
        work.cast = if work.bytes() > PAST_CACHES { cast_past_caches } else { cast };
        Ok(work)
    }
}

impl Work for UnitGather {
    type Output = Vec<HostBuffer>;

    fn blocks(&self) -> usize {
        self.blocks.len()
    }

    fn bytes(&self) -> usize {
        let filled: usize =
            self.targets[0].iter().map(|target| element_bytes(target) * target.len()).sum();
        filled * self.targets.len()
    }

    /// Reads the block once from memory, and writes it for every member while it is in the cache.
    ///
    /// Bytes count with the padding between the pieces: a wire would carry it.
    fn run(&self, block: usize, meter: &Meter<'_>) {
        let (from, range) = &self.blocks[block];
        let shard = &self.shards[*from];
        for (to, targets) in self.targets.iter().enumerate() {
            for (param, place, range) in pieces_in(&self.pieces[*from], range.clone()) {
                // SAFETY: CO-2, pieces cover each element of a parameter once, blocks do not overlap, each is run once.
                let target = unsafe { take_values(&targets[param], range) };
                (self.cast)(target, &shard[place]);
            }
            if let Some(target) = targets.first() {
                meter.received(to, *from, range.len(), element_bytes(target));
            }
        }
    }

    fn finish(self) -> Vec<Vec<HostBuffer>> {
        let whole =
            |targets: Vec<_>| targets.into_iter().map(DisjointBuffer::into_buffer).collect();
        self.targets.into_iter().map(whole).collect()
    }
}

fn element_bytes(buffer: &DisjointBuffer) -> usize {
    match buffer {
        DisjointBuffer::F32(_) => 4,
        DisjointBuffer::F16(_) | DisjointBuffer::BF16(_) => 2,
    }
}
