//! Operations that move elements as they are: all_gather, broadcast, gather, scatter, all_to_all.

use std::ops::Range;

use hsdp_kernels::{DisjointVec, Element, copy_past_caches};

use super::member_buffers::{MemberBuffers, Source};
use super::{BLOCK_BYTES, Meter, Outputs, PAST_CACHES, Work, blocks_of, one_length, take};

/// Consecutive elements of one member, and where they go.
#[derive(Clone, Debug)]
struct Move {
    /// The slot of the member that gives.
    from: usize,
    /// The first element in its source.
    start: usize,
    /// How many.
    len: usize,
    /// The slots of the members that take it, if they have a target.
    to: Range<usize>,
    /// Where they begin in a taker's target.
    at: usize,
}

/// Moves of elements. No two moves to one member overlap in its target.
pub(crate) struct Copies<T> {
    /// By slot.
    sources: Vec<Source<T>>,
    targets: Vec<Option<DisjointVec<T>>>,
    moves: Vec<Move>,
    /// How elements are written.
    copy: fn(&mut [T], &[T]),
}

impl<T: Element> Copies<T> {
    /// Every member's source goes to every target, in member order.
    ///
    /// # Errors
    /// If the sources differ in length: their moves would overlap.
    pub(crate) fn to_all(members: Vec<MemberBuffers<T>>) -> Result<Self, String> {
        let (count, len) = (members.len(), one_length(members.iter().map(|it| it.source.len()))?);
        let whole = |from| Move { from, start: 0, len, to: 0..count, at: from * len };
        Ok(Self::of(members, (0..count).map(whole)))
    }

    /// The root's source goes to every target.
    pub(crate) fn from_root(members: Vec<MemberBuffers<T>>, root: usize) -> Self {
        let len = members[root].source.len();
        let moves = [Move { from: root, start: 0, len, to: 0..members.len(), at: 0 }];
        Self::of(members, moves)
    }

    /// The root's source is dealt out to the members' targets, `part` elements each.
    pub(crate) fn dealt_by(members: Vec<MemberBuffers<T>>, root: usize, part: usize) -> Self {
        let deal = |to| Move { from: root, start: to * part, len: part, to: to..to + 1, at: 0 };
        let moves = (0..members.len()).map(deal);
        Self::of(members, moves)
    }

    /// Every member's source is dealt out to all targets, `counts[from][to]` elements from one to another; each
    /// target takes its parts in member order.
    pub(crate) fn split(members: Vec<MemberBuffers<T>>, counts: &[Vec<usize>]) -> Self {
        let mut filled = vec![0; members.len()];
        let mut moves = Vec::with_capacity(members.len() * members.len());
        for (from, counts) in counts.iter().enumerate() {
            let mut start = 0;
            for (to, &len) in counts.iter().enumerate() {
                moves.push(Move { from, start, len, to: to..to + 1, at: filled[to] });
                start += len;
                filled[to] += len;
            }
        }
        Self::of(members, moves)
    }

    /// CO-2 rests on the four above: the moves to one target do not overlap in it.
    fn of(members: Vec<MemberBuffers<T>>, moves: impl IntoIterator<Item = Move>) -> Self {
        let cut = |it: Move| {
            let parts = blocks_of(0..it.len, BLOCK_BYTES / size_of::<T>());
            parts.map(move |part| Move {
                start: it.start + part.start,
                len: part.len(),
                at: it.at + part.start,
                ..it.clone()
            })
        };
        let moves = moves.into_iter().flat_map(cut).collect();
        let disjoint = |it: MemberBuffers<T>| (it.source, it.target.map(DisjointVec::from));
        let (sources, targets) = members.into_iter().map(disjoint).unzip();
        let mut work = Self { sources, targets, moves, copy: <[T]>::copy_from_slice };
        if work.bytes() > PAST_CACHES {
            work.copy = copy_past_caches;
        }
        work
    }

    /// The targets that take a move.
    fn takers(&self, it: &Move) -> impl Iterator<Item = &DisjointVec<T>> {
        self.targets[it.to.clone()].iter().flatten()
    }
}

impl<T: Element> Work for Copies<T> {
    type Output = MemberBuffers<T>;

    fn blocks(&self) -> usize {
        self.moves.len()
    }

    fn bytes(&self) -> usize {
        self.moves.iter().map(|it| it.len * self.takers(it).count() * size_of::<T>()).sum()
    }

    fn run(&self, block: usize, _meter: &Meter<'_>) {
        let it = &self.moves[block];
        let source = &self.sources[it.from].elements()[it.start..it.start + it.len];
        for target in self.takers(it) {
            // SAFETY: CO-2, moves to one target do not overlap, and each is run once.
            let target = unsafe { take(target, it.at..it.at + it.len) };
            (self.copy)(target, source);
        }
    }

    fn finish(self) -> Outputs<MemberBuffers<T>> {
        let filled = self.targets.into_iter().map(|target| target.map(DisjointVec::into_vec));
        let members = self.sources.into_iter().zip(filled);
        members.map(|(source, target)| MemberBuffers::done(source, target)).collect()
    }
}
