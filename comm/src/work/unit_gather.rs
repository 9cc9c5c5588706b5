//! The runtime's all-gather: shards of a unit become whole parameters, in one pass.

use std::ops::Range;
use std::sync::Arc;

use hsdp_kernels::{
    DisjointBuffer, HostBuffer, SharedBuffer, Values, ValuesMut, copy_values_past_caches,
};
use hsdp_sharding::UnitLayout;

use super::{BLOCK_ELEMENTS, Meter, Work, pieces_in, take_values};

/// What a member brings: its shard, to be read where it lies, and its parameters' buffers, to be filled. All are of one dtype.
pub(crate) struct UnitGatherDeposit {
    pub(crate) layout: Arc<UnitLayout>,
    pub(crate) shard: SharedBuffer,
    pub(crate) targets: Vec<HostBuffer>,
}

/// Every member's shard, copied into every member's parameters.
pub(crate) struct UnitGather {
    shards: Vec<SharedBuffer>,
    targets: Vec<Vec<DisjointBuffer>>,
    layout: Arc<UnitLayout>,
    /// How many shards, next to each other, share a block.
    neighbours: usize,
    /// How elements are written.
    copy: fn(ValuesMut<'_>, Values<'_>),
}

/// What all members get together, in bytes, above which it is written past the caches: little of it would still be there
/// when the next unit comes.
const PAST_CACHES: usize = 4 << 20;

/// Shards of fewer elements are written through the caches all the same: past them, each piece is waited for at its end.
const LONG: usize = 512;

/// Shards share blocks only where so many blocks are left for threads to claim.
const LEAST_BLOCKS: usize = 16;

impl UnitGather {
    /// # Errors
    /// If the members do not have the same layout.
    pub(crate) fn new(members: Vec<UnitGatherDeposit>) -> Result<Self, String> {
        let layout = Arc::clone(&members[0].layout);
        if members.iter().any(|member| member.layout != layout) {
            return Err("ranks have different layouts of one unit".to_owned());
        }
        let neighbours = neighbours(layout.shard_size(), layout.shard_len());
        let disjoint = |targets: Vec<_>| targets.into_iter().map(DisjointBuffer::from).collect();
        let members = members.into_iter().map(|member| (member.shard, disjoint(member.targets)));
        let (shards, targets): (_, Vec<_>) = members.unzip();
        let mut work = Self { shards, targets, layout, neighbours, copy: through_caches };
        work.copy = work.copy();
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
        work.copy = work.copy();
        Ok(work)
    }

    /// How elements are best written.
    fn copy(&self) -> fn(ValuesMut<'_>, Values<'_>) {
        let is_large = self.bytes() > PAST_CACHES && self.layout.shard_len() >= LONG;
        if is_large { copy_values_past_caches } else { through_caches }
    }

    /// Into how many blocks each shard is cut.
    fn cuts(&self) -> usize {
        self.layout.shard_len().div_ceil(BLOCK_ELEMENTS)
    }

    /// Whose shards, and which elements of each. The blocks cover all shards once.
    fn block(&self, block: usize) -> (Range<usize>, Range<usize>) {
        let (first, start) =
            (block / self.cuts() * self.neighbours, block % self.cuts() * BLOCK_ELEMENTS);
        let end = self.shards.len().min(first + self.neighbours);
        (first..end, start..self.layout.shard_len().min(start + BLOCK_ELEMENTS))
    }

    /// What a range of a shard holds: of which parameter, the elements, and which these are in the parameter.
    fn parts(&self, from: usize, range: &Range<usize>) -> impl Iterator<Item = Part<'_>> {
        let shard = self.shards[from].values();
        let parts = pieces_in(self.layout.pieces(from), range.clone());
        parts.map(move |(param, place, range)| (param, shard.slice(place), range))
    }

    fn write(&self, targets: &[DisjointBuffer], (param, source, range): &Part<'_>) {
        // SAFETY: CO-2, pieces cover each element of a parameter once, blocks do not overlap, each is run once.
        let target = unsafe { take_values(&targets[*param], range.clone()) };
        (self.copy)(target, *source);
    }
}

type Part<'a> = (usize, Values<'a>, Range<usize>);

impl Work for UnitGather {
    type Output = Vec<HostBuffer>;

    fn blocks(&self) -> usize {
        self.shards.len().div_ceil(self.neighbours) * self.cuts()
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
        let (from, range) = self.block(block);
        if from.len() == 1 {
            for part in self.parts(from.start, &range) {
                self.targets.iter().for_each(|targets| self.write(targets, &part));
            }
        } else {
            // What several have lies side by side in a target: one target after the other.
            let parts: Vec<_> = from.clone().flat_map(|from| self.parts(from, &range)).collect();
            for targets in &self.targets {
                parts.iter().for_each(|part| self.write(targets, part));
            }
        }
        for (to, targets) in self.targets.iter().enumerate() {
            if let Some(target) = targets.first() {
                meter.received_of_each(to, from.clone(), (range.len(), element_bytes(target)));
            }
        }
    }

    fn finish(self) -> Vec<Vec<HostBuffer>> {
        let whole =
            |targets: Vec<_>| targets.into_iter().map(DisjointBuffer::into_buffer).collect();
        self.targets.into_iter().map(whole).collect()
    }
}

/// One shard a block, or several next to each other that fit into one together: what many members have of a small unit lies
/// side by side in every target.
fn neighbours(members: usize, shard_len: usize) -> usize {
    let fitting = BLOCK_ELEMENTS / shard_len.max(1);
    fitting.clamp(1, members.div_ceil(LEAST_BLOCKS))
}

fn through_caches(target: ValuesMut<'_>, source: Values<'_>) {
    target.copy_from(source);
}

fn element_bytes(buffer: &DisjointBuffer) -> usize {
    match buffer {
        DisjointBuffer::F32(_) => 4,
        DisjointBuffer::F16(_) | DisjointBuffer::BF16(_) => 2,
    }
}
