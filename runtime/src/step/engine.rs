//! The engine: all work between the begin and the end of a step.
//!
//! It is shared behind an `Arc`, because an autograd's custom ops must be able to hold it. The
//! public types ([`Step`](crate::Step), [`Pass`](crate::Pass), [`Gradients`](crate::Gradients))
//! make the wrong order of calls impossible to write. A [`Token`] identifies the microbatch and the
//! attempt that a caller means.
//!
//! The engine decides nothing about the order of operations: a
//! [`StepMachine`](hsdp_sharding::step::StepMachine) does. The engine feeds it with the calls of
//! the program, carries out its outputs, and keeps buffers and operations under way.
//!
//! | subject | file |
//! |---|---|
//! | calls of a program | `engine`, `opening`, `finish`, `evaluation` |
//! | outputs of the machine, carried out | `drive` |
//! | buffers and operations under way | `gathers`, `reductions` |
//! | numbers of a step | `step_state`, `exponent` |
//! | errors of calls | `attempt`, `refused`, `check`, `unused` |

use std::fmt::Display;
use std::panic::Location;
use std::sync::atomic::{AtomicU64, Ordering};

use hsdp_comm::{Mistake, StepFailure, in_work};
use hsdp_sharding::step::Refused;
use hsdp_sharding::{ParamId, UnitId};

use crate::error::{DataError, Error};
use crate::options::objective::{LossSum, Seed};
use crate::options::uneven::EndOfRun;
use crate::state::context::Context;
use crate::state::full::Full;
use crate::state::gradients::UnitGradients;
use crate::state::joint::Failure;
use crate::state::lock::{Lock, Locked};
use crate::state::model_id::ModelId;
use crate::state::shard::Shard;
use crate::step::attempt::{Attempt, Opened, Token};
use crate::step::gathers::UnitGathers;
use crate::step::reductions::UnitReductions;
use crate::step::state::State;

/// The shared engine of one rank's model.
#[derive(Debug)]
pub(crate) struct Engine {
    pub(crate) context: Context,
    pub(crate) id: ModelId,
    pub(super) state: Lock<State>,
    /// The attempt that is under way, or [`NO_ATTEMPT`]. It is outside the lock, so that a step can
    /// be aborted while another thread waits in it.
    pub(super) under_way: AtomicU64,
}

pub(super) const NO_ATTEMPT: u64 = 0;

/// The call under way where a thread reads a gradient, which may be another rank's.
const READING: &str = "the reading of a gradient";

/// The result of the exchange of headers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Begun {
    Step(Opened),
    End(EndOfRun),
}

impl Engine {
    pub(crate) fn new(context: Context, shards: Vec<Shard>) -> Self {
        let state = Lock::new(State::new(&context, shards));
        Self { context, id: ModelId::new(), state, under_way: AtomicU64::new(NO_ATTEMPT) }
    }

    pub(crate) fn state(&self) -> Locked<'_, State> {
        self.state.lock()
    }

    /// Waits for the state, for a call that the caller's code may make from inside another call of
    /// this model.
    ///
    /// # Errors
    /// [`Error::Misuse`] if it does.
    pub(crate) fn enter(
        &self,
        operation: &'static str,
        step: u64,
    ) -> Result<Locked<'_, State>, Error> {
        let entered = if in_work() { Err(READING) } else { self.state.enter(operation) };
        entered.map_err(|outer| {
            let what = format!("called from inside another call: {outer}");
            self.context.misuse(operation, step, what)
        })
    }

    /// Begins a microbatch; `None` where the step has no next one, because ranks have no more data.
    pub(crate) fn begin_microbatch(&self, opened: Opened) -> Result<Option<Token>, Error> {
        let operation = "microbatch";
        let mut state = self.in_step(opened, operation)?;
        state.attempt(&self.context, operation, |state| {
            let begun = state.machine.begin_microbatch();
            begun.map_err(|refused| state.refused(&self.context, operation, refused))?;
            state.drive(&self.context, operation)?;
            if !state.machine.has_microbatch() {
                return Ok(None);
            }
            state.step_mut().loss = None;
            Ok(Some(Token { opened, microbatch: state.machine.microbatches() }))
        })
    }

    /// Returns the error of a step that has no next microbatch.
    pub(crate) fn end_of_data(&self, opened: Opened) -> Error {
        match self.in_step(opened, "microbatch") {
            Ok(state) => Error::Data(DataError::EndOfData {
                step: opened.step,
                microbatch: Some(state.machine.microbatches()),
                supply: state.machine.supply().cloned().unwrap_or_default(),
            }),
            Err(error) => error,
        }
    }

    /// Waits for the state, if the step that was opened is under way.
    ///
    /// # Errors
    /// [`Error::Misuse`] if it is over, or inside another call.
    pub(super) fn in_step(
        &self,
        opened: Opened,
        operation: &'static str,
    ) -> Result<Locked<'_, State>, Error> {
        let state = self.enter(operation, opened.step)?;
        let is_same = state.attempt.as_ref().is_some_and(|attempt| attempt.opened == opened);
        if is_same && state.is_in_step() {
            return Ok(state);
        }
        Err(self.context.misuse(operation, opened.step, "the step is over".to_owned()))
    }

    /// Waits for the next gather of `unit` in the plan's order.
    pub(crate) fn unshard(&self, token: Token, unit: UnitId) -> Result<Full, Error> {
        let mut state = self.enter("unshard", token.opened.step)?;
        state.check_at(&self.context, token, "unshard")?;
        state.attempt(&self.context, "unshard", |state| state.need(&self.context, unit))
    }

    /// Takes the loss of a microbatch and returns the seed of its backward.
    pub(crate) fn loss(&self, token: Token, loss: LossSum) -> Result<Seed, Error> {
        let mut state = self.enter("loss", token.opened.step)?;
        self.check_has_backward(&state, token, "loss")?;
        state.check_at(&self.context, token, "loss")?;
        let exponent = state.attempt(&self.context, "loss", |state| {
            let weight = state.step_mut().weight_with(&self.context, loss.weight())?;
            let taken = state.machine.loss();
            taken.map_err(|refused| state.refused(&self.context, "loss", refused))?;
            state.step_mut().take_loss(&self.context, loss, weight);
            state.drive(&self.context, "loss")?;
            Ok(state.step_mut().exponent.unwrap_or(0))
        })?;
        let scale = state.loss_scale.value();
        let sensitivity = loss.sensitivity(self.context.options.objective);
        let value = sensitivity * f64::powi(2.0, -exponent) * scale;
        Ok(Seed { value, loss_scale: scale })
    }

    /// Takes a unit's gradients of a microbatch.
    pub(crate) fn reduce(
        &self,
        token: Token,
        unit: UnitId,
        gradients: UnitGradients,
    ) -> Result<(), Error> {
        let mut state = self.enter("reduce", token.opened.step)?;
        self.check_has_backward(&state, token, "reduce")?;
        state.check_at(&self.context, token, "reduce")?;
        let microbatch = token.microbatch;
        let span = tracing::trace_span!("reduce", unit = unit.index(), microbatch);
        state.attempt(&self.context, "reduce", |state| {
            span.in_scope(|| state.reduce(&self.context, unit, gradients))
        })
    }

    /// Ends a microbatch, or a batch of an evaluation.
    pub(crate) fn finish_microbatch(&self, token: Token) -> Result<(), Error> {
        let operation = "finish of a microbatch";
        let mut state = self.enter(operation, token.opened.step)?;
        state.check_at(&self.context, token, operation)?;
        state.attempt(&self.context, operation, |state| {
            state.note_scattered(&self.context)?;
            let ended = state.machine.end_microbatch();
            ended.map_err(|refused| state.refused(&self.context, operation, refused))?;
            state.drive(&self.context, operation).map(drop)
        })
    }

    /// Returns whether `token` means a batch of an evaluation.
    pub(crate) fn is_in_batch(&self, token: Token) -> bool {
        let state = self.state.enter("has_backward");
        state.is_ok_and(|state| state.evaluation.is_some() && state.is_at(token))
    }

    fn check_has_backward(
        &self,
        state: &State,
        token: Token,
        operation: &'static str,
    ) -> Result<(), Error> {
        if state.evaluation.is_none() || !state.is_at(token) {
            return Ok(());
        }
        let what = "a batch of an evaluation has no backward: finish it".to_owned();
        Err(self.context.misuse(operation, token.opened.step, what))
    }

    /// Notes the error of a caller, if the step or the evaluation has none so far.
    pub(crate) fn note_failure(&self, token: Token, reason: &dyn Display) {
        let Ok(mut state) = self.state.enter("note_failure") else { return };
        if state.is_at(token)
            && let Some(attempt) = &mut state.attempt
        {
            attempt.note_failure(|| reason.to_string());
        }
    }

    /// Announces that this rank aborts the step, and discards it. Every other rank discards it too.
    ///
    /// The announcement waits for no rank. A thread that waits in the step at this moment gets its
    /// error from it, and then releases the state.
    pub(crate) fn abort_step(&self, opened: Opened, given: Option<String>) {
        self.discard_step(opened, given, |failure| {
            self.context.world.abort_step_of(opened.epoch, failure);
        });
    }

    /// Does as [`abort_step`](Self::abort_step) for a step that the program has leaked. All ranks
    /// may find it, in the call that fails with `error`, between steps.
    pub(crate) fn abort_leaked_step(&self, opened: Opened, error: &Error) {
        self.discard_step(opened, Some(error.to_string()), |failure| {
            let mistake = error.mistake(failure.step, Location::caller());
            self.context.world.announce_mistake(opened.epoch, failure, mistake);
        });
    }

    /// Does as [`abort_step`](Self::abort_step) for an evaluation, which all ranks may drop. Its
    /// number identifies it among those of the model.
    pub(crate) fn abort_evaluation(&self, opened: Opened, number: u64) {
        let reason = "the evaluation was dropped before its mean".to_owned();
        self.discard_step(opened, Some(reason), |failure| {
            let mistake = Mistake::of(&("drop of an evaluation", failure.step, number));
            self.context.world.announce_mistake(opened.epoch, failure, mistake);
        });
    }

    fn discard_step(
        &self,
        opened: Opened,
        given: Option<String>,
        announce: impl FnOnce(StepFailure),
    ) {
        // A step that is dropped inside one of its own calls is as good as leaked: the next
        // `begin_step` aborts it.
        if self.state.is_held_here() {
            return;
        }
        let (attempt, acq_rel, relaxed) = (opened.attempt, Ordering::AcqRel, Ordering::Relaxed);
        if self.under_way.compare_exchange(attempt, NO_ATTEMPT, acq_rel, relaxed).is_err() {
            return;
        }
        let reason = self.reason_for_abort(given);
        let Opened { step, epoch, .. } = opened;
        announce(StepFailure { step, reason });
        let mut state = self.state();
        if let Some(step) = state.step.take() {
            // A rank that ran out of data in the middle of the step has data again for the next
            // attempt.
            self.context.world.set_absent(&step.absent);
        }
        if state.evaluation.take().is_some() {
            self.context.world.set_absent(&[]);
        }
        state.attempt = None;
        state.machine.abort();
        state.gathers = UnitGathers::default();
        state.reductions = UnitReductions::new(&self.context);
        state.kept.clear();
        self.context.full_pool.let_go();
        self.context.full_pool.set_limit(state.machine.plan().memory().full);
        // A rank that has aborted the epoch itself may have left it already: this step must not end
        // the next epoch.
        if self.context.world.epoch() == epoch {
            self.context.world.next_epoch();
        }
    }

    /// Returns the reason of an abort: the first error of the step, or else the reason that was
    /// `given`, or else a description of the state. Never blocks: the step may be aborted while
    /// another thread waits in it.
    fn reason_for_abort(&self, given: Option<String>) -> String {
        let state = self.state.try_lock();
        let attempt = state.as_ref().and_then(|state| state.attempt.as_ref());
        let failure = attempt.and_then(Attempt::failure).map(str::to_owned);
        failure.or(given).unwrap_or_else(|| {
            let seen = match state {
                None => "the step was dropped while another thread was in it",
                Some(_) if std::thread::panicking() => "the rank panicked",
                Some(_) => "the step was dropped before its finish",
            };
            seen.to_owned()
        })
    }
}

impl State {
    /// Takes a unit's gradients of the open microbatch.
    fn reduce(
        &mut self,
        context: &Context,
        unit: UnitId,
        gradients: UnitGradients,
    ) -> Result<(), Error> {
        let scale = self.loss_scale.value();
        let step = self.step_mut();
        step.check_seeded(context, scale)?;
        gradients.check(context, step.number, unit)?;
        let gradients = step.of_items(context, gradients);
        match self.machine.offer(unit) {
            // The unit has no gradient, as was checked.
            Err(Refused::Frozen { .. }) => return Ok(()),
            offered => offered.map_err(|refused| self.refused(context, "reduce", refused))?,
        }
        for (index, gradient) in gradients.entries.iter().enumerate() {
            if gradient.is_some() {
                self.step_mut().presence.insert(context.number_of(ParamId { unit, index }));
            }
        }
        self.reductions.offer(unit, gradients);
        self.note_scattered(context)?;
        self.drive(context, "reduce").map(drop)
    }
}
