//! The engine: all work between the begin and the end of a step.
//!
//! It is shared behind an `Arc`, because an autograd's custom ops must be able to hold it. The
//! public types ([`Step`](crate::Step), [`Pass`](crate::Pass), [`Gradients`](crate::Gradients))
//! make the wrong order of calls impossible to write. A [`MicrobatchId`] identifies the microbatch
//! and the attempt that a caller means.
//!
//! The engine decides nothing about the order of operations: a
//! [`StepMachine`](hsdp_sharding::step::StepMachine) does. The engine feeds it with the calls of
//! the program, carries out its outputs, and keeps buffers and operations under way.
//!
//! | subject | file |
//! |---|---|
//! | calls of a program | `engine` |
//! | outputs of the machine, carried out; records, exchanged | `drive` |
//! | buffers and operations under way | `gathers`, `reductions` |
//! | numbers of a step, and the gradients that follow from an agreement | `step_state`, `ended` |
//! | errors of calls | `refusals` |

use std::fmt::Display;
use std::ops::ControlFlow;
use std::panic::Location;
use std::sync::atomic::{AtomicU64, Ordering};

use hsdp_comm::{Mistake, StepFailure, in_work};
use hsdp_sharding::step::{Begin, EvaluationKind, Intent};
use hsdp_sharding::{BufferId, Phase, UnitId};

use crate::agree::agreement::{EvaluationEnd, EvaluationTotals};
use crate::agree::comparison;
use crate::agree::comparison::LastUpdate;
use crate::agree::header::Agreed;
use crate::error::{DataError, Error};
use crate::options::divide::exponent_known_early;
use crate::options::objective::{LossSum, Seed};
use crate::options::{EndOfRun, StepOptions};
use crate::state::buffers::ModelBuffers;
use crate::state::context::{Context, ModelId};
use crate::state::control;
use crate::state::full::Full;
use crate::state::gradients::UnitGradients;
use crate::state::lock::{Lock, StateGuard};
use crate::state::shard::Shard;
use crate::step::drive::{EngineState, EvaluationState};
use crate::step::ended::EndedStep;
use crate::step::gathers::UnitGathers;
use crate::step::gradients::{Gradients, Verdict};
use crate::step::reductions::UnitReductions;
use crate::step::refusals::{AttemptId, AttemptState, MicrobatchId};
use crate::step::statistics::StatisticsSums;
use crate::step::step_state::{AgreedStep, StepState};

/// The shared engine of one rank's model.
#[derive(Debug)]
pub(crate) struct Engine {
    pub(crate) context: Context,
    pub(crate) id: ModelId,
    state: Lock<EngineState>,
    /// The attempt that is under way, or [`NO_ATTEMPT`]. It is outside the lock, so that a step can
    /// be aborted while another thread waits in it.
    under_way: AtomicU64,
}

const NO_ATTEMPT: u64 = 0;

/// The call under way where a thread reads a gradient, which may be another rank's.
const READING: &str = "the reading of a gradient";

/// An evaluation that was begun. Its number identifies it among those of the model.
#[derive(Clone, Copy, Debug)]
pub(crate) struct OpenedEvaluation {
    pub(crate) id: AttemptId,
    pub(crate) number: u64,
}

impl Engine {
    pub(crate) fn new(context: Context, shards: Vec<Shard>, buffers: ModelBuffers) -> Self {
        let state = Lock::new(EngineState::new(&context, shards, buffers));
        Self { context, id: ModelId::new(), state, under_way: AtomicU64::new(NO_ATTEMPT) }
    }

    pub(crate) fn state(&self) -> StateGuard<'_, EngineState> {
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
    ) -> Result<StateGuard<'_, EngineState>, Error> {
        let entered = if in_work() { Err(READING) } else { self.state.enter(operation) };
        entered.map_err(|outer| {
            let what = format!("called from inside another call: {outer}");
            self.context.misuse(operation, step, what)
        })
    }

    /// Begins a microbatch.
    ///
    /// # Errors
    /// [`DataError::EndOfData`] if the step has no next one, because ranks have no more data; the
    /// step goes on then. Errors of the exchange; [`Error::Misuse`].
    pub(crate) fn begin_microbatch(&self, id: AttemptId) -> Result<MicrobatchId, Error> {
        let operation = "microbatch";
        let mut state = self.in_step(id, operation)?;
        state.attempt(&self.context, operation, |state| {
            let begun = state.machine.begin_microbatch();
            begun.map_err(|refused| state.refused(&self.context, operation, refused))?;
            state.drive(&self.context, operation).map(drop)
        })?;
        let microbatch = state.machine.microbatches();
        if !state.machine.has_microbatch() {
            // The end of data is no failure, so it is not noted as the reason of a later abort.
            let supply = state.machine.supply().cloned().unwrap_or_default();
            let microbatch = Some(microbatch);
            return Err(Error::Data(DataError::EndOfData { step: id.step, microbatch, supply }));
        }
        state.step_mut().loss = None;
        state.buffers.begin_microbatch();
        Ok(MicrobatchId { attempt: id, microbatch })
    }

    /// Waits for the state, if the step of this attempt is under way.
    ///
    /// # Errors
    /// [`Error::Misuse`] if it is over, or inside another call.
    fn in_step(
        &self,
        id: AttemptId,
        operation: &'static str,
    ) -> Result<StateGuard<'_, EngineState>, Error> {
        let state = self.enter(operation, id.step)?;
        let is_same = state.attempt.as_ref().is_some_and(|attempt| attempt.id == id);
        if is_same && state.is_in_step() {
            return Ok(state);
        }
        Err(self.context.misuse(operation, id.step, "the step is over".to_owned()))
    }

    /// Waits for the next gather of `unit` in the plan's order.
    pub(crate) fn unshard(&self, token: MicrobatchId, unit: UnitId) -> Result<Full, Error> {
        let mut state = self.enter("unshard", token.attempt.step)?;
        state.check_at(&self.context, token, "unshard")?;
        state.attempt(&self.context, "unshard", |state| state.need(&self.context, unit))
    }

    /// Takes the loss of a microbatch and returns the seed of its backward.
    pub(crate) fn loss(&self, token: MicrobatchId, loss: LossSum) -> Result<Seed, Error> {
        let mut state = self.enter("loss", token.attempt.step)?;
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
        token: MicrobatchId,
        unit: UnitId,
        gradients: UnitGradients,
    ) -> Result<(), Error> {
        let mut state = self.enter("reduce", token.attempt.step)?;
        self.check_has_backward(&state, token, "reduce")?;
        state.check_at(&self.context, token, "reduce")?;
        let microbatch = token.microbatch;
        let span = tracing::trace_span!("reduce", unit = unit.index(), microbatch);
        state.attempt(&self.context, "reduce", |state| {
            span.in_scope(|| state.reduce(&self.context, unit, gradients))
        })
    }

    /// Sums statistics of a batch over all ranks.
    pub(crate) fn statistics(
        &self,
        token: MicrobatchId,
        unit: UnitId,
        index: usize,
        phase: Phase,
        own: Vec<f64>,
    ) -> Result<Vec<f64>, Error> {
        let operation = "statistics";
        let mut state = self.enter(operation, token.attempt.step)?;
        if state.evaluation.is_some() && state.is_at(token) {
            let what =
                "a batch of an evaluation sums no statistics: its layers use those of training";
            return Err(self.context.misuse(operation, token.attempt.step, what.to_owned()));
        }
        state.check_at(&self.context, token, operation)?;
        state.attempt(&self.context, operation, |state| {
            let declared = self.context.plan.spec()[unit].statistics.get(index);
            if let Some(declared) = declared.filter(|it| it.elements(phase) != own.len()) {
                return Err(Error::Size {
                    operation,
                    name: declared.name.clone(),
                    rank: self.context.rank(),
                    got: own.len(),
                    want: declared.elements(phase),
                });
            }
            let taken = state.machine.statistics(unit, index, phase);
            taken.map_err(|refused| state.refused(&self.context, operation, refused))?;
            state.statistics.give(own);
            state.drive(&self.context, operation)?;
            Ok(state.statistics.take())
        })
    }

    /// Returns a buffer as this step has written it so far.
    pub(crate) fn buffer(&self, token: MicrobatchId, buffer: BufferId) -> Result<Vec<f32>, Error> {
        let state = self.enter("buffer", token.attempt.step)?;
        state.check_at(&self.context, token, "buffer")?;
        Ok(state.buffers.value(buffer).to_vec())
    }

    /// Writes a buffer in a microbatch.
    pub(crate) fn write_buffer(
        &self,
        token: MicrobatchId,
        id: BufferId,
        values: &[f32],
    ) -> Result<(), Error> {
        let operation = "write_buffer";
        let step = token.attempt.step;
        let mut state = self.enter(operation, step)?;
        state.check_at(&self.context, token, operation)?;
        let buffer = &self.context.plan.spec()[id];
        state.attempt(&self.context, operation, |state| {
            let has_loss = state.step.as_ref().map(|step| step.loss.is_some());
            let what = match has_loss {
                None => {
                    format!("an evaluation writes no buffer, and this one writes {}", buffer.name)
                }
                Some(true) => format!(
                    "{} is written after the loss: a buffer is written in the forward alone, and \
                     the second run of a recomputed unit would write it twice",
                    buffer.name
                ),
                Some(false) if values.len() != buffer.numel() => {
                    return Err(Error::Size {
                        operation,
                        name: buffer.name.clone(),
                        rank: self.context.rank(),
                        got: values.len(),
                        want: buffer.numel(),
                    });
                }
                Some(false) => {
                    state.buffers.write(id, token.microbatch, values);
                    return Ok(());
                }
            };
            Err(self.context.misuse(operation, step, what))
        })
    }

    /// Ends a microbatch, or a batch of an evaluation.
    pub(crate) fn finish_microbatch(&self, token: MicrobatchId) -> Result<(), Error> {
        let operation = "finish of a microbatch";
        let mut state = self.enter(operation, token.attempt.step)?;
        state.check_at(&self.context, token, operation)?;
        state.attempt(&self.context, operation, |state| {
            state.note_complete(&self.context)?;
            let ended = state.machine.end_microbatch();
            ended.map_err(|refused| state.refused(&self.context, operation, refused))?;
            state.drive(&self.context, operation).map(drop)
        })
    }

    /// Returns the kind of the evaluation, if `token` means a batch of one.
    pub(crate) fn evaluation_of(&self, token: MicrobatchId) -> Option<EvaluationKind> {
        let state = self.state.enter("evaluation_of").ok()?;
        state.evaluation.as_ref().filter(|_| state.is_at(token)).map(|it| it.kind)
    }

    /// Refuses a call of a backward in a batch of an evaluation, which has none of its own.
    fn check_has_backward(
        &self,
        state: &EngineState,
        token: MicrobatchId,
        operation: &'static str,
    ) -> Result<(), Error> {
        let Some(evaluation) = state.evaluation.as_ref().filter(|_| state.is_at(token)) else {
            return Ok(());
        };
        let what = match evaluation.kind {
            EvaluationKind::ForwardOnly => "a batch of an evaluation has no backward: finish it",
            EvaluationKind::WithBackward => {
                "a batch of an evaluation has no loss and no gradients of its own: it takes part \
                 in the backward of a microbatch of another model, and is finished after that"
            }
        };
        Err(self.context.misuse(operation, token.attempt.step, what.to_owned()))
    }

    /// Notes the error of a caller, if the step or the evaluation has none so far.
    pub(crate) fn note_failure(&self, token: MicrobatchId, reason: &dyn Display) {
        let Ok(mut state) = self.state.enter("note_failure") else { return };
        if state.is_at(token)
            && let Some(attempt) = &mut state.attempt
        {
            attempt.note_failure(|| reason.to_string());
        }
    }

    /// Announces that this rank aborts a step or an evaluation, for a reason that is `given`, and
    /// discards it. Every other rank discards it too. A mistake identifies a reason to which all
    /// ranks may come, such as a step that the program has leaked.
    ///
    /// The announcement waits for no rank. A thread that waits in the step at this moment gets its
    /// error from it, and then releases the state.
    pub(crate) fn abort(&self, id: AttemptId, given: Option<String>, mistake: Option<Mistake>) {
        // A step that is dropped inside one of its own calls is as good as leaked: the next
        // `begin_step` aborts it.
        if self.state.is_held_here() {
            return;
        }
        let AttemptId { step, attempt, epoch } = id;
        let taken = self.under_way.compare_exchange(
            attempt,
            NO_ATTEMPT,
            Ordering::AcqRel,
            Ordering::Relaxed,
        );
        if taken.is_err() {
            return;
        }
        let failure = StepFailure { step, reason: self.reason_for_abort(given) };
        match mistake {
            None => self.context.world.abort_step_of(epoch, failure),
            Some(mistake) => self.context.world.announce_mistake(epoch, failure, mistake),
        }
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
        state.abort_machine();
        state.gathers = UnitGathers::default();
        state.reductions = UnitReductions::new(&self.context);
        state.buffers.discard();
        state.statistics = StatisticsSums::default();
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
        let failure = attempt.and_then(AttemptState::failure).map(str::to_owned);
        failure.or(given).unwrap_or_else(|| {
            let seen = match state {
                None => "the step was dropped while another thread was in it",
                Some(_) if std::thread::panicking() => "the rank panicked",
                Some(_) => "the step was dropped before its finish",
            };
            seen.to_owned()
        })
    }

    /// Exchanges headers, and opens the step if it takes place.
    pub(crate) fn begin_step(
        &self,
        options: StepOptions,
    ) -> Result<ControlFlow<EndOfRun, AttemptId>, Error> {
        let mut state = self.state_between_steps("begin_step")?;
        let step = state.next_step;
        let intent = Intent::Step { microbatches: options.microbatches, input: options.input };
        control::between_steps(&self.context.world, step, || {
            self.check_own_shards(&state, "begin_step")?;
            let begun = state.machine.begin(Begin { step, intent });
            begun.map_err(|refused| state.refused(&self.context, "begin_step", refused))
        })?;
        let epoch = self.context.world.epoch();
        let Agreed { headers, shutdown } = state.open(&self.context, intent, options)?;
        let supply = headers.supply;
        if !state.machine.is_in_step() {
            self.context.world.set_absent(&[]);
            return Ok(ControlFlow::Break(EndOfRun { step, supply }));
        }
        self.context.world.set_absent(&supply.exhausted);
        let mut begun = StepState::new(&self.context, step, options);
        begun.absent.clone_from(&supply.exhausted);
        begun.exponent = exponent_known_early(self.context.options.objective, headers.weight_hint);
        state.shutdown = shutdown;
        let sums = state.kept.take(&self.context.plan);
        state.reductions.begin(sums);
        state.step = Some(begun);
        let id = self.open_attempt(&mut state, epoch);
        // The program's subscriber may panic. Then the next call between steps aborts this step.
        self.warn_of_forgotten(&state, step);
        Ok(ControlFlow::Continue(id))
    }

    /// Opens an attempt at the step or the evaluation that `state` has, in an epoch of the world.
    fn open_attempt(&self, state: &mut EngineState, epoch: u64) -> AttemptId {
        state.attempts += 1;
        let id = AttemptId { step: state.next_step, attempt: state.attempts, epoch };
        state.attempt = Some(AttemptState::new(id));
        self.under_way.store(id.attempt, Ordering::Release);
        id
    }

    /// Exchanges with all ranks that this one makes no more steps.
    ///
    /// # Errors
    /// [`DataError::UnevenEnds`](crate::DataError::UnevenEnds) if another rank has data for a step.
    pub(crate) fn end_run(&self) -> Result<(), Error> {
        let mut state = self.state_between_steps("end_run")?;
        let begin = Begin { step: state.next_step, intent: Intent::End };
        let begun = state.machine.begin(begin);
        begun.expect("no step is under way");
        state.open(&self.context, Intent::End, StepOptions::default())?;
        self.context.world.set_absent(&[]);
        Ok(())
    }

    /// Returns the digest of the last update, for [`compare_updates`](Self::compare_updates).
    pub(crate) fn digest_of_update(&self) -> u64 {
        let state = self.state();
        state.updated.digest(state.next_step)
    }

    /// Compares the digests of the last update that all ranks have `said`. Collective over the
    /// world if they differ.
    ///
    /// # Errors
    /// [`Error::Disagreement`] on all ranks; [`Error::Comm`].
    pub(crate) fn compare_updates(&self, said: &[u64]) -> Result<(), Error> {
        let state = self.state();
        let last = LastUpdate { updated: &state.updated, finished: state.next_step };
        comparison::of_updates(&self.context, last, said)
    }

    /// Ends the world if an update has stopped in its middle: a checkpoint would have the values of
    /// no step.
    ///
    /// # Errors
    /// [`Error::Comm`] that ends the world.
    pub(crate) fn check_updated(&self) -> Result<(), Error> {
        let half_updated = self.state().half_updated;
        half_updated.map_or(Ok(()), |step| Err(self.end_half_updated(step)))
    }

    /// Waits for the state, and takes the buffers of shards back from gathers of slices, so that
    /// this rank's slices can be read. Returns also whether the shards are whole. Waits for the
    /// updates of other replicas, which issue the gathers, too.
    ///
    /// # Errors
    /// The end of the world, if an update of slices has stopped in its middle.
    pub(crate) fn settled_shards(&self) -> Result<(StateGuard<'_, EngineState>, bool), Error> {
        let mut state = self.state();
        if let Some(half) = state.half_updated.filter(|_| self.context.plan.divides_state()) {
            return Err(self.end_half_updated(half));
        }
        let are_whole = state.settle_slices(&self.context)?;
        // Averages are whole.
        let are_whole = are_whole || state.own_shards.is_some();
        Ok((state, are_whole))
    }

    /// Waits for the state, and until the shards are whole, outside of a step. Collective over the
    /// world if replicas divide state.
    ///
    /// # Errors
    /// Errors of the exchange and of gathers of slices; [`Error::Misuse`] in a step; the end of the
    /// world, if an update of slices has stopped in its middle.
    pub(crate) fn await_slices(&self) -> Result<(), Error> {
        if !self.context.plan.divides_state() {
            return Ok(());
        }
        self.state_between_steps("await_slices")?.await_slices(&self.context)
    }

    /// Waits for the state, if no step is under way, and the last update has ended. A step that was
    /// leaked is discarded: no caller can finish it.
    fn state_between_steps(
        &self,
        operation: &'static str,
    ) -> Result<StateGuard<'_, EngineState>, Error> {
        let mut state = self.state();
        if let Some(half) = state.half_updated {
            return Err(self.end_half_updated(half));
        }
        let Some(attempt) = &state.attempt else {
            // A panic may have left the machine where a step opens.
            if !state.machine.is_between() {
                state.abort_machine();
            }
            return Ok(state);
        };
        let id = attempt.id;
        let leaked = match &state.step {
            Some(step) => format!("step {}", step.number),
            None => "an evaluation".to_owned(),
        };
        let what = format!("{leaked} was neither finished nor dropped");
        let error = self.context.misuse(operation, state.next_step, what);
        drop(state);
        let mistake = control::mistake(&error, id.step, Location::caller());
        self.abort(id, Some(error.to_string()), Some(mistake));
        Err(error)
    }

    /// Ends the world, since parameters are neither those before the update of a step nor those
    /// after it.
    fn end_half_updated(&self, step: u64) -> Error {
        let what = "the update has not ended, by a panic or a device that failed: some parameters \
                    are updated and others are not";
        let error = self.context.misuse("optimizer step", step, what.to_owned());
        self.context.world.abort(&error.to_string());
        self.context.world.end().map_or(error, Error::Comm)
    }

    /// Checks that the shards are the model's own.
    ///
    /// # Errors
    /// [`Error::Misuse`] while averages are in their place.
    pub(crate) fn check_own_shards(
        &self,
        state: &EngineState,
        operation: &'static str,
    ) -> Result<(), Error> {
        if state.own_shards.is_none() {
            return Ok(());
        }
        let what = "inside with_shards the model has averaged parameters, for evaluation: its own \
                    are trained and saved outside";
        Err(self.context.misuse(operation, state.next_step, what.to_owned()))
    }

    /// Warns, once, of gradients that an optimizer should have taken.
    fn warn_of_forgotten(&self, state: &EngineState, next: u64) {
        let Some(step) = state.kept.take_forgotten() else { return };
        let rank = self.context.rank().index();
        hsdp_warnings::warn!(
            rank,
            step,
            next,
            "the gradients of a step were dropped, and no optimizer has updated the parameters \
             with them: pass them to an optimizer"
        );
    }

    /// Finishes the reductions, agrees with all ranks, and returns the gradients.
    ///
    /// An error before the agreement, or of buffers that differ, leaves the step open, for its
    /// owner to abort. The other errors of the agreement are the same on all ranks: the step is
    /// over then, and needs no announcement.
    pub(crate) fn finish_step(&self, id: AttemptId) -> Result<Gradients, Error> {
        let mut state = self.in_step(id, "finish")?;
        state.attempt(&self.context, "finish", |state| {
            let asked = state.machine.finish();
            asked.map_err(|refused| state.refused(&self.context, "finish", refused))?;
            state.drive(&self.context, "finish").map(drop)
        })?;
        state.attempt = None;
        let mut step = state.step.take().expect("it was there a moment ago");
        self.under_way.store(NO_ATTEMPT, Ordering::Release);
        if state.machine.is_settled() {
            self.context.settle(state.machine.plan());
        }
        state.next_step += 1;
        state.last_weight = step.largest_weight;
        let AgreedStep { grad_shards, agreement } =
            step.agreed.take().expect("all ranks have agreed");
        let ended =
            EndedStep { id: &self.id, context: &self.context, step: &step, agreement: &agreement };
        let gradients = ended.gradients(&mut state.loss_scale, grad_shards);
        match &gradients {
            Ok(Gradients { verdict: Verdict::Apply, .. }) => state.buffers.commit(),
            Ok(_) | Err(_) => state.buffers.discard(),
        }
        gradients
    }

    /// Begins an evaluation. Not collective.
    pub(crate) fn begin_evaluation(&self, kind: EvaluationKind) -> Result<OpenedEvaluation, Error> {
        let mut state = self.state_between_steps("evaluation")?;
        state.machine.evaluate(kind).expect("no step is under way");
        state.evaluations += 1;
        self.context.world.set_step(state.next_step);
        state.evaluation = Some(EvaluationState { kind, end: None, totals: None });
        let id = self.open_attempt(&mut state, self.context.world.epoch());
        Ok(OpenedEvaluation { id, number: state.evaluations })
    }

    /// Begins this rank's next batch.
    pub(crate) fn begin_batch(&self, id: AttemptId) -> Result<MicrobatchId, Error> {
        self.in_evaluation(id, "batch", |context, state| {
            let begun = state.machine.begin_batch();
            begun.map_err(|refused| state.refused_in_evaluation(context, "batch", refused))?;
            state.drive(context, "batch")?;
            Ok(MicrobatchId { attempt: id, microbatch: state.machine.microbatches() })
        })
    }

    /// Gathers along until no rank has another batch, exchanges sums, and ends the evaluation.
    /// Returns the totals of all ranks.
    ///
    /// An error before the exchange leaves the evaluation open, for its owner to abort. A different
    /// call on another rank is an error on all of them: the evaluation is over then.
    pub(crate) fn end_evaluation(
        &self,
        id: AttemptId,
        end: EvaluationEnd,
    ) -> Result<EvaluationTotals, Error> {
        let operation = end.operation();
        let totals = self.in_evaluation(id, operation, |context, state| {
            let asked = state.machine.end_evaluation();
            asked.map_err(|refused| state.refused_in_evaluation(context, operation, refused))?;
            state.evaluation_mut().end = Some(end);
            state.drive(context, operation)?;
            let ended = state.evaluation.take().expect("it was there a moment ago");
            state.attempt = None;
            self.under_way.store(NO_ATTEMPT, Ordering::Release);
            Ok(ended.totals.expect("the ranks have added up their sums"))
        })?;
        totals.check_ends()?;
        Ok(totals)
    }

    /// Aborts an evaluation that has not ended on all ranks.
    pub(crate) fn abort_evaluation(&self, OpenedEvaluation { id, number }: OpenedEvaluation) {
        let reason = "the evaluation was dropped before its mean or its finish".to_owned();
        let mistake = Mistake::of(&("drop of an evaluation", id.step, number));
        self.abort(id, Some(reason), Some(mistake));
    }

    fn in_evaluation<T>(
        &self,
        id: AttemptId,
        operation: &'static str,
        act: impl FnOnce(&Context, &mut EngineState) -> Result<T, Error>,
    ) -> Result<T, Error> {
        let mut state = self.enter(operation, id.step)?;
        if state.attempt.as_ref().is_none_or(|attempt| attempt.id != id) {
            let what = "the evaluation is over".to_owned();
            return Err(self.context.misuse(operation, id.step, what));
        }
        state.attempt(&self.context, operation, |state| act(&self.context, state))
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use hsdp_comm::World;
    use hsdp_sharding::{ByteCount, Mesh, ModelSpec, Param, Plan, Unit};

    use super::*;
    use crate::options::ModelOptions;

    fn engine() -> Engine {
        let spec = ModelSpec::new().unit(Unit::new("a").param(Param::new("w", [4])));
        let options = ModelOptions::on(Mesh::SINGLE);
        let plan = Plan::new(spec, Mesh::SINGLE, options.plan_options()).expect("a plan");
        let context = Context::new(World::single(), Arc::new(plan), options).expect("a context");
        Engine::new(context, Vec::new(), ModelBuffers::default())
    }

    #[test]
    fn a_panic_where_a_step_opens_leaves_nothing() {
        for call in [
            |engine: &Engine| engine.begin_step(StepOptions::microbatches(1)).map(drop),
            |engine: &Engine| engine.begin_evaluation(EvaluationKind::ForwardOnly).map(drop),
            |engine: &Engine| engine.end_run(),
        ] {
            let engine = engine();
            // A panic in the exchange of headers leaves the machine like this.
            engine.state().machine.begin(Begin::step(0, Some(1))).expect("no step is under way");
            call(&engine).expect("nothing is left");
        }
    }

    #[test]
    fn an_aborted_step_leaves_the_limit_of_the_order_that_stays() {
        let engine = engine();
        let begun = engine.begin_step(StepOptions::microbatches(1)).expect("a step");
        let ControlFlow::Continue(id) = begun else { panic!("{begun:?}") };
        // The order that a forward has found needs as much.
        engine.context.full_pool.set_limit(ByteCount::ZERO);
        engine.abort(id, None, None);
        assert_eq!(engine.context.full_pool.limit(), engine.context.plan.memory().full);
    }
}
