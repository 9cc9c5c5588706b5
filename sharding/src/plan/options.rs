//! What a user chooses about a step.

use std::fmt;
use std::str::FromStr;

use crate::{DType, Error};

#[cfg(test)]
mod tests;

/// When gradients are communicated.
///
/// Displayed and parsed as `reduce-scatter`, `every`, `local`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Accumulation {
    /// Reduce-scatter in each microbatch, all-reduce once a step.
    #[default]
    ReduceScatter,
    /// Reduce-scatter and all-reduce in each microbatch.
    Every,
    /// No communication before the last microbatch; gradients accumulate unsharded, in f32.
    Local,
}

impl Accumulation {
    /// Every mode.
    pub const ALL: [Self; 3] = [Self::ReduceScatter, Self::Every, Self::Local];

    /// Its name on a command line.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::ReduceScatter => "reduce-scatter",
            Self::Every => "every",
            Self::Local => "local",
        }
    }
}

impl fmt::Display for Accumulation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for Accumulation {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        Self::ALL.into_iter().find(|mode| mode.name() == text).ok_or_else(|| Error::Unparsable {
            what: "accumulation mode",
            text: text.to_owned(),
            expected: "reduce-scatter, every or local",
        })
    }
}

/// How many copies of a gathered unit there are where ranks share a process.
///
/// Displayed and parsed as `per-rank`, `per-process`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum FullCopies {
    /// One for each rank, which may do with it what it likes.
    #[default]
    PerRank,
    /// One that all ranks of the world read: replicas hold the same parameters. All ranks must be threads of one process.
    PerProcess,
}

impl FullCopies {
    /// Every choice.
    pub const ALL: [Self; 2] = [Self::PerRank, Self::PerProcess];

    /// Its name on a command line.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::PerRank => "per-rank",
            Self::PerProcess => "per-process",
        }
    }
}

impl fmt::Display for FullCopies {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for FullCopies {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        Self::ALL.into_iter().find(|copies| copies.name() == text).ok_or_else(|| {
            Error::Unparsable {
                what: "choice of full copies",
                text: text.to_owned(),
                expected: "per-rank or per-process",
            }
        })
    }
}

/// What a plan depends on besides model and mesh. All ranks must choose the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct PlanOptions {
    /// The dtype of full parameters, on the wire and in the forward: f32, f16 or bf16. Shards are
    /// f32.
    pub param_dtype: DType,
    /// The wire dtype of gradients: f32, f16 or bf16. Sums are f32.
    pub reduce_dtype: DType,
    /// When gradients are communicated.
    pub accumulation: Accumulation,
    /// How many gathers ahead of the one asked for are issued, within a microbatch.
    pub prefetch: usize,
    /// How many copies of a gathered unit there are.
    pub full_copies: FullCopies,
    /// Words of f32 that the optimizer keeps for each trainable element: 2 for AdamW, 1 for SGD
    /// with momentum.
    pub optimizer_slots: usize,
}

impl Default for PlanOptions {
    /// f32 throughout, reduce-scatter in each microbatch, one gather ahead, AdamW.
    fn default() -> Self {
        Self {
            param_dtype: DType::F32,
            reduce_dtype: DType::F32,
            accumulation: Accumulation::default(),
            prefetch: 1,
            full_copies: FullCopies::default(),
            optimizer_slots: 2,
        }
    }
}
