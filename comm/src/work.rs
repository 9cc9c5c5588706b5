//! The work of an operation, cut into blocks that any thread may run, in any order.
//!
//! What a block writes depends on its number and on the deposits alone, never on who runs it or when: that is
//! why results do not depend on timing. In reading order: `exchange` (what members bring), `copy` (operations that move
//! elements), `handover` (those that pass whole vectors on), `reduce` and `reduce_scatter` (those that combine),
//! `runs`, `unit_gather`, `shared_gather`, `unit_reduce` and `all_reduce_scaled` (the runtime's own).

mod all_reduce_scaled;
mod copy;
mod exchange;
mod handover;
mod reduce;
mod reduce_scatter;
mod runs;
mod shared_gather;
mod unit_gather;
mod unit_reduce;

#[cfg(test)]
mod tests;

use std::cell::Cell;
use std::ops::Range;
use std::sync::Arc;

use hsdp_kernels::{DisjointBuffer, DisjointVec, ValuesMut};
use hsdp_sharding::{ByteCount, Piece, Rank};
use smallvec::SmallVec;

pub(crate) use self::all_reduce_scaled::{AllReduceScaled, Scaled};
pub(crate) use self::copy::Copies;
pub(crate) use self::exchange::{Exchange, Source};
pub(crate) use self::handover::{Barrier, Handing, Handover};
pub(crate) use self::reduce::{Receivers, Reduce, ReduceInPlace, combine};
pub(crate) use self::reduce_scatter::ReduceScatter;
pub(crate) use self::shared_gather::{SharedGather, SharedGatherDeposit};
pub(crate) use self::unit_gather::{UnitGather, UnitGatherDeposit};
pub(crate) use self::unit_reduce::{UnitReduce, UnitReduceDeposit};
use crate::local::{Again, Record};
use crate::sync::atomic::{AtomicUsize, Ordering};
use crate::{Channel, Descriptor, Op};

/// Elements of f32 in a block: 32 KiB, so that a sum stays in the first-level cache, or close to it.
const BLOCK_ELEMENTS: usize = 8 << 10;

/// Elements of a block where there is much work: what a block costs beside its elements, to claim and to count it, is seen
/// no more.
const MOST_ELEMENTS: usize = 4 * BLOCK_ELEMENTS;

/// As many blocks, and more, keep all threads busy to the end.
const ENOUGH_BLOCKS: usize = 64;

/// What is filled together, in bytes, above which it is written past the caches: little of it would still be there when it is read.
pub(crate) const PAST_CACHES: usize = 8 << 20;

/// Bytes of a block of a general collective.
const BLOCK_BYTES: usize = 64 << 10;

/// What there is one of for each member, by slot. Few members need no memory of their own for it: it would be given back by
/// another thread than took it, which allocators are slow at. For what is small: it moves with what holds it.
pub(crate) type PerMember<T> = SmallVec<[T; 4]>;

/// The work of one operation, with everything that its members deposited.
pub(crate) trait Work: Send + Sync + 'static {
    /// What a member gets.
    type Output: Send + 'static;

    /// What it keeps its parts in, which serves the next: `()` where it is made anew each time.
    type Lists: Default + Send + 'static;

    /// How many blocks there are, numbered from 0.
    fn blocks(&self) -> usize;

    /// How much work all blocks are together: the bytes that they write, or those that they read where that is the
    /// greater part. It decides whether waking others pays, and counts nothing.
    fn bytes(&self) -> usize;

    /// Whether a block calls code of a user, or waits in a library, which may take as long as they like.
    fn calls_users(&self) -> bool {
        false
    }

    /// Runs a block. Called once for each; several blocks at a time, on different threads.
    fn run(&self, block: usize, meter: &Meter<'_>);

    /// Who has the operation gather again, before anybody gets an output: asked when every block has been run.
    fn again(&self) -> Option<Arc<dyn Again>> {
        None
    }

    /// Called when every block has been run: gives the members' outputs, by slot, and lets go of all that they lent. What is left are
    /// lists, empty, for work of its kind to come.
    fn finish(self, outputs: &mut Outputs<Self::Output>) -> Self::Lists;
}

/// What the members bring to one operation, in the order of their slots.
pub(crate) struct Deposits<'a, D> {
    slots: &'a mut [Option<D>],
    next: usize,
}

impl<'a, D> Deposits<'a, D> {
    pub(crate) fn of(slots: &'a mut [Option<D>]) -> Self {
        Self { slots, next: 0 }
    }

    /// What each member brings, before it is taken.
    pub(crate) fn each(&self) -> impl Iterator<Item = &D> {
        self.slots.iter().map(|it| it.as_ref().expect("all have come, and nothing is taken"))
    }

    /// What the first member brings, before it is taken.
    fn first(&self) -> &D {
        self.slots[0].as_ref().expect("all have come, and nothing is taken")
    }
}

impl<D> Iterator for Deposits<'_, D> {
    type Item = D;

    fn next(&mut self) -> Option<D> {
        let deposit = self.slots.get_mut(self.next)?.take();
        self.next += 1;
        Some(deposit.expect("all have come, and each is taken once"))
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        let left = self.slots.len() - self.next;
        (left, Some(left))
    }
}

impl<D> ExactSizeIterator for Deposits<'_, D> {}

/// How work is assembled that takes no lists of work before.
pub(crate) fn anew<L, D, W>(
    assemble: impl FnOnce(Vec<D>) -> Result<W, String>,
) -> impl FnOnce(L, Deposits<'_, D>) -> Result<W, String> {
    move |_, deposits| assemble(deposits.collect())
}

/// What the members get, by slot.
pub(crate) struct Outputs<O>(SmallVec<[Option<O>; 1]>);

impl<O> Outputs<O> {
    pub(crate) fn slot(&mut self, slot: usize) -> &mut Option<O> {
        &mut self.0[slot]
    }

    /// One member's: the others get theirs elsewhere.
    pub(crate) fn only(&mut self, slot: usize, output: O) {
        self.0.resize_with(slot + 1, || None);
        self.0[slot] = Some(output);
    }

    pub(crate) fn clear(&mut self) {
        self.0.clear();
    }
}

impl<O> Default for Outputs<O> {
    fn default() -> Self {
        Self(SmallVec::new())
    }
}

impl<O> Extend<O> for Outputs<O> {
    fn extend<I: IntoIterator<Item = O>>(&mut self, outputs: I) {
        self.0.extend(outputs.into_iter().map(Some));
    }
}

/// Where blocks report what they received from other ranks, and whose deposit they are reading.
pub(crate) struct Meter<'a> {
    records: &'a [Arc<Record>],
    ranks: &'a [Rank],
    channel: Channel,
    op: Op,
    /// By slot: the threads that are reading its deposit.
    readers: &'a [AtomicUsize],
    /// What this block is reading.
    reading: Cell<Option<usize>>,
}

impl<'a> Meter<'a> {
    pub(crate) fn new(
        records: &'a [Arc<Record>],
        ranks: &'a [Rank],
        descriptor: &Descriptor,
        readers: &'a [AtomicUsize],
    ) -> Self {
        let Descriptor { channel, op, .. } = *descriptor;
        // What is sent counts where it arrives.
        let op = if op == Op::Send { Op::Recv } else { op };
        Self { records, ranks, channel, op, readers, reading: Cell::new(None) }
    }

    /// The rank of the member in `slot`.
    pub(crate) fn rank(&self, slot: usize) -> Rank {
        self.ranks[slot]
    }

    /// The member in slot `to` has read `count` elements of `size` bytes that the member in slot `from` owns.
    pub(crate) fn received(&self, to: usize, from: usize, count: usize, size: usize) {
        let [to, from] = [self.ranks[to], self.ranks[from]];
        if to != from {
            let bytes = ByteCount::of(count * size);
            self.records[to.index()].ledger.received(self.channel, self.op, bytes);
        }
    }

    /// Has the member in `slot` lend what it brought: if `read` panics or hangs, it is the one to name. Where another
    /// member lends meanwhile, that one is.
    pub(crate) fn lent_by(&self, slot: usize, read: impl FnOnce()) {
        let outer = self.turn_to(Some(slot));
        read();
        self.turn_to(outer);
    }

    /// Whose deposit is being read from now on; whose it was.
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

    /// Whose code was running when the block panicked.
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

/// Blocks of at most `len` of the elements that each slot owns: of the range that goes with it.
fn owned_blocks(
    owned: impl IntoIterator<Item = (usize, Range<usize>)>,
    len: usize,
) -> Vec<(usize, Range<usize>)> {
    let cut = |(owner, range)| blocks_of(range, len).map(move |block| (owner, block));
    owned.into_iter().flat_map(cut).collect()
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
