//! The tree of ranks along which exchanges go. `REMOTE.md`, "Exchanges".

use hsdp_sharding::Rank;

/// The number of ranks that send their contributions to one rank. Up to 33 ranks have one that all others send to.
const FAN_OUT: usize = 32;

/// The place of a rank in the tree of its world. Rank 0 is the root.
#[derive(Clone, Copy, Debug)]
pub(super) struct Tree {
    pub(super) rank: Rank,
    /// The number of ranks.
    pub(super) size: usize,
    fan_out: usize,
}

impl Tree {
    pub(super) fn new(rank: Rank, size: usize) -> Self {
        Self { rank, size, fan_out: FAN_OUT }
    }

    /// A tree in which all other ranks send to rank 0: where its process sends on all messages anyway.
    pub(super) fn flat(rank: Rank, size: usize) -> Self {
        Self { fan_out: usize::MAX, ..Self::new(rank, size) }
    }

    /// The place of another rank.
    fn of(self, rank: Rank) -> Self {
        Self { rank, ..self }
    }

    /// All other ranks.
    pub(super) fn others(self) -> impl Iterator<Item = Rank> {
        (0..self.size).map(Rank::new).filter(move |rank| *rank != self.rank)
    }

    /// The rank to which this one sends; the root has none.
    pub(super) fn parent(self) -> Option<Rank> {
        Some(Rank::new(self.rank.index().checked_sub(1)? / self.fan_out))
    }

    /// The ranks that send to this one.
    pub(super) fn children(self) -> impl Iterator<Item = Rank> {
        let first = self.fan_out.saturating_mul(self.rank.index()).saturating_add(1);
        (first..self.size.min(first.saturating_add(self.fan_out))).map(Rank::new)
    }

    /// The number of ranks whose contributions this one sends on: its own, and those of all below it.
    pub(super) fn subtree(self) -> usize {
        let below: usize = self.children().map(|child| self.of(child).subtree()).sum();
        1 + below
    }

    /// Whether a rank sends to this one.
    pub(super) fn is_child(self, rank: Rank) -> bool {
        rank.index() < self.size && self.of(rank).parent() == Some(self.rank)
    }

    /// `rank`, and those above it.
    pub(super) fn path(self, rank: Rank) -> impl Iterator<Item = Rank> {
        std::iter::successors(Some(rank), move |rank| self.of(*rank).parent())
    }

    /// Whether `rank` is `root`, or below it.
    pub(super) fn is_below(self, rank: Rank, root: Rank) -> bool {
        self.path(rank).any(|rank| rank == root)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_rank_is_the_child_of_its_parent_and_of_no_other() {
        let sizes = [1, 2, 33, 34, 256, 1_100];
        for (size, tree) in sizes
            .into_iter()
            .flat_map(|size| [(size, Tree::new as fn(_, _) -> _), (size, Tree::flat)])
        {
            let of = |rank| tree(Rank::new(rank), size);
            let mut children: Vec<_> = (0..size).flat_map(|rank| of(rank).children()).collect();
            children.sort_unstable();
            assert_eq!(children, (1..size).map(Rank::new).collect::<Vec<_>>());
            let is_a_child = |rank| {
                let parent = of(rank).parent().expect("it is not the root");
                let parent = of(parent.index());
                parent.is_child(Rank::new(rank)) && parent.children().any(|it| it.index() == rank)
            };
            assert!((1..size).all(is_a_child));
            assert_eq!(of(0).subtree(), size);
            assert!(of(0).parent().is_none() && !of(0).is_child(Rank::new(size)));
        }
    }

    #[test]
    fn a_subtree_has_the_ranks_that_are_below() {
        let tree = Tree::new(Rank::new(3), 1_100);
        let below = (0..1_100).filter(|rank| tree.is_below(Rank::new(*rank), Rank::new(3)));
        assert_eq!(below.count(), tree.subtree());
    }
}
