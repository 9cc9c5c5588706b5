//! The members that have arrived at an operation, and those that are missing.

use std::sync::Arc;

use hsdp_sharding::Rank;

use super::arrival::Arrivals;
use super::operation::{Operation, Phase};
use crate::Descriptor;

/// The members of an operation, while some are missing.
pub(crate) struct Attendance {
    pub(crate) arrived: Vec<Rank>,
    pub(crate) missing: Vec<Rank>,
}

impl Attendance {
    fn of(ranks: &[Rank], arrivals: &Arrivals) -> Self {
        let ranks_where = |there: bool| {
            let slots = ranks.iter().zip(arrivals);
            slots.filter(|(_, slot)| slot.is_some() == there).map(|(rank, _)| *rank).collect()
        };
        Self { arrived: ranks_where(true), missing: ranks_where(false) }
    }

    /// Whether another rank waits for `rank`: no other waits for one that was to send to itself.
    pub(crate) fn others_await(&self, rank: Rank) -> bool {
        self.missing.contains(&rank) && self.arrived.iter().any(|other| *other != rank)
    }
}

impl Operation {
    /// The descriptors of the members that have arrived, by slot; `None` once the work has begun or the operation is settled.
    pub(crate) fn wanted(&self) -> Option<Arrivals> {
        self.state.lock().phase.arrivals().cloned()
    }

    /// The members that have arrived, and those that are missing; `None` once the work has begun or the operation is settled.
    pub(crate) fn attendance(&self) -> Option<Attendance> {
        let state = self.state.lock();
        Some(Attendance::of(&self.ranks, state.phase.arrivals()?))
    }

    /// The descriptor of `rank`, and the members that are missing; `None` if `rank` has not arrived, or no member is missing, or
    /// members differ.
    pub(crate) fn gathering(&self, rank: Rank) -> Option<(Arc<Descriptor>, Vec<Rank>)> {
        let state = self.state.lock();
        let Phase::Gathering(gathering) = &state.phase else { return None };
        if gathering.difference.is_some() {
            return None;
        }
        let slots = self.ranks.iter().zip(&gathering.arrivals);
        let own = slots.filter(|(member, _)| **member == rank).find_map(|(_, own)| own.clone())?;
        Some((own, Attendance::of(&self.ranks, &gathering.arrivals).missing))
    }

    /// The first descriptor of a member that has arrived; `None` if there is none, or the work has begun.
    pub(crate) fn awaited(&self) -> Option<Arc<Descriptor>> {
        self.wanted()?.into_iter().flatten().next()
    }
}
