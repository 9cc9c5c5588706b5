//! The order in which one microbatch issues its collectives.

use std::fmt;

use crate::{AfterForward, ModelSpec, UnitId};

#[cfg(test)]
mod tests;

/// One half of a microbatch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Phase {
    /// From the batch to the loss.
    Forward,
    /// From the loss to the gradients.
    Backward,
}

impl fmt::Display for Phase {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Forward => "forward",
            Self::Backward => "backward",
        })
    }
}

/// One all-gather of a unit's parameters.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Gather {
    /// The unit that is gathered.
    pub unit: UnitId,
    /// The half of the microbatch that needs the unit.
    pub phase: Phase,
}

/// All units for the forward; then the resharded units for the backward, last first.
pub(super) fn gathers(spec: &ModelSpec) -> Vec<Gather> {
    let resharded = |unit: &UnitId| spec[*unit].after_forward == AfterForward::Reshard;
    let forward = spec.unit_ids().map(|unit| Gather { unit, phase: Phase::Forward });
    let backward = spec.unit_ids().rev().filter(resharded);
    forward.chain(backward.map(|unit| Gather { unit, phase: Phase::Backward })).collect()
}

/// The units with a gradient, last first.
pub(super) fn reductions(spec: &ModelSpec) -> Vec<UnitId> {
    spec.unit_ids().rev().filter(|unit| spec[*unit].is_trainable()).collect()
}
