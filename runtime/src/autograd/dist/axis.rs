//! The axes along which a collective goes, as types.

use std::fmt::{self, Debug};

/// An axis that a method goes along: [`OnReplicate`], [`OnShard`], or [`OnBoth`] for the whole mesh.
pub trait MeshAxis: Copy + Debug {
    /// The axis as a value.
    const AXES: Axes;
}

/// The axes of a [`MeshAxis`], as a value.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Axes {
    /// The replicate axis.
    Replicate,
    /// The shard axis.
    Shard,
    /// The whole mesh, in rank order.
    Both,
}

impl Axes {
    /// The indices of these axes in a pair of states.
    pub(super) const fn places(self) -> &'static [usize] {
        match self {
            Self::Replicate => &[0],
            Self::Shard => &[1],
            Self::Both => &[0, 1],
        }
    }
}

impl fmt::Display for Axes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Replicate => "the replicate axis",
            Self::Shard => "the shard axis",
            Self::Both => "the whole mesh",
        })
    }
}

/// Along the replicate axis.
#[derive(Clone, Copy, Debug)]
pub struct OnReplicate;

/// Along the shard axis.
#[derive(Clone, Copy, Debug)]
pub struct OnShard;

/// Over the whole mesh, in rank order. For values in the same state on both axes.
#[derive(Clone, Copy, Debug)]
pub struct OnBoth;

impl MeshAxis for OnReplicate {
    const AXES: Axes = Axes::Replicate;
}

impl MeshAxis for OnShard {
    const AXES: Axes = Axes::Shard;
}

impl MeshAxis for OnBoth {
    const AXES: Axes = Axes::Both;
}
