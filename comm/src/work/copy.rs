//! Operations that move elements as they are: all_gather, broadcast, gather, scatter, all_to_all.

use hsdp_kernels::{DisjointVec, Element, copy_past_caches};

use super::exchange::{Exchange, Source};
use super::{
    BLOCK_BYTES, Deposits, Meter, Outputs, PAST_CACHES, Work, blocks_of, one_length, take,
};

/// Consecutive elements of one member, and where they go.
#[derive(Clone, Copy, Debug)]
struct Move {
    /// The slot of the member that gives.
    from: usize,
    /// The first element in its source.
    start: usize,
    /// How many.
    len: usize,
    /// Who takes.
    to: To,
    /// Where they begin in a taker's target.
    at: usize,
}

/// Who takes.
#[derive(Clone, Copy, Debug)]
enum To {
    /// The member in this slot.
    One(usize),
    /// Every member that has a target.
    All,
}

/// Moves of elements. No two moves to one member overlap in its target.
pub(crate) struct Copies<T> {
    lists: CopyLists<T>,
    /// How elements are written.
    copy: fn(&mut [T], &[T]),
}

/// What members bring, by slot, and what is to be done.
pub(crate) struct CopyLists<T> {
    sources: Vec<Source<T>>,
    targets: Vec<Option<DisjointVec<T>>>,
    moves: Vec<Move>,
}

impl<T> Default for CopyLists<T> {
    fn default() -> Self {
        Self { sources: Vec::new(), targets: Vec::new(), moves: Vec::new() }
    }
}

impl<T: Element> Copies<T> {
    /// Every member's source goes to every target, in member order.
    ///
    /// # Errors
    /// If the sources differ in length: their moves would overlap.
    pub(crate) fn to_everybody(
        lists: CopyLists<T>,
        members: Deposits<'_, Exchange<T>>,
    ) -> Result<Self, String> {
        let work = Self::of(lists, members);
        let sources = &work.lists.sources;
        let (members, len) = (sources.len(), one_length(sources.iter().map(Source::len))?);
        let whole = |from| Move { from, start: 0, len, to: To::All, at: from * len };
        Ok(work.moving((0..members).map(whole)))
    }

    /// The root's source goes to every target.
    pub(crate) fn from_root(members: Vec<Exchange<T>>, root: usize) -> Self {
        let len = members[root].source.len();
        let moves = [Move { from: root, start: 0, len, to: To::All, at: 0 }];
        Self::of(CopyLists::default(), members).moving(moves)
    }

    /// The root's source is dealt out to the members' targets, `part` elements each.
    pub(crate) fn dealt_by(members: Vec<Exchange<T>>, root: usize, part: usize) -> Self {
        let deal = |to| Move { from: root, start: to * part, len: part, to: To::One(to), at: 0 };
        let moves = (0..members.len()).map(deal);
        Self::of(CopyLists::default(), members).moving(moves)
    }

    /// Every member's source is dealt out to all targets, `counts[from][to]` elements from one to another; each
    /// target takes its parts in member order.
    pub(crate) fn split(members: Vec<Exchange<T>>, counts: &[Vec<usize>]) -> Self {
        let mut filled = vec![0; members.len()];
        let mut moves = Vec::with_capacity(members.len() * members.len());
        for (from, counts) in counts.iter().enumerate() {
            let mut start = 0;
            for (to, &len) in counts.iter().enumerate() {
                moves.push(Move { from, start, len, to: To::One(to), at: filled[to] });
                start += len;
                filled[to] += len;
            }
        }
        Self::of(CopyLists::default(), members).moving(moves)
    }

    /// What the members bring, and nothing to do with it.
    fn of(lists: CopyLists<T>, members: impl IntoIterator<Item = Exchange<T>>) -> Self {
        let mut lists = lists;
        for Exchange { source, target } in members {
            lists.sources.push(source);
            lists.targets.push(target.map(DisjointVec::from));
        }
        Self { lists, copy: <[T]>::copy_from_slice }
    }

    /// CO-2 rests on the four above: the moves to one target do not overlap in it.
    fn moving(mut self, moves: impl IntoIterator<Item = Move>) -> Self {
        let cut = |it: Move| {
            let parts = blocks_of(0..it.len, BLOCK_BYTES / size_of::<T>());
            parts.map(move |part| Move {
                start: it.start + part.start,
                len: part.len(),
                at: it.at + part.start,
                ..it
            })
        };
        self.lists.moves.extend(moves.into_iter().flat_map(cut));
        if self.bytes() > PAST_CACHES {
            self.copy = copy_past_caches;
        }
        self
    }

    fn copy(&self, it: Move, to: usize) {
        let Some(target) = &self.lists.targets[to] else { return };
        let source = &self.lists.sources[it.from].elements()[it.start..it.start + it.len];
        // SAFETY: CO-2, moves to one target do not overlap, and each is run once.
        let target = unsafe { take(target, it.at..it.at + it.len) };
        (self.copy)(target, source);
    }
}

impl<T: Element> Work for Copies<T> {
    type Output = Exchange<T>;
    type Lists = CopyLists<T>;

    fn blocks(&self) -> usize {
        self.lists.moves.len()
    }

    fn bytes(&self) -> usize {
        let takers = |to| match to {
            To::One(_) => 1,
            To::All => self.lists.targets.iter().flatten().count(),
        };
        self.lists.moves.iter().map(|it| it.len * takers(it.to) * size_of::<T>()).sum()
    }

    fn run(&self, block: usize, _meter: &Meter<'_>) {
        let it = self.lists.moves[block];
        match it.to {
            To::One(to) => self.copy(it, to),
            To::All => (0..self.lists.targets.len()).for_each(|to| self.copy(it, to)),
        }
    }

    fn finish(self, outputs: &mut Outputs<Exchange<T>>) -> CopyLists<T> {
        let CopyLists { mut sources, mut targets, mut moves } = self.lists;
        let filled = targets.drain(..).map(|target| target.map(DisjointVec::into_vec));
        let members = sources.drain(..).zip(filled);
        outputs.extend(members.map(|(source, target)| Exchange::done(source, target)));
        moves.clear();
        CopyLists { sources, targets, moves }
    }
}
