//! The states of the other members, as one member knows them.

use std::collections::{BTreeMap, VecDeque};
use std::time::{Duration, Instant};

use hsdp_sharding::Rank;
use parking_lot::{Condvar, Mutex};
use prost::bytes::Bytes;

use crate::ControlError;
use crate::wire::{Changed, Loss, Pass, RoundFailed, RoundKind, Standing, Value};

/// The state of a member.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum State {
    /// Its heartbeats arrive.
    Alive,
    /// It has missed heartbeats. It may become alive again.
    Suspect,
    /// It has left.
    Finished,
    /// It is lost, for good.
    Lost {
        /// The kind of reason.
        loss: Loss,
        /// The reason that the coordinator gives.
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
    /// The state of a member; `None` for a rank that is not in the world.
    #[must_use]
    pub fn state(&self, rank: Rank) -> Option<&State> {
        self.states.get(rank.index())
    }

    /// The states of all members, by rank.
    #[must_use]
    pub fn states(&self) -> &[State] {
        &self.states
    }

    /// The ranks that have missed heartbeats.
    #[must_use]
    pub fn suspects(&self) -> Vec<Rank> {
        self.which(|state| *state == State::Suspect)
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

    /// The error with which every further call fails: [`Aborted`](ControlError::Aborted),
    /// [`CoordinatorLost`](ControlError::CoordinatorLost), [`CutOff`](ControlError::CutOff), [`BadMessage`](ControlError::BadMessage) or
    /// [`DeclaredLost`](ControlError::DeclaredLost). `None` while the job goes on.
    #[must_use]
    pub fn ended(&self) -> Option<&ControlError> {
        self.ended.as_ref()
    }

    fn which(&self, is: impl Fn(&State) -> bool) -> Vec<Rank> {
        let states = self.states.iter().enumerate().filter(|(_, state)| is(state));
        states.map(|(index, _)| Rank::new(index)).collect()
    }
}

/// State that a member's calls and its connection share.
#[derive(Debug)]
pub(crate) struct Shared {
    inside: Mutex<Inside>,
    changed: Condvar,
    rank: Rank,
}

#[derive(Debug)]
struct Inside {
    status: Status,
    rounds: BTreeMap<String, Round>,
    passed: VecDeque<Pass>,
    farewell: bool,
    /// The time of the last frame of the coordinator.
    heard: Instant,
}

/// The results so far of a round that a call waits for.
#[derive(Debug)]
struct Round {
    wanted: usize,
    values: BTreeMap<Rank, Bytes>,
    failed: Option<ControlError>,
}

impl Shared {
    pub(crate) fn new(rank: Rank, world: u32) -> Self {
        let status = Status { states: vec![State::Alive; world as usize], ended: None };
        let (rounds, passed) = (BTreeMap::new(), VecDeque::new());
        let inside = Inside { status, rounds, passed, farewell: false, heard: Instant::now() };
        Self { inside: Mutex::new(inside), changed: Condvar::new(), rank }
    }

    pub(crate) fn status(&self) -> Status {
        self.inside.lock().status.clone()
    }

    /// Notes that a frame of the coordinator has arrived.
    pub(crate) fn heard(&self, now: Instant) {
        self.inside.lock().heard = now;
    }

    /// The time since the last frame of the coordinator.
    pub(crate) fn silence(&self) -> Duration {
        self.inside.lock().heard.elapsed()
    }

    /// Stores a message of another member.
    pub(crate) fn passed(&self, pass: Pass) {
        self.inside.lock().passed.push_back(pass);
    }

    /// Takes the oldest message.
    pub(crate) fn take_passed(&self) -> Option<Pass> {
        self.inside.lock().passed.pop_front()
    }

    /// Waits until `is` holds for the status, or until the time is up.
    pub(crate) fn wait_for(&self, within: Duration, is: impl Fn(&Status) -> bool) -> Status {
        let until = Instant::now() + within;
        let mut inside = self.inside.lock();
        while !is(&inside.status) && !self.changed.wait_until(&mut inside, until).timed_out() {}
        inside.status.clone()
    }

    /// Registers a round that a call is going to wait for.
    pub(crate) fn begin(&self, key: &str, kind: RoundKind) -> Result<(), ControlError> {
        let mut inside = self.inside.lock();
        if let Some(ended) = &inside.status.ended {
            return Err(ended.clone());
        }
        if inside.rounds.contains_key(key) {
            return Err(ControlError::KeyBusy { key: key.to_owned(), rank: self.rank });
        }
        let wanted = match kind {
            RoundKind::Exchange => inside.status.states.len(),
            RoundKind::Broadcast => 1,
        };
        let round = Round { wanted, values: BTreeMap::new(), failed: None };
        inside.rounds.insert(key.to_owned(), round);
        Ok(())
    }

    /// Waits for a round's values, in rank order; `None` if the time is up.
    pub(crate) fn end(
        &self,
        key: &str,
        until: Instant,
    ) -> Option<Result<Vec<Vec<u8>>, ControlError>> {
        let mut inside = self.inside.lock();
        let outcome = loop {
            if let Some(outcome) = inside.outcome(key) {
                break Some(outcome);
            }
            if self.changed.wait_until(&mut inside, until).timed_out() {
                break inside.outcome(key);
            }
        };
        inside.rounds.remove(key);
        outcome
    }

    /// Waits for the coordinator's answer to the goodbye, or for the error that ended the connection; `None` if the time
    /// is up.
    pub(crate) fn wait_for_farewell(&self, until: Instant) -> Option<Result<(), ControlError>> {
        let mut inside = self.inside.lock();
        loop {
            if inside.farewell {
                return Some(Ok(()));
            }
            match &inside.status.ended {
                None | Some(ControlError::Aborted { .. }) => {}
                Some(ended) => return Some(Err(ended.clone())),
            }
            if self.changed.wait_until(&mut inside, until).timed_out() {
                return None;
            }
        }
    }

    pub(crate) fn value(&self, value: Value) {
        self.with(|inside| {
            if let Some(round) = inside.rounds.get_mut(&value.key) {
                round.values.insert(Rank::new(value.rank as usize), value.value);
            }
        });
    }

    pub(crate) fn round_failed(&self, failed: &RoundFailed) {
        let failure = failed.failure.as_ref().and_then(|failure| failure.error(&failed.key).ok());
        self.with(|inside| {
            if let Some(round) = inside.rounds.get_mut(&failed.key) {
                round.failed = failure;
            }
        });
    }

    pub(crate) fn changed(&self, changed: &Changed) {
        let state = match Standing::try_from(changed.standing) {
            Ok(Standing::Alive) | Err(_) => State::Alive,
            Ok(Standing::Suspect) => State::Suspect,
            Ok(Standing::Finished) => State::Finished,
            Ok(Standing::Lost) => {
                State::Lost { loss: changed.loss(), why: changed.why.as_str().into() }
            }
        };
        self.with(|inside| {
            if let Some(old) = inside.status.states.get_mut(changed.rank as usize) {
                *old = state;
            }
        });
    }

    /// Notes the end of the job. The first error stays.
    pub(crate) fn ended(&self, why: ControlError) {
        self.with(|inside| {
            inside.status.ended.get_or_insert(why);
        });
    }

    pub(crate) fn farewell(&self) {
        self.with(|inside| inside.farewell = true);
    }

    fn with(&self, change: impl FnOnce(&mut Inside)) {
        change(&mut self.inside.lock());
        self.changed.notify_all();
    }
}

impl Inside {
    /// The result of a call that waits for a round, if it is known.
    fn outcome(&mut self, key: &str) -> Option<Result<Vec<Vec<u8>>, ControlError>> {
        let round = self.rounds.get_mut(key)?;
        if let Some(failed) = round.failed.take() {
            return Some(Err(failed));
        }
        if round.values.len() == round.wanted {
            let values = std::mem::take(&mut round.values);
            return Some(Ok(values.into_values().map(Vec::from).collect()));
        }
        self.status.ended.clone().map(Err)
    }
}
