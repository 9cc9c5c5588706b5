//! A member of a world, from the side of its process.

use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use hsdp_sharding::Rank;
use prost::bytes::Bytes;
use tokio::sync::mpsc;

use crate::limits::{MOST_MESSAGE, MOST_RECEIVERS, most_passed};
use crate::status::{Passed, Shared};
use crate::wire::{Body, FromMember};
use crate::{ArgumentError, ConnectionError, ControlError, Ends, Status};

/// This process as a member of a world whose ranks have all joined.
///
/// Every call has a deadline. If it is dropped without [`leave`](Self::leave), the others learn
/// within a second that the member is lost.
#[derive(Debug)]
pub struct Membership {
    pub(crate) ends: Ends,
    pub(crate) world: u32,
    /// The deadline of [`leave`](Self::leave).
    pub(crate) farewell: Duration,
    pub(crate) shared: Arc<Shared>,
    pub(crate) messages: Option<mpsc::UnboundedSender<FromMember>>,
    pub(crate) thread: Option<JoinHandle<()>>,
}

impl Membership {
    /// This process's rank.
    #[must_use]
    pub fn rank(&self) -> Rank {
        self.ends.rank
    }

    /// The number of ranks in the world.
    #[must_use]
    pub fn size(&self) -> usize {
        self.world as usize
    }

    /// Sends a message to other members, in the order of ranks, with a number for each of them.
    /// Does not wait. Each member [takes](Self::take_passed) the messages of another in the order
    /// in which they were sent. A message to a member that has left or is lost is dropped.
    ///
    /// At most [`most_passed`](Self::most_passed) messages may be on the way to one member. If a
    /// member sends more than the receiver takes, the coordinator may declare the receiver lost.
    ///
    /// # Errors
    /// [`ArgumentError::TooLong`] if the message has more than
    /// [`MOST_MESSAGE`](crate::MOST_MESSAGE) bytes. Without a coordinator: [`ConnectionError`].
    pub fn pass(&self, to: &[(Rank, u32)], message: Bytes) -> Result<(), ControlError> {
        let bytes = message.len();
        if bytes > MOST_MESSAGE {
            return Err(
                ArgumentError::TooLong { what: "the message", bytes, most: MOST_MESSAGE }.into()
            );
        }
        let body = Body::from(message);
        let mut parts = to.chunks(MOST_RECEIVERS);
        parts.try_for_each(|to| self.send(FromMember::Pass(to.to_vec(), body.clone())))?;
        Ok(())
    }

    /// The number of messages that one member may have on the way to another.
    #[must_use]
    pub fn most_passed(&self) -> usize {
        most_passed(self.world)
    }

    /// Takes the oldest message that another member has sent to this one. `None` if there is none.
    /// Does not wait.
    #[must_use]
    pub fn take_passed(&self) -> Option<Passed> {
        self.shared.state.lock().passed.pop_front()
    }

    /// Has `listener` called by the thread of the connection after each message that another member
    /// has sent to this one. It must not wait. The first listener stays.
    pub fn listen(&self, listener: Box<dyn Fn() + Send + Sync>) {
        let _ = self.shared.listener.set(listener);
    }

    /// The states of all members. Does not wait.
    #[must_use]
    pub fn status(&self) -> Status {
        self.shared.state.lock().status.clone()
    }

    /// Leaves: the others see this rank as finished, and not as lost.
    ///
    /// # Errors
    /// [`ConnectionError`] if the coordinator has not confirmed it.
    pub fn leave(self) -> Result<(), ConnectionError> {
        self.send(FromMember::Goodbye)?;
        let within = self.farewell;
        self.shared.wait_for_farewell(within).unwrap_or_else(|| {
            let problem = format!("it has not confirmed within {within:?} that this rank leaves");
            Err(ConnectionError::CoordinatorLost { ends: self.ends, problem })
        })
    }

    /// Asks the coordinator for a heartbeat now. Does not wait for it.
    pub fn ask(&self) {
        // After the end of the connection there is no answer, and the status has the reason.
        let _ = self.send(FromMember::Beat);
    }

    /// The time since the last message of the coordinator. Does not wait.
    #[must_use]
    pub fn silence(&self) -> Duration {
        self.shared.state.lock().heard.elapsed()
    }

    fn send(&self, message: FromMember) -> Result<(), ConnectionError> {
        let ended = || self.shared.state.lock().status.ended.clone().map_or(Ok(()), Err);
        ended()?;
        if self.messages.as_ref().is_some_and(|messages| messages.send(message).is_ok()) {
            return Ok(());
        }
        ended()?;
        let problem = "the connection has ended".to_owned();
        Err(ConnectionError::CoordinatorLost { ends: self.ends, problem })
    }
}

impl Drop for Membership {
    fn drop(&mut self) {
        drop(self.messages.take());
        if let Some(thread) = self.thread.take() {
            // The thread ends when `messages` is dropped; its panic is not ours to handle.
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
mod tests;
