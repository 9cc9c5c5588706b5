//! How the world ends, between the ranks. `REMOTE.md`, "The end of the world".

use std::sync::Arc;
use std::time::Duration;

use hsdp_sharding::Rank;

use super::{Endpoint, FIRST_NAP};
use crate::backend::thread::{Core, Operation};
use crate::engine::from_now;
use crate::remote::ending::Proposal;
use crate::remote::header::end_bytes;
use crate::remote::message::Kind;
use crate::remote::progress::{self, Turned};
use crate::remote::transport::{Answer, Loss};
use crate::sync;
use crate::{AbortReason, Error};

/// The end of the world is known before that, or the progress engine is gone.
const PATIENCE: Duration = Duration::from_secs(2);

impl Endpoint {
    /// Before a rank is blamed as late: its message may wait in the process that forwards all messages. If that process answers, this
    /// rank takes in what came with the answer. If it is silent, the world ends here: this rank names that process, and tells the
    /// others, if they hear it, that it hears nothing.
    pub(crate) fn await_forwarder(&self, core: &Core) {
        let Some((rank, reason)) = self.silence(core) else { return };
        let own = core.ended_by(self.rank, reason.clone());
        self.pass_on(Some(Proposal { origin: self.rank, error: own }));
        let doomed = self.ending.lock().take_doomed();
        core.end_here(core.ended_by(rank, reason), &doomed);
    }

    /// This rank sees an end of the world: what all get is known when the others have answered. Waits for that, but in the turn of
    /// the progress engine, who is the one to hear them.
    pub(crate) fn propose_end(&self, core: &Core, error: &Error) {
        self.hear_end(self.rank, Proposal { origin: self.rank, error: error.clone() });
        let until = from_now(PATIENCE);
        while !progress::is_in_turn() && core.status().world_end().is_none() {
            if self.hear() {
                continue;
            }
            if sync::now() > until {
                // The progress is gone: what the others say is not heard any more.
                let doomed = self.ending.lock().take_doomed();
                core.end_here(error.clone(), &doomed);
            }
            self.sleep(FIRST_NAP);
        }
    }

    /// The process that forwards all messages, with the reason of its loss, if it is silent. Waits for its answer, for half a second at
    /// most; or for `PATIENCE`, if the progress thread hangs in its turn.
    fn silence(&self, core: &Core) -> Option<(Rank, AbortReason)> {
        let until = from_now(PATIENCE);
        let goes_on = || core.status().world_end().is_none() && sync::now() < until;
        while !progress::is_in_turn() && goes_on() {
            if let Some(answer) = self.answer_of_forwarder() {
                return answer.err();
            }
            if !self.hear() {
                self.sleep(FIRST_NAP);
            }
        }
        None
    }

    /// Whether the process that forwards all messages has answered, and nothing came with the answer that is still to be taken in; or
    /// is lost. `None` while that is not known, and while the progress thread is in its turn: one that hangs there never ends it.
    fn answer_of_forwarder(&self) -> Option<Result<(), (Rank, AbortReason)>> {
        let mut progress = self.progress.try_lock()?;
        match progress.forwarder() {
            Answer::Heard => (progress.turn(self) != Turned::Something).then_some(Ok(())),
            Answer::Silent(Loss { rank, cause }) => Some(Err((rank, progress.reason(rank, cause)))),
            Answer::Awaited => None,
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
            let header = end_bytes(u64::from(origin.get()), &error, self.rank);
            let request = self.to_all(Kind::End, &header);
            self.outgoing.lock().requests.extend(request);
            self.changed.notify_all();
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

    /// Ends the world, if it is known how.
    pub(in crate::remote) fn try_end(&self, core: &Core) {
        let mut ending = self.ending.lock();
        if !ending.has_begun() || core.status().world_end().is_some() {
            return;
        }
        let is_there = |rank| !core.record(rank).has_left();
        let verdict = ending.verdict(is_there);
        drop(ending);
        if let Some((end, doomed)) = verdict {
            core.end_here(end, &doomed);
        }
    }
}
