//! The work of an operation, cut into blocks that any thread may run, in any order.
//!
//! The elements that a block writes depend on its number and on the contributions alone, never on the thread that runs it or the
//! time: so results do not depend on timing. In reading order: `buffers` (what a member brings), `member_buffers` (of which it reads one and fills another), `copy` (operations that move
//! elements), `handover` (those that pass whole vectors on), `reduce` and `reduce_scatter` (those that combine),
//! `unit_buffers`, `runs`, `unit_gather`, `shared_gather` and `unit_reduce` (the runtime's own); `cuts` (the blocks of many of them).

mod buffers;
mod copy;
mod cuts;
mod handover;
mod member_buffers;
mod reduce;
mod reduce_scatter;
mod runs;
mod shared_gather;
mod unit_buffers;
mod unit_gather;
mod unit_reduce;

#[cfg(test)]
mod tests;

use std::cell::Cell;
use std::ops::Range;
use std::sync::Arc;

use hsdp_kernels::{DisjointBuffer, DisjointVec, ValuesMut};
use hsdp_sharding::{Piece, Rank};

pub(crate) use self::buffers::Buffers;
pub(crate) use self::copy::Copies;
use self::cuts::Cuts;
pub(crate) use self::handover::{Barrier, Handing, Handover, sources_of};
pub use self::member_buffers::Lent;
pub(crate) use self::member_buffers::{MemberBuffers, Source, Splits, check_pairs};
pub(crate) use self::reduce::{Scaled, all_reduce, all_reduce_scaled, combine, reduce};
pub(crate) use self::reduce_scatter::ReduceScatter;
pub(crate) use self::shared_gather::{SharedGather, SharedGatherContribution};
pub use self::unit_buffers::{Accumulator, Contribution, NonFiniteAt, Reduced};
pub(crate) use self::unit_gather::{UnitGather, UnitGatherContribution};
pub(crate) use self::unit_reduce::{UnitReduce, UnitReduceContribution};
use crate::engine::Operation;
pub(crate) use crate::engine::{Outputs, PerMember};
use crate::sync::atomic::{AtomicUsize, Ordering};

/// Elements of f32 in a block: 32 KiB, so that a sum stays in the first-level cache, or close to it.
const BLOCK_ELEMENTS: usize = 8 << 10;

/// Elements of a block where there is much work: what a block costs beside its elements, to claim and to count it, is seen
/// no more.
const MOST_ELEMENTS: usize = 4 * BLOCK_ELEMENTS;

/// As many blocks, and more, keep all threads busy to the end.
const ENOUGH_BLOCKS: usize = 64;

/// The bytes of outputs that are filled together, above which they are written past the caches: little of them would still be there when they are read.
pub(crate) const PAST_CACHES: usize = 8 << 20;

/// Bytes of a block of a general collective.
const BLOCK_BYTES: usize = 64 << 10;

/// Why contributions to the work of a unit do not fit together.
pub(crate) const LAYOUTS_DIFFER: &str = "ranks have different layouts of one unit";

/// The work of one operation, with the contributions of all its members.
pub(crate) trait Work: Send + Sync + 'static {
    /// The output of a member.
    type Output: Send + 'static;

    /// The number of blocks, which are numbered from 0.
    fn blocks(&self) -> usize;

    /// The bytes that all blocks together write, or those that they read where that is the greater part. They decide whether
    /// waking others pays, and count nothing.
    fn bytes(&self) -> usize;

    /// Whether a block calls code of a user, or waits in a library, which may take as long as they like.
    fn calls_users(&self) -> bool {
        false
    }

    /// Runs a block. Called once for each; several blocks at a time, on different threads.
    fn run(&self, block: usize, meter: &Meter<'_>);

    /// The beginning of another round, if there is one before the members get their outputs. Called when every block has been run.
    fn next_round(&mut self) -> Option<NextRound> {
        None
    }

    /// Returns the members' outputs, and drops all that they lent. Called when every block of the last round has been run.
    fn finish(self) -> Outputs<Self::Output>;
}

/// Has an operation gather again.
pub(crate) type NextRound = Box<dyn FnOnce(&Arc<Operation>) + Send>;

/// Makes the work of all contributions, in slot order.
///
/// # Errors
/// If contributions do not fit together: in words that go before "in operation ...".
pub(crate) trait Assemble<D, W>: FnOnce(Vec<D>) -> Result<W, String> {}

impl<D, W, F: FnOnce(Vec<D>) -> Result<W, String>> Assemble<D, W> for F {}

/// Notes the member whose contribution a block reads.
pub(crate) struct Meter<'a> {
    ranks: &'a [Rank],
    /// By slot: the threads that are reading its contribution.
    readers: &'a [AtomicUsize],
    /// The slot whose contribution this block is reading.
    reading: Cell<Option<usize>>,
}

impl<'a> Meter<'a> {
    pub(crate) fn new(ranks: &'a [Rank], readers: &'a [AtomicUsize]) -> Self {
        Self { ranks, readers, reading: Cell::new(None) }
    }

    /// The rank of the member in `slot`.
    pub(crate) fn rank(&self, slot: usize) -> Rank {
        self.ranks[slot]
    }

    /// Has the member in `slot` lend its contribution: if `read` panics or hangs, an error names this member, or another that lends
    /// inside of `read`.
    pub(crate) fn lent_by(&self, slot: usize, read: impl FnOnce()) {
        let outer = self.turn_to(Some(slot));
        read();
        self.turn_to(outer);
    }

    /// Sets the slot whose contribution is being read; returns the slot before.
    fn turn_to(&self, slot: Option<usize>) -> Option<usize> {
        let before = self.reading.replace(slot);
        if let Some(before) = before {
            self.readers[before].fetch_sub(1, Ordering::Relaxed);
        }
        if let Some(slot) = slot {
            self.readers[slot].fetch_add(1, Ordering::Relaxed);
        }
        before
    }

    /// The slot whose code was running when the block panicked.
    pub(crate) fn reading(&self) -> Option<usize> {
        self.reading.get()
    }
}

/// The elements of `range` of an output, for the one block whose they are.
///
/// # Safety
///
/// CO-2: no other block takes one of them, and no other slice of this block.
#[expect(clippy::mut_from_ref, reason = "CO-2: the caller keeps slices apart")]
unsafe fn take<T>(output: &DisjointVec<T>, range: Range<usize>) -> &mut [T] {
    #[cfg(test)]
    tests::taken::note(output, output.len(), &range);
    // SAFETY: CO-2, the caller's promise is passed on.
    unsafe { output.slice_mut(range) }
}

/// The elements of `range` of an output whose dtype is a value, for the one block whose they are.
///
/// # Safety
///
/// CO-2: no other block takes one of them, and no other slice of this block.
unsafe fn take_values(output: &DisjointBuffer, range: Range<usize>) -> ValuesMut<'_> {
    #[cfg(test)]
    tests::taken::note(output, output.len(), &range);
    // SAFETY: CO-2, the caller's promise is passed on.
    unsafe { output.slice_mut(range) }
}

/// Elements of a block where there are `all` to be cut.
fn block_elements(all: usize) -> usize {
    let fitting = all / ENOUGH_BLOCKS / BLOCK_ELEMENTS * BLOCK_ELEMENTS;
    fitting.clamp(BLOCK_ELEMENTS, MOST_ELEMENTS)
}

/// The one length of all `lengths`, on which unsafe code rests (CO-2).
///
/// # Errors
/// If two differ, which their descriptors should have told; or there is none.
fn one_length(lengths: impl IntoIterator<Item = usize>) -> Result<usize, String> {
    let mut lengths = lengths.into_iter().enumerate();
    let (_, first) = lengths.next().ok_or("no member takes part")?;
    match lengths.find(|(_, len)| *len != first) {
        Some((slot, len)) => Err(format!("member 0 brings {first} elements, member {slot} {len},")),
        None => Ok(first),
    }
}

/// Cuts `range` into blocks of at most `len`.
fn blocks_of(range: Range<usize>, len: usize) -> impl Iterator<Item = Range<usize>> {
    let end = range.end;
    range.step_by(len).map(move |start| start..end.min(start + len))
}

/// The parts of `pieces`, which are in order and do not overlap, that lie in `range` of the shard: each with
/// its range in the shard and its range in the parameter.
fn pieces_in(
    pieces: impl Iterator<Item = Piece>,
    range: Range<usize>,
) -> impl Iterator<Item = (usize, Range<usize>, Range<usize>)> {
    let Range { start, end } = range;
    let after = pieces.skip_while(move |piece| piece.shard_range().end <= start);
    let overlapping = after.take_while(move |piece| piece.shard_start < end);
    overlapping.map(move |piece| {
        let shard = piece.shard_range();
        let part = shard.start.max(range.start)..shard.end.min(range.end);
        let offset = piece.param_start + (part.start - shard.start);
        (piece.param, part.clone(), offset..offset + part.len())
    })
}
