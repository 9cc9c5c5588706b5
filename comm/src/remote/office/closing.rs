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

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::thread;
    use std::time::Instant;

    use hsdp_sharding::Rank;

    use super::*;
    use crate::local::Core;
    use crate::remote::buffer::Buffer;
    use crate::remote::letter::Letter;
    use crate::remote::transport::{Transport, TransportError};
    use crate::{Error, WorldOptions};

    /// Its other end takes nothing any more.
    #[derive(Debug)]
    struct Stuck;

    impl Transport for Stuck {
        fn send(&mut self, _: Rank, _: &Arc<Letter>) -> Result<(), TransportError> {
            Ok(())
        }

        fn receive(&mut self) -> Result<Option<(Rank, Buffer)>, TransportError> {
            Ok(None)
        }

        fn under_way(&mut self) -> Result<usize, TransportError> {
            Ok(1)
        }

        fn close(&mut self, _: Option<&Error>) {}
    }

    #[test]
    fn who_leaves_hears_of_an_end_that_comes_meanwhile() {
        let core = Core::new(2, WorldOptions::default());
        let office = Office::new(&core, Rank::new(0), Box::new(Stuck));
        core.open_office(Arc::clone(&office));
        office.start().expect("a thread");
        let (started, deadline) = (Instant::now(), Duration::from_secs(60));
        thread::scope(|scope| {
            scope.spawn(|| office.close(core.status(), deadline));
            while !office.lingers() {
                thread::yield_now();
            }
            let reason = "its process is gone".into();
            core.end_here(Error::StepAborted { rank: Rank::new(1), step: 0, reason }, &[]);
        });
        assert!(office.has_given_up() && started.elapsed() < Duration::from_secs(30));
    }
}
