//! The state of a rank's model that changes from step to step: the machine of the step, the
//! operations under way, and the numbers of the step.

use std::sync::Arc;

use hsdp_sharding::step::StepMachine;

use crate::agree::agreement::EvaluationTotals;
use crate::agree::comparison::Updated;
use crate::agree::header::{Agreed, StepHeader};
use crate::error::Error;
use crate::options::precision::LossScale;
use crate::options::uneven::Shutdown;
use crate::state::context::Context;
use crate::state::shard::Shard;
use crate::state::sums::SumsPool;
use crate::step::attempt::{Attempt, Stopped, Token};
use crate::step::gathers::UnitGathers;
use crate::step::gradients::{Gradients, Verdict};
use crate::step::reductions::UnitReductions;
use crate::step::step_state::StepState;

/// The state that changes from step to step.
#[derive(Debug)]
pub(crate) struct State {
    /// This rank's parameters, by unit. Peers read them in place while a gather is under way.
    pub(crate) shards: Vec<Shard>,
    /// The shards of the model while averages are in their place.
    pub(crate) own_shards: Option<Vec<Shard>>,
    pub(crate) loss_scale: LossScale,
    /// The number of the next step.
    pub(crate) next_step: u64,
    /// Steps that an optimizer has completed, with an update or a skip.
    pub(crate) committed: u64,
    /// Steps whose update an optimizer has applied: those of `committed` without the skipped ones.
    pub(crate) applied: u64,
    /// Number of checkpoints that have replaced the parameters.
    pub(crate) loads: u64,
    /// Number of checkpoints that were opened of this model.
    pub(crate) opened: u32,
    /// Record of the optimizers' update of the last step.
    pub(crate) updated: Updated,
    /// The step whose update has begun and has not ended.
    pub(crate) half_updated: Option<u64>,
    /// The largest weight that a microbatch of the last step had on this rank.
    pub(crate) last_weight: u64,
    /// Attempts at steps so far: a step that was aborted is tried again with the same number.
    pub(super) attempts: u64,
    /// The evaluations so far.
    pub(super) evaluations: u64,
    /// Whether a rank asked, when the last step began, that it be the last.
    pub(crate) shutdown: Shutdown,
    /// The order of steps and evaluations.
    pub(super) machine: StepMachine,
    pub(super) gathers: UnitGathers,
    pub(super) reductions: UnitReductions,
    /// The source of the sums of a step. Gradients return the sums to it.
    pub(crate) kept: Arc<SumsPool>,
    /// The attempt at a step or an evaluation that is under way.
    pub(super) attempt: Option<Attempt>,
    /// A step while it begins, or the end of the run.
    pub(super) opening: Option<Opening>,
    /// The numbers of the step that is under way.
    pub(super) step: Option<StepState>,
    /// The evaluation that is under way.
    pub(super) evaluation: Option<EvaluationState>,
}

/// A step while it begins, or the end of the run in its place.
#[derive(Debug)]
pub(super) struct Opening {
    pub(super) header: StepHeader,
    /// Agreement of the ranks, once they have exchanged headers.
    pub(super) agreed: Option<Agreed>,
}

/// An evaluation that has begun and not ended.
#[derive(Debug, Default)]
pub(super) struct EvaluationState {
    /// This rank's sum and its items, while the mean is taken.
    pub(super) own: (f64, u64),
    /// The totals of all ranks, once they have agreed on them.
    pub(super) totals: Option<EvaluationTotals>,
}

impl State {
    /// Makes the state of a model that has made no step.
    pub(super) fn new(context: &Context, shards: Vec<Shard>) -> Self {
        Self {
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
            shutdown: Shutdown::default(),
            machine: StepMachine::new(Arc::clone(&context.plan), context.rules()),
            gathers: UnitGathers::default(),
            reductions: UnitReductions::new(context),
            kept: Arc::default(),
            attempt: None,
            opening: None,
            step: None,
            evaluation: None,
        }
    }

    pub(crate) fn is_in_step(&self) -> bool {
        self.step.is_some()
    }

    /// Returns whether gradients of a step still exist: each has a handle to `kept`.
    pub(crate) fn has_gradients_out(&self) -> bool {
        Arc::strong_count(&self.kept) > 1
    }

    /// Returns whether `token` means the microbatch or the batch that is open.
    pub(super) fn is_at(&self, token: Token) -> bool {
        let is_same = self.attempt.as_ref().is_some_and(|attempt| attempt.opened == token.opened);
        let (is_open, number) = (self.machine.has_microbatch(), self.machine.microbatches());
        is_same && is_open && number == token.microbatch
    }

    /// Checks that `token` means the microbatch or the batch that is open.
    ///
    /// # Errors
    /// [`Error::StalePass`].
    pub(super) fn check_at(
        &self,
        context: &Context,
        token: Token,
        operation: &'static str,
    ) -> Result<(), Error> {
        if self.is_at(token) {
            return Ok(());
        }
        let number = self.machine.microbatches();
        let current = match &self.step {
            None => "no step is under way".to_owned(),
            Some(_) if self.machine.has_microbatch() => {
                format!("the model is in microbatch {number} of step {}", self.next_step)
            }
            Some(_) => format!("the model is between microbatches of step {}", self.next_step),
        };
        let held = format!("microbatch {} of step {}", token.microbatch, token.opened.step);
        Err(Error::StalePass { operation, rank: context.rank(), held, current })
    }

    /// Runs a call of the step or the evaluation that is under way, and notes how it ends.
    ///
    /// # Errors
    /// Errors of the call; [`Error::Misuse`] and [`Error::Comm`] if an earlier call has failed in
    /// the middle of its work.
    pub(super) fn attempt<T>(
        &mut self,
        context: &Context,
        operation: &'static str,
        call: impl FnOnce(&mut Self) -> Result<T, Error>,
    ) -> Result<T, Error> {
        let is_step = self.step.is_some();
        let attempt = self.attempt.as_mut().expect("a step or an evaluation is under way");
        let step = attempt.opened.step;
        attempt.enter().map_err(|stopped| match stopped {
            Stopped::Discarded(error) => Error::Comm(error),
            Stopped::Broken(failure) if is_step => {
                let what = format!("an earlier call of the step failed ({failure}): drop the step");
                context.misuse(operation, step, what)
            }
            Stopped::Broken(failure) => {
                context.misuse(operation, step, format!("{failure}: drop the evaluation"))
            }
        })?;
        let result = call(self);
        if let Some(attempt) = &mut self.attempt {
            attempt.leave(&result);
        }
        result
    }

    pub(super) fn step_mut(&mut self) -> &mut StepState {
        self.step.as_mut().expect("a step is under way")
    }

    /// Begins the update of the last step, if all ranks have agreed on one, and notes its options.
    /// Until [`commit`](Self::commit) some parameters may be updated, and others not.
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
