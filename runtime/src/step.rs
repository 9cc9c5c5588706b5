//! A step and its microbatches, as types: what may be called when.

use std::marker::PhantomData;
use std::sync::Arc;

use hsdp_sharding::{Plan, UnitId};

use crate::engine::reductions::UnitGradients;
use crate::engine::{Engine, NoMore, Opened, Token};
use crate::error::Error;
use crate::full::Full;
use crate::gradients::Gradients;
use crate::model::ShardedModel;
use crate::objective::{LossSum, Seed};
use crate::precision::Precision;
use crate::uneven::{EndOfRun, Shutdown};

/// A step that is under way. It owns everything that is pending.
///
/// Dropping it gives the step up: that is announced without blocking, every rank discards its partial,
/// and the next step starts clean.
///
/// Two steps of one model at once do not compile:
///
/// ```compile_fail,E0499
/// # fn f(model: &mut hsdp::ShardedModel) -> Result<(), hsdp::Error> {
/// let one = model.begin_step(hsdp::StepOptions::microbatches(1))?;
/// let two = model.begin_step(hsdp::StepOptions::microbatches(1))?;
/// one.finish()?;
/// # two.finish()?; Ok(()) }
/// ```
///
/// Neither does an optimizer's step without this one's `finish`:
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
    opened: Opened,
    model: PhantomData<&'model mut ShardedModel>,
}

impl<'model> Step<'model> {
    pub(crate) fn new(engine: Arc<Engine>, opened: Opened) -> Self {
        Self { engine, opened, model: PhantomData }
    }

    /// Whether a rank [asked](crate::StepOptions::shutdown) that this step be the last: the same on all ranks, which go through it and then
    /// save, if they do, and end their run.
    #[must_use]
    pub fn shutdown(&self) -> Shutdown {
        self.engine.state().shutdown
    }

    /// Begins the next microbatch, for which this rank has data.
    ///
    /// Not collective where the step was begun with a number of microbatches; otherwise collective over the world,
    /// with the `microbatch` or the `finish` of all other ranks: they find out whether all have another one.
    ///
    /// # Errors
    /// [`Error::Misuse`] if the one before it was not finished, or the step has had all of its microbatches;
    /// [`Error::EndOfData`] if it ends here, since other ranks have no more data, and [`Error::UnevenInputs`] if that
    /// is refused, as the model's [`Uneven`](crate::Uneven) says; [`Error::Comm`] if the exchange fails.
    pub fn microbatch(&mut self) -> Result<Pass<'_>, Error> {
        match self.engine.begin_microbatch(self.opened)? {
            Ok(token) => Ok(self.pass(token)),
            Err(NoMore) => Err(self.engine.end_of_data(self.opened)),
        }
    }

    /// As [`microbatch`](Self::microbatch); `None` if the step ends here, since other ranks have no more data.
    ///
    /// # Errors
    /// As there, but for `EndOfData`.
    pub fn next_microbatch(&mut self) -> Result<Option<Pass<'_>>, Error> {
        let token = self.engine.begin_microbatch(self.opened)?.ok();
        Ok(token.map(|token| self.pass(token)))
    }

    fn pass(&mut self, token: Token) -> Pass<'_> {
        let handle = PassHandle { engine: Arc::clone(&self.engine), token };
        Pass { handle, step: PhantomData }
    }

    /// Completes all reductions, all-reduces over the replicas, agrees with all ranks, and divides once.
    ///
    /// Collective over the world. A rank that has brought fewer microbatches than others goes through theirs with
    /// weight 0 under [`Uneven::ZeroWeight`](crate::Uneven::ZeroWeight).
    ///
    /// # Errors
    /// [`Error::EmptyStep`], [`Error::NonFinite`] and [`Error::UnusedParameter`] on all ranks alike, and
    /// [`Error::EndOfData`] if ranks were out of data before the first microbatch of a step of as many as come;
    /// [`Error::Misuse`] if microbatches are missing; [`Error::Comm`] if a collective fails.
    pub fn finish(self) -> Result<Gradients, Error> {
        self.engine.finish_step(self.opened)
    }

    /// Gives the step up, for a reason of the caller's: a batch that cannot be read, say.
    ///
    /// Not collective, and does not block. Every other rank gets [`hsdp_comm::Error::StepAborted`] from its next call or
    /// wait, with this rank, the step and the reason (that of an error of the step itself, if there was one before);
    /// all discard their partials, and the next step starts clean. A drop does the same without a reason.
    pub fn abandon(self, reason: impl Into<String>) {
        self.engine.abort_step(self.opened, Some(reason.into()));
    }
}

impl Drop for Step<'_> {
    fn drop(&mut self) {
        self.engine.abort_step(self.opened, None);
    }
}

/// What the exchange at the beginning of a step led to.
#[derive(Debug)]
#[must_use = "a step that is dropped is aborted on all ranks"]
pub enum NextStep<'model> {
    /// It takes place. A rank without data just finishes it.
    Step(Step<'model>),
    /// The run is over, on all ranks.
    End(EndOfRun),
}

/// A microbatch that is under way: one forward and backward.
#[derive(Debug)]
#[must_use = "a microbatch that is not finished fails its step"]
pub struct Pass<'step> {
    handle: PassHandle,
    step: PhantomData<&'step mut ()>,
}

impl Pass<'_> {
    /// Waits for a unit's parameters; the next units are on their way.
    ///
    /// Each call is the unit's next turn in the plan's gather order: the first for the forward, the
    /// second for the backward. A unit that the plan keeps has one turn, and the caller keeps the result.
    /// Collective over the shard group, in the plan's order whatever the order of calls.
    ///
    /// # Errors
    /// [`Error::Misuse`] if the unit has had all of its turns, the model has no such unit, or it is the backward's turn
    /// and there was no [`loss`](Self::loss); [`Error::Comm`] if the gather fails.
    pub fn unshard(&mut self, unit: UnitId) -> Result<Full, Error> {
        self.handle.unshard(unit)
    }

    /// Takes the microbatch's loss, between forward and backward, and says what the backward starts from.
    ///
    /// Collective over the world in the first step, where ranks agree on the size of weights; see
    /// [`StepOptions::weight_hint`](crate::StepOptions::weight_hint).
    ///
    /// # Errors
    /// [`Error::Misuse`] if the microbatch has a loss already, or the weights of the step exceed 2^64;
    /// [`Error::Comm`] if a collective fails.
    pub fn loss(&mut self, loss: LossSum) -> Result<Seed, Error> {
        self.handle.loss(loss)
    }

    /// Takes a unit's gradients: reduce-scatters them and adds the result to the partial.
    ///
    /// Units may come in any order; they are issued in the plan's. Collective over the shard group.
    ///
    /// # Errors
    /// [`Error::Size`] if a gradient has another length than its parameter; [`Error::Misuse`] if it belongs to a frozen
    /// parameter, there are not as many as parameters, the unit was reduced before in this microbatch or is none of the
    /// model's, or the loss is still to come; [`Error::Comm`] if a collective fails.
    pub fn reduce(&mut self, unit: UnitId, gradients: UnitGradients) -> Result<(), Error> {
        self.handle.reduce(unit, gradients)
    }

    /// Ends the microbatch: units that were not reduced contribute zeros; without a loss it weighs nothing.
    ///
    /// Collective over the shard group, in mode `Every` over the world: issues every gather and reduction of the
    /// plan that this rank has not. Waits for the gathers.
    ///
    /// # Errors
    /// [`Error::Comm`] if a collective fails.
    pub fn finish(self) -> Result<(), Error> {
        self.handle.engine.finish_microbatch(self.handle.token)
    }

    /// A handle to this microbatch that an autograd's custom ops can hold.
    #[must_use]
    pub fn handle(&self) -> PassHandle {
        self.handle.clone()
    }
}

/// What an autograd's custom op holds of a microbatch. Using it after the microbatch is an error that names both.
#[derive(Clone, Debug)]
pub struct PassHandle {
    engine: Arc<Engine>,
    token: Token,
}

impl PassHandle {
    /// As [`Pass::unshard`].
    ///
    /// # Errors
    /// As there, and [`Error::StalePass`] if the microbatch is over.
    pub fn unshard(&self, unit: UnitId) -> Result<Full, Error> {
        self.engine.unshard(self.token, unit)
    }

    /// As [`Pass::loss`].
    ///
    /// # Errors
    /// As there, and [`Error::StalePass`] if the microbatch is over.
    pub fn loss(&self, loss: LossSum) -> Result<Seed, Error> {
        self.engine.loss(self.token, loss)
    }

    /// As [`Pass::reduce`].
    ///
    /// # Errors
    /// As there, and [`Error::StalePass`] if the microbatch is over.
    pub fn reduce(&self, unit: UnitId, gradients: UnitGradients) -> Result<(), Error> {
        self.engine.reduce(self.token, unit, gradients)
    }

    /// The plan.
    #[must_use]
    pub fn plan(&self) -> &Plan {
        &self.engine.fabric.plan
    }

    /// The dtypes of the model.
    #[must_use]
    pub fn precision(&self) -> Precision {
        self.engine.fabric.options.precision
    }
}
