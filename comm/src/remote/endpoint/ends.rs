//! The end of the world, between the ranks. `REMOTE.md`, "The end of the world".

use std::sync::Arc;
use std::time::Duration;

use hsdp_sharding::Rank;

use super::{Endpoint, FIRST_NAP};
use crate::engine::{SharedOperation, from_now};
use crate::remote::header::end_bytes;
use crate::remote::message::MessageKind;
use crate::remote::progress::{self, ProgressTurn};
use crate::remote::transport::{Answer, PeerLoss};
use crate::{AbortReason, Error, sync};

/// How long a process that forwards messages is waited for, if it cannot be asked.
const PATIENCE: Duration = Duration::from_secs(2);

impl Endpoint {
    /// The rank that decides about the end of the world, and compares the states of ranks: the lowest that has not left.
    pub(in crate::remote) fn lowest(&self) -> Option<Rank> {
        (0..self.size).map(Rank::new).find(|rank| !self.state.record(*rank).has_left())
    }

    /// Ends the world, unless it is over. Returns the end that all ranks get, or `error` while that is not known.
    pub(crate) fn end(&self, error: Error) -> Error {
        if self.state.early_ends.world_end().is_none() {
            self.propose_end(&error);
        }
        self.state.early_ends.world_end().unwrap_or(error)
    }

    /// Ends the world by `rank`'s doing.
    pub(in crate::remote) fn end_by(&self, rank: Rank, reason: AbortReason) {
        self.end(self.state.ended_by(rank, reason));
    }

    /// Ends the world since `rank` has sent an invalid message.
    pub(in crate::remote) fn end_garbled(&self, rank: Rank, problem: String) {
        self.end_by(rank, AbortReason::Garbled { problem: problem.into() });
    }

    /// This rank sees an end of the world. The lowest rank decides; where it is silent for half a second, this rank does. Waits for that,
    /// except in a turn of the progress engine, which hears the lowest rank.
    fn propose_end(&self, error: &Error) {
        match self.lowest().filter(|rank| *rank != self.rank) {
            None => self.end_with(error, error),
            Some(lowest) if self.ending.lock().see(error) => {
                self.send_end(MessageKind::Proposal, error, vec![lowest]);
            }
            Some(_) => {}
        }
        while !progress::is_in_turn() && self.state.early_ends.world_end().is_none() {
            if !self.hear() {
                self.try_end();
                self.sleep(FIRST_NAP);
            }
        }
    }

    /// Ends the world with `own` here, and with `told` on the other ranks, unless this rank knows an end.
    fn end_with(&self, own: &Error, told: &Error) {
        let decided = self.ending.lock().decide();
        if let Some(doomed) = decided {
            // Before any message of a rank that knows the end.
            self.send_end(MessageKind::End, told, self.others(0..self.size));
            self.state.end_here(own.clone(), &doomed);
        }
    }

    /// Another rank sees an end, and takes this one for the lowest: it gets the end of the world.
    pub(in crate::remote) fn hear_proposal(&self, from: Rank, error: &Error) {
        self.end_with(error, error);
        if let Some(end) = self.state.early_ends.world_end() {
            self.send_end(MessageKind::End, &end, vec![from]);
        }
    }

    /// The world has ended. Where another rank than the lowest says so, the lowest is told, once.
    pub(in crate::remote) fn hear_end(&self, from: Rank, error: &Error) {
        let decided = self.ending.lock().decide();
        if let Some(doomed) = decided {
            let lowest = self.lowest().filter(|rank| ![from, self.rank].contains(rank));
            lowest.into_iter().for_each(|rank| self.send_end(MessageKind::End, error, vec![rank]));
            self.state.end_here(error.clone(), &doomed);
        }
    }

    /// Before a rank is blamed as late: its message may wait in the process that forwards all messages. If that process answers, this
    /// rank takes in the messages that came with the answer. If it is silent, the world ends here: this rank names that process, and tells the
    /// others, if they hear it, that it hears nothing.
    pub(crate) fn await_forwarder(&self) {
        if let Some((rank, reason)) = self.silence() {
            let told = self.state.ended_by(self.rank, reason.clone());
            self.end_with(&self.state.ended_by(rank, reason), &told);
        }
    }

    /// The process that forwards all messages, with the reason of its loss, if it is silent. Waits for its answer, for half a second at
    /// most; or for `PATIENCE`, if the progress thread hangs in its turn.
    fn silence(&self) -> Option<(Rank, AbortReason)> {
        let until = from_now(PATIENCE);
        let goes_on = || self.state.early_ends.world_end().is_none() && sync::now() < until;
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
        match progress.transport.forwarder() {
            Answer::Heard => (progress.turn(self) != ProgressTurn::Something).then_some(Ok(())),
            Answer::Silent(PeerLoss { rank, cause }) => {
                Some(Err((rank, progress.reason(rank, cause))))
            }
            Answer::Awaited => None,
        }
    }

    fn send_end(&self, kind: MessageKind, error: &Error, to: Vec<Rank>) {
        self.send(kind, &end_bytes(0, error, self.rank), to);
    }

    /// An operation fails with the end of the world, which is not known yet.
    pub(crate) fn doom(&self, operation: Arc<SharedOperation>) {
        self.ending.lock().doomed.push(operation);
    }

    /// Whether this rank has seen an end, and the world has not ended: it stays for the answer of the lowest rank.
    pub(in crate::remote) fn is_deciding(&self) -> bool {
        self.ending.lock().is_open()
    }

    /// Ends the world, if this rank has seen an end, and the lowest rank is silent.
    pub(in crate::remote) fn try_end(&self) {
        let overdue = self.ending.lock().overdue();
        overdue.into_iter().for_each(|error| self.end_with(&error, &error));
    }
}
