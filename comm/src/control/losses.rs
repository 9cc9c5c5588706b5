//! The losses that the control plane reports, and the ranks at fault. `control/CONTROL.md`, "Reasons of a loss".

use hsdp_control::{ConnectionError, Loss, State, Status};
use hsdp_sharding::Rank;

use crate::remote::{Cause, PeerLoss};

/// The rank whose process runs the coordinator.
pub(super) const COORDINATOR: Rank = Rank::new(0);

/// The ranks that are lost.
pub(super) fn losses_of(status: &Status) -> Vec<PeerLoss> {
    let loss = |(index, state): (usize, &State)| {
        let State::Lost { loss, why } = state else { return None };
        let cause = match loss {
            Loss::Ended => Cause::Ended(why.to_string()),
            Loss::Silent | Loss::Forged | Loss::Invalid => Cause::Unreachable(why.to_string()),
        };
        Some(PeerLoss { rank: Rank::new(index), cause })
    };
    status.states.iter().enumerate().filter_map(loss).collect()
}

/// The loss for which rank `own` reaches no other rank.
pub(super) fn end_of(own: Rank, error: &ConnectionError) -> PeerLoss {
    let text = error.to_string();
    let (rank, cause) = match error {
        ConnectionError::CoordinatorLost { .. } => (COORDINATOR, Cause::Ended(text)),
        ConnectionError::CutOff { .. } => (COORDINATOR, Cause::Unreachable(text)),
        _ => (own, Cause::Unreachable(text)),
    };
    PeerLoss { rank, cause }
}
