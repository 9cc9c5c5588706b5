//! The shape of a group: how many members are on which machine, and with whom they share it.

use hsdp_sharding::{Axis, Mesh, Rank};

use crate::{Error, Machine};

#[cfg(test)]
mod tests;

/// How many members a group has on each machine. Collectives of groups of one shape take the same
/// time.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Shape {
    /// Equal machines are one part; ascending.
    parts: Vec<ShapePart>,
}

/// Machines with as many members of a group, and as many groups that share them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct ShapePart {
    /// Members of the group on each of the machines.
    pub(super) members: usize,
    /// Groups of the axis, with this one, that use the machine's network at the same time; on a
    /// host, its memory.
    pub(super) groups: usize,
    /// Machines that are such.
    machines: usize,
}

impl Shape {
    fn new(machines: impl IntoIterator<Item = (usize, usize)>) -> Self {
        let mut sorted: Vec<_> = machines.into_iter().collect();
        sorted.sort_unstable();
        let equal = sorted.chunk_by(|one, next| one == next);
        let part = |chunk: &[(usize, usize)]| {
            let (members, groups) = chunk[0];
            ShapePart { members, groups, machines: chunk.len() }
        };
        Self { parts: equal.map(part).collect() }
    }

    /// Number of members of the group.
    #[must_use]
    pub fn members(&self) -> usize {
        self.parts.iter().map(|part| part.members * part.machines).sum()
    }

    /// Number of machines that have a member.
    #[must_use]
    pub fn machines(&self) -> usize {
        self.parts.iter().map(|part| part.machines).sum()
    }

    /// Returns the largest number of members on one machine.
    #[must_use]
    pub fn most_members(&self) -> usize {
        self.parts.iter().map(|part| part.members).max().unwrap_or(0)
    }

    pub(super) fn parts(&self) -> &[ShapePart] {
        &self.parts
    }
}

/// The shapes of all groups of a mesh on a machine or a cluster: ranks fill one machine after the
/// other, in their order.
#[derive(Clone, Debug)]
pub struct Shapes {
    mesh: Mesh,
    /// Ranks of a machine; None if all ranks are on one.
    cards: Option<usize>,
    /// Number of groups that use a machine's network, by axis and machine.
    networked: [Vec<usize>; 2],
}

impl Shapes {
    /// Places the ranks of `mesh`.
    ///
    /// # Errors
    /// [`Error::TooManyRanks`] if they need several machines and `machine` has no network.
    pub fn new(mesh: Mesh, machine: &Machine) -> Result<Self, Error> {
        let Some(device) = machine.device() else {
            return Ok(Self { mesh, cards: None, networked: Default::default() });
        };
        let cards = machine.cards();
        let ranks = mesh.world_size();
        if ranks > cards && device.links.network.is_none() {
            return Err(Error::TooManyRanks { machine: machine.name.clone(), cards, ranks, mesh });
        }
        let networked = [Axis::Replicate, Axis::Shard].map(|axis| networked(mesh, cards, axis));
        Ok(Self { mesh, cards: Some(cards), networked })
    }

    /// Returns the shape of the group of `rank` along `axis`.
    ///
    /// # Panics
    /// If the mesh does not contain `rank`.
    #[must_use]
    pub fn group(&self, axis: Axis, rank: Rank) -> Shape {
        let Some(cards) = self.cards else {
            let members = self.mesh.axis_size(axis);
            return Shape::new([(members, self.mesh.world_size() / members)]);
        };
        let machines = by_machine(self.mesh.members(axis, rank), cards);
        let networked = &self.networked[axis as usize];
        match machines.as_slice() {
            [(_, members)] => Shape::new([(*members, 1)]),
            machines => Shape::new(machines.iter().map(|(at, members)| (*members, networked[*at]))),
        }
    }

    /// Returns the shape of the group of all ranks.
    #[must_use]
    pub fn world(&self) -> Shape {
        let cards = self.cards.unwrap_or(self.mesh.world_size());
        let machines = by_machine(self.mesh.ranks(), cards);
        Shape::new(machines.into_iter().map(|(_, members)| (members, 1)))
    }
}

/// Machines with their members, from the ranks of a group in ascending order.
fn by_machine(ranks: impl Iterator<Item = Rank>, cards: usize) -> Vec<(usize, usize)> {
    let mut machines: Vec<(usize, usize)> = Vec::new();
    for rank in ranks {
        let at = rank.index() / cards;
        match machines.last_mut() {
            Some((last, members)) if *last == at => *members += 1,
            _ => machines.push((at, 1)),
        }
    }
    machines
}

/// Counts the groups along `axis` with a member on a machine and one elsewhere, by machine.
fn networked(mesh: Mesh, cards: usize, axis: Axis) -> Vec<usize> {
    let mut groups = vec![0; mesh.world_size().div_ceil(cards)];
    let is_first = |rank: &Rank| mesh.coordinate(*rank).on(axis) == 0;
    for first in mesh.ranks().filter(is_first) {
        let machines = by_machine(mesh.members(axis, first), cards);
        for (at, _) in machines.iter().filter(|_| machines.len() > 1) {
            groups[*at] += 1;
        }
    }
    groups
}
