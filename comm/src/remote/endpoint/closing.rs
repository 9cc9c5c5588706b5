//! How a rank goes that shares no memory with the others. `REMOTE.md`, "Progress".

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::{Endpoint, NAPS};
use crate::engine::from_now;
use crate::remote::progress;
use crate::sync;

/// How long messages are waited for when the world has ended early: some hear nothing any more.
const FAREWELL: Duration = Duration::from_secs(1);

impl Endpoint {
    /// Ends the thread, when it has sent the messages that this rank owes; after `deadline` without that, or soon after an early end, which may
    /// come meanwhile. One that hangs in its turn is left behind.
    pub(crate) fn close(&self, deadline: Duration) {
        self.leave();
        let Some(thread) = self.thread.lock().take() else { return };
        if progress::is_in_turn() {
            // Something that is dropped in a turn had the last handle of the world: the turn cannot wait for its own end.
            self.outgoing.lock().gives_up = Some(from_now(deadline));
            return;
        }
        self.wait_for_messages(deadline);
        self.give_up();
        // MPI ends where its last handle is dropped, which the thread may hold, and must not do so in a thread that a program leaves behind.
        if self.ends_before(from_now(FAREWELL)) {
            let _ = thread.join();
        }
    }

    fn wait_for_messages(&self, deadline: Duration) {
        let until = from_now(deadline);
        let early_ends = &self.state.early_ends;
        while early_ends.check_world().is_ok() && sync::now() < until {
            if self.ends_before(until.min(from_now(NAPS[1]))) {
                return;
            }
        }
        if early_ends.check_world().is_err() {
            self.ends_before(from_now(FAREWELL));
        }
    }

    /// Has the thread end, if it has not, whatever is still to be sent.
    fn give_up(&self) {
        let has_ended = self.change(|outgoing| {
            outgoing.gives_up = Some(sync::now());
            outgoing.is_called = true;
            outgoing.has_ended
        });
        if !has_ended {
            let rank = self.rank.get();
            hsdp_warnings::warn!(rank, "messages to other ranks were not sent in time");
        }
    }

    /// Whether the thread ends; waits for it.
    fn ends_before(&self, until: Instant) -> bool {
        let mut outgoing = self.outgoing.lock();
        while !outgoing.has_ended && sync::now() < until {
            self.changed.wait_until(&mut outgoing, until);
        }
        outgoing.has_ended
    }
}

/// The thread's last word, however it ends: the progress engine lets go of the world.
pub(super) struct LastWord(pub(super) Arc<Endpoint>);

impl Drop for LastWord {
    fn drop(&mut self) {
        let Self(endpoint) = self;
        endpoint.progress.lock().close(endpoint.state.early_ends.world_end().as_ref());
        endpoint.change(|outgoing| outgoing.has_ended = true);
    }
}
