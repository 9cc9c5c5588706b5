//! The work of an operation, cut into blocks that any thread may run, in any order.
//!
//! What a block writes depends on its number and on the deposits alone, never on who runs it or when: that is
//! why results do not depend on timing. In reading order: `copy` (operations that move elements), `handover` (those that
//! pass whole vectors on), `reduce` (those that combine), `unit_gather`, `unit_reduce` and `all_reduce_scaled` (the
//! runtime's own).

mod all_reduce_scaled;
mod copy;
mod handover;
mod reduce;
mod unit_gather;
mod unit_reduce;

#[cfg(test)]
mod tests;

use std::cell::Cell;
use std::ops::Range;
use std::sync::Arc;

use hsdp_sharding::{ByteCount, Piece, Rank};

pub(crate) use self::all_reduce_scaled::AllReduceScaled;
pub(crate) use self::copy::{Copies, Exchange};
pub(crate) use self::handover::{Handover, Meeting};
pub(crate) use self::reduce::{Receivers, ReduceInPlace, ReduceScatter, RootOnly, combine};
pub(crate) use self::unit_gather::{UnitGather, UnitGatherDeposit};
pub(crate) use self::unit_reduce::{UnitReduce, UnitReduceDeposit};
use crate::local::Record;
use crate::{Channel, Op};

/// Elements of f32 in a block: 32 KiB, so that a sum stays in the first-level cache, or close to it.
const BLOCK_ELEMENTS: usize = 8 << 10;

/// Bytes of a block of a general collective.
const BLOCK_BYTES: usize = 64 << 10;

/// The work of one operation, with everything that its members deposited.
pub(crate) trait Work: Send + Sync {
    /// What a member gets.
    type Output: Send + 'static;

    /// How many blocks there are, numbered from 0.
    fn blocks(&self) -> usize;

    /// Bytes that all blocks write together.
    fn bytes(&self) -> usize;

    /// Runs a block. Called once for each; several blocks at a time, on different threads.
    fn run(&self, block: usize, meter: &Meter<'_>);

    /// Called when every block has been run: the members' outputs, by slot.
    fn finish(self) -> Vec<Self::Output>;
}

/// Where blocks report what they received from other ranks, and whose deposit they are reading.
pub(crate) struct Meter<'a> {
    records: &'a [Arc<Record>],
    ranks: &'a [Rank],
    channel: Channel,
    op: Op,
    reading: Cell<Option<usize>>,
}

impl<'a> Meter<'a> {
    pub(crate) fn new(
        records: &'a [Arc<Record>],
        ranks: &'a [Rank],
        channel: Channel,
        op: Op,
    ) -> Self {
        // What is sent counts where it arrives.
        let op = if op == Op::Send { Op::Recv } else { op };
        Self { records, ranks, channel, op, reading: Cell::new(None) }
    }

    /// The member in slot `to` has read `count` elements of `size` bytes that the member in slot `from` owns.
    pub(crate) fn received(&self, to: usize, from: usize, count: usize, size: usize) {
        let [to, from] = [self.ranks[to], self.ranks[from]];
        if to != from {
            let bytes = ByteCount::of(count * size);
            self.records[to.index()].ledger.received(self.channel, self.op, bytes);
        }
    }

    /// The deposit of the member in `slot` is being read: if that panics, it is the one to name.
    pub(crate) fn read_from(&self, slot: usize) {
        self.reading.set(Some(slot));
    }

    pub(crate) fn reading(&self) -> Option<usize> {
        self.reading.get()
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
    pieces: &[Piece],
    range: Range<usize>,
) -> impl Iterator<Item = (usize, Range<usize>, Range<usize>)> {
    let first = pieces.partition_point(|piece| piece.shard_range().end <= range.start);
    let overlapping = pieces[first..].iter().take_while({
        let end = range.end;
        move |piece| piece.shard_start < end
    });
    overlapping.map(move |piece| {
        let shard = piece.shard_range();
        let part = shard.start.max(range.start)..shard.end.min(range.end);
        let offset = piece.param_start + (part.start - shard.start);
        (piece.param, part.clone(), offset..offset + part.len())
    })
}
