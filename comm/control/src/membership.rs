//! A member of a world, from the side of its process.

use std::fmt;
use std::net::SocketAddr;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use hsdp_sharding::Rank;
use prost::bytes::Bytes;
use tokio::sync::{mpsc, watch};

use crate::job::short;
use crate::limits::{MOST_VALUE, cut, most_passed};
use crate::status::Shared;
use crate::wire::{Abort, FromMember, Give, Pass, RoundKind};
use crate::{ControlError, Deadlines, Member, Status};

/// How long an abort waits for the answer of the coordinator.
const ABORT: Duration = Duration::from_secs(1);

/// This process as a member of a world whose ranks have all joined.
///
/// Every call has a deadline. If it is dropped without [`leave`](Self::leave), the others learn within a second that the
/// member is lost.
pub struct Membership {
    pub(crate) rank: Rank,
    pub(crate) members: Vec<Member>,
    pub(crate) server: SocketAddr,
    pub(crate) deadlines: Deadlines,
    pub(crate) shared: Arc<Shared>,
    pub(crate) says: Option<mpsc::UnboundedSender<FromMember>>,
    pub(crate) voice: watch::Sender<Voice>,
    pub(crate) thread: Option<JoinHandle<()>>,
}

/// Whether a member's heartbeats are sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Voice {
    Speaking,
    Silent,
}

impl fmt::Debug for Membership {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut shown = f.debug_struct("Membership");
        shown.field("rank", &self.rank).field("members", &self.members).finish_non_exhaustive()
    }
}

impl Membership {
    /// This process's rank.
    #[must_use]
    pub fn rank(&self) -> Rank {
        self.rank
    }

    /// The number of ranks in the world.
    #[must_use]
    pub fn size(&self) -> usize {
        self.members.len()
    }

    /// All members, by rank.
    #[must_use]
    pub fn members(&self) -> &[Member] {
        &self.members
    }

    /// Exchanges values: every rank gets the values of all ranks, in rank order. **Collective**: all ranks call it with
    /// this key, from any thread.
    ///
    /// The key may be used again when the call has returned on all ranks.
    ///
    /// # Errors
    /// [`ControlError::TooLong`] if the key has more than 256 bytes or the value more than [`MOST_VALUE`](crate::MOST_VALUE);
    /// [`ControlError::KeyBusy`] if another thread uses this key; [`ControlError::Crowded`] if too many keys are in use.
    /// The same on all ranks: [`ControlError::Late`], [`ControlError::Absent`], [`ControlError::MixedRound`],
    /// [`ControlError::Aborted`]. Without a connection: [`ControlError::CoordinatorLost`], [`ControlError::CutOff`],
    /// [`ControlError::BadMessage`], [`ControlError::DeclaredLost`].
    pub fn exchange(&self, key: &str, value: &[u8]) -> Result<Vec<Vec<u8>>, ControlError> {
        self.round(key, RoundKind::Exchange, Some(value))
    }

    /// Broadcasts a value: exactly one rank gives a value, and every rank gets it. **Collective**: all ranks call it
    /// with this key, and it waits for all of them.
    ///
    /// # Errors
    /// The errors of [`exchange`](Self::exchange), and [`ControlError::Givers`] on all ranks if no rank gives a value or
    /// several do.
    pub fn broadcast(&self, key: &str, value: Option<&[u8]>) -> Result<Vec<u8>, ControlError> {
        let mut values = self.round(key, RoundKind::Broadcast, value)?;
        values.pop().ok_or_else(|| self.lost("it has sent no value"))
    }

    /// Sends a message to another member, which [takes](Self::take_passed) the messages of each member in the order in
    /// which they were sent. Does not wait. A message to a member that has left or is lost is dropped.
    ///
    /// At most [`most_passed`](Self::most_passed) messages may be on the way to one member. If a member sends more than the
    /// receiver takes, the coordinator may declare the receiver lost.
    ///
    /// # Errors
    /// [`ControlError::TooLong`] if the message has more than [`MOST_VALUE`](crate::MOST_VALUE) bytes. Without a coordinator:
    /// [`ControlError::CoordinatorLost`], [`ControlError::CutOff`], [`ControlError::BadMessage`], [`ControlError::DeclaredLost`].
    pub fn pass(&self, to: Rank, what: Vec<u8>) -> Result<(), ControlError> {
        if what.len() > MOST_VALUE {
            let bytes = what.len();
            return Err(ControlError::TooLong { what: "the message", bytes, most: MOST_VALUE });
        }
        let what = Bytes::from(what);
        self.say(FromMember::Pass(Pass { rank: to.get(), what }))
    }

    /// The number of messages that one member may have on the way to another.
    #[must_use]
    pub fn most_passed(&self) -> usize {
        most_passed(self.members.len())
    }

    /// Takes the oldest message that another member has sent to this one, with its sender. `None` if there is none. Does
    /// not wait.
    #[must_use]
    pub fn take_passed(&self) -> Option<(Rank, Vec<u8>)> {
        let Pass { rank, what } = self.shared.take_passed()?;
        Some((Rank::new(rank as usize), what.into()))
    }

    /// The states of all members. Does not wait.
    #[must_use]
    pub fn status(&self) -> Status {
        self.shared.status()
    }

    /// Waits until `is` holds for the status, or for `within`. Returns the status then.
    pub fn wait_for(&self, within: Duration, is: impl Fn(&Status) -> bool) -> Status {
        self.shared.wait_for(within, is)
    }

    /// Ends the job: all members see it in their status within a second, and every call of theirs fails with
    /// [`ControlError::Aborted`]. The first abort counts.
    ///
    /// Waits until the coordinator has confirmed it, or for a second. The others get the first 256 bytes of a long reason.
    pub fn abort(&self, reason: &str) {
        if self.say(FromMember::Abort(Abort { reason: cut(reason) })).is_ok() {
            // If the process ends now, the coordinator has the abort.
            let _ = self.wait_for(ABORT, |status| status.ended().is_some());
        }
    }

    /// Leaves: the others see this rank as finished, and not as lost. Works after an abort, too.
    ///
    /// # Errors
    /// [`ControlError::CoordinatorLost`], [`ControlError::CutOff`], [`ControlError::BadMessage`] or [`ControlError::DeclaredLost`]
    /// if the coordinator has not confirmed it.
    pub fn leave(self) -> Result<(), ControlError> {
        self.say(FromMember::Goodbye(()))?;
        let within = self.deadlines.handshake;
        let heard = self.shared.wait_for_farewell(Instant::now() + within);
        heard.unwrap_or_else(|| {
            Err(self.lost(&format!("it has not confirmed within {within:?} that this rank leaves")))
        })
    }

    /// Asks the coordinator for a heartbeat now. Does not wait for it.
    pub fn ask(&self) {
        // After the end of the connection there is no answer, and the status has the reason.
        let _ = self.say(FromMember::Beat(()));
    }

    /// The time since the last message of the coordinator. Does not wait.
    #[must_use]
    pub fn silence(&self) -> Duration {
        self.shared.silence()
    }

    /// For tests: stops the heartbeats.
    #[doc(hidden)]
    pub fn fall_silent(&self) {
        self.voice.send_replace(Voice::Silent);
    }

    /// For tests: resumes the heartbeats.
    #[doc(hidden)]
    pub fn speak_again(&self) {
        self.voice.send_replace(Voice::Speaking);
    }

    fn round(
        &self,
        key: &str,
        kind: RoundKind,
        value: Option<&[u8]>,
    ) -> Result<Vec<Vec<u8>>, ControlError> {
        short("the key", key)?;
        let bytes = value.map_or(0, <[u8]>::len);
        if bytes > MOST_VALUE {
            return Err(ControlError::TooLong { what: "the value", bytes, most: MOST_VALUE });
        }
        self.shared.begin(key, kind)?;
        let value = value.map(Bytes::copy_from_slice);
        let said =
            self.say(FromMember::Give(Give { key: key.to_owned(), kind: kind.into(), value }));
        // The coordinator checks the round's deadline. This one finds a coordinator that does not answer at all.
        let within = self.deadlines.round + self.deadlines.until_lost();
        let until = if said.is_ok() { Instant::now() + within } else { Instant::now() };
        let outcome = self.shared.end(key, until);
        outcome.unwrap_or_else(|| {
            said?;
            Err(self.lost(&format!("it has not answered `{key}` for {within:?}")))
        })
    }

    fn say(&self, letter: FromMember) -> Result<(), ControlError> {
        let said = self.says.as_ref().is_some_and(|says| says.send(letter).is_ok());
        if said {
            return Ok(());
        }
        let ended = self.status().ended().cloned();
        Err(ended.unwrap_or_else(|| self.lost("the connection has ended")))
    }

    fn lost(&self, problem: &str) -> ControlError {
        let (rank, server) = (self.rank, self.server);
        ControlError::CoordinatorLost { rank, server, problem: problem.to_owned() }
    }
}

impl Drop for Membership {
    fn drop(&mut self) {
        drop(self.says.take());
        if let Some(thread) = self.thread.take() {
            // The thread ends when `says` is dropped; its panic is not ours to handle.
            let _ = thread.join();
        }
    }
}
