//! The position of a microbatch in a run.

use hsdp::Rank;

/// Position of one microbatch in a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// Number of the step, from 0.
    pub step: u64,
    /// Index of the microbatch in the step.
    pub microbatch: usize,
    /// Rank that computes the microbatch.
    pub rank: Rank,
}
