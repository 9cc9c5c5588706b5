//! The losses that the control plane reports, and the ranks at fault. `control/CONTROL.md`, "Reasons of a loss".

use hsdp_control::{ConnectionError, Loss as Kind, State, Status};
use hsdp_sharding::Rank;

use crate::remote::{Cause, Loss};

/// The rank whose process runs the coordinator.
pub(super) const COORDINATOR: Rank = Rank::new(0);

/// The ranks that are lost.
pub(super) fn losses_of(status: &Status) -> Vec<Loss> {
    let loss = |(index, state): (usize, &State)| {
        let State::Lost { loss, why } = state else { return None };
        let cause = match loss {
            Kind::Ended => Cause::Ended(why.to_string()),
            Kind::Silent | Kind::Forged | Kind::Invalid => Cause::Unreachable(why.to_string()),
        };
        Some(Loss { rank: Rank::new(index), cause })
    };
    status.states.iter().enumerate().filter_map(loss).collect()
}

/// The loss for which rank `own` reaches no other rank.
pub(super) fn end_of(own: Rank, error: &ConnectionError) -> Loss {
    let text = error.to_string();
    let (rank, cause) = match error {
        ConnectionError::CoordinatorLost { .. } => (COORDINATOR, Cause::Ended(text)),
        ConnectionError::CutOff { .. } => (COORDINATOR, Cause::Unreachable(text)),
        _ => (own, Cause::Unreachable(text)),
    };
    Loss { rank, cause }
}
