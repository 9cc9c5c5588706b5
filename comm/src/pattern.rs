//! The table of every collective: which member gives which elements to which member, in which
//! round, and how they are combined there.
//!
//! The ledger, the counting backend, messages and devices read their ranges here. A pattern is a
//! function of a descriptor: it knows no buffer, and has no I/O, no thread and no clock.

#[cfg(test)]
mod tests;

use std::ops::Range;

use hsdp_sharding::{ByteCount, DType, Rank, balanced};

use crate::{Descriptor, Op, Reduction};

/// The table of one operation, as the member in `slot` knows it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Pattern<'a> {
    pub(crate) slot: usize,
    pub(crate) members: usize,
    op: Op,
    count: usize,
    /// The slot of the root, of an operation that has one.
    root: Option<usize>,
    reduction: Option<Reduction>,
    /// The bytes of an element, by round. Finished sums travel in f32, where contributions are
    /// scaled.
    sizes: [usize; 2],
    variant: Variant<'a>,
}

/// The facts that are not in a descriptor.
#[derive(Clone, Copy, Debug)]
enum Variant<'a> {
    Plain,
    /// Of an `all_to_all`: where the elements begin that this member gives to each and gets of
    /// each, and the end ([`starts_of`]). No member knows the others' splits.
    Dealt {
        send: &'a [usize],
        receive: &'a [usize],
    },
    /// Of an `all_gather`: these many members give, and only the first one gets.
    Shared {
        shards: usize,
    },
    /// Starts of the members' parts, and the end of the last one. Each element has one place on all
    /// members.
    Cut(&'a [usize]),
    /// Of a permutation: the members that get from this one and give to it, as far as it knows.
    Permuted {
        to: Option<usize>,
        from: Option<usize>,
    },
}

/// The elements that one member gives to another.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Stretch {
    /// The range in the giver's elements.
    source: Range<usize>,
    /// The range in the taker's output.
    target: Range<usize>,
}

/// How many rounds an operation has: a member's part in a round may need all that it got in the
/// round before.
pub(crate) fn rounds(op: Op) -> u8 {
    if op == Op::AllReduce { 2 } else { 1 }
}

impl<'a> Pattern<'a> {
    /// The pattern of an operation of `ranks`, for the member in `slot`.
    pub(crate) fn of(descriptor: &Descriptor, ranks: &[Rank], slot: usize) -> Self {
        let Descriptor { op, reduction, dtype, scaling, root, .. } = *descriptor;
        let root = root.and_then(|root| ranks.iter().position(|rank| *rank == root));
        let size = dtype.map_or(0, DType::size_bytes);
        let sizes = [size, scaling.map_or(size, |_| size_of::<f32>())];
        let members = ranks.len();
        let count = descriptor.counts.total();
        Self { slot, members, op, count, root, reduction, sizes, variant: Variant::Plain }
    }

    /// The same, for another member.
    pub(crate) fn at(self, slot: usize) -> Self {
        Self { slot, ..self }
    }

    /// Returns the same, with this member's splits, as [`starts_of`] makes them.
    pub(crate) fn dealt(self, send: &'a [usize], receive: &'a [usize]) -> Self {
        Self { variant: Variant::Dealt { send, receive }, ..self }
    }

    /// The same, where the first `shards` members give, and only the first member gets.
    pub(crate) fn shared(self, shards: usize) -> Self {
        Self { variant: Variant::Shared { shards }, ..self }
    }

    /// Returns the same for buffers in which each member owns a part. `cuts` has the starts of the
    /// parts, and the end of the last one.
    pub(crate) fn cut(self, cuts: &'a [usize]) -> Self {
        Self { variant: Variant::Cut(cuts), ..self }
    }

    /// The same, where this member gives to member `to` and gets from member `from`.
    pub(crate) fn permuted(self, to: Option<usize>, from: Option<usize>) -> Self {
        Self { variant: Variant::Permuted { to, from }, ..self }
    }

    /// The other members, by slot.
    pub(crate) fn others(&self) -> impl Iterator<Item = usize> + use<> {
        let own = self.slot;
        (0..self.members).filter(move |slot| *slot != own)
    }

    /// Returns the members that may get elements of another one, in ranges of which all get the
    /// same.
    pub(crate) fn takers(&self) -> impl Iterator<Item = Range<usize>> + use<> {
        let (all, len) = match self.op {
            Op::AllGather | Op::Broadcast => (0..self.members, self.members),
            Op::Gather => self.root.map_or((0..0, 1), |root| (root..root + 1, 1)),
            Op::Barrier => (0..0, 1),
            _ => (0..self.members, 1),
        };
        all.step_by(len.max(1)).map(move |first| first..first + len)
    }

    pub(crate) fn rounds(&self) -> u8 {
        rounds(self.op)
    }

    /// The elements of this member that member `to` gets.
    pub(crate) fn gives(&self, round: u8, to: usize) -> Range<usize> {
        self.part(round, self.slot, to).source
    }

    /// The place where the elements of member `from` go on this member.
    pub(crate) fn takes(&self, round: u8, from: usize) -> Range<usize> {
        self.part(round, from, self.slot).target
    }

    /// How elements that go to one place are combined there, in member order; `None` where each has
    /// a place of its own.
    pub(crate) fn combines(&self, round: u8) -> Option<Reduction> {
        self.reduction.filter(|_| round == 0)
    }

    /// The bytes of an element.
    pub(crate) fn element_bytes(&self, round: u8) -> usize {
        self.sizes[usize::from(round)]
    }

    /// The bytes that this member gets of member `from`; as many as can be counted, if they are
    /// more.
    pub(crate) fn bytes_from(&self, round: u8, from: usize) -> usize {
        self.takes(round, from).len().saturating_mul(self.element_bytes(round))
    }

    /// The bytes that this member gets of all others in all rounds: what a ledger counts.
    pub(crate) fn received(&self) -> ByteCount {
        (0..self.rounds()).map(|round| self.received_in(round)).sum()
    }

    /// The same in one round. Not added up one by one where it is known: an operation between many
    /// threads would take longer.
    pub(crate) fn received_in(&self, round: u8) -> ByteCount {
        let own = self.takes(round, self.slot).len();
        let elements = match self.combines(round) {
            Some(_) => own.saturating_mul(self.members - 1),
            None if round > 0 => self.count - own,
            None => self.others().map(|from| self.takes(round, from).len()).sum(),
        };
        ByteCount::of(elements.saturating_mul(self.element_bytes(round)))
    }

    /// The table.
    fn part(&self, round: u8, from: usize, to: usize) -> Stretch {
        let Self { count, members, .. } = *self;
        let is_root = |slot| self.root == Some(slot);
        match (self.op, self.variant) {
            (_, Variant::Dealt { send, receive }) => {
                Stretch { source: nth(send, to), target: nth(receive, from) }
            }
            (Op::AllGather, Variant::Cut(cuts)) => Stretch::in_place(nth(cuts, from)),
            (Op::ReduceScatter, Variant::Cut(cuts)) => Stretch::in_place(nth(cuts, to)),
            (Op::AllGather, Variant::Shared { shards }) if to > 0 || from >= shards => {
                Stretch::default()
            }
            (Op::AllGather, _) => Stretch::new(0, from.saturating_mul(count), count),
            (Op::Gather, _) if is_root(to) => Stretch::new(0, from.saturating_mul(count), count),
            (Op::Broadcast, _) if is_root(from) => Stretch::new(0, 0, count),
            (Op::Scatter, _) if is_root(from) => Stretch::new(to.saturating_mul(count), 0, count),
            (Op::ReduceScatter, _) => Stretch::new(to * (count / members), 0, count / members),
            (Op::Reduce, _) if is_root(to) => Stretch::new(0, 0, count),
            // Each member combines its slice, and then gives it to all.
            (Op::AllReduce, _) => {
                Stretch::in_place(balanced(count, members, if round == 0 { to } else { from }))
            }
            (Op::Permute, Variant::Permuted { to: taker, from: giver })
                if (taker, self.slot) == (Some(to), from)
                    || (giver, self.slot) == (Some(from), to) =>
            {
                Stretch::new(0, 0, count)
            }
            (Op::Send | Op::Recv, _) if (from, to) == (0, 1) => Stretch::new(0, 0, count),
            _ => Stretch::default(),
        }
    }
}

impl Stretch {
    fn new(source: usize, target: usize, len: usize) -> Self {
        let range = |start: usize| start..start.saturating_add(len);
        Self { source: range(source), target: range(target) }
    }

    fn in_place(range: Range<usize>) -> Self {
        Self { source: range.clone(), target: range }
    }
}

/// Returns where ranges of these lengths begin that lie side by side, and the end of the last one.
pub(crate) fn starts_of(counts: &[usize]) -> Vec<usize> {
    let mut starts = Vec::with_capacity(counts.len() + 1);
    starts.push(0);
    starts.extend(counts.iter().scan(0_usize, |end, count| {
        *end = end.saturating_add(*count);
        Some(*end)
    }));
    starts
}

/// Returns the `index`-th of ranges that lie side by side.
pub(crate) fn nth(starts: &[usize], index: usize) -> Range<usize> {
    starts[index]..starts[index + 1]
}
