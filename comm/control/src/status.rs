//! What a member knows of the others.

use std::collections::{BTreeMap, VecDeque};
use std::time::{Duration, Instant};

use hsdp_sharding::Rank;
use parking_lot::{Condvar, Mutex};
use prost::bytes::Bytes;

use crate::ControlError;
use crate::wire::{Changed, Pass, RoundFailed, RoundKind, Standing, Value};

/// What has become of a member.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum State {
    /// It is heard.
    Alive,
    /// It has missed heartbeats. It may come back.
    Suspect,
    /// It has said goodbye.
    Finished,
    /// It is gone, and does not come back.
    Lost {
        /// What was seen of it.
        why: Box<str>,
    },
}

/// What a member knows of the world, at one time.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Status {
    states: Vec<State>,
    ended: Option<ControlError>,
}

impl Status {
    /// What has become of a member. Of a rank that is not in the world, nothing is known.
    #[must_use]
    pub fn state(&self, rank: Rank) -> Option<&State> {
        self.states.get(rank.index())
    }

    /// What has become of all, by rank.
    #[must_use]
    pub fn states(&self) -> &[State] {
        &self.states
    }

    /// Who has missed heartbeats.
    #[must_use]
    pub fn suspects(&self) -> Vec<Rank> {
        self.which(|state| *state == State::Suspect)
    }

    /// Who is gone.
    #[must_use]
    pub fn lost(&self) -> Vec<Rank> {
        self.which(|state| matches!(state, State::Lost { .. }))
    }

    /// Who has said goodbye.
    #[must_use]
    pub fn finished(&self) -> Vec<Rank> {
        self.which(|state| *state == State::Finished)
    }

    /// Why nothing can be asked any more: [`Aborted`](ControlError::Aborted), [`CoordinatorLost`](ControlError::CoordinatorLost) or
    /// [`CutOff`](ControlError::CutOff).
    #[must_use]
    pub fn ended(&self) -> Option<&ControlError> {
        self.ended.as_ref()
    }

    fn which(&self, is: impl Fn(&State) -> bool) -> Vec<Rank> {
        let states = self.states.iter().enumerate().filter(|(_, state)| is(state));
        states.map(|(index, _)| Rank::new(index)).collect()
    }
}

/// What a member's calls and its connection share.
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
}

/// What has come of a round that a call waits for.
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
        let inside = Inside { status, rounds, passed, farewell: false };
        Self { inside: Mutex::new(inside), changed: Condvar::new(), rank }
    }

    pub(crate) fn status(&self) -> Status {
        self.inside.lock().status.clone()
    }

    /// Another member has passed something on.
    pub(crate) fn passed(&self, pass: Pass) {
        self.inside.lock().passed.push_back(pass);
    }

    /// What was passed on first, and is not taken.
    pub(crate) fn take_passed(&self) -> Option<Pass> {
        self.inside.lock().passed.pop_front()
    }

    /// The status once it is as `is` wants it, or when time is up.
    pub(crate) fn wait_for(&self, within: Duration, is: impl Fn(&Status) -> bool) -> Status {
        let until = Instant::now() + within;
        let mut inside = self.inside.lock();
        while !is(&inside.status) && !self.changed.wait_until(&mut inside, until).timed_out() {}
        inside.status.clone()
    }

    /// A call begins to wait for a round.
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

    /// Waits for a round's values, in the order of ranks; nothing if time is up.
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

    /// Whether the coordinator has heard the goodbye, or why it never will.
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
            Ok(Standing::Lost) => State::Lost { why: changed.why.as_str().into() },
        };
        self.with(|inside| {
            if let Some(old) = inside.status.states.get_mut(changed.rank as usize) {
                *old = state;
            }
        });
    }

    /// The first reason stays, but for an abort of a world whose coordinator then goes, too.
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
    /// What a call that waits for a round returns, if it is known.
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
