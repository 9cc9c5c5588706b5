//! The power of two that is taken out of every seed of a step, so that gradients have the size of a
//! mean on the wire.

use crate::options::objective::Objective;

/// The power of two that is taken out of every seed, where it is known before the first loss.
pub(super) fn exponent_known_early(objective: Objective, largest_hint: u64) -> Option<i32> {
    match (objective, largest_hint) {
        (Objective::RankMean, _) => Some(0),
        (_, 0) => None,
        (_, hint) => Some(exponent_of(hint)),
    }
}

/// The power of two next below a weight.
pub(super) fn exponent_of(weight: u64) -> i32 {
    weight.checked_ilog2().map_or(0, |exponent| exponent.try_into().unwrap_or(0))
}
