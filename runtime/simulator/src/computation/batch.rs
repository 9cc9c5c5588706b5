//! The data of a rank in a microbatch.

use std::fmt;
use std::str::FromStr;

use hsdp_sharding::DType;

use crate::Error;

/// The data of a rank's microbatch, and how it is computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Batch {
    /// Sequences.
    pub sequences: usize,
    /// Tokens of a sequence.
    pub context: usize,
    /// The dtype of activations and full parameters of units that declare none.
    pub dtype: DType,
    /// The part of a forward that the backward computes again.
    pub recompute: Recompute,
}

impl Batch {
    pub(super) const fn tokens(&self) -> f64 {
        self.sequences as f64 * self.context as f64
    }

    /// Bytes of an element of activations, in a unit that declares the dtype `compute`.
    pub(super) fn element(&self, compute: Option<DType>) -> f64 {
        compute.unwrap_or(self.dtype).size_bytes() as f64
    }
}

/// The part of a unit's forward that its backward computes again, instead of keeping it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Recompute {
    /// Nothing.
    #[default]
    Nothing,
    /// Attention from queries, keys and values on: its scores take the most memory, and few operations.
    Attention,
    /// All of it: only the inputs of units are kept.
    Unit,
}

impl Recompute {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::Nothing, Self::Attention, Self::Unit];

    /// Its name on a command line.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Nothing => "nothing",
            Self::Attention => "attention",
            Self::Unit => "unit",
        }
    }
}

impl fmt::Display for Recompute {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for Recompute {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        let unknown = || Error::Computation {
            problem: format!("{text:?} cannot be recomputed: expected nothing, attention or unit"),
        };
        Self::ALL.into_iter().find(|it| it.name() == text).ok_or_else(unknown)
    }
}
