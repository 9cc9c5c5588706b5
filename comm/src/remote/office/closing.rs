//! How a rank goes that shares no memory with the others. `REMOTE.md`, "Leaving".

use std::time::Duration;

use super::{Leaving, NAPS, Office};
use crate::local::{Status, from_now};
use crate::sync;

/// How long letters are waited for when the world has ended early: some hear nothing any more.
const FAREWELL: Duration = Duration::from_secs(1);

impl Office {
    /// Ends the thread, when it has sent what this rank owes; after `deadline` without that, or soon after an early end, which may
    /// come meanwhile.
    pub(crate) fn close(&self, status: &Status, deadline: Duration) {
        self.leave();
        let Some(thread) = self.thread.lock().take() else { return };
        let (until, mut end_seen) = (from_now(deadline), None);
        while !self.has_sent_all() {
            let now = sync::now();
            if status.world_end().is_some() {
                end_seen.get_or_insert(now);
            }
            let since_end = end_seen.map(|seen| now.saturating_duration_since(seen));
            if now >= until || since_end.is_some_and(|since| since >= FAREWELL) {
                break;
            }
        }
        if self.has_sent_all() {
            let _ = thread.join();
        } else {
            self.outgoing.lock().leaving = Leaving::GaveUp;
            let rank = self.rank.get();
            tracing::warn!(rank, "letters to other ranks were not sent in time");
        }
        self.courier.lock().close();
        if self.has_given_up() {
            self.clear_line();
        }
    }

    /// Whether the thread has ended; waits a moment for it.
    fn has_sent_all(&self) -> bool {
        let mut outgoing = self.outgoing.lock();
        if !outgoing.has_ended {
            self.bell.wait_until(&mut outgoing, from_now(NAPS[1]));
        }
        outgoing.has_ended
    }
}
