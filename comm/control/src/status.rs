//! The states of the other members, as one member knows them.

use std::collections::VecDeque;
use std::fmt;
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use hsdp_sharding::Rank;
use parking_lot::{Condvar, Mutex};
use prost::bytes::Bytes;
use serde::{Deserialize, Serialize};

use crate::ControlError;
use crate::wire::{Loss, short};

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

/// The states of all members at one time, as one member knows them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Status {
    states: Vec<State>,
    ended: Option<ControlError>,
}

impl Status {
    /// The states of all members, by rank.
    #[must_use]
    pub fn states(&self) -> &[State] {
        &self.states
    }

    /// The ranks that are lost.
    #[must_use]
    pub fn lost(&self) -> Vec<Rank> {
        self.which(|state| matches!(state, State::Lost { .. }))
    }

    /// The ranks that have left.
    #[must_use]
    pub fn finished(&self) -> Vec<Rank> {
        self.which(|state| *state == State::Finished)
    }

    /// The error with which every further call fails: [`CoordinatorLost`](ControlError::CoordinatorLost), [`CutOff`](ControlError::CutOff),
    /// [`BadMessage`](ControlError::BadMessage) or [`DeclaredLost`](ControlError::DeclaredLost). `None` while the job goes on.
    #[must_use]
    pub fn ended(&self) -> Option<&ControlError> {
        self.ended.as_ref()
    }

    fn which(&self, is: impl Fn(&State) -> bool) -> Vec<Rank> {
        let states = self.states.iter().enumerate().filter(|(_, state)| is(state));
        states.map(|(index, _)| Rank::new(index)).collect()
    }
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

/// A function that any thread may call.
pub(crate) type Listener = Box<dyn Fn() + Send + Sync>;

/// State that a member's calls and its connection share.
pub(crate) struct Shared {
    state: Mutex<Inside>,
    changed: Condvar,
    /// Is called after a message of another member was stored.
    listener: OnceLock<Listener>,
}

#[derive(Debug)]
struct Inside {
    status: Status,
    passed: VecDeque<Passed>,
    farewell: bool,
    /// The time of the last frame of the coordinator.
    heard: Instant,
}

impl Shared {
    pub(crate) fn new(world: u32) -> Self {
        let status = Status { states: vec![State::Alive; world as usize], ended: None };
        let (passed, heard) = (VecDeque::new(), Instant::now());
        let state = Mutex::new(Inside { status, passed, farewell: false, heard });
        Self { state, changed: Condvar::new(), listener: OnceLock::new() }
    }

    /// Has `listener` called after each message of another member. The first listener stays.
    pub(crate) fn listen(&self, listener: Listener) {
        let _ = self.listener.set(listener);
    }

    pub(crate) fn status(&self) -> Status {
        self.state.lock().status.clone()
    }

    /// The error with which every further call fails.
    pub(crate) fn end(&self) -> Option<ControlError> {
        self.state.lock().status.ended.clone()
    }

    /// Notes that a frame of the coordinator has arrived.
    pub(crate) fn heard(&self, now: Instant) {
        self.state.lock().heard = now;
    }

    /// The time since the last frame of the coordinator.
    pub(crate) fn silence(&self) -> Duration {
        self.state.lock().heard.elapsed()
    }

    /// Stores a message of another member.
    pub(crate) fn passed(&self, message: Passed) {
        self.state.lock().passed.push_back(message);
        if let Some(listener) = self.listener.get() {
            listener();
        }
    }

    /// Takes the oldest message.
    pub(crate) fn take_passed(&self) -> Option<Passed> {
        self.state.lock().passed.pop_front()
    }

    /// Waits for the coordinator's answer to the goodbye, or for the error that ended the connection; `None` if the time
    /// is up.
    pub(crate) fn wait_for_farewell(&self, within: Duration) -> Option<Result<(), ControlError>> {
        let until = Instant::now() + within;
        let mut state = self.state.lock();
        let is_over = |state: &Inside| state.farewell || state.status.ended.is_some();
        while !is_over(&state) && !self.changed.wait_until(&mut state, until).timed_out() {}
        if state.farewell { Some(Ok(())) } else { state.status.ended.clone().map(Err) }
    }

    pub(crate) fn changed(&self, rank: Rank, state: State) {
        if let Some(old) = self.state.lock().status.states.get_mut(rank.index()) {
            *old = state;
        }
    }

    /// Notes the end of the membership. The first error stays.
    pub(crate) fn ended(&self, why: ControlError) {
        self.with(|state| {
            state.status.ended.get_or_insert(why);
        });
    }

    pub(crate) fn farewell(&self) {
        self.with(|state| state.farewell = true);
    }

    fn with(&self, change: impl FnOnce(&mut Inside)) {
        change(&mut self.state.lock());
        self.changed.notify_all();
    }
}

impl fmt::Debug for Shared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Shared").field("state", &self.state).finish_non_exhaustive()
    }
}
