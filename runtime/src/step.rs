//! A step and its microbatches, as types that allow only the right order of calls.

pub(crate) mod drive;
mod ended;
pub(crate) mod engine;
mod gathers;
pub(crate) mod gradients;
mod reductions;
pub(crate) mod refusals;
mod statistics;
mod step_state;

use std::fmt;
use std::marker::PhantomData;
use std::sync::Arc;

use hsdp_sharding::step::EvaluationKind;
use hsdp_sharding::{BufferId, Phase, Plan, UnitId};

use crate::error::Error;
use crate::options::objective::{LossSum, Seed};
use crate::options::precision::Precision;
use crate::options::{EndOfRun, Shutdown};
use crate::state::full::Full;
use crate::state::gradients::UnitGradients;
use crate::step::engine::Engine;
use crate::step::gradients::Gradients;
use crate::step::refusals::{AttemptId, MicrobatchId};

/// A step that is under way. It owns all pending operations.
///
/// Dropping it aborts the step: it announces the abort without blocking, every rank discards its
/// partials, and the next step starts without them.
///
/// Two steps of one model at the same time do not compile:
///
/// ```compile_fail,E0499
/// # fn f(model: &mut hsdp::ShardedModel) -> Result<(), hsdp::Error> {
/// let one = model.begin_step(hsdp::StepOptions::microbatches(1))?;
/// let two = model.begin_step(hsdp::StepOptions::microbatches(1))?;
/// one.finish()?;
/// # two.finish()?; Ok(()) }
/// ```
///
/// An optimizer's step without `finish` does not compile either:
///
/// ```compile_fail,E0308
/// # use hsdp::Optimizer as _;
/// # fn f(model: &mut hsdp::ShardedModel, adamw: &mut hsdp::AdamW) -> Result<(), hsdp::Error> {
/// let step = model.begin_step(hsdp::StepOptions::microbatches(1))?;
/// adamw.step(model, step)?;
/// # Ok(()) }
/// ```
#[derive(Debug)]
#[must_use = "a step that is dropped is aborted on all ranks"]
pub struct Step<'model> {
    engine: Arc<Engine>,
    id: AttemptId,
    model: PhantomData<&'model mut ()>,
}

impl<'model> Step<'model> {
    pub(crate) fn new(engine: Arc<Engine>, id: AttemptId) -> Self {
        Self { engine, id, model: PhantomData }
    }

    /// Returns whether a rank [asked](crate::StepOptions::shutdown) that this step be the last. The
    /// same on all ranks: each of them completes the step, may save a checkpoint, and ends its run.
    #[must_use]
    pub fn shutdown(&self) -> Shutdown {
        self.engine.state().shutdown
    }

    /// Begins the next microbatch, for which this rank has data.
    ///
    /// Not collective if the step was begun with a number of microbatches. Otherwise collective
    /// over the world, with the `microbatch` or the `finish` of all other ranks: the ranks exchange
    /// whether they have another microbatch.
    ///
    /// # Errors
    /// [`Error::Misuse`] if the last microbatch was not finished, or the step has had all of its
    /// microbatches; [`DataError::EndOfData`](crate::DataError::EndOfData) if there is no next
    /// microbatch because other ranks have no more data, which is no failure: the step goes on, and
    /// [`finish`](Self::finish) follows;
    /// [`DataError::UnevenInputs`](crate::DataError::UnevenInputs) if the model's
    /// [`Uneven`](crate::Uneven) refuses that; [`Error::Comm`] if the exchange fails.
    pub fn microbatch(&mut self) -> Result<Pass<'_>, Error> {
        let token = self.engine.begin_microbatch(self.id)?;
        Ok(Pass::of(PassHandle::new(&self.engine, token)))
    }

    /// Completes all reductions, all-reduces the partials over the replicas, and agrees with all
    /// ranks on the result.
    ///
    /// Collective over the world. Under [`Uneven::ZeroWeight`](crate::Uneven::ZeroWeight) a rank
    /// with fewer microbatches than other ranks takes part in their remaining microbatches with
    /// weight 0.
    ///
    /// # Errors
    /// On all ranks: [`DataError::EmptyStep`](crate::DataError::EmptyStep) if all weights are 0 and
    /// the objective is `WeightedMean`,
    /// [`DataError::WeightOverflow`](crate::DataError::WeightOverflow) if the sum of the weights
    /// exceeds a `u64`, [`GradientError::NonFinite`](crate::GradientError::NonFinite),
    /// [`GradientError::WithoutGradient`](crate::GradientError::WithoutGradient) and
    /// [`GradientError::UnusedParameters`](crate::GradientError::UnusedParameters) as the model's
    /// options say. In a step without a given number of microbatches
    /// [`DataError::EndOfData`](crate::DataError::EndOfData) if ranks had no data for the first
    /// microbatch, and [`DataError::UnevenInputs`](crate::DataError::UnevenInputs) if ranks differ
    /// and the model's [`Uneven`](crate::Uneven) refuses that. [`Error::Misuse`] if a microbatch is
    /// missing or not finished, or an earlier call of the step failed or panicked on this rank;
    /// [`Error::OutOfMemory`] if a buffer cannot be allocated; [`Error::Comm`] if a collective
    /// fails.
    pub fn finish(self) -> Result<Gradients, Error> {
        self.engine.finish_step(self.id)
    }

    /// Aborts the step for a reason of the caller, such as a batch that cannot be read.
    ///
    /// Not collective, and does not block. Every other rank gets
    /// [`CommError::StepAborted`](crate::CommError) from its next call or wait, with this rank, the
    /// step and the reason (or the first error of the step on this rank, if it had one). All ranks
    /// discard their partials, and the next step starts without them. A drop does the same without
    /// a reason.
    pub fn abandon(self, reason: impl Into<String>) {
        self.engine.abort(self.id, Some(reason.into()), None);
    }
}

impl Drop for Step<'_> {
    fn drop(&mut self) {
        self.engine.abort(self.id, None, None);
    }
}

/// The result of [`ShardedModel::next_step`](crate::ShardedModel::next_step): a step, or the end of
/// the run. The same on all ranks.
#[derive(Debug)]
#[must_use = "a step that is dropped is aborted on all ranks"]
pub enum NextStep<'model> {
    /// The step takes place. A rank without data only calls [`Step::finish`].
    Step(Step<'model>),
    /// The run is over on all ranks.
    End(EndOfRun),
}

/// A microbatch that is under way: one forward and backward; or a [batch](crate::Evaluation::batch)
/// of an evaluation: one forward, and where the evaluation is
/// [asked](crate::ShardedModel::evaluation_with_backward) for it, the gathers of one backward.
///
/// A call that is refused changes nothing. After a call that has failed in the middle of its work,
/// as without memory or in a collective, no call of the step succeeds: drop the step.
#[derive(Debug)]
#[must_use = "a microbatch that is not finished fails its step"]
pub struct Pass<'step> {
    handle: PassHandle,
    step: PhantomData<&'step mut ()>,
}

impl Pass<'_> {
    pub(crate) fn of(handle: PassHandle) -> Self {
        Self { handle, step: PhantomData }
    }

    /// Gathers a unit's parameters and waits for them. The gathers of the next units are issued
    /// ahead.
    ///
    /// Each call takes the unit's next gather in the plan's order: the first call that of the
    /// forward, the second that of the backward. A unit that the plan keeps has one gather, and the
    /// caller keeps the result. Collective over the shard group, or over the world with
    /// [`FullCopies::PerProcess`](crate::FullCopies::PerProcess). Gathers are issued in the plan's
    /// order, whatever the order of calls. In the first forward under
    /// [`UnitOrder::Follow`](crate::UnitOrder::Follow), from the first unit on that is not used as
    /// declared, it is collective over the world, with the `unshard` of all other ranks, and with
    /// the `loss`, `reduce` or `finish` that ends their forward.
    ///
    /// # Errors
    /// [`Error::Misuse`] if the unit has no gather left, the model has no such unit, the gather is
    /// that of the backward before [`loss`](Self::loss), the unit is used after one that is
    /// declared behind it under [`UnitOrder::Error`](crate::UnitOrder::Error), or an earlier call
    /// of the step failed; [`Error::OutOfMemory`] if a buffer cannot be allocated; [`Error::Comm`]
    /// if the gather fails.
    pub fn unshard(&mut self, unit: UnitId) -> Result<Full, Error> {
        self.handle.unshard(unit)
    }

    /// Takes the microbatch's loss, between forward and backward, and returns the seed of the
    /// backward.
    ///
    /// Collective over the world in the first microbatch of the first step, in which the ranks
    /// agree on the size of weights, unless a rank gave a
    /// [`StepOptions::weight_hint`](crate::StepOptions::weight_hint) or the objective is
    /// `RankMean`. Issues all gathers of the forward that were not issued.
    ///
    /// # Errors
    /// [`Error::Misuse`] if the microbatch has a loss already, the weights of this rank in the step
    /// add up to 2^64 or more, a rank that began the step without data gives a weight above 0, the
    /// pass is a batch of an evaluation, or an earlier call of the step failed; [`Error::Comm`] if
    /// a collective fails.
    pub fn loss(&mut self, loss: LossSum) -> Result<Seed, Error> {
        let PassHandle { engine, token } = &self.handle;
        engine.loss(*token, loss)
    }

    /// Takes a unit's gradients, reduce-scatters them, and adds the result to the partial.
    ///
    /// `gradients` has one entry for each parameter of the unit: all elements of the gradient,
    /// row-major, or none for zeros. Units may come in any order; their reduce-scatters are issued
    /// in the plan's order. Collective over the shard group.
    ///
    /// # Errors
    /// [`Error::Size`] if a gradient has another number of elements than its parameter;
    /// [`Error::Misuse`] if a gradient belongs to a frozen parameter, if there is not one entry for
    /// each parameter, if the unit was reduced before in this microbatch, or zeros were reduced in
    /// its place, if the model has no such unit, before [`loss`](Self::loss), in a batch of an
    /// evaluation, or if an earlier call of the step failed; [`Error::OutOfMemory`] if a buffer
    /// cannot be allocated; [`Error::Comm`] if a collective fails.
    pub fn reduce(&mut self, unit: UnitId, gradients: UnitGradients) -> Result<(), Error> {
        let PassHandle { engine, token } = &self.handle;
        engine.reduce(*token, unit, gradients)
    }

    /// Ends the microbatch. Units that were not reduced contribute zeros; a microbatch without a
    /// loss has weight 0.
    ///
    /// Collective over the shard group, in mode `Every` over the world: it issues all gathers and
    /// reductions of the plan that this rank has not issued. Waits for the gathers.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`] if a buffer cannot be allocated; [`Error::Comm`] if a collective
    /// fails; [`Error::Misuse`] if an earlier call of the step failed.
    pub fn finish(self) -> Result<(), Error> {
        self.handle.engine.finish_microbatch(self.handle.token)
    }

    /// Returns a handle to this microbatch that an autograd's custom ops can hold.
    #[must_use]
    pub fn handle(&self) -> PassHandle {
        self.handle.clone()
    }
}

/// A handle of a microbatch for an autograd's custom ops. Its use after the microbatch is an error,
/// which names the handle's microbatch and the model's. So is its use inside another call of the
/// model ([`Error::Misuse`]): while a gradient is read, or in an optimizer's update.
#[derive(Clone, Debug)]
pub struct PassHandle {
    engine: Arc<Engine>,
    token: MicrobatchId,
}

impl PassHandle {
    pub(crate) fn new(engine: &Arc<Engine>, token: MicrobatchId) -> Self {
        Self { engine: Arc::clone(engine), token }
    }

    /// Returns whether units are gathered again for a backward: in a step for that of the pass, and
    /// in an [evaluation with a backward](crate::ShardedModel::evaluation_with_backward) for that of
    /// another pass. False for a batch of another evaluation. Not collective.
    #[must_use]
    pub fn has_backward(&self) -> bool {
        self.engine.evaluation_of(self.token) != Some(EvaluationKind::ForwardOnly)
    }

    /// Returns whether the pass is a batch of an evaluation, which has no loss and reduces no
    /// gradients. Not collective.
    #[must_use]
    pub fn is_evaluation(&self) -> bool {
        self.engine.evaluation_of(self.token).is_some()
    }

    /// As [`Pass::unshard`].
    ///
    /// # Errors
    /// As [`Pass::unshard`], and [`Error::StalePass`] if the microbatch is over.
    pub fn unshard(&self, unit: UnitId) -> Result<Full, Error> {
        self.engine.unshard(self.token, unit)
    }

    /// As [`Pass::reduce`].
    ///
    /// # Errors
    /// As [`Pass::reduce`], and [`Error::StalePass`] if the microbatch is over.
    pub fn reduce(&self, unit: UnitId, gradients: UnitGradients) -> Result<(), Error> {
        self.engine.reduce(self.token, unit, gradients)
    }

    /// Returns the elements of a [buffer](hsdp_sharding::Param::buffer), row-major: as the last
    /// microbatch that wrote it in this step has left them, or else as the last step has. Not
    /// collective.
    ///
    /// # Errors
    /// [`Error::StalePass`] if the microbatch is over.
    ///
    /// # Panics
    /// If the model has no such buffer.
    pub fn buffer(&self, buffer: BufferId) -> Result<Vec<f32>, Error> {
        self.engine.buffer(self.token, buffer)
    }

    /// Writes all elements of a [buffer](hsdp_sharding::Param::buffer), row-major. Later
    /// microbatches of the step read them. They count when [`Step::finish`] has returned gradients
    /// to apply, whether an optimizer takes these or not: a step that is dropped, fails, or is
    /// skipped leaves the buffers as they were. Not collective: ranks compare digests, or take
    /// means, when the step finishes.
    ///
    /// # Errors
    /// [`Error::Size`] for another number of elements; [`Error::Misuse`] after the loss, in a batch
    /// of an evaluation, or if an earlier call of the step failed; [`Error::StalePass`] if the
    /// microbatch is over.
    ///
    /// # Panics
    /// If the model has no such buffer.
    pub fn write_buffer(&self, buffer: BufferId, values: &[f32]) -> Result<(), Error> {
        self.engine.write_buffer(self.token, buffer, values)
    }

    /// Sums statistics of a batch over all ranks, in rank order, in a unit's forward or backward:
    /// those that the unit declares by
    /// [`Unit::batch_norm`](hsdp_sharding::Unit::batch_norm), with `index` counted in the unit.
    ///
    /// `own` has `[2 channels + 1]` elements in the forward and `[2 channels]` in the backward.
    /// Returns as many sums. A rank without data, or whose program leaves them out, takes part with
    /// zeros. In the backward they come in the reverse order of the forward. **Collective** over
    /// the world.
    ///
    /// # Errors
    /// [`Error::Misuse`] if the unit has no such statistics or is not in use, they were summed in
    /// this microbatch before, the program has come to later ones, or in a batch of an evaluation;
    /// [`Error::Size`] for another number of elements; [`Error::StalePass`] if the microbatch is
    /// over; [`Error::Comm`] if the collective fails.
    pub fn statistics(
        &self,
        unit: UnitId,
        index: usize,
        phase: Phase,
        own: Vec<f64>,
    ) -> Result<Vec<f64>, Error> {
        self.engine.statistics(self.token, unit, index, phase, own)
    }

    /// Notes why this rank's step will fail: the text of an error outside of the runtime, such as
    /// one of the model's forward. The other ranks get it when the step is dropped. Only the first
    /// note of a step counts, errors of the runtime among them. Not collective.
    pub fn note_failure(&self, reason: &dyn fmt::Display) {
        self.engine.note_failure(self.token, reason);
    }

    /// Names the usual causes of a parameter without a gradient, for warnings and errors: an
    /// adapter knows its autograd. Not collective.
    pub fn explain_unused(&self, causes: &'static str) {
        self.engine.context.unused.set_causes(causes);
    }

    /// Returns whether an adapter should tell zeros that its autograd gives in place of missing
    /// gradients from gradients: until the first step is over, and later if there were
    /// [some](Self::note_cuts). Not collective.
    #[must_use]
    pub fn seeks_cuts(&self) -> bool {
        self.engine.context.unused.seeks_cuts(self.engine.context.options.unused)
    }

    /// Notes that the autograd of an adapter gives zeros in place of missing gradients, which the
    /// adapter leaves out. Not collective.
    pub fn note_cuts(&self) {
        self.engine.context.unused.note_cuts();
    }

    /// Returns the model's plan.
    #[must_use]
    pub fn plan(&self) -> &Plan {
        self.engine.context.settled_plan()
    }

    /// Returns the dtypes of the model.
    #[must_use]
    pub fn precision(&self) -> Precision {
        self.engine.context.options.precision
    }
}
