//! Ranks that are alike: the coarsest partition in which ranks of one color have groups of one
//! shape with members of the same colors.

use std::collections::HashMap;
use std::hash::Hash;

use hsdp_sharding::{Axis, Mesh, Rank};

use crate::host::Members;

/// The number of a group's shape, by its members and the first of them
/// ([`Costs::shape`](super::Costs::shape)).
pub(crate) type ShapeOf<'a> = &'a dyn Fn(Members, Rank) -> usize;

/// The colors of ranks, and the groups in which colors meet.
#[derive(Clone, Debug)]
pub(crate) struct Colors {
    firsts: Vec<Rank>,
    counts: Vec<usize>,
    /// Classes of the groups of each color's ranks, by [`Members`].
    groups: Vec<[usize; 3]>,
    classes: Vec<GroupClass>,
}

/// Groups of one shape with members of the same colors.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct GroupClass {
    pub(super) shape: usize,
    /// The colors of its members, each once.
    pub(super) colors: Vec<usize>,
}

/// Numbers for keys, in the order in which they come.
struct KeyNumbers<K> {
    of: HashMap<K, usize>,
    /// Last key and its number. Ranks that follow each other are often alike.
    last: Option<(K, usize)>,
}

impl<K: Clone + Eq + Hash> KeyNumbers<K> {
    fn new() -> Self {
        Self { of: HashMap::new(), last: None }
    }

    fn len(&self) -> usize {
        self.of.len()
    }

    fn of(&mut self, key: K) -> usize {
        match &self.last {
            Some((last, number)) if *last == key => *number,
            _ => {
                let next = self.len();
                let number = *self.of.entry(key.clone()).or_insert(next);
                self.last = Some((key, number));
                number
            }
        }
    }
}

impl Colors {
    /// Returns the colors of the ranks of a mesh.
    pub(crate) fn of(mesh: Mesh, shape: ShapeOf<'_>) -> Self {
        let mut color = vec![0; mesh.world_size()];
        let mut count = 1;
        loop {
            let [shard, replicate] =
                [Axis::Shard, Axis::Replicate].map(|axis| groups(mesh, axis, &color, shape));
            let mut refined = KeyNumbers::new();
            color = mesh
                .ranks()
                .map(|rank| {
                    let at = mesh.coordinate(rank);
                    refined.of((
                        color[rank.index()],
                        shard[at.replicate_index],
                        replicate[at.shard_index],
                    ))
                })
                .collect();
            if refined.len() == count {
                return Self::stable(mesh, &color, shape);
            }
            count = refined.len();
        }
    }

    fn stable(mesh: Mesh, color: &[usize], shape: ShapeOf<'_>) -> Self {
        let mut firsts = Vec::new();
        let mut counts = Vec::new();
        for rank in mesh.ranks() {
            let color = color[rank.index()];
            if color == firsts.len() {
                firsts.push(rank);
                counts.push(0);
            }
            counts[color] += 1;
        }
        let mut numbers = KeyNumbers::new();
        let mut classes = Vec::new();
        let mut number = |members, ranks: Vec<Rank>| {
            let mut colors: Vec<usize> = ranks.iter().map(|rank| color[rank.index()]).collect();
            colors.sort_unstable();
            colors.dedup();
            let class = GroupClass { shape: shape(members, ranks[0]), colors };
            let number = numbers.of((members, class.clone()));
            if number == classes.len() {
                classes.push(class);
            }
            number
        };
        let groups = firsts.iter().map(|rank| {
            let shard = number(Members::Shard, mesh.group(Axis::Shard, *rank));
            let replicate = number(Members::Replicate, mesh.group(Axis::Replicate, *rank));
            [shard, replicate, number(Members::World, mesh.ranks().collect())]
        });
        let groups = groups.collect();
        Self { firsts, counts, groups, classes }
    }

    /// Returns the number of colors.
    pub(crate) fn len(&self) -> usize {
        self.firsts.len()
    }

    /// Returns the first rank of a color.
    pub(super) fn first(&self, color: usize) -> Rank {
        self.firsts[color]
    }

    /// Returns the number of its ranks.
    pub(super) fn count(&self, color: usize) -> usize {
        self.counts[color]
    }

    /// Returns the class of the groups in which ranks of a color meet others.
    pub(super) fn group(&self, color: usize, members: Members) -> usize {
        self.groups[color][members as usize]
    }

    pub(super) fn class(&self, class: usize) -> &GroupClass {
        &self.classes[class]
    }

    pub(super) fn classes(&self) -> usize {
        self.classes.len()
    }
}

/// Returns a number for each group along an axis, by the index on the other one: equal for equal
/// shapes and colors of members.
fn groups(mesh: Mesh, axis: Axis, color: &[usize], shape: ShapeOf<'_>) -> Vec<usize> {
    let (count, members) = match axis {
        Axis::Shard => (mesh.replicate_size(), Members::Shard),
        Axis::Replicate => (mesh.shard_size(), Members::Replicate),
    };
    let step = if axis == Axis::Shard { mesh.shard_size() } else { 1 };
    let mut numbers = KeyNumbers::new();
    let number = |index: usize| {
        let rank = Rank::new(index * step);
        let mut colors: Vec<usize> =
            mesh.members(axis, rank).map(|rank| color[rank.index()]).collect();
        colors.sort_unstable();
        numbers.of((shape(members, rank), colors))
    };
    (0..count).map(number).collect()
}
