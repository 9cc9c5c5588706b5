//! The contribution of a member to an operation, and the work that contributions together make.
//!
//! Work is cut into blocks that any thread may run, in any order. The elements that a block writes
//! depend on its number and on the contributions alone, never on the thread that runs it or the
//! time: so results do not depend on timing.
//!
//! In reading order: `vectors` (the collectives on vectors), `parts` (gathers in place),
//! `unit_gather` and `unit_reduce` (the calls on whole units).

mod parts;
mod unit_gather;
mod unit_reduce;
mod vectors;

#[cfg(test)]
mod tests;

use std::cell::Cell;
use std::ops::ControlFlow::{self, Break, Continue};
use std::ops::Range;
use std::sync::Arc;

use bytemuck::Pod;
use hsdp_kernels::{DisjointBuffer, DisjointVec, GradientValues, ValuesMut};
use hsdp_sharding::{Piece, Rank, UnitLayout};

pub(crate) use self::parts::{PartsContribution, one_cut};
pub(crate) use self::unit_gather::{SharedGatherContribution, UnitGatherContribution};
pub(crate) use self::unit_reduce::UnitReduceContribution;
pub use self::unit_reduce::{Accumulator, Contribution, NonFiniteAt, Reduced};
pub use self::vectors::Lent;
pub(crate) use self::vectors::{Filled, Source, VectorRoute, Vectors};
use crate::engine::SharedOperation;
pub(crate) use crate::engine::{Outputs, PerMember};
use crate::pattern::Pattern;
use crate::sync::atomic::{AtomicUsize, Ordering};
use crate::{Counts, Descriptor, Error, Scaling};

/// Elements of f32 in a block: 32 KiB, so that a sum stays in the first-level cache, or close to
/// it.
const BLOCK_ELEMENTS: usize = 8 << 10;

/// Elements of a block where there is much work. At this size the cost of claiming a block is
/// negligible.
const MOST_ELEMENTS: usize = 4 * BLOCK_ELEMENTS;

/// As many blocks, and more, keep all threads busy to the end.
const ENOUGH_BLOCKS: usize = 64;

/// Bytes of outputs that are filled together, above which they are written past the caches: little
/// of them would still be there when they are read.
const PAST_CACHES: usize = 8 << 20;

/// Bytes of a block of a general collective.
const BLOCK_BYTES: usize = 64 << 10;

/// Why contributions to the work of a unit do not fit together.
pub(crate) const LAYOUTS_DIFFER: &str = "ranks have different layouts of one unit";

/// The contribution of a member to an operation: its buffers, and what becomes of them together
/// with those of all members in one memory, apart by messages, or without peers.
pub(crate) trait Contribute: Sized + Send + 'static {
    /// The output of the member.
    type Gets: Send + 'static;

    /// The work that all contributions make in one memory.
    type Work: Work<Gets = Self::Gets>;

    /// The function that was called: descriptors alone do not tell all of them apart. 0 where no
    /// message carries the contribution.
    const FUNCTION: u8 = 0;

    /// Returns the pattern of the operation: the plain one of its descriptor, with what the member
    /// brings beside it.
    fn pattern<'a>(&'a self, plain: Pattern<'a>) -> Pattern<'a> {
        plain
    }

    /// Returns the layout of the unit that was passed.
    fn layout(&self) -> Option<&UnitLayout> {
        None
    }

    /// Returns a note of this member alone, for the others.
    fn note(&self) -> u64 {
        0
    }

    /// Returns the gradients that the member brings, for a fault to poison; none of most
    /// operations.
    fn gradients(&mut self) -> &mut [Option<Arc<dyn GradientValues>>] {
        &mut []
    }

    /// Has all contributions in one memory learn what only all of them together say.
    ///
    /// # Errors
    /// The contradiction, in words that go before "in operation ...".
    fn introduce(_all: &mut [Self]) -> Result<(), String> {
        Ok(())
    }

    /// Makes the work of all contributions in one memory, in slot order.
    ///
    /// # Errors
    /// If contributions do not fit together: in words that go before "in operation ...".
    fn assemble(all: Vec<Self>, at: At<'_>) -> Result<Self::Work, String>;

    /// Writes the elements of `range`, which go to the member in slot `to` by a message. May call
    /// code of users.
    fn pack(&self, _at: At<'_>, _to: usize, _range: Range<usize>, _body: &mut [u8]) {}

    /// Keeps the part that stays here, if that was lent for no longer, when all messages have been
    /// packed. May call code of users.
    ///
    /// # Errors
    /// The failure. It ends the world: the others have this member's promise.
    fn keep(&mut self, _at: At<'_>) -> Result<(), Error> {
        Ok(())
    }

    /// Learns by messages what only all members together say.
    ///
    /// # Errors
    /// The contradiction, in words that go before "in operation ...".
    fn learn<'a>(
        &mut self,
        _at: At<'_>,
        _said: impl Fn(usize) -> MemberSays<'a>,
    ) -> Result<(), String> {
        Ok(())
    }

    /// Unpacks the elements of the other members, which were checked.
    fn unpack(self, at: At<'_>, _received: &Received<'_>) -> AfterRound<Self> {
        Break(self.alone(at))
    }

    /// Makes the output where no other member exists: as if each gave what this one gives, where
    /// that makes sense.
    fn alone(self, at: At<'_>) -> Self::Gets;
}

/// A member's place in an operation.
#[derive(Clone, Copy)]
pub(crate) struct At<'a> {
    /// The call, as this member means it.
    pub(crate) actual: &'a Descriptor,
    /// The members, by slot.
    pub(crate) ranks: &'a [Rank],
    /// The member's own.
    pub(crate) slot: usize,
    /// From 0. An all-reduce between members that share no memory has two.
    pub(crate) round: u8,
}

impl At<'_> {
    /// Returns the plain pattern of the operation.
    pub(crate) fn pattern(&self) -> Pattern<'static> {
        Pattern::of(self.actual, self.ranks, self.slot)
    }

    /// Returns divisors and wire dtype.
    ///
    /// # Panics
    /// If the operation has none.
    fn scaling(&self) -> Scaling {
        self.actual.scaling.expect("a reduction of gradients has one")
    }

    /// Returns whether no other round follows.
    pub(crate) fn is_last_round(&self) -> bool {
        self.round + 1 == self.pattern().rounds()
    }

    /// Goes on to another round, or to the output after the last one.
    fn go_on<D: Contribute>(&self, own: D, output: impl FnOnce(D) -> D::Gets) -> AfterRound<D> {
        if self.is_last_round() { Break(output(own)) } else { Continue(own) }
    }
}

/// The facts that a member tells the others beside its elements.
pub(crate) struct MemberSays<'a> {
    pub(crate) counts: &'a Counts,
    pub(crate) note: u64,
}

/// The elements of the other members, as bytes by slot; none of this member.
pub(crate) struct Received<'a>(pub(crate) &'a dyn Fn(usize) -> &'a [u8]);

impl Received<'_> {
    fn bytes(&self, from: usize) -> &[u8] {
        (self.0)(from)
    }

    fn elements<T: Pod>(&self, from: usize) -> &[T] {
        bytemuck::cast_slice(self.bytes(from))
    }
}

/// A member's buffers after a round: its output, or its contribution to another round.
pub(crate) type AfterRound<D> = ControlFlow<<D as Contribute>::Gets, D>;

/// The work of one operation, with the contributions of all its members.
pub(crate) trait Work: Send + Sync + 'static {
    /// The output of a member.
    type Gets: Send + 'static;

    /// Returns the number of blocks, which are numbered from 0.
    fn blocks(&self) -> usize;

    /// Returns the bytes that all blocks together write, or those that they read where that is the
    /// greater part. They decide whether waking others pays, and count nothing.
    fn bytes(&self) -> usize;

    /// Returns whether a block calls code of a user, or waits in a library, which may take as long
    /// as they like.
    fn calls_users(&self) -> bool {
        false
    }

    /// Runs a block. Called once for each; several blocks at a time, on different threads.
    fn run(&self, block: usize, meter: &Meter<'_>);

    /// Returns the beginning of another round, if there is one before the members get their
    /// outputs. Called when every block has been run.
    fn next_round(&mut self) -> Option<NextRound> {
        None
    }

    /// Returns the members' outputs, and drops all that they lent. Called when every block of the
    /// last round has been run.
    fn finish(self) -> Outputs<Self::Gets>;
}

/// Has an operation gather again.
pub(crate) type NextRound = Box<dyn FnOnce(&Arc<SharedOperation>) + Send>;

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

    /// Returns the rank of the member in `slot`.
    pub(crate) fn rank(&self, slot: usize) -> Rank {
        self.ranks[slot]
    }

    /// Has the member in `slot` lend its contribution: if `read` panics or hangs, an error names
    /// this member, or another that lends inside of `read`.
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

    /// Returns the slot whose code was running when the block panicked.
    pub(crate) fn reading(&self) -> Option<usize> {
        self.reading.get()
    }
}

/// Borrows `range` of an output for the one block that writes it.
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

/// Borrows `range` of an output whose dtype is a value, for the one block that writes it.
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

/// Returns the elements of a block where there are `all` to be cut.
fn block_elements(all: usize) -> usize {
    let fitting = all / ENOUGH_BLOCKS / BLOCK_ELEMENTS * BLOCK_ELEMENTS;
    fitting.clamp(BLOCK_ELEMENTS, MOST_ELEMENTS)
}

/// Returns the one length of all `lengths`.
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

/// Returns the parts of `pieces`, which are in order and do not overlap, that lie in `range` of the
/// shard: each with its range in the shard and its range in the parameter.
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

/// Parts of one length that are each cut into blocks. The blocks cover all parts once.
struct Cuts {
    /// Elements of a part.
    len: usize,
    /// Elements of a block, but for the last one of a part.
    block_len: usize,
}

impl Cuts {
    /// Returns the number of blocks of each part.
    fn each(&self) -> usize {
        self.len.div_ceil(self.block_len)
    }

    /// Returns the part of a block, and the range of the block in that part.
    fn block(&self, block: usize) -> (usize, Range<usize>) {
        let start = block % self.each() * self.block_len;
        (block / self.each(), start..self.len.min(start + self.block_len))
    }
}
