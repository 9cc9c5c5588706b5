//! A member of a world, as its process sees it.

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

/// How long an abort waits until it is heard.
const ABORT: Duration = Duration::from_secs(1);

/// A member of a world whose ranks have all come.
///
/// Every call has a deadline. A member that is dropped without [`leave`](Self::leave) is lost to the others, within a second.
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
    /// Its rank.
    #[must_use]
    pub fn rank(&self) -> Rank {
        self.rank
    }

    /// Ranks in the world.
    #[must_use]
    pub fn size(&self) -> usize {
        self.members.len()
    }

    /// All members, by rank.
    #[must_use]
    pub fn members(&self) -> &[Member] {
        &self.members
    }

    /// Gives every rank the values of all, in the order of ranks. Collective: all ranks call it with this key, from any thread.
    ///
    /// When it has returned everywhere the key may be used again.
    ///
    /// # Errors
    /// [`ControlError::TooLong`] if the key has more than 256 bytes or the value more than [`MOST_VALUE`](crate::MOST_VALUE);
    /// [`ControlError::KeyBusy`] if another thread is in this key. The same on all ranks: [`ControlError::Late`],
    /// [`ControlError::Absent`], [`ControlError::MixedRound`], [`ControlError::Aborted`]. Without a coordinator: [`ControlError::CoordinatorLost`],
    /// [`ControlError::CutOff`].
    pub fn exchange(&self, key: &str, value: &[u8]) -> Result<Vec<Vec<u8>>, ControlError> {
        self.round(key, RoundKind::Exchange, Some(value))
    }

    /// Gives every rank the value of the one that gives some. Collective: all ranks call it with this key; it waits for all of them.
    ///
    /// # Errors
    /// Those of [`exchange`](Self::exchange), and [`ControlError::Givers`] if none gives a value or several do.
    pub fn broadcast(&self, key: &str, value: Option<&[u8]>) -> Result<Vec<u8>, ControlError> {
        let mut values = self.round(key, RoundKind::Broadcast, value)?;
        values.pop().ok_or_else(|| self.lost("it has sent no value"))
    }

    /// Passes something to another member, which [takes](Self::take_passed) what comes of each in the order in which it was passed. Does not
    /// wait. What is for a member that is finished or lost comes to nobody.
    ///
    /// Whoever passes more than the other takes has it lost: no more than [`most_passed`](Self::most_passed) may be on their way
    /// to it.
    ///
    /// # Errors
    /// [`ControlError::TooLong`] if it has more than [`MOST_VALUE`](crate::MOST_VALUE) bytes. Without a coordinator:
    /// [`ControlError::CoordinatorLost`], [`ControlError::CutOff`].
    pub fn pass(&self, to: Rank, what: Vec<u8>) -> Result<(), ControlError> {
        if what.len() > MOST_VALUE {
            let bytes = what.len();
            return Err(ControlError::TooLong { what: "what is passed", bytes, most: MOST_VALUE });
        }
        let what = Bytes::from(what);
        self.say(FromMember::Pass(Pass { rank: to.get(), what }))
    }

    /// How many that one member has passed to another may wait until that takes them.
    #[must_use]
    pub fn most_passed(&self) -> usize {
        most_passed(self.members.len())
    }

    /// What came first of what others have passed to this member, and who it was. Does not wait.
    #[must_use]
    pub fn take_passed(&self) -> Option<(Rank, Vec<u8>)> {
        let Pass { rank, what } = self.shared.take_passed()?;
        Some((Rank::new(rank as usize), what.into()))
    }

    /// What has become of all members. Does not wait.
    #[must_use]
    pub fn status(&self) -> Status {
        self.shared.status()
    }

    /// The status once it is as `is` wants it, or after `within`.
    pub fn wait_for(&self, within: Duration, is: impl Fn(&Status) -> bool) -> Status {
        self.shared.wait_for(within, is)
    }

    /// Ends the job: all members see it in their status within a second, and every call of theirs fails with it. The first one counts.
    ///
    /// Waits until the coordinator has heard it, or for a second. Of a long reason the first 256 bytes are told.
    pub fn abort(&self, reason: &str) {
        if self.say(FromMember::Abort(Abort { reason: cut(reason) })).is_ok() {
            // Who ends its process now has been heard.
            let _ = self.wait_for(ABORT, |status| status.ended().is_some());
        }
    }

    /// Says goodbye: this rank has finished, and is not lost. After an abort, too.
    ///
    /// # Errors
    /// [`ControlError::CoordinatorLost`] or [`ControlError::CutOff`] if nobody heard it.
    pub fn leave(self) -> Result<(), ControlError> {
        self.say(FromMember::Goodbye(()))?;
        let within = self.deadlines.handshake;
        let heard = self.shared.wait_for_farewell(Instant::now() + within);
        heard.unwrap_or_else(|| {
            Err(self.lost(&format!("it has not answered a goodbye for {within:?}")))
        })
    }

    /// For tests: no heartbeats from now on.
    #[doc(hidden)]
    pub fn fall_silent(&self) {
        self.voice.send_replace(Voice::Silent);
    }

    /// For tests: heartbeats again.
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
        // The coordinator looks at the round's deadline; here it is looked whether the coordinator answers at all.
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
        Err(ended.unwrap_or_else(|| self.lost("the connection is over")))
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
            // It ends as soon as nobody can say anything any more; a panic of it was its own.
            let _ = thread.join();
        }
    }
}
