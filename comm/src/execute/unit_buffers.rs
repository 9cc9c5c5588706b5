//! The buffers of the calls on whole units, as callers pass and get them.

use std::sync::Arc;

use hsdp_kernels::{Fold, GradientValues, Scaling};
use hsdp_sharding::Rank;

/// One member's contribution to the reduction of a unit's gradients.
#[derive(Clone, Debug)]
pub struct Contribution {
    /// The gradients, by index of the parameter in the unit. `None` contributes zeros; frozen parameters have none.
    /// Gradients are read in place, and dropped before [`Pending::wait`](crate::Pending::wait) returns their sum.
    pub gradients: Vec<Option<Arc<dyn GradientValues>>>,
    /// The divisors and the wire dtype; the same on all members.
    pub scaling: Scaling,
}

/// The buffer for a member's part of a reduction.
#[derive(Clone, Debug, PartialEq)]
pub struct Accumulator {
    /// `[layout.trainable().shard_len]`, f32.
    pub partial: Vec<f32>,
    /// Whether the sum replaces the partial or is added to it. Members may differ in it.
    pub fold: Fold,
}

/// A member's part of a reduction.
#[derive(Clone, Debug, PartialEq)]
pub struct Reduced {
    /// The accumulator's partial, with the sum in it.
    pub partial: Vec<f32>,
    /// The first element of it that is not finite, if there is one.
    pub non_finite: Option<NonFiniteAt>,
}

/// The origin of an infinity or a NaN in a partial.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NonFiniteAt {
    /// The index of the parameter in its unit.
    pub param: usize,
    /// The first member whose contribution was not finite on the wire; `None` if all were finite and only their sum is not.
    pub from: Option<Rank>,
}
