//! The record of a step.

use serde::Serialize;

/// A line of `metrics.jsonl`, without norms of each parameter and an evaluation.
#[derive(Clone, Copy, Debug, Serialize)]
pub(crate) struct StepRecord {
    /// Number of the step, from 0.
    pub(crate) step: u64,
    /// Mean loss of all ranks.
    pub(crate) loss: f64,
    /// 2-norm of the gradients, before clipping; null in the file where a gradient overflowed.
    pub(crate) grad_norm: f64,
    /// Number of tokens on all ranks.
    pub(crate) tokens: u64,
    /// Time of the microbatches and the update.
    pub(crate) seconds: f64,
    /// False if all ranks skipped the update because a gradient overflowed.
    #[serde(skip)]
    pub(crate) applied: bool,
}
