//! How a rank goes that shares no memory with the others. `REMOTE.md`, "Leaving".

use std::time::{Duration, Instant};

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
        if !self.sends_all(status, deadline) {
            self.give_up();
        }
        self.courier.lock().close();
        if self.has_given_up() {
            self.clear_line();
        }
        // What it holds goes with it: MPI ends where that goes last, and must not do so in a thread that a program leaves behind.
        if self.ends_before(from_now(FAREWELL)) {
            let _ = thread.join();
        }
    }

    /// Whether the thread has sent all, and ended.
    fn sends_all(&self, status: &Status, deadline: Duration) -> bool {
        let until = from_now(deadline);
        while status.world_end().is_none() && sync::now() < until {
            if self.ends_before(until.min(from_now(NAPS[1]))) {
                return true;
            }
        }
        self.ends_before(until.min(from_now(FAREWELL)))
    }

    fn give_up(&self) {
        self.outgoing.lock().leaving = Leaving::GaveUp;
        self.bell.notify_one();
        let rank = self.rank.get();
        tracing::warn!(rank, "letters to other ranks were not sent in time");
    }

    /// Whether the thread ends; waits for it.
    fn ends_before(&self, until: Instant) -> bool {
        let mut outgoing = self.outgoing.lock();
        while !outgoing.has_ended && sync::now() < until {
            self.bell.wait_until(&mut outgoing, until.min(from_now(NAPS[1])));
        }
        outgoing.has_ended
    }
}
