//! The state of a world that its ranks share, wherever they run.

use std::sync::Arc;

use hsdp_flight::{Origin, Recorder};
use hsdp_sharding::Rank;

use super::judge::{MemberWait, RankState, Wait};
use super::operation::{Gatherings, SharedOperation};
use super::rank::{EarlyEnds, Record};
use crate::options::WorldOptions;
use crate::{AbortReason, Error, WorldError};

/// The state of a world that its ranks share.
#[derive(Debug)]
pub(crate) struct WorldState {
    pub(crate) options: WorldOptions,
    pub(crate) origin: Origin,
    pub(crate) records: Arc<[Arc<Record>]>,
    pub(crate) early_ends: Arc<EarlyEnds>,
    pub(crate) table: Gatherings,
}

impl WorldState {
    pub(crate) fn new(size: usize, options: WorldOptions) -> Arc<Self> {
        let entries = options.flight_entries;
        let origin = Origin::now();
        let record = |_| Arc::new(Record::new(Recorder::new(entries, origin)));
        Arc::new(Self {
            options,
            origin,
            records: (0..size).map(record).collect(),
            early_ends: Arc::default(),
            table: Gatherings::default(),
        })
    }

    pub(crate) fn record(&self, rank: Rank) -> &Record {
        &self.records[rank.index()]
    }

    /// Whether all ranks but `rank` have left.
    pub(crate) fn is_last(&self, rank: Rank) -> bool {
        let mut others = self.records.iter().enumerate().filter(|(it, _)| *it != rank.index());
        others.all(|(_, record)| record.has_left())
    }

    /// The error that says that the world ended by `rank`'s doing: that of a rank, or of a process
    /// of the job beyond the ranks.
    pub(crate) fn ended_by(&self, rank: Rank, reason: AbortReason) -> Error {
        let record = self.records.get(rank.index());
        let (step, operation) = record.map_or((0, None), |it| (it.step(), it.last()));
        WorldError::Aborted { rank, step, operation, reason }.into()
    }

    /// Ends the world for the ranks of this process, and with it operations that miss members, and
    /// those of `doomed`.
    pub(crate) fn end_here(&self, error: Error, doomed: &[Arc<SharedOperation>]) -> Error {
        let end = self.early_ends.end_world(error);
        for operation in self.table.take_out(None) {
            operation.fail_gathering(&end);
        }
        doomed.iter().for_each(|operation| operation.fail(&end));
        end
    }

    /// An operation of `epoch`, which has ended, misses a member that brings nothing more to it.
    pub(crate) fn fail_in_epoch(&self, operation: &SharedOperation, epoch: u64) {
        if let Err(end) = self.early_ends.check(epoch) {
            self.table.remove(operation.key);
            operation.fail_gathering(&end);
        }
    }

    /// Forgets what no rank can ask for any more.
    pub(crate) fn forget_old_epochs(&self) {
        let oldest = self.records.iter().map(|record| record.epoch()).min();
        self.early_ends.forget_before(oldest.unwrap_or(0));
    }

    /// The state of a rank, as far as this process knows it.
    pub(crate) fn rank_state(&self, rank: Rank) -> RankState {
        let record = self.record(rank);
        let epoch = record.epoch();
        let wait = |(is_of_issuer, operation): (bool, Arc<SharedOperation>)| match operation
            .wait_of(rank)
        {
            Wait::Members(members) => Wait::Members(MemberWait { is_of_issuer, ..members }),
            work => work,
        };
        let on_device = record.device_wait().map(Wait::Members);
        RankState {
            step: record.step(),
            epoch,
            given_up: self.early_ends.is_aborted(epoch),
            has_left: record.has_left(),
            last: record.last(),
            waits: record.blocked_on().into_iter().map(wait).chain(on_device).collect(),
            ..RankState::default()
        }
    }
}

impl SharedOperation {
    /// The wait of a thread of `rank` for this operation, which need not be its only issuer.
    /// Members that differ end it by themselves, like work.
    pub(crate) fn wait_of(&self, rank: Rank) -> Wait {
        match self.gathering(rank) {
            None => Wait::Work(self.lender()),
            Some((operation, missing)) => {
                Wait::Members(MemberWait { operation, index: None, missing, is_of_issuer: false })
            }
        }
    }
}
