//! The states of ranks, for the judge. JUDGE.md.

use std::sync::Arc;

use hsdp_sharding::Rank;

use super::core::Core;
use crate::Error;
use crate::engine::Operation;
use crate::engine::judge::{self, Finding, Look, Members, RankState, Wait};
use crate::mismatch::{Mismatch, MismatchRow};

impl Core {
    /// The state of a rank, as far as this process knows it.
    pub(crate) fn state(&self, rank: Rank) -> RankState {
        let record = self.record(rank);
        let epoch = record.epoch();
        let wait = |(is_of_issuer, operation): (bool, Arc<Operation>)| {
            operation.wait_of(rank, is_of_issuer)
        };
        let on_device = record.device_wait().map(Wait::Members);
        RankState {
            step: record.step(),
            epoch,
            given_up: self.status.is_aborted(epoch),
            has_left: record.has_left(),
            last: record.last(),
            waits: record.blocked_on().into_iter().map(wait).chain(on_device).collect(),
            ..RankState::default()
        }
    }

    /// Ends the world if `waiter`, which waits for `operation`, waits for ranks that wait for each other.
    pub(super) fn end_if_circle(&self, waiter: Rank, operation: &Arc<Operation>) {
        let before = self.look(waiter, operation);
        if judge::judge(&before, &before).is_none() {
            return;
        }
        if let Some(Finding::Circle(rows)) = judge::judge(&self.look(waiter, operation), &before) {
            self.end(waiting_for_each_other(rows));
        }
    }

    /// The states of `waiter`, which waits for `operation`, and of the ranks that it reaches.
    fn look(&self, waiter: Rank, operation: &Arc<Operation>) -> Look {
        let mut own = self.state(waiter);
        let wait = operation.wait_of(waiter, false);
        let key = |wait: &Wait| wait.members().map(Members::key);
        if !own.waits.iter().any(|it| key(it) == key(&wait)) {
            own.waits.push(wait);
        }
        let mut look = judge::reached(&own.waits, |rank| self.state(rank));
        look.insert(waiter, own);
        look
    }

    /// The rank that keeps `operation` from ending: JUDGE.md.
    pub(super) fn culprit(&self, waiter: Rank, operation: &Arc<Operation>) -> Option<Rank> {
        let wait = operation.wait_of(waiter, false);
        let look = judge::reached(std::slice::from_ref(&wait), |rank| self.state(rank));
        judge::culprit(&look, waiter, &wait)
    }
}

impl Operation {
    /// The wait of `rank` for this operation. Members that differ end it by themselves, like work.
    fn wait_of(&self, rank: Rank, is_of_issuer: bool) -> Wait {
        match self.gathering(rank) {
            None => Wait::Work(self.lender()),
            Some((operation, missing)) => {
                Wait::Members(Members { operation, index: None, missing, is_of_issuer })
            }
        }
    }
}

/// The error that says that these ranks wait for each other.
pub(crate) fn waiting_for_each_other(rows: Vec<MismatchRow>) -> Error {
    let problem = "ranks wait for each other in different operations".to_owned();
    Error::CollectiveMismatch { table: Arc::new(Mismatch { problem, rows }) }
}
