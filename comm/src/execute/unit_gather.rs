//! The runtime's all-gathers: shards of a unit become whole parameters, in one pass, for each member or
//! once for all that share memory.

use std::ops::ControlFlow::Break;
use std::ops::Range;
use std::sync::Arc;
use std::{iter, mem};

use hsdp_kernels::{
    DisjointBuffer, HostBuffer, SharedBuffer, Values, ValuesMut, copy_all_past_caches,
};
use hsdp_sharding::UnitLayout;
use smallvec::SmallVec;

use super::{
    AfterRound, At, BLOCK_ELEMENTS, Contribute, Cuts, LAYOUTS_DIFFER, Meter, Outputs, PAST_CACHES,
    Received, Work, block_elements, pieces_in, take_values,
};
use crate::bytes::{bytes_of, values, values_mut};
use crate::pattern::Pattern;

/// The contribution of a member: its shard, to be read where it lies, and its parameters' buffers, to be
/// filled. All are of one dtype.
pub(crate) struct UnitGatherContribution {
    pub(crate) layout: Arc<UnitLayout>,
    pub(crate) shard: SharedBuffer,
    pub(crate) targets: Vec<HostBuffer>,
}

impl Contribute for UnitGatherContribution {
    type Gets = Vec<HostBuffer>;
    type Work = UnitGather;
    const FUNCTION: u8 = 6;

    fn layout(&self) -> Option<&UnitLayout> {
        Some(&self.layout)
    }

    fn assemble(all: Vec<Self>, _at: At<'_>) -> Result<UnitGather, String> {
        let layout = Arc::clone(&all[0].layout);
        if all.iter().any(|member| member.layout != layout) {
            return Err(LAYOUTS_DIFFER.to_owned());
        }
        let (shards, targets) = all.into_iter().map(|it| (it.shard, it.targets)).unzip();
        Ok(UnitGather::of(layout, shards, targets))
    }

    /// Writes the shard, with its padding.
    fn pack(&self, _at: At<'_>, _to: usize, range: Range<usize>, body: &mut [u8]) {
        body.copy_from_slice(bytes_of(self.shard.values().slice(range)));
    }

    fn unpack(self, at: At<'_>, received: &Received<'_>) -> AfterRound<Self> {
        let Self { layout, shard, mut targets } = self;
        let dtype = shard.dtype();
        // The other members fill their targets at the same time, from the same caches if they are
        // processes of one machine.
        let filled = layout.full_len() * dtype.size_bytes() * at.ranks.len();
        let is_large = filled > PAST_CACHES;
        for from in 0..at.ranks.len() {
            let is_own = from == at.slot;
            let source = if is_own { shard.values() } else { values(dtype, received.bytes(from)) };
            for piece in layout.pieces(from) {
                let target = targets[piece.param].values_mut().slice(piece.param_range());
                let source = source.slice(piece.shard_range());
                match is_large {
                    true => copy_all_past_caches([(target, source)]),
                    false => target.copy_from(source),
                }
            }
        }
        Break(targets)
    }

    fn alone(self, _at: At<'_>) -> Vec<HostBuffer> {
        self.targets
    }
}

/// Every member's shard, copied into every member's parameters.
pub(crate) struct UnitGather {
    /// By slot.
    shards: Vec<SharedBuffer>,
    targets: Vec<Vec<DisjointBuffer>>,
    layout: Arc<UnitLayout>,
    /// Number of shards, next to each other, that share a block.
    neighbours: usize,
    /// Of the shards.
    cuts: Cuts,
    /// Whether elements are best written past the caches.
    pub(super) is_past_caches: bool,
}

/// The length of runs below which writing past the caches gains nothing, since much of each lies in
/// cache lines that are not whole.
const LONG: usize = 512;

/// The most words of 8 bytes in shards that share a block: an element has at most 4 bytes.
const MOST_WORDS: usize = BLOCK_ELEMENTS / 2;

/// Shards share blocks only where so many blocks are left for threads to claim.
const LEAST_BLOCKS: usize = 16;

impl UnitGather {
    /// Gathers one shard for each member of the layout into the buffers of each target.
    fn of(
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

    /// Returns the buffers of each target, filled.
    fn filled(self) -> impl Iterator<Item = Vec<HostBuffer>> {
        let whole = |it: Vec<_>| it.into_iter().map(DisjointBuffer::into_buffer).collect();
        self.targets.into_iter().map(whole)
    }

    /// Returns the most elements that are written one after the other.
    fn run_len(&self) -> usize {
        let together = if self.is_put_together() { self.neighbours } else { 1 };
        self.regions().iter().map(Range::len).max().unwrap_or(0) * together
    }

    /// Returns whether neighbours' shards are put together: for one target alone that would be a copy
    /// more.
    fn is_put_together(&self) -> bool {
        self.neighbours > 1 && self.targets.len() > 1
    }

    /// Returns the trainable and the frozen region of a shard. In a parameter, only elements of one of
    /// them lie side by side with the neighbours'.
    fn regions(&self) -> [Range<usize>; 2] {
        let trainable = self.layout.trainable().shard_len;
        [0..trainable, trainable..self.layout.shard_len()]
    }

    /// Returns the shards of a block, and the range of each. The blocks cover all shards once.
    fn block(&self, block: usize) -> (Range<usize>, Range<usize>) {
        let (few, range) = self.cuts.block(block);
        let first = few * self.neighbours;
        (first..self.shards.len().min(first + self.neighbours), range)
    }

    /// Returns the parts of a range of a shard.
    fn parts(&self, from: usize, range: &Range<usize>) -> impl Iterator<Item = ShardPart<'_>> {
        let shard = self.shards[from].values();
        let parts = pieces_in(self.layout.pieces(from), range.clone());
        parts.map(move |(param, place, range)| ShardPart {
            param,
            values: shard.slice(place),
            range,
        })
    }

    /// Writes parts of shards into a member's parameters.
    fn write<'a>(&self, targets: &[DisjointBuffer], parts: impl Iterator<Item = ShardPart<'a>>) {
        let copies = parts.map(|ShardPart { param, values, range }| {
            // SAFETY: CO-2, pieces cover each element of a parameter once, blocks do not overlap, each
            // is run once.
            let target = unsafe { take_values(&targets[param], range) };
            (target, values)
        });
        match self.is_past_caches {
            true => copy_all_past_caches(copies),
            false => copies.for_each(|(target, source)| target.copy_from(source)),
        }
    }

    /// Writes the shards of neighbours: put together once, and then the whole for one target after the
    /// other.
    ///
    /// A block of several shards has the whole of each: they are cut only where each is larger than a
    /// block.
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
        let part = |run: &ShardRun| {
            let values = stage.slice(run.place.clone());
            ShardPart { param: run.param, values, range: run.range.clone() }
        };
        for targets in &self.targets {
            self.write(targets, runs.iter().map(part));
        }
    }
}

impl Work for UnitGather {
    type Gets = Vec<HostBuffer>;

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

/// Returns the number of shards that share a block: one, or several next to each other that fit into it
/// together, since the shards of a small unit lie side by side in every target.
fn neighbours(members: usize, shard_len: usize) -> usize {
    let fitting = BLOCK_ELEMENTS / shard_len.max(1);
    fitting.clamp(1, members.div_ceil(LEAST_BLOCKS))
}

/// Elements of a shard that lie side by side in a parameter.
#[derive(Clone)]
struct ShardPart<'a> {
    param: usize,
    values: Values<'a>,
    /// The elements' range in the parameter.
    range: Range<usize>,
}

/// Elements that lie side by side on a stage, and in a parameter.
struct ShardRun {
    param: usize,
    /// The elements' range on the stage.
    place: Range<usize>,
    /// The elements' range in the parameter.
    range: Range<usize>,
}

/// Copies parts to a stage, one after the other. Returns the runs that they make there.
fn put_together<'a>(
    mut stage: ValuesMut<'_>,
    parts: impl Iterator<Item = ShardPart<'a>>,
) -> SmallVec<[ShardRun; 32]> {
    let mut runs = SmallVec::<[ShardRun; 32]>::new();
    let mut filled = 0;
    for ShardPart { param, values, range } in parts {
        let place = filled..filled + values.len();
        filled = place.end;
        stage.reborrow().slice(place.clone()).copy_from(values);
        match runs.last_mut() {
            Some(last) if last.param == param && last.range.end == range.start => {
                last.place.end = place.end;
                last.range.end = range.end;
            }
            _ => runs.push(ShardRun { param, place, range }),
        }
    }
    runs
}

/// The contribution of a member where ranks share a copy: its shard, to be read where it lies; of the
/// first member also the holder of the parameters' buffers.
pub(crate) struct SharedGatherContribution<T> {
    pub(crate) layout: Arc<UnitLayout>,
    pub(crate) shard: SharedBuffer,
    pub(crate) holder: Option<Arc<T>>,
}

impl<T: AsMut<Vec<HostBuffer>> + Send + Sync + 'static> Contribute for SharedGatherContribution<T> {
    type Gets = Option<Arc<T>>;
    type Work = SharedGather<T>;

    fn pattern<'a>(&'a self, plain: Pattern<'a>) -> Pattern<'a> {
        plain.shared(self.layout.shard_size())
    }

    fn assemble(mut all: Vec<Self>, _at: At<'_>) -> Result<SharedGather<T>, String> {
        let layout = Arc::clone(&all[0].layout);
        let members = all.len();
        if all.iter().any(|member| member.layout != layout) {
            return Err(LAYOUTS_DIFFER.to_owned());
        }
        let mut holder = all[0].holder.take().ok_or("no member brings buffers")?;
        // The shards behind these hold the same.
        all.truncate(layout.shard_size());
        let shards = all.into_iter().map(|member| member.shard).collect();
        let targets = vec![mem::take(only(&mut holder).as_mut())];
        Ok(SharedGather { gather: UnitGather::of(layout, shards, targets), holder, members })
    }

    fn alone(self, _at: At<'_>) -> Self::Gets {
        None
    }
}

/// The first replica's shards, copied into the buffers of one holder.
pub(crate) struct SharedGather<T> {
    gather: UnitGather,
    holder: Arc<T>,
    members: usize,
}

impl<T: AsMut<Vec<HostBuffer>> + Send + Sync + 'static> Work for SharedGather<T> {
    type Gets = Option<Arc<T>>;

    fn blocks(&self) -> usize {
        self.gather.blocks()
    }

    fn bytes(&self) -> usize {
        self.gather.bytes()
    }

    fn run(&self, block: usize, meter: &Meter<'_>) {
        self.gather.run(block, meter);
    }

    fn finish(self) -> Outputs<Option<Arc<T>>> {
        let Self { gather, mut holder, members } = self;
        gather.filled().for_each(|targets| *only(&mut holder).as_mut() = targets);
        iter::repeat_n(Some(holder), members).collect()
    }
}

/// Returns the content of a holder that has one handle.
fn only<T>(holder: &mut Arc<T>) -> &mut T {
    Arc::get_mut(holder).expect("there was no other handle when it was contributed")
}
