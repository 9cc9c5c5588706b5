//! The early ends of a world and of a step. PROTOCOL.md, "The two early ends".

use std::sync::Arc;

use hsdp_sharding::Rank;

use super::core::Core;
use super::work::WorkPanic;
use crate::engine::judge::{MemberWait, WaitKey};
use crate::engine::{Arrivals, Attendance, Difference, SharedOperation};
use crate::mismatch::{Mismatch, MismatchRow, Wanted};
use crate::{AbortReason, Descriptor, Error, WorldError};

/// The rank that keeps an operation from ending, if one does; or the rank whose comparer is silent.
type Judged = Result<Option<Rank>, Rank>;

impl Core {
    /// Ends the world since `rank` cannot go on, unless it is over.
    #[cfg(feature = "nccl")]
    pub(crate) fn end_requested(&self, rank: Rank, reason: &str) {
        let reason = AbortReason::Requested { reason: reason.into() };
        self.end(self.state.ended_by(rank, reason));
    }

    /// The error that says that the world ended in the work of an operation: by `rank`'s doing, if
    /// that is known.
    fn ended_in_work(
        &self,
        rank: Option<Rank>,
        operation: &Arc<Descriptor>,
        reason: AbortReason,
    ) -> Error {
        match rank {
            Some(rank) => self.state.ended_by(rank, reason),
            None => WorldError::WorkFailed { operation: Arc::clone(operation), reason }.into(),
        }
    }

    /// Ends the world. Returns the error that all ranks get: the first that ended it.
    ///
    /// Where the other ranks share no memory with this one, one of them decides, which is waited
    /// for: half a second at the most.
    pub(crate) fn end(&self, error: Error) -> Error {
        match self.endpoint() {
            None => self.state.end_here(error, &[]),
            Some(endpoint) => endpoint.end(error),
        }
    }

    /// An operation fails with the end of the world, now or when it is known.
    pub(crate) fn fail_at_end(&self, operation: &Arc<SharedOperation>) {
        match (self.state.early_ends.world_end(), self.endpoint()) {
            (Some(end), _) => operation.fail(&end),
            (None, Some(endpoint)) => endpoint.doom(Arc::clone(operation)),
            (None, None) => unreachable!("the world has just ended"),
        }
    }

    /// Ends an epoch: operations for which members are missing fail, those that are being worked on
    /// complete.
    ///
    /// Where members share no memory, those fail for which a member is missing that brings nothing
    /// more, and all of them say so: `REMOTE.md`, "Aborted steps".
    pub(crate) fn end_epoch(&self, epoch: u64, error: Error) {
        if let Some(endpoint) = self.endpoint() {
            return endpoint.end_epoch(epoch, error);
        }
        let end = self.state.early_ends.end_epoch(epoch, error);
        for operation in self.state.table.take_out(Some(epoch)) {
            operation.fail_gathering(&end);
        }
    }

    /// A rank goes. If others wait for it, now or later, the world ends.
    pub(crate) fn leave(&self, rank: Rank) {
        if !self.state.record(rank).leave() {
            return;
        }
        self.state.early_ends.ring();
        if let Some(endpoint) = self.endpoint() {
            return endpoint.leave();
        }
        for operation in self.state.table.snapshot() {
            // If no member has arrived yet, the first that does will look.
            let waits = operation.attendance().is_some_and(|there| there.others_await(rank));
            if let (true, Some(awaited)) = (waits, operation.awaited()) {
                let _ = self.end_left(rank, &operation, awaited);
            }
        }
    }

    /// The other half of [`leave`](Self::leave): a member that arrives looks whether a missing one
    /// has left.
    pub(super) fn end_if_missing_left(
        &self,
        operation: &SharedOperation,
        awaited: &Arc<Descriptor>,
    ) -> Result<(), Error> {
        let left = |rank: &Rank| self.state.record(*rank).has_left();
        if !operation.ranks.iter().any(left) {
            return Ok(());
        }
        let Some(there) = operation.attendance() else { return Ok(()) };
        let gone = |rank: &&Rank| left(rank) && there.others_await(**rank);
        match there.missing.iter().find(gone) {
            Some(rank) => Err(self.end_left(*rank, operation, Arc::clone(awaited))),
            None => Ok(()),
        }
    }

    /// A member that has left is missing at an operation. That ends the world, or, if the epoch has
    /// ended before, only the operation: the thread that has announced the end of the epoch may not
    /// have come to this operation yet. Returns that end.
    fn end_left(&self, rank: Rank, operation: &SharedOperation, awaited: Arc<Descriptor>) -> Error {
        match self.state.early_ends.check(awaited.epoch) {
            Ok(()) => self.end(self.state.ended_by(rank, AbortReason::Left { awaited })),
            Err(end) => {
                self.state.fail_in_epoch(operation, awaited.epoch);
                end
            }
        }
    }

    /// Ends the world, and `operation` with it, because its work panicked.
    pub(super) fn end_panicked(&self, operation: &Arc<SharedOperation>, panic: WorkPanic) {
        let WorkPanic { descriptor, rank, message } = panic;
        let reason = AbortReason::Panicked { message };
        self.end(self.ended_in_work(rank, &descriptor, reason));
        self.fail_at_end(operation);
    }

    /// Ends the world because two members of `operation` differ; the error of the operation.
    pub(super) fn end_difference(
        &self,
        operation: &Arc<SharedOperation>,
        difference: Difference,
        descriptor: &Descriptor,
    ) -> Error {
        // No descriptors are left where another end came first.
        let Some(wanted) = operation.wanted() else {
            return operation.failure().expect("members that differ never begin the work");
        };
        let what = match difference {
            Difference::Descriptor => "ranks disagree about",
            Difference::Work => "ranks call different functions in",
        };
        let problem = format!("{what} {}", descriptor.place());
        let end = self.end_mismatch(operation, problem, wanted);
        operation.failure().unwrap_or(end)
    }

    /// Ends the world, and `operation` with it, because its members differ.
    pub(super) fn end_mismatch(
        &self,
        operation: &Arc<SharedOperation>,
        problem: String,
        wanted: Arrivals,
    ) -> Error {
        let row = |(rank, wanted): (&Rank, Option<_>)| MismatchRow {
            rank: *rank,
            wanted: match wanted {
                Some(descriptor) => Wanted::Arrived(descriptor),
                None => Wanted::Missing(self.state.record(*rank).last()),
            },
        };
        let rows = operation.ranks.iter().zip(wanted).map(row).collect();
        let end = self.end(WorldError::Mismatch(Arc::new(Mismatch { problem, rows })).into());
        self.fail_at_end(operation);
        end
    }

    /// Ends the world because `waiter` has waited for `operation` for longer than the deadline.
    /// Work of members that have all come at the last moment is waited for once more.
    pub(super) fn end_late(
        &self,
        waiter: Rank,
        operation: &Arc<SharedOperation>,
        descriptor: &Arc<Descriptor>,
    ) {
        if operation.is_settled() {
            return;
        }
        let judged = self.judge_late(waiter, operation, descriptor);
        let Some((attendance, judged)) = judged else { return };
        let working = attendance.is_none();
        let Attendance { arrived, missing } = attendance.unwrap_or_else(|| Attendance {
            arrived: operation.ranks.to_vec(),
            missing: Vec::new(),
        });
        let culprit = match judged {
            Err(silent) if !missing.contains(&silent) => return self.end_unjudged(silent),
            Err(silent) => Some(silent),
            // Members that arrived during the search are no culprits any more, but they were late.
            Ok(culprit) => culprit.or(missing.first().copied()),
        };
        let awaited = Arc::clone(descriptor);
        let deadline = self.state.options.deadline;
        let reason = AbortReason::Deadline {
            awaited,
            deadline,
            arrived: arrived.into(),
            missing: missing.into(),
        };
        self.end(self.ended_in_work(culprit, descriptor, reason));
        if working {
            self.fail_at_end(operation);
        }
    }

    /// The members that are missing at `operation`, and the rank at fault; `None` if none is
    /// missing any more when messages are in that were on their way, or the world has ended since
    /// they do not arrive.
    fn judge_late(
        &self,
        waiter: Rank,
        operation: &Arc<SharedOperation>,
        descriptor: &Arc<Descriptor>,
    ) -> Option<(Option<Attendance>, Judged)> {
        let attendance = operation.attendance();
        let Some(endpoint) = self.endpoint().filter(|_| attendance.is_some()) else {
            return Some((attendance, Ok(self.culprit(waiter, operation))));
        };
        endpoint.await_forwarder();
        let attendance = Some(operation.attendance()?);
        let judged = endpoint.await_culprit(WaitKey::new(descriptor, None));
        operation.attendance().map(|_| (attendance, judged))
    }

    /// Ends the world because the comparer of a rank is silent.
    pub(crate) fn end_unjudged(&self, silent: Rank) {
        let problem = "it does not answer a rank whose deadline has passed".into();
        self.end(self.state.ended_by(silent, AbortReason::Unreachable { problem }));
    }

    /// Ends the world because the device of `rank` has waited in a call of NCCL for longer than the
    /// deadline.
    #[cfg_attr(not(feature = "nccl"), allow(dead_code, reason = "the watchdog of NCCL uses it"))]
    pub(crate) fn end_late_on_device(&self, rank: Rank, wait: &MemberWait) {
        let Some(endpoint) = self.endpoint() else { return };
        let culprit = match endpoint.await_culprit(wait.key()) {
            Err(silent) => return self.end_unjudged(silent),
            Ok(culprit) => culprit,
        };
        let is_there = |rank: &Rank| Some(*rank) != culprit;
        let members = wait.missing.iter().chain([&rank]).copied();
        let (arrived, missing): (Vec<_>, Vec<_>) = members.partition(is_there);
        let awaited = Arc::clone(&wait.operation);
        let deadline = self.state.options.deadline;
        let reason = AbortReason::Deadline {
            awaited,
            deadline,
            arrived: arrived.into(),
            missing: missing.into(),
        };
        self.end(self.ended_in_work(culprit, &wait.operation, reason));
    }
}
