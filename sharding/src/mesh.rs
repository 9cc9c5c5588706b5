//! The mesh of ranks, *replicate x shard*.

use std::fmt;

use crate::{Error, Rank};

/// A direction of the mesh. (A tensor has *dims*, never axes.)
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Axis {
    /// Ranks along this axis hold the same shard, and all-reduce at the end of a step.
    Replicate,
    /// Ranks along this axis hold different shards of the same unit, and gather and reduce-scatter.
    Shard,
}

impl fmt::Display for Axis {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Replicate => "replicate",
            Self::Shard => "shard",
        })
    }
}

/// The position of a rank in the mesh.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Coordinate {
    /// The index in the rank's replicate group, from 0: the number of its replica.
    pub replicate_index: usize,
    /// The index in the rank's shard group, from 0: the number of the slice of every unit that the
    /// rank owns.
    pub shard_index: usize,
}

impl Coordinate {
    /// The index in the rank's group along `axis`.
    #[must_use]
    pub const fn on(self, axis: Axis) -> usize {
        match axis {
            Axis::Replicate => self.replicate_index,
            Axis::Shard => self.shard_index,
        }
    }
}

/// The ranks of a world as a rectangle: `rank = replicate_index * shard_size + shard_index`.
///
/// Displayed and parsed as `RxS`. This is `2x3`:
///
/// ```text
///                     shard axis ->
///                  0        1        2        one row is a shard group: it holds the
/// replicate   0  rank 0   rank 1   rank 2     model once, cut into 3
/// axis        1  rank 3   rank 4   rank 5     one column is a replicate group: its
///                                             ranks hold the same shard
/// ```
///
/// ```
/// use hsdp_sharding::{Axis, Mesh, Rank};
/// let mesh: Mesh = "2x3".parse()?;
/// assert_eq!(mesh.group(Axis::Shard, Rank::new(4)), [3, 4, 5].map(Rank::new));
/// assert_eq!(mesh.group(Axis::Replicate, Rank::new(4)), [1, 4].map(Rank::new));
/// # Ok::<(), hsdp_sharding::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Mesh {
    replicate: usize,
    shard: usize,
}

impl Mesh {
    /// The mesh of a single rank, `1x1`.
    pub const SINGLE: Self = Self { replicate: 1, shard: 1 };

    /// The mesh of `replicate` replicas with `shard` ranks each.
    ///
    /// # Errors
    /// [`Error::InvalidMesh`] if an axis has size 0, or if the world exceeds `u32::MAX` ranks.
    pub fn new(replicate: usize, shard: usize) -> Result<Self, Error> {
        let world = replicate.checked_mul(shard).and_then(|size| u32::try_from(size).ok());
        match world {
            None | Some(0) => Err(Error::InvalidMesh { replicate, shard }),
            Some(_) => Ok(Self { replicate, shard }),
        }
    }

    /// Number of ranks of the mesh.
    #[must_use]
    pub const fn world_size(&self) -> usize {
        self.replicate * self.shard
    }

    /// Number of ranks of a group along `axis`.
    #[must_use]
    pub const fn axis_size(&self, axis: Axis) -> usize {
        match axis {
            Axis::Replicate => self.replicate,
            Axis::Shard => self.shard,
        }
    }

    /// Number of replicas, which is the number of ranks of a replicate group.
    #[must_use]
    pub const fn replicate_size(&self) -> usize {
        self.replicate
    }

    /// Number of shards of a unit, which is the number of ranks of a shard group.
    #[must_use]
    pub const fn shard_size(&self) -> usize {
        self.shard
    }

    /// Whether `rank` is a rank of this mesh.
    #[must_use]
    pub const fn contains(&self, rank: Rank) -> bool {
        rank.index() < self.world_size()
    }

    /// The coordinate of `rank`.
    ///
    /// # Panics
    /// If the mesh does not [contain](Self::contains) `rank`.
    #[must_use]
    pub fn coordinate(&self, rank: Rank) -> Coordinate {
        assert!(self.contains(rank), "rank {rank} is not in the mesh {self}");
        Coordinate {
            replicate_index: rank.index() / self.shard,
            shard_index: rank.index() % self.shard,
        }
    }

    /// The rank at `coordinate`.
    ///
    /// # Panics
    /// If an index is not below the size of its axis.
    #[must_use]
    pub fn rank_at(&self, coordinate: Coordinate) -> Rank {
        let Coordinate { replicate_index, shard_index } = coordinate;
        assert!(
            replicate_index < self.replicate && shard_index < self.shard,
            "coordinate ({replicate_index}, {shard_index}) is not in the mesh {self}"
        );
        Rank::new(replicate_index * self.shard + shard_index)
    }

    /// The ranks of the group of `rank` along `axis`, `rank` included, in the order of their index.
    ///
    /// # Panics
    /// If the mesh does not [contain](Self::contains) `rank`.
    #[must_use]
    pub fn group(&self, axis: Axis, rank: Rank) -> Vec<Rank> {
        self.members(axis, rank).collect()
    }

    /// An iterator over the ranks that [`group`](Self::group) returns. It does not allocate.
    ///
    /// # Panics
    /// If the mesh does not [contain](Self::contains) `rank`.
    pub fn members(&self, axis: Axis, rank: Rank) -> impl ExactSizeIterator<Item = Rank> + use<> {
        let mesh = *self;
        let Coordinate { replicate_index, shard_index } = self.coordinate(rank);
        let member = move |index| match axis {
            Axis::Replicate => Coordinate { replicate_index: index, shard_index },
            Axis::Shard => Coordinate { replicate_index, shard_index: index },
        };
        (0..self.axis_size(axis)).map(move |index| mesh.rank_at(member(index)))
    }

    /// All ranks of the mesh, in ascending order.
    pub fn ranks(&self) -> impl ExactSizeIterator<Item = Rank> + use<> {
        (0..self.world_size()).map(Rank::new)
    }
}

impl fmt::Display for Mesh {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&format!("{}x{}", self.replicate, self.shard))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ranks(numbers: &[usize]) -> Vec<Rank> {
        numbers.iter().copied().map(Rank::new).collect()
    }

    #[test]
    fn coordinates_and_ranks_are_inverse_on_all_meshes_up_to_8x8() {
        for (replicate, shard) in (1..=8).flat_map(|r| (1..=8).map(move |s| (r, s))) {
            let mesh = Mesh::new(replicate, shard).unwrap();
            assert_eq!(mesh.ranks().len(), replicate * shard);
            for rank in mesh.ranks() {
                let place = mesh.coordinate(rank);
                assert_eq!(mesh.rank_at(place), rank);
                assert_eq!(mesh.group(Axis::Shard, rank)[place.on(Axis::Shard)], rank);
                assert_eq!(mesh.group(Axis::Replicate, rank)[place.on(Axis::Replicate)], rank);
            }
        }
    }

    #[test]
    fn groups_partition_the_world() {
        let mesh = Mesh::new(3, 4).unwrap();
        for axis in [Axis::Replicate, Axis::Shard] {
            let mut seen: Vec<Rank> = Vec::new();
            for rank in mesh.ranks().filter(|&rank| mesh.coordinate(rank).on(axis) == 0) {
                let group = mesh.group(axis, rank);
                assert!(group.iter().all(|&member| mesh.group(axis, member) == group));
                seen.extend(group);
            }
            seen.sort();
            assert!(seen.into_iter().eq(mesh.ranks()));
        }
    }

    #[test]
    fn a_2x3_mesh_by_hand() {
        let mesh = Mesh::new(2, 3).unwrap();
        assert_eq!(mesh.world_size(), 6);
        assert_eq!(mesh.axis_size(Axis::Replicate), 2);
        assert_eq!(mesh.axis_size(Axis::Shard), 3);
        let place = Coordinate { replicate_index: 1, shard_index: 2 };
        assert_eq!(mesh.coordinate(Rank::new(5)), place);
        assert_eq!(mesh.group(Axis::Shard, Rank::new(5)), ranks(&[3, 4, 5]));
        assert_eq!(mesh.group(Axis::Replicate, Rank::new(5)), ranks(&[2, 5]));
    }

    #[test]
    fn impossible_meshes_are_refused_with_their_sizes() {
        for (replicate, shard) in [(0, 4), (4, 0), (1 << 16, 1 << 16), (usize::MAX, 2)] {
            let error = Mesh::new(replicate, shard).unwrap_err();
            assert_eq!(error, Error::InvalidMesh { replicate, shard });
        }
        let error = "0x4".parse::<Mesh>().unwrap_err().to_string();
        assert_eq!(
            error,
            "mesh 0x4: each axis needs at least 1 rank, and both together at most 4294967295"
        );
    }

    #[test]
    #[should_panic(expected = "rank 6 is not in the mesh 2x3")]
    fn a_rank_outside_has_no_coordinate() {
        let _ = Mesh::new(2, 3).unwrap().coordinate(Rank::new(6));
    }

    #[test]
    #[should_panic(expected = "(0, 3) is not in the mesh 2x3")]
    fn a_coordinate_outside_has_no_rank() {
        let place = Coordinate { replicate_index: 0, shard_index: 3 };
        let _ = Mesh::new(2, 3).unwrap().rank_at(place);
    }
}
