//! How the world ends, between the ranks. `REMOTE.md`, "The end of the world".

use std::sync::Arc;
use std::time::Duration;

use hsdp_sharding::Rank;

use super::{FIRST_NAP, Office};
use crate::Error;
use crate::local::{Core, Operation, from_now};
use crate::remote::courier;
use crate::remote::ending::{Proposal, late};
use crate::remote::letter::Kind;
use crate::remote::statement::end_bytes;
use crate::sync;

/// The end of the world is known before that, or the courier is gone.
const PATIENCE: Duration = Duration::from_secs(2);

impl Office {
    /// This rank sees an end of the world: what all get is known when the others have answered. Waits for that, but in the turn of
    /// the courier, who is the one to hear them.
    pub(crate) fn propose_end(&self, core: &Core, error: &Error) {
        self.hear_end(self.rank, Proposal { origin: self.rank, error: error.clone() });
        let until = from_now(PATIENCE);
        while !courier::is_in_turn() && core.status().world_end().is_none() {
            if self.hear() {
                continue;
            }
            if sync::now() > until {
                // The courier is gone: what the others say is not heard any more.
                let doomed = self.ending.lock().take_doomed();
                core.end_here(error.clone(), &doomed);
            }
            self.sleep(FIRST_NAP);
        }
    }

    /// A rank says how the world ends; what is news is passed on.
    pub(in crate::remote) fn hear_end(&self, from: Rank, proposal: Proposal) {
        let news = self.ending.lock().say(from, self.rank, proposal, None);
        self.pass_on(news);
    }

    /// The same, where this rank is said to keep others waiting, and waits itself.
    pub(in crate::remote) fn hear_blame(&self, from: Rank, proposal: Proposal, own: Proposal) {
        let news = self.ending.lock().say(from, self.rank, proposal, Some(own));
        self.pass_on(news);
    }

    fn pass_on(&self, news: Option<Proposal>) {
        if let Some(Proposal { origin, error }) = news {
            let statement = end_bytes(u64::from(origin.get()), &error, self.rank);
            let errand = self.to_all(Kind::End, &statement);
            self.outgoing.lock().errands.extend(errand);
            self.bell.notify_one();
        }
    }

    /// An operation fails with the end of the world, which is not known yet.
    pub(crate) fn doom(&self, operation: Arc<Operation>) {
        self.ending.lock().doom(operation);
    }

    /// Whether somebody has said that the world ends, and it has not ended: this rank stays for what the others say.
    pub(in crate::remote) fn is_deciding(&self, core: &Core) -> bool {
        self.ending.lock().has_begun() && core.status().check_world().is_ok()
    }

    /// Ends the world, if it is known how. If a rank is late, and the process that forwards all messages is `silent`, the error is
    /// that of the silence: the messages of the late rank may wait in that process.
    pub(in crate::remote) fn try_end(&self, core: &Core, silent: impl FnOnce() -> Option<Error>) {
        let mut ending = self.ending.lock();
        if !ending.has_begun() || core.status().world_end().is_some() {
            return;
        }
        let is_there = |rank| !core.record(rank).has_left();
        let verdict = ending.verdict(is_there);
        drop(ending);
        if let Some((end, doomed)) = verdict {
            let silence = late(&end).and_then(|_| silent());
            core.end_here(silence.unwrap_or(end), &doomed);
        }
    }
}
