//! The engine: all work between the begin and the end of a step.
//!
//! It is shared behind an `Arc`, because an autograd's custom ops must be able to hold it. The public
//! types ([`Step`](crate::Step), [`Pass`](crate::Pass), [`Gradients`](crate::Gradients)) make the wrong
//! order of calls impossible to write. In the engine each kind of state is one documented enum, and a
//! [`Token`] identifies the microbatch and the attempt that a caller means.
//!
//! | state | file |
//! |---|---|
//! | constant state: plan, options, groups | `context` |
//! | the parameters, which an optimizer changes | `shard` |
//! | the order of the units | `schedule` |
//! | the gathers of a microbatch | `gathers`, `full_pool` |
//! | the reductions of a step | `reductions`, `partial`, `sums`, `unsharded`, `kept`, `place` |
//! | the begin of a step | `opening`, `joint` |
//! | the step itself | `step_state`, `microbatches`, `check` |
//! | the exchange of small records between ranks | `control` |
//! | the end of a step | `finish`, `unused` |
//! | forwards without a backward | `evaluation` |
//! | the state that lies on a device | `device` |

use std::fmt::Display;
use std::panic::Location;
use std::sync::atomic::{AtomicU64, Ordering};

use hsdp_comm::{Mistake, StepFailure, in_work};
use hsdp_sharding::UnitId;

use crate::agree::updated::Updated;
use crate::error::Error;
use crate::options::objective::{LossSum, Seed};
use crate::options::precision::LossScale;
use crate::options::uneven::{EndOfRun, Shutdown, Supply};
use crate::state::context::Context;
use crate::state::full::Full;
use crate::state::joint::Failure;
use crate::state::lock::{Lock, Locked};
use crate::state::model_id::ModelId;
use crate::state::shard::Shard;
use crate::step::check;
use crate::step::evaluation::EvaluationState;
use crate::step::gradients::{Gradients, Verdict};
pub(crate) use crate::step::microbatches::NoMore;
use crate::step::step_state::StepState;
pub(crate) use crate::step::step_state::Token;
use crate::step::unit_gradients::UnitGradients;

/// The shared engine of one rank's model.
#[derive(Debug)]
pub(crate) struct Engine {
    pub(crate) context: Context,
    pub(crate) id: ModelId,
    pub(super) state: Lock<State>,
    /// The attempt that is under way, or [`NO_ATTEMPT`]. It is outside the lock, so that a step can be aborted while
    /// another thread waits in it.
    pub(super) under_way: AtomicU64,
}

pub(super) const NO_ATTEMPT: u64 = 0;

/// The call under way where a thread reads a gradient, which may be another rank's.
const READING: &str = "the reading of a gradient";

/// A step that was begun: its number, the number of the attempt, and the epoch of the world.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Opened {
    pub(crate) step: u64,
    pub(crate) attempt: u64,
    pub(crate) epoch: u64,
}

/// The result of the exchange of headers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Begun {
    Step(Opened),
    End(EndOfRun),
}

/// The state that changes from step to step.
#[derive(Debug)]
pub(crate) struct State {
    /// This rank's parameters, by unit. Peers read them in place while a gather is under way.
    pub(crate) shards: Vec<Shard>,
    /// The shards of the model while others are in their place.
    pub(crate) own_shards: Option<Vec<Shard>>,
    pub(crate) loss_scale: LossScale,
    /// The number of the next step.
    pub(crate) next_step: u64,
    /// Steps that an optimizer has completed, with an update or a skip.
    pub(crate) committed: u64,
    /// Steps whose update an optimizer has applied: those of `committed` without the skipped ones.
    pub(crate) applied: u64,
    /// How often a checkpoint has replaced the parameters.
    pub(crate) loads: u64,
    /// Number of checkpoints that were opened of this model.
    pub(crate) opened: u32,
    /// How an optimizer has updated the last step.
    pub(crate) updated: Updated,
    /// The step whose update has begun and has not ended.
    pub(crate) half_updated: Option<u64>,
    /// The largest weight that a microbatch of the last step had on this rank.
    pub(crate) last_weight: u64,
    /// Attempts at steps so far: a step that was aborted is tried again with the same number.
    pub(super) attempts: u64,
    /// The evaluations so far.
    pub(super) evaluations: u64,
    /// The statements of all ranks at the end of the last step.
    /// The ranks with and without data, when the last step began.
    pub(super) supply: Supply,
    /// Whether a rank asked then that the step be the last.
    pub(crate) shutdown: Shutdown,
    pub(super) step: Option<StepState>,
    pub(super) evaluation: Option<EvaluationState>,
}

impl State {
    pub(crate) fn is_in_step(&self) -> bool {
        self.step.is_some()
    }

    /// The batch of an evaluation that `token` means, if it is open.
    fn batch_at(&self, token: Token) -> Option<&EvaluationState> {
        self.evaluation.as_ref().filter(|evaluation| evaluation.is_at(token))
    }

    /// Begins the update of the last step, if all ranks have agreed on one, and notes its options. Until
    /// [`commit`](Self::commit) some parameters may be updated, and others not.
    pub(crate) fn begin_update(&mut self, gradients: &Gradients, options: String) {
        if gradients.verdict == Verdict::Apply {
            let clipped = &gradients.clipping.lines;
            self.updated.note(self.next_step, options, gradients.max_norm, clipped);
            self.half_updated = Some(gradients.step);
        }
    }

    /// Counts the last step as committed, and its update as applied if the ranks agreed to apply
    /// it.
    pub(crate) fn commit(&mut self, verdict: &Verdict) {
        self.half_updated = None;
        self.committed += 1;
        self.applied += u64::from(*verdict == Verdict::Apply);
    }
}

impl Engine {
    pub(crate) fn new(context: Context, shards: Vec<Shard>) -> Self {
        let state = State {
            shards,
            own_shards: None,
            loss_scale: LossScale::new(context.options.loss_scaling),
            next_step: 0,
            committed: 0,
            applied: 0,
            loads: 0,
            opened: 0,
            updated: Updated::default(),
            half_updated: None,
            last_weight: 0,
            attempts: 0,
            evaluations: 0,
            supply: Supply::default(),
            shutdown: Shutdown::default(),
            step: None,
            evaluation: None,
        };
        Self {
            context,
            id: ModelId::new(),
            state: Lock::new(state),
            under_way: AtomicU64::new(NO_ATTEMPT),
        }
    }

    pub(crate) fn state(&self) -> Locked<'_, State> {
        self.state.lock()
    }

    /// The state, for a call that the caller's code may make from inside another call of this model.
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

    /// Begins a microbatch. Returns `Err` inside `Ok` where the step has no next microbatch, because ranks have no more data.
    pub(crate) fn begin_microbatch(&self, opened: Opened) -> Result<Result<Token, NoMore>, Error> {
        let mut state = self.enter("microbatch", opened.step)?;
        match state.step.as_mut().filter(|step| step.opened == opened) {
            Some(step) => step.note(|step| step.begin_microbatch(&self.context)),
            None => {
                Err(self.context.misuse("microbatch", opened.step, "the step is over".to_owned()))
            }
        }
    }

    /// The error of a step that has no next microbatch.
    pub(crate) fn end_of_data(&self, opened: Opened) -> Error {
        let state = self.state();
        match state.step.as_ref().filter(|step| step.opened == opened) {
            Some(step) => step.end_of_data(),
            None => self.context.misuse("microbatch", opened.step, "the step is over".to_owned()),
        }
    }

    /// Waits for the next gather of `unit` in the plan's order.
    pub(crate) fn unshard(&self, token: Token, unit: UnitId) -> Result<Full, Error> {
        let mut state = self.enter("unshard", token.opened.step)?;
        if state.batch_at(token).is_some() {
            return self.unshard_in_batch(&mut state, (token, unit));
        }
        let State { step, shards, .. } = &mut *state;
        let step = StepState::at(step, &self.context, token, "unshard")?;
        step.note(|step| {
            check::unit(&self.context, step.number(), unit, "unshard")?;
            step.unshard(&self.context, shards, unit)
        })
    }

    /// Takes the loss of a microbatch and returns the seed of its backward.
    pub(crate) fn loss(&self, token: Token, loss: LossSum) -> Result<Seed, Error> {
        let mut state = self.enter("loss", token.opened.step)?;
        self.check_has_backward(&state, token, "loss")?;
        let scale = state.loss_scale.value();
        let State { step, shards, .. } = &mut *state;
        let step = StepState::at(step, &self.context, token, "loss")?;
        step.note(|step| step.take_loss(&self.context, shards, loss))?;
        let exponent = step.exponent.unwrap_or(0);
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
        let scale = state.loss_scale.value();
        let State { step, shards, .. } = &mut *state;
        let step = StepState::at(step, &self.context, token, "reduce")?;
        step.note(|step| {
            check::unit(&self.context, step.number(), unit, "reduce")?;
            step.reduce((&self.context, shards), scale, (unit, gradients))
        })
    }

    pub(crate) fn finish_microbatch(&self, token: Token) -> Result<(), Error> {
        let mut state = self.enter("finish of a microbatch", token.opened.step)?;
        if state.batch_at(token).is_some() {
            return self.finish_batch(&mut state);
        }
        let State { step, shards, .. } = &mut *state;
        let step = StepState::at(step, &self.context, token, "finish of a microbatch")?;
        step.note(|step| step.finish_microbatch(&self.context, shards))
    }

    /// Whether `token` means a batch of an evaluation.
    pub(crate) fn is_in_batch(&self, token: Token) -> bool {
        self.state.enter("has_backward").is_ok_and(|state| state.batch_at(token).is_some())
    }

    fn check_has_backward(
        &self,
        state: &State,
        token: Token,
        operation: &'static str,
    ) -> Result<(), Error> {
        if state.batch_at(token).is_none() {
            return Ok(());
        }
        let what = "a batch of an evaluation has no backward: finish it".to_owned();
        Err(self.context.misuse(operation, token.opened.step, what))
    }

    /// Notes the error of a caller, if the step or the evaluation has none so far.
    pub(crate) fn note_failure(&self, token: Token, reason: &dyn Display) {
        let Ok(mut state) = self.state.enter("note_failure") else { return };
        if let Some(evaluation) = state.evaluation.as_mut().filter(|it| it.is_at(token)) {
            evaluation.failure.get_or_insert_with(|| reason.to_string());
        }
        if let Ok(step) = StepState::at(&mut state.step, &self.context, token, "note_failure") {
            step.note_failure(reason);
        }
    }

    /// Announces that this rank aborts the step, and discards it. Every other rank discards it too.
    ///
    /// The announcement waits for no rank. A thread that waits in the step at this moment gets its error from it, and then
    /// releases the state.
    pub(crate) fn abort_step(&self, opened: Opened, given: Option<String>) {
        self.discard_step(opened, given, |failure| {
            self.context.world.abort_step_of(opened.epoch, failure);
        });
    }

    /// As [`abort_step`](Self::abort_step), for a step that the program has leaked. All ranks may
    /// find it, in the call that fails with `error`, between steps.
    pub(crate) fn abort_leaked_step(&self, opened: Opened, error: &Error) {
        self.discard_step(opened, Some(error.to_string()), |failure| {
            let mistake = error.mistake(failure.step, Location::caller());
            self.context.world.announce_mistake(opened.epoch, failure, mistake);
        });
    }

    /// As [`abort_step`](Self::abort_step), for an evaluation, which all ranks may drop. Its number
    /// tells it from others of the model.
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
        // A step that is dropped inside one of its own calls is as good as leaked: the next `begin_step` aborts it.
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
            // A rank that ran out of data in the middle of the step has data again for the next attempt.
            self.context.world.set_absent(&step.absent);
        }
        if state.evaluation.take().is_some() {
            self.context.world.set_absent(&[]);
        }
        self.context.kept.clear();
        self.context.full_pool.let_go();
        self.context.schedules.forget();
        // A rank that has aborted the epoch itself may have left it already: this step must not end the next epoch.
        if self.context.world.epoch() == epoch {
            self.context.world.next_epoch();
        }
    }

    /// The reason of an abort: the first error of the step, or else the reason that was `given`, or else a description of the
    /// state. Never blocks: the step may be aborted while another thread waits in it.
    fn reason_for_abort(&self, given: Option<String>) -> String {
        let state = self.state.try_lock();
        let step = state.as_ref().and_then(|state| state.step.as_ref());
        let failure = step.and_then(StepState::failure).map(str::to_owned);
        let evaluation = state.as_ref().and_then(|state| state.evaluation.as_ref());
        let failure = failure.or_else(|| evaluation?.failure.clone());
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
