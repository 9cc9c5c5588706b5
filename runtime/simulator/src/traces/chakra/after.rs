//! The nodes that a node follows.

use crate::simulation::Lane;

/// The last node of each lane that something follows; 0 stands for none. The nodes of a lane are in order, so the last one stands for all.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct After([u64; After::LANES]);

impl After {
    /// A thread, a device, and as many streams as there are channels.
    pub(super) const LANES: usize = 6;

    /// The place of a lane.
    pub(super) const fn place(lane: Lane) -> usize {
        match lane {
            Lane::Host => 0,
            Lane::Computation => 1,
            Lane::Collectives(stream) => 2 + stream,
        }
    }

    /// After this node alone.
    pub(super) fn node(lane: Lane, id: u64) -> Self {
        let mut after = Self::default();
        after.0[Self::place(lane)] = id;
        after
    }

    /// After those of one lane.
    pub(super) fn only(self, lane: Lane) -> Self {
        Self::node(lane, self.0[Self::place(lane)])
    }

    /// After those of the other one, too.
    pub(super) fn and(self, other: Self) -> Self {
        Self(std::array::from_fn(|lane| self.0[lane].max(other.0[lane])))
    }

    /// The identifiers.
    pub(super) fn ids(self) -> impl Iterator<Item = u64> {
        self.0.into_iter().filter(|id| *id > 0)
    }
}
