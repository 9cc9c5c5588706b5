//! Who has come to an operation, with what, and who is missing.

use std::sync::Arc;

use hsdp_sharding::Rank;

use super::operation::Operation;
use super::phase::Phase;
use crate::Descriptor;

/// Who is there and who is not, while members are missing.
pub(crate) struct Attendance {
    pub(crate) arrived: Vec<Rank>,
    pub(crate) missing: Vec<Rank>,
}

impl Attendance {
    /// Whether another rank waits for `rank`: one that was to send to itself is awaited by nobody.
    pub(crate) fn others_await(&self, rank: Rank) -> bool {
        self.missing.contains(&rank) && self.arrived.iter().any(|other| *other != rank)
    }
}

impl Operation {
    /// What each member wants that has come, by slot; `None` once the work has begun or the operation is settled.
    pub(crate) fn wanted(&self) -> Option<Vec<Option<Arc<Descriptor>>>> {
        let mut meeting = self.meeting.lock();
        Some(meeting.phase.arrivals()?.to_vec())
    }

    /// Who is there and who is not; `None` once the work has begun or the operation failed.
    pub(crate) fn attendance(&self) -> Option<Attendance> {
        let mut meeting = self.meeting.lock();
        let arrivals = &*meeting.phase.arrivals()?;
        let ranks_where = |there: bool| {
            let slots = self.ranks().iter().zip(arrivals);
            slots.filter(|(_, slot)| slot.is_some() == there).map(|(rank, _)| *rank).collect()
        };
        Some(Attendance { arrived: ranks_where(true), missing: ranks_where(false) })
    }

    /// What `rank` brought and who is missing; `None` if `rank` is not there, or nobody is missing, or members disagree.
    pub(crate) fn gathering(&self, rank: Rank) -> Option<(Arc<Descriptor>, Vec<Rank>)> {
        let mut meeting = self.meeting.lock();
        let Phase::Gathering { slots, .. } = &mut meeting.phase else { return None };
        let (mut brought, mut missing) = (None, Vec::new());
        for (member, arrival) in self.ranks().iter().zip(slots.arrivals()) {
            match arrival {
                None => missing.push(*member),
                Some(arrival) if *member == rank => brought = Some(Arc::clone(arrival)),
                Some(_) => {}
            }
        }
        Some((brought?, missing))
    }

    /// A descriptor that a member brought; `None` if nobody came, or the work has begun.
    pub(crate) fn awaited(&self) -> Option<Arc<Descriptor>> {
        self.wanted()?.into_iter().flatten().next()
    }
}
