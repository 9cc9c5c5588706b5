//! How a world or a step ends early, and who says so. PROTOCOL.md, "The two early ends".

use std::sync::Arc;

use hsdp_sharding::Rank;

use super::core::Core;
use super::operation::{Attendance, Operation};
use super::running::BlockPanic;
use crate::mismatch::{Mismatch, MismatchRow, Wanted};
use crate::{AbortReason, Descriptor, Error};

impl Core {
    /// The error that says that the world ended by `rank`'s doing.
    pub(crate) fn ended_by(&self, rank: Rank, reason: AbortReason) -> Error {
        let record = self.record(rank);
        Error::WorldAborted { rank, step: record.step(), operation: record.last(), reason }
    }

    /// Ends the world. The error that everybody gets: the first one that ended it.
    pub(crate) fn end(&self, error: Error) -> Error {
        let end = self.status().end_world(error);
        for operation in self.table().drain(None) {
            operation.fail_gathering(&end);
        }
        end
    }

    /// Ends an epoch: operations for which members are missing fail, those that are being worked on complete.
    pub(crate) fn end_epoch(&self, epoch: u64, error: Error) {
        let end = self.status().end_epoch(epoch, error);
        for operation in self.table().drain(Some(epoch)) {
            operation.fail_gathering(&end);
        }
    }

    /// Forgets what no rank can ask for any more.
    pub(crate) fn forget_old_epochs(&self) {
        let oldest = self.records().iter().map(|record| record.epoch()).min();
        self.status().forget_before(oldest.unwrap_or(0));
    }

    /// A rank goes. If others wait for it, now or later, the world ends.
    pub(crate) fn leave(&self, rank: Rank) {
        if !self.record(rank).leave() {
            return;
        }
        for operation in self.table().snapshot() {
            let waits = |attendance: &Attendance| attendance.missing.contains(&rank);
            // Where nobody has arrived yet, whoever does will look.
            if let (true, Some(awaited)) =
                (operation.attendance().as_ref().is_some_and(waits), operation.awaited())
            {
                self.end(self.ended_by(rank, AbortReason::Left { awaited }));
            }
        }
    }

    /// The other half of [`leave`](Self::leave): whoever arrives looks whether a missing member has left.
    pub(super) fn end_if_missing_left(
        &self,
        operation: &Operation,
        awaited: &Arc<Descriptor>,
    ) -> Result<(), Error> {
        let left = |rank: &Rank| self.record(*rank).has_left();
        if !operation.ranks().iter().any(left) {
            return Ok(());
        }
        let missing = operation.attendance().map_or(Vec::new(), |attendance| attendance.missing);
        match missing.into_iter().find(left) {
            Some(rank) => {
                let awaited = Arc::clone(awaited);
                Err(self.end(self.ended_by(rank, AbortReason::Left { awaited })))
            }
            None => Ok(()),
        }
    }

    /// Ends the world, and `operation` with it, because a block panicked.
    pub(super) fn end_panicked(&self, operation: &Operation, panic: BlockPanic) {
        let BlockPanic { rank, message } = panic;
        let end = self.end(self.ended_by(rank, AbortReason::Panicked { message }));
        operation.fail(&end);
    }

    /// Ends the world, and `operation` with it, because its members want different things.
    pub(super) fn end_mismatch(
        &self,
        operation: &Operation,
        problem: String,
        wanted: Vec<Option<Arc<Descriptor>>>,
    ) -> Error {
        let row = |(rank, wanted): (&Rank, Option<_>)| MismatchRow {
            rank: *rank,
            wanted: match wanted {
                Some(descriptor) => Wanted::Arrived(descriptor),
                None => Wanted::Missing(self.record(*rank).last()),
            },
        };
        let rows = operation.ranks().iter().zip(wanted).map(row).collect();
        let end =
            self.end(Error::CollectiveMismatch { table: Arc::new(Mismatch { problem, rows }) });
        operation.fail(&end);
        end
    }

    /// Ends the world because `rank` has waited for `descriptor` for longer than the deadline.
    pub(super) fn end_late(&self, operation: &Operation, rank: Rank, descriptor: &Arc<Descriptor>) {
        if operation.is_settled() {
            return;
        }
        let attendance = operation.attendance();
        let working = attendance.is_none();
        let Attendance { arrived, missing } = attendance.unwrap_or_else(|| Attendance {
            arrived: operation.ranks().to_vec(),
            missing: Vec::new(),
        });
        let culprit = missing.first().copied().unwrap_or(rank);
        let reason = AbortReason::Deadline {
            awaited: Arc::clone(descriptor),
            deadline: self.options().deadline,
            arrived,
            missing,
        };
        let end = self.end(self.ended_by(culprit, reason));
        if working {
            operation.fail(&end);
        }
    }
}
