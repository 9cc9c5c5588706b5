//! Waits of ranks that are threads, before the judge. JUDGE.md.

use std::slice;
use std::sync::Arc;

use hsdp_sharding::Rank;

use super::core::Core;
use crate::engine::Operation;
use crate::engine::judge::{self, Finding, Look, waiting_for_each_other};

impl Core {
    /// Ends the world if `waiter`, which waits, waits for ranks that wait for each other.
    pub(super) fn end_if_circle(&self, waiter: Rank) {
        let before = self.look(waiter);
        if judge::judge(&before, &before).is_none() {
            return;
        }
        if let Some(Finding::Circle(rows)) = judge::judge(&self.look(waiter), &before) {
            self.end(waiting_for_each_other(rows));
        }
    }

    /// The states of `waiter`, and of the ranks that it reaches.
    fn look(&self, waiter: Rank) -> Look {
        let own = self.state.rank_state(waiter);
        let mut look = judge::reached(&own.waits, |rank| self.state.rank_state(rank));
        look.insert(waiter, own);
        look
    }

    /// The rank that keeps `operation` from ending: JUDGE.md.
    pub(super) fn culprit(&self, waiter: Rank, operation: &Arc<Operation>) -> Option<Rank> {
        let wait = operation.wait_of(waiter);
        let look = judge::reached(slice::from_ref(&wait), |rank| self.state.rank_state(rank));
        judge::culprit(&look, waiter, &wait)
    }
}
