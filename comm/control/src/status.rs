//! The states of the other members, as one member knows them.

use std::collections::VecDeque;
use std::fmt;
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use hsdp_sharding::Rank;
use parking_lot::{Condvar, Mutex};
use prost::bytes::Bytes;
use serde::{Deserialize, Serialize};

use crate::limits::short;
use crate::{ConnectionError, Ends};

/// The state of a member.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum State {
    /// It has neither left nor been lost.
    Alive,
    /// It has left.
    Finished,
    /// It is lost, for good.
    Lost {
        /// The kind of reason.
        loss: Loss,
        /// The reason that the coordinator gives.
        #[serde(deserialize_with = "short")]
        why: Box<str>,
    },
}

/// The kind of reason for which a member is lost.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Loss {
    /// Its connection ended before it left. Its process may be gone, or the connection was cut.
    Ended,
    /// It neither sent nor received anything for too long. Its process may be stopped, or the
    /// network cut.
    Silent,
    /// A message from it or to it failed authentication: it was changed on the way, or another
    /// process has sent it.
    Forged,
    /// It has sent, or was sent, an authenticated message that does not follow the protocol.
    Invalid,
}

impl Loss {
    /// Returns the error of a member that ends its own connection for this reason.
    pub(crate) fn error(self, ends: Ends, problem: String) -> ConnectionError {
        match self {
            Self::Ended => ConnectionError::CoordinatorLost { ends, problem },
            _ => ConnectionError::BadMessage { ends, problem },
        }
    }
}

/// The states of all members at one time, as one member knows them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Status {
    /// The states of all members, by rank.
    pub states: Vec<State>,
    /// The error with which every further call fails. `None` while the job goes on.
    pub ended: Option<ConnectionError>,
}

/// A message of another member.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Passed {
    /// The sender.
    pub from: Rank,
    /// The number that the sender gave for this member.
    pub number: u32,
    /// The message.
    pub message: Bytes,
}

/// State that a member's calls and its connection share.
pub(crate) struct Shared {
    pub(crate) state: Mutex<SharedState>,
    changed: Condvar,
    /// Is called after a message of another member was stored.
    pub(crate) listener: OnceLock<Box<dyn Fn() + Send + Sync>>,
}

/// The state under the lock of [`Shared`].
#[derive(Debug)]
pub(crate) struct SharedState {
    pub(crate) status: Status,
    /// The messages of other members, the oldest first.
    pub(crate) passed: VecDeque<Passed>,
    /// Whether the coordinator has answered the goodbye.
    pub(crate) farewell: bool,
    /// The time of the last frame of the coordinator.
    pub(crate) heard: Instant,
}

impl Shared {
    pub(crate) fn new(world: u32) -> Self {
        let status = Status { states: vec![State::Alive; world as usize], ended: None };
        let passed = VecDeque::new();
        let heard = Instant::now();
        let state = Mutex::new(SharedState { status, passed, farewell: false, heard });
        Self { state, changed: Condvar::new(), listener: OnceLock::new() }
    }

    /// Stores a message of another member.
    pub(crate) fn passed(&self, message: Passed) {
        self.state.lock().passed.push_back(message);
        if let Some(listener) = self.listener.get() {
            listener();
        }
    }

    /// Waits for the coordinator's answer to the goodbye, or for the error that ended the
    /// connection; `None` if the time is up.
    pub(crate) fn wait_for_farewell(
        &self,
        within: Duration,
    ) -> Option<Result<(), ConnectionError>> {
        let mut state = self.state.lock();
        let goes_on = |state: &mut SharedState| !state.farewell && state.status.ended.is_none();
        self.changed.wait_while_for(&mut state, goes_on, within);
        if state.farewell { Some(Ok(())) } else { state.status.ended.clone().map(Err) }
    }

    /// Changes the state, and wakes the call that waits for the end.
    pub(crate) fn with(&self, change: impl FnOnce(&mut SharedState)) {
        change(&mut self.state.lock());
        self.changed.notify_all();
    }
}

impl fmt::Debug for Shared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Shared").field("state", &self.state).finish_non_exhaustive()
    }
}
