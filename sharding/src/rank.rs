//! Ranks: the members of a world.

use std::fmt;

use serde::{Deserialize, Serialize};

/// One member of the world: a number from 0 to the world size minus one.
///
/// Displayed as the bare number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Rank(u32);

impl Rank {
    /// The rank with this number.
    ///
    /// # Panics
    /// If `index` is above `u32::MAX`: no [`Mesh`](crate::Mesh) has such a rank.
    #[must_use]
    pub const fn new(index: usize) -> Self {
        assert!(index <= u32::MAX as usize, "a rank is at most 4294967295");
        #[expect(clippy::cast_possible_truncation, reason = "checked in the line above")]
        Self(index as u32)
    }

    /// Its number as a `usize`, for indexing.
    #[must_use]
    pub const fn index(self) -> usize {
        self.0 as usize
    }

    /// Its number as a `u32`, as headers and descriptors hold it.
    #[must_use]
    pub const fn get(self) -> u32 {
        self.0
    }
}

impl fmt::Display for Rank {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}
