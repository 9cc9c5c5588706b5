//! The runtime's all-gather: shards of a unit become whole parameters, in one pass.

use std::iter;
use std::ops::Range;
use std::sync::Arc;

use hsdp_kernels::{DisjointBuffer, HostBuffer, SharedBuffer, copy_all_past_caches};
use hsdp_sharding::UnitLayout;
use smallvec::SmallVec;

use super::runs::{Part, Run, put_together};
use super::{
    BLOCK_ELEMENTS, Buffers, Cuts, LAYOUTS_DIFFER, Meter, Outputs, PAST_CACHES, Work,
    block_elements, pieces_in, take_values,
};
use crate::bytes::values_mut;
use crate::pattern::Pattern;

/// The contribution of a member: its shard, to be read where it lies, and its parameters' buffers, to be filled. All are of one dtype.
pub(crate) struct UnitGatherContribution {
    pub(crate) layout: Arc<UnitLayout>,
    pub(crate) shard: SharedBuffer,
    pub(crate) targets: Vec<HostBuffer>,
}

impl Buffers for UnitGatherContribution {
    type Output = Vec<HostBuffer>;

    fn output_alone(self, _pattern: &Pattern<'_>) -> Vec<HostBuffer> {
        self.targets
    }
}

/// Every member's shard, copied into every member's parameters.
pub(crate) struct UnitGather {
    /// By slot.
    shards: Vec<SharedBuffer>,
    targets: Vec<Vec<DisjointBuffer>>,
    layout: Arc<UnitLayout>,
    /// How many shards, next to each other, share a block.
    neighbours: usize,
    /// Of the shards.
    cuts: Cuts,
    /// Whether elements are best written past the caches.
    pub(super) is_past_caches: bool,
}

/// Shorter runs are written through the caches all the same: past them nothing is gained, since much of each lies in rows that are not whole.
const LONG: usize = 512;

/// The most words of 8 bytes in shards that share a block: an element has at most 4 bytes.
const MOST_WORDS: usize = BLOCK_ELEMENTS / 2;

/// Shards share blocks only where so many blocks are left for threads to claim.
const LEAST_BLOCKS: usize = 16;

impl UnitGather {
    /// # Errors
    /// If the members do not have the same layout.
    pub(crate) fn new(members: Vec<UnitGatherContribution>) -> Result<Self, String> {
        let layout = Arc::clone(&members[0].layout);
        if members.iter().any(|member| member.layout != layout) {
            return Err(LAYOUTS_DIFFER.to_owned());
        }
        let (shards, targets) = members.into_iter().map(|it| (it.shard, it.targets)).unzip();
        Ok(Self::of(layout, shards, targets))
    }

    /// One shard for each member of the layout, into the buffers of each target.
    pub(super) fn of(
        layout: Arc<UnitLayout>,
        shards: Vec<SharedBuffer>,
        targets: Vec<Vec<HostBuffer>>,
    ) -> Self {
        let neighbours = neighbours(layout.shard_size(), layout.shard_len());
        let len = layout.shard_len();
        let cuts = Cuts { len, block_len: block_elements(layout.shard_size() * len) };
        let apart = |it: Vec<HostBuffer>| it.into_iter().map(DisjointBuffer::from).collect();
        let targets = targets.into_iter().map(apart).collect();
        let mut work = Self { shards, targets, layout, neighbours, cuts, is_past_caches: false };
        work.is_past_caches = work.bytes() > PAST_CACHES && work.run_len() >= LONG;
        work
    }

    /// The buffers of each target, filled.
    pub(super) fn filled(self) -> impl Iterator<Item = Vec<HostBuffer>> {
        let whole = |it: Vec<_>| it.into_iter().map(DisjointBuffer::into_buffer).collect();
        self.targets.into_iter().map(whole)
    }

    /// How many elements are written one after the other, at the most.
    fn run_len(&self) -> usize {
        let together = if self.is_put_together() { self.neighbours } else { 1 };
        self.regions().iter().map(Range::len).max().unwrap_or(0) * together
    }

    /// Whether neighbours' shards are put together: for one target alone that would be a copy more.
    fn is_put_together(&self) -> bool {
        self.neighbours > 1 && self.targets.len() > 1
    }

    /// Of a shard: what can be trained, and what is frozen. In a parameter, only elements of one of them lie side by side with the neighbours'.
    fn regions(&self) -> [Range<usize>; 2] {
        let trainable = self.layout.trainable().shard_len;
        [0..trainable, trainable..self.layout.shard_len()]
    }

    /// The shards of a block, and the range of each. The blocks cover all shards once.
    fn block(&self, block: usize) -> (Range<usize>, Range<usize>) {
        let (few, range) = self.cuts.block(block);
        let first = few * self.neighbours;
        (first..self.shards.len().min(first + self.neighbours), range)
    }

    /// The parts of a range of a shard: the parameter, the elements, and their range in the parameter.
    fn parts(&self, from: usize, range: &Range<usize>) -> impl Iterator<Item = Part<'_>> {
        let shard = self.shards[from].values();
        let parts = pieces_in(self.layout.pieces(from), range.clone());
        parts.map(move |(param, place, range)| (param, shard.slice(place), range))
    }

    /// Writes parts of shards into a member's parameters.
    fn write<'a>(&self, targets: &[DisjointBuffer], parts: impl Iterator<Item = Part<'a>>) {
        let copies = parts.map(|(param, source, range)| {
            // SAFETY: CO-2, pieces cover each element of a parameter once, blocks do not overlap, each is run once.
            let target = unsafe { take_values(&targets[param], range) };
            (target, source)
        });
        match self.is_past_caches {
            true => copy_all_past_caches(copies),
            false => copies.for_each(|(target, source)| target.copy_from(source)),
        }
    }

    /// Writes the shards of neighbours: put together once, and then the whole for one target after the other.
    ///
    /// A block of several shards has the whole of each: they are cut only where each is larger than a block.
    fn write_together(&self, from: &Range<usize>) {
        assert_eq!(self.cuts.each(), 1, "shards that share a block are whole");
        let regions = self.regions();
        let parts = regions
            .iter()
            .flat_map(|region| from.clone().flat_map(move |from| self.parts(from, region)));
        let dtype = self.shards[0].values().dtype();
        let mut room = SmallVec::<[u64; MOST_WORDS]>::new();
        let bytes = from.len() * self.layout.shard_len() * dtype.size_bytes();
        room.resize(bytes.div_ceil(size_of::<u64>()), 0);
        let mut stage = values_mut(dtype, &mut bytemuck::cast_slice_mut(&mut room)[..bytes]);
        let runs = put_together(stage.reborrow(), parts);
        let stage = stage.as_values();
        let part = |run: &Run| (run.param, stage.slice(run.place.clone()), run.range.clone());
        for targets in &self.targets {
            self.write(targets, runs.iter().map(part));
        }
    }
}

impl Work for UnitGather {
    type Output = Vec<HostBuffer>;

    fn blocks(&self) -> usize {
        self.shards.len().div_ceil(self.neighbours) * self.cuts.each()
    }

    fn bytes(&self) -> usize {
        let elements: usize = self.targets[0].iter().map(DisjointBuffer::len).sum();
        elements * self.targets.len() * self.shards[0].dtype().size_bytes()
    }

    /// Reads the block once from memory, and writes it for every member while it is in the cache.
    fn run(&self, block: usize, _meter: &Meter<'_>) {
        let (from, range) = self.block(block);
        let parts = from.clone().flat_map(|from| self.parts(from, &range));
        match &self.targets[..] {
            _ if self.is_put_together() => self.write_together(&from),
            [target] => self.write(target, parts),
            all => parts.for_each(|part| {
                all.iter().for_each(|it| self.write(it, iter::once(part.clone())));
            }),
        }
    }

    fn finish(self) -> Outputs<Vec<HostBuffer>> {
        self.filled().collect()
    }
}

/// One shard a block, or several next to each other that fit into one together: what many members have of a small unit lies
/// side by side in every target.
fn neighbours(members: usize, shard_len: usize) -> usize {
    let fitting = BLOCK_ELEMENTS / shard_len.max(1);
    fitting.clamp(1, members.div_ceil(LEAST_BLOCKS))
}
