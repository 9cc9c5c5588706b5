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

/// The order of a microbatch's collectives.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Schedule {
    /// All units, in the order of the forward.
    pub(super) order: Vec<UnitId>,
    pub(super) gathers: Vec<Gather>,
    pub(super) reductions: Vec<UnitId>,
}

impl Schedule {
    /// The schedule of a forward that uses all units in this order.
    pub(super) fn of(spec: &ModelSpec, order: Vec<UnitId>) -> Self {
        let resharded = |unit: &UnitId| spec[*unit].after_forward == AfterForward::Reshard;
        let forward = order.iter().map(|&unit| Gather { unit, phase: Phase::Forward });
        let backward = order.iter().copied().rev();
        let again = backward.clone().filter(resharded);
        let again = again.map(|unit| Gather { unit, phase: Phase::Backward });
        let gathers = forward.chain(again).collect();
        let reductions = backward.filter(|unit| spec[*unit].is_trainable()).collect();
        Self { order, gathers, reductions }
    }

    /// Returns the number of gathers before each reduction, where gathers and reductions are one
    /// sequence.
    pub(super) fn gathers_before(&self, spec: &ModelSpec, prefetch: usize) -> Vec<usize> {
        let all = self.gathers.len();
        let mut places = vec![None; spec.units().len()];
        for (place, gather) in self.gathers.iter().enumerate().skip(self.order.len()) {
            places[gather.unit.index()] = Some(place);
        }
        let mut last = self.order.len() - 1;
        let before = |unit: &UnitId| {
            last = places[unit.index()].unwrap_or(last);
            let end = last.saturating_add(prefetch).saturating_add(1).min(all);
            spec[*unit].is_trainable().then_some(end)
        };
        self.order.iter().rev().filter_map(before).collect()
    }
}
