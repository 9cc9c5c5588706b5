//! A model whose parameters are sharded over a mesh, and the calls that need it beside steps and
//! updates: evaluation, export, norms, clipping.
//!
//! The engine of the step below does the work. This floor keeps the state that updates share, and
//! knows no optimizer and no checkpoint.

pub(crate) mod evaluation;
pub(crate) mod export;
pub(crate) mod gradients;
pub(crate) mod norms;
pub(crate) mod updates;

use std::collections::BTreeMap;
use std::ops::ControlFlow;
use std::sync::Arc;

use hsdp_comm::{
    Error as CommError, Fault, FaultPlace, ModelLabel, PartKind, Reduction, World, WorldError,
};
use hsdp_kernels::Element;
use hsdp_sharding::step::EvaluationKind;
use hsdp_sharding::{BufferId, FullCopies, ModelSpec, Param, Piece, Plan, Rank, UnitId};
use parking_lot::Mutex;

use crate::agree::comparison::{self, InitialValues};
use crate::error::{DataError, Error};
use crate::model::evaluation::Evaluation;
use crate::model::norms::{
    COUNTS, Histogram, Histograms, Norms, add_square, by_parameter, count, counted_pieces,
    over_ranks, trained, within,
};
use crate::model::updates::{Moved, Updates};
use crate::options::placement::Placement;
use crate::options::{EndOfRun, ModelOptions, StepOptions};
use crate::state::buffers::ModelBuffers;
use crate::state::context::{Context, ErrorSite, ModelId};
use crate::state::control;
use crate::state::events::Event;
use crate::state::shard::Shard;
use crate::step::engine::Engine;
use crate::step::{NextStep, Step};

/// This rank's part of a model: its shards of the parameters, and the engine that gathers
/// parameters and reduces gradients.
#[derive(Debug)]
pub struct ShardedModel {
    pub(crate) engine: Arc<Engine>,
    /// Locked for a moment only, also by those who hold the state of the engine.
    pub(crate) updates: Mutex<Updates>,
}

/// The tensors of a rank's model that is made.
#[derive(Debug)]
pub(crate) struct InitialTensors {
    pub(crate) shards: Vec<Shard>,
    pub(crate) buffers: ModelBuffers,
    /// Digests of the values that the program gave.
    pub(crate) values: InitialValues,
}

impl ShardedModel {
    /// Plans the model, keeps this rank's shard of each parameter, and compares plan, options and
    /// shards with all other ranks.
    ///
    /// `init` returns a parameter's full value in f32, row-major, `numel` elements. It is called
    /// once for each parameter, in the order of the spec, and then for each
    /// [buffer](Param::buffer), and must return the same values on all ranks. The ranks compare
    /// digests of these values, so random numbers with different seeds are an error here.
    /// Parameters that are [stored](Param::stored_in) in the compute dtype are rounded once, to
    /// nearest, ties to even.
    ///
    /// Collective over the world. A rank that is refused, by its options for example, tells the
    /// other ranks and does not wait for them. A rank that is behind gets `StepAborted` with the
    /// reason, also from a collective of its own before this call.
    ///
    /// # Errors
    /// [`Error::Plan`] if the spec cannot be planned; [`Error::Options`] if an option has a value
    /// that is not allowed, or the mesh does not have the world's size; [`Error::Size`] if `init`
    /// returns another number of elements; [`Error::Kernel`] if there is not enough memory;
    /// [`Error::Disagreement`] on all ranks if ranks differ; [`Error::Comm`] if the communication
    /// fails, or if this is the world's first model and a fault is at a unit that it does not have,
    /// which ends the world; on a device also `Error::Placement` if the device cannot be used, and
    /// `Error::Device` if it has not enough memory.
    pub fn new(
        world: World,
        spec: ModelSpec,
        options: ModelOptions,
        init: impl FnMut(&Param) -> Vec<f32>,
    ) -> Result<Self, Error> {
        let context = Self::context(world, spec, options)?;
        let tensors = control::between_steps(&context.world, 0, || cut(&context, init))?;
        Self::of(context, tensors)
    }

    /// Returns the constant parts of a model: plan, options and groups. A failure is told to the
    /// other ranks.
    pub(crate) fn context(
        world: World,
        spec: ModelSpec,
        options: ModelOptions,
    ) -> Result<Context, Error> {
        let telling = world.clone();
        control::between_steps(&telling, 0, || {
            let options = options.checked()?;
            if options.mesh.world_size() != world.size() {
                return Err(Error::Options {
                    what: format!(
                        "a mesh of {} has {} ranks, the world has {}",
                        options.mesh,
                        options.mesh.world_size(),
                        world.size()
                    ),
                });
            }
            if options.full_copies == FullCopies::PerProcess && !world.shares_memory() {
                let what = "FullCopies::PerProcess with ranks that are not threads of one process";
                return Err(Error::Options { what: what.to_owned() });
            }
            if options.full_copies == FullCopies::PerProcess && options.placement != Placement::Host
            {
                let what = "FullCopies::PerProcess with a model that lies on a device";
                return Err(Error::Options { what: what.to_owned() });
            }
            let plan = Arc::new(Plan::new(spec, options.mesh, options.plan_options())?);
            check_stored(&plan, options.placement)?;
            check_faults(&world, plan.spec().units().len())?;
            Context::new(world, plan, options)
        })
    }

    /// Makes the model from this rank's tensors, after a comparison with all other ranks.
    pub(crate) fn of(mut context: Context, tensors: InitialTensors) -> Result<Self, Error> {
        let InitialTensors { shards, buffers, values } = tensors;
        let label = comparison::of_models(&context, &shards, &values)?;
        context.take_label(label);
        let engine = Arc::new(Engine::new(context, shards, buffers));
        Ok(Self { engine, updates: Mutex::default() })
    }

    /// Returns the plan: layouts, order of collectives, memory and bytes. Until a first step is
    /// finished, its order of units is the declared one; then it is as
    /// [`UnitOrder`](crate::UnitOrder) says.
    #[must_use]
    pub fn plan(&self) -> &Plan {
        self.engine.context.settled_plan()
    }

    /// Returns the world in which the model's collectives run.
    #[must_use]
    pub fn world(&self) -> &World {
        &self.engine.context.world
    }

    /// Returns this rank.
    #[must_use]
    pub fn rank(&self) -> Rank {
        self.engine.context.rank()
    }

    /// Returns the options of the model.
    #[must_use]
    pub fn options(&self) -> &ModelOptions {
        &self.engine.context.options
    }

    /// Returns whether this rank's part of the model lies on a device.
    #[must_use]
    pub fn is_on_device(&self) -> bool {
        self.engine.context.device.is_some()
    }

    /// Returns whether this rank's part of the model is updated on a device: it lies there, and
    /// none of it is offloaded.
    #[must_use]
    pub fn updates_on_device(&self) -> bool {
        self.engine.context.updates_on_device()
    }

    /// Begins a step. The ranks exchange headers of 72 bytes, and compare step, plan, options, loss
    /// scale, and the [options](crate::Optimizer::check) with which an optimizer has updated the
    /// last step.
    ///
    /// Collective over the world. After an error that is not [fatal](Error::is_fatal) no step is
    /// open on this rank, and there is no step to drop. This rank calls this method again, and so
    /// do the others: they may have another error (`StepAborted` if they had begun the step
    /// already), or still wait for this rank's header.
    ///
    /// # Errors
    /// As [`next_step`](Self::next_step), and [`DataError::EndOfData`](crate::DataError::EndOfData)
    /// where that returns [`NextStep::End`].
    pub fn begin_step(&mut self, options: StepOptions) -> Result<Step<'_>, Error> {
        match self.next_step(options)? {
            NextStep::Step(step) => Ok(step),
            NextStep::End(EndOfRun { step, supply }) => {
                Err(Error::Data(DataError::EndOfData { step, microbatch: None, supply }))
            }
        }
    }

    /// As [`begin_step`](Self::begin_step), for runs in which some ranks may have more data than
    /// others. Each rank states with [`StepOptions::input`] whether it has data, and all ranks get
    /// the same result: a step, or the end of the run.
    ///
    /// Collective over the world, with the [`end_run`](Self::end_run) of ranks that end their run.
    ///
    /// # Errors
    /// [`DataError::UnevenInputs`](crate::DataError::UnevenInputs) on all ranks if only some ranks
    /// have data and the model's [`Uneven`](crate::Uneven) refuses that, and
    /// [`DataError::UnevenEnds`](crate::DataError::UnevenEnds) if some ranks [end their
    /// run](Self::end_run); [`Error::Disagreement`] if ranks differ in step, plan, options, loss
    /// scale, number of microbatches or the [options](crate::Optimizer::check) of the last update,
    /// or replicas in the [bits of their shards](ModelOptions::compare_replicas);
    /// [`DataError::SameSamples`](crate::DataError::SameSamples) if two ranks name the same
    /// [samples](StepOptions::samples); [`Error::Misuse`] for a step of 0 microbatches, inside
    /// [`with_shards`](Self::with_shards), or while a step is neither finished nor dropped;
    /// [`Error::Comm`] if the communication fails.
    pub fn next_step(&mut self, options: StepOptions) -> Result<NextStep<'_>, Error> {
        Ok(match self.engine.begin_step(options)? {
            ControlFlow::Continue(id) => NextStep::Step(Step::new(Arc::clone(&self.engine), id)),
            ControlFlow::Break(end) => NextStep::End(end),
        })
    }

    /// Ends this rank's run, after the steps that it has committed, and checks that the run ends on
    /// all ranks. This is the last call of a training loop. [Collective
    /// calls](Self::full_parameters) outside of steps may follow.
    ///
    /// A rank that ends its loop without this call *leaves* the world when it drops its last handle
    /// of it. Ranks that begin another step then get `WorldError::Aborted`, and the rank that left
    /// gets no error.
    ///
    /// Collective over the world, with the [`next_step`](Self::next_step) of ranks that begin
    /// another step. That call returns the end of the run if no rank has data, or under
    /// [`Uneven::Stop`](crate::Uneven::Stop).
    ///
    /// # Errors
    /// [`DataError::UnevenEnds`](crate::DataError::UnevenEnds) on all ranks if another rank has
    /// data for a step, except under [`Uneven::Stop`](crate::Uneven::Stop); [`Error::Disagreement`]
    /// if ranks have committed different numbers of steps, or differ in the
    /// [options](crate::Optimizer::check) of the last update; [`Error::Misuse`] if a step was
    /// neither finished nor dropped; [`Error::Comm`] if the communication fails.
    pub fn end_run(&mut self) -> Result<(), Error> {
        self.engine.end_run()
    }

    /// Returns the identity of this model. An optimizer keeps the identity of the model for which
    /// it was made.
    #[must_use]
    pub fn id(&self) -> &ModelId {
        &self.engine.id
    }

    /// Returns the number of this model among those of its world, and its name if it has one. They
    /// are the same on all ranks. Errors of ranks that use different models show them.
    #[must_use]
    pub fn label(&self) -> ModelLabel {
        self.engine.context.label.unwrap_or(ModelLabel::FIRST)
    }

    /// Returns the number of steps that an optimizer has completed, with an update or, where all
    /// ranks agreed to skip, without one.
    #[must_use]
    pub fn committed_steps(&self) -> u64 {
        self.engine.state().committed
    }

    /// Returns the number of updates that optimizers have applied: the committed steps without the
    /// skipped ones. A schedule of learning rates follows this number, so that its first rate
    /// belongs to the first update that changes parameters.
    ///
    /// All ranks have the same number, because they agree whether a step is skipped. A checkpoint
    /// stores it, and a load restores it.
    #[must_use]
    pub fn applied_steps(&self) -> u64 {
        self.engine.state().applied
    }

    /// Returns the factor by which losses are multiplied in the next step. The same on all ranks.
    #[must_use]
    pub fn loss_scale(&self) -> f64 {
        self.engine.state().loss_scale.value()
    }

    /// Returns this rank's shard of a unit's parameters, in f32, in the layout's order. It is a
    /// handle to the values of this moment, which later updates do not change. It is a copy if
    /// parameters are [stored](Param::stored_in) in the compute dtype, or lie on a device; the call
    /// waits for that. Not collective.
    ///
    /// With [`StateOver::World`](crate::StateOver::World) the call waits for the slices of the
    /// other replicas. If the unit computes in 16 bits, the elements outside of this rank's
    /// [slice](Plan::slice) are rounded: this rank has no master of them.
    ///
    /// # Errors
    /// [`Error::Kernel`] if there is no memory for a copy; [`Error::Device`](Error) if the
    /// parameters lie on a device that fails; [`Error::Misuse`] if slices are missing, until
    /// [`await_slices`](Self::await_slices) or the next step: another rank has ended the epoch of
    /// their gathers, or processes that compute on devices have updated the model.
    ///
    /// # Panics
    /// If the model has no such unit.
    pub fn shard(&self, unit: UnitId) -> Result<Arc<Vec<f32>>, Error> {
        let (state, are_whole) = self.engine.settled_shards()?;
        let context = &self.engine.context;
        if !are_whole {
            let what = "slices of the last update are missing, because their gathers were lost \
                        with an epoch that has ended, or are made in the next forward of processes \
                        on devices: `await_slices` gathers them, on all ranks, as the next step \
                        does";
            return Err(context.misuse("shard", state.next_step, what.to_owned()));
        }
        state.shards[unit.index()].in_f32(context.site("shard", state.next_step))
    }

    /// Waits until the shards are whole: with [`StateOver::World`](crate::StateOver::World)
    /// replicas gather slices after an update, while the program goes on. The next forward waits
    /// for the slices of each unit, so a program needs this call only to measure time or bytes, and
    /// before [`shard`](Self::shard) where processes compute on devices.
    ///
    /// Collective over the world, outside of steps, if replicas divide state: one exchange of a
    /// word. If a rank has lost slices, all ranks gather all of them again.
    ///
    /// # Errors
    /// [`Error::Comm`] if the exchange or a gather fails; [`Error::Misuse`] within a step.
    pub fn await_slices(&self) -> Result<(), Error> {
        self.engine.await_slices()
    }

    /// Returns all parameters in full, and all [buffers](Param::buffer), in f32, row-major, by
    /// name: for export, evaluation and tests.
    ///
    /// Collective over the shard group, outside of steps: one gather for each unit, in the order of
    /// the spec. Every rank gets all parameters. With [`StateOver::World`](crate::StateOver::World)
    /// collective over the world: masters are gathered over the replicas first.
    ///
    /// # Errors
    /// [`Error::Comm`] if a gather fails; [`Error::Kernel`] if there is not enough memory;
    /// [`Error::Device`](Error) if the parameters lie on a device that fails.
    pub fn full_parameters(&self) -> Result<BTreeMap<String, Vec<f32>>, Error> {
        let context = &self.engine.context;
        let (state, _) = self.engine.settled_shards()?;
        let shards = state.shards.clone();
        let step = state.next_step;
        let name = |id: BufferId| context.plan.spec()[id].name.clone();
        let buffers = state.buffers.committed();
        let buffers: Vec<_> = buffers.map(|(id, values)| (name(id), values.to_vec())).collect();
        drop(state);
        let mut tensors = control::between_steps(&context.world, step, || {
            export::full_parameters(context.site("full_parameters", step), &shards)
        })?;
        tensors.extend(buffers);
        Ok(tensors)
    }

    /// Returns a [buffer](Param::buffer) by name, as the last step left it: f32, row-major, whole
    /// on each rank. `None` if the model has no such buffer. Not collective. Inside
    /// [`with_shards`](Self::with_shards) it is the average.
    ///
    /// ```
    /// use hsdp::prelude::*;
    ///
    /// let norm = Unit::new("bn")
    ///     .param(Param::new("bn.weight", [2]))
    ///     .param(Param::new("bn.running_mean", [2]).buffer());
    /// let options = ModelOptions::on(Mesh::new(1, 1)?);
    /// let spec = ModelSpec::new().unit(norm);
    /// let model = ShardedModel::new(World::single(), spec, options, |_| vec![0.5; 2])?;
    /// assert_eq!(model.buffer("bn.running_mean"), Some(vec![0.5; 2]));
    /// assert_eq!(model.buffer("bn.weight"), None, "it is a parameter");
    /// # Ok::<(), hsdp::Error>(())
    /// ```
    #[must_use]
    pub fn buffer(&self, name: &str) -> Option<Vec<f32>> {
        let id = self.engine.context.plan.spec().find_buffer(name)?;
        Some(self.engine.state().buffers.committed_value(id).to_vec())
    }

    /// Starts a recording of the engine's [events](Event).
    pub fn record_events(&self) {
        self.engine.context.events.record();
    }

    /// Ends the recording and returns its events, in order; empty without a recording.
    #[must_use]
    pub fn take_events(&self) -> Vec<Event> {
        self.engine.context.events.take()
    }

    /// Begins an evaluation, between two steps, before the first or after the last. Not collective:
    /// its [batches](Evaluation::batch) are.
    ///
    /// # Errors
    /// [`Error::Misuse`] within a step that was neither finished nor dropped.
    pub fn evaluation(&mut self) -> Result<Evaluation<'_>, Error> {
        self.begin_evaluation(EvaluationKind::ForwardOnly)
    }

    /// Begins an evaluation whose batches take part in the backward of another model: of a
    /// generator whose loss a critic computes, for example, or of a model with a perceptual loss.
    /// All parameters of this model are constants in that loss, even those that it trains in steps
    /// of its own.
    ///
    /// Each batch has the gathers of a microbatch of training: of all units for the forward, and of
    /// those that are not [kept](hsdp_sharding::Unit::keep) again for the backward. The memory for
    /// full parameters is that of the plan. Nothing is reduced, and no parameter changes. Finish a
    /// batch after the backward that it takes part in.
    ///
    /// A batch is open while a microbatch of the other model is, so a rank cannot gather along in
    /// one of them alone: all ranks run as many batches as microbatches, in one order. A rank whose
    /// data is short runs the forward and the backward on any input, with a loss of weight 0; if
    /// the other model sums [statistics](hsdp_sharding::Unit::statistics), on an input without
    /// items. One batch serves one backward.
    ///
    /// ```
    /// # use hsdp::prelude::*;
    /// # let ranks = hsdp::launch(2, WorldOptions::default(), |world| -> Result<(), hsdp::Error> {
    /// # let spec = || ModelSpec::new().unit(Unit::new("linear").param(Param::new("w", [2])));
    /// # let options = || Ok::<_, hsdp::Error>(ModelOptions::on(Mesh::new(1, 2)?));
    /// # let mut generator = ShardedModel::new(world.clone(), spec(), options()?, |_| vec![0.5; 2])?;
    /// # let mut critic = ShardedModel::new(world, spec(), options()?, |_| vec![0.25; 2])?;
    /// # let unit = UnitId::new(0);
    /// let mut step = generator.begin_step(StepOptions::microbatches(1))?;
    /// let mut evaluation = critic.evaluation_with_backward()?;
    /// let mut made = step.microbatch()?;
    /// let mut judged = evaluation.batch()?;
    /// let x = made.unshard(unit)?.as_f32(0).expect("an f32 model")[0];
    /// let score = judged.unshard(unit)?.as_f32(0).expect("an f32 model")[0] * x;
    /// let seed = made.loss(LossSum::new(f64::from(score), 1))?.value() as f32;
    /// let grad = judged.unshard(unit)?.as_f32(0).expect("an f32 model")[0] * seed;
    /// made.reduce(unit, UnitGradients::of([vec![grad, 0.0]]))?;
    /// made.finish()?;
    /// judged.finish()?;
    /// evaluation.finish()?;
    /// let gradients = step.finish()?;
    /// # assert_eq!(gradients.norm(), 0.25);
    /// # Ok(())
    /// # });
    /// # ranks.into_iter().collect::<Result<(), _>>()?;
    /// # Ok::<(), hsdp::Error>(())
    /// ```
    ///
    /// Not collective: its [batches](Evaluation::batch) are.
    ///
    /// # Errors
    /// The errors of [`evaluation`](Self::evaluation).
    pub fn evaluation_with_backward(&mut self) -> Result<Evaluation<'_>, Error> {
        self.begin_evaluation(EvaluationKind::WithBackward)
    }

    fn begin_evaluation(&mut self, kind: EvaluationKind) -> Result<Evaluation<'_>, Error> {
        let opened = self.engine.begin_evaluation(kind)?;
        Ok(Evaluation::new(Arc::clone(&self.engine), opened))
    }

    /// Returns the 2-norm of the values of each parameter, also of frozen ones, over all shards.
    /// Squares are summed in f64. Parameters on a device are copied to the host.
    ///
    /// Collective over the world, outside of steps: one all-reduce of an f64 for each parameter.
    /// All ranks get the same bits.
    ///
    /// # Errors
    /// [`Error::Comm`] if the all-reduce fails; [`Error::Kernel`] if there is not enough memory;
    /// [`Error::Device`](Error) if the parameters lie on a device that fails.
    pub fn norms(&self) -> Result<Norms, Error> {
        let squares = self.summed("norms", 1, add_square)?;
        Ok(by_parameter(self.plan(), &squares, |_| true, |square| square[0].sqrt()))
    }

    /// As many sums for each parameter: `add` adds elements of this rank to those of their
    /// parameter.
    fn summed<T: Element>(
        &self,
        operation: &'static str,
        count: usize,
        add: impl Fn(&mut [T], &[f32]),
    ) -> Result<Vec<T>, Error> {
        let context = &self.engine.context;
        let (state, _) = self.engine.settled_shards()?;
        let shards = state.shards.clone();
        let step = state.next_step;
        drop(state);
        control::between_steps(&context.world, step, || {
            let mut sums = vec![T::zeroed(); count * context.parameters()];
            let pieces = counted_pieces(context);
            for (unit, shard) in context.plan.spec().unit_ids().zip(&shards) {
                let elements = shard.in_f32(context.site(operation, step))?;
                for (number, range) in within(&pieces[unit.index()], elements.len()) {
                    add(&mut sums[count * number..][..count], &elements[range]);
                }
            }
            over_ranks(context, step, None, Reduction::Sum, sums)
        })
    }

    /// Returns a histogram of the values of each parameter, also of frozen ones, over all shards.
    /// Parameters on a device are copied to the host.
    ///
    /// Collective over the world, outside of steps: one all-reduce of 51 u64 for each parameter.
    ///
    /// # Errors
    /// As [`norms`](Self::norms).
    pub fn histograms(&self) -> Result<Histograms, Error> {
        let count = |counts: &mut [u64], values: &[f32]| count(counts, values.iter().copied());
        Ok(by_parameter(
            self.plan(),
            &self.summed("histograms", COUNTS, count)?,
            |_| true,
            Histogram::of,
        ))
    }

    /// Returns how far the last update has moved the parameters; `None` if it was not
    /// [measured](crate::Gradients::measured), or if all ranks skipped the step. Not collective.
    ///
    /// ```
    /// use hsdp::prelude::*;
    /// # fn step(
    /// #     model: &mut ShardedModel,
    /// #     adamw: &mut AdamW,
    /// #     gradients: hsdp::Gradients,
    /// # ) -> Result<(), hsdp::Error> {
    /// adamw.step(model, gradients.measured())?;
    /// if let Some(update) = model.last_update() {
    ///     for (name, ratio) in update.ratios(model)?.iter() {
    ///         println!("{name}: {ratio:.1e}");
    ///     }
    /// }
    /// # Ok(())
    /// # }
    /// ```
    #[must_use]
    pub fn last_update(&self) -> Option<MeasuredUpdate> {
        let moved = self.updates.lock().moved.clone()?;
        let finished = self.engine.state().next_step;
        Some(MeasuredUpdate { model: self.id().clone(), finished, moved })
    }

    /// Returns an operation between steps, for the errors that name it.
    pub(crate) fn site(&self, operation: &'static str) -> ErrorSite<'_> {
        self.engine.context.site(operation, self.committed_steps())
    }

    /// Checks that the parameters have their own values, and that no step works with them, and
    /// takes their buffers back from gathers of slices.
    ///
    /// # Errors
    /// [`Error::Misuse`] within a step, or while its gradients exist: they belong to the present
    /// values of the parameters; inside [`with_shards`](Self::with_shards).
    pub(crate) fn check_between_steps(&self, operation: &'static str) -> Result<(), Error> {
        let state = self.engine.state();
        self.engine.check_own_shards(&state, operation)?;
        if !state.is_in_step() && !state.has_gradients_out() {
            drop(state);
            return self.engine.settled_shards().map(drop);
        }
        let what = "a step is under way, or its gradients still exist: first apply the gradients \
                    with an optimizer, or drop them";
        Err(self.engine.context.misuse(operation, state.next_step, what.to_owned()))
    }
}

/// How far an update has moved the parameters of a model: this rank's part, until ranks add up
/// theirs.
#[derive(Clone, Debug)]
pub struct MeasuredUpdate {
    model: ModelId,
    finished: u64,
    moved: Moved,
}

impl MeasuredUpdate {
    /// Returns the 2-norm of the change of each trainable parameter, in f64: with the decay of
    /// weights, and after clipping. 0 for a parameter that was not updated.
    ///
    /// Collective over the world: one all-reduce of two f64 for each parameter. All ranks get the
    /// same bits.
    ///
    /// # Errors
    /// [`Error::Misuse`] if it is an update of another model; [`Error::Comm`] if the all-reduce
    /// fails.
    pub fn norms(&self, model: &ShardedModel) -> Result<Norms, Error> {
        self.of_squares(model, |[_, change]| change.sqrt())
    }

    /// Returns the 2-norm of the change of each trainable parameter over the 2-norm of the
    /// parameter before the update. 0 for a parameter that was not updated; infinite for one that
    /// was zero and has changed.
    ///
    /// Collective over the world: one all-reduce of two f64 for each parameter. All ranks get the
    /// same bits.
    ///
    /// # Errors
    /// As [`norms`](Self::norms).
    pub fn ratios(&self, model: &ShardedModel) -> Result<Norms, Error> {
        self.of_squares(model, |[before, change]| match change {
            0.0 => 0.0,
            change => (change / before).sqrt(),
        })
    }

    fn of_squares(
        &self,
        model: &ShardedModel,
        value: impl Fn([f64; 2]) -> f64,
    ) -> Result<Norms, Error> {
        let context = &model.engine.context;
        let step = self.finished;
        let squares = control::between_steps(&context.world, step, || {
            if self.model != *model.id() {
                let what = "this is an update of another model".to_owned();
                return Err(context.misuse("norms of an update", step, what));
            }
            let squares = self.moved.squares.clone();
            over_ranks(context, step, Some(PartKind::Change), Reduction::Sum, squares)
        })?;
        Ok(trained(model.plan(), &squares, |of| value([of[0], of[1]])))
    }
}

/// Refuses parameters without an f32 master on a device, where an update takes the masters of a
/// whole unit.
fn check_stored(plan: &Plan, placement: Placement) -> Result<(), Error> {
    let stored = |(_, param): (_, &Param)| Some((param.name.clone(), param.stored?));
    match plan.spec().params().find_map(stored) {
        Some((name, dtype)) if placement != Placement::Host => {
            let what = format!(
                "parameter `{name}`, stored in {dtype}: a model on a device has f32 masters of all \
                 parameters; do not use `stored_in`, or place the model on the host"
            );
            Err(Error::Options { what })
        }
        _ => Ok(()),
    }
}

/// Refuses a fault at a unit that the world's first model does not have; a later model may have
/// fewer units. Each rank refuses the faults of all ranks. If another process was not given the
/// fault, it learns of it from the end of the world.
fn check_faults(world: &World, units: usize) -> Result<(), Error> {
    let lacking = |fault: &&Fault| match fault.place {
        FaultPlace::Unit(unit) | FaultPlace::UnitStage(unit, _) => unit.index() >= units,
        FaultPlace::Stage(_) | FaultPlace::Call(_) => false,
    };
    let Some(fault) = world.take_faults().iter().find(lacking) else { return Ok(()) };
    let problem = format!("the model has {units} units, numbered from 0");
    let error = CommError::from(WorldError::BadFault { fault: fault.to_string(), problem });
    world.abort(&error.to_string());
    Err(error.into())
}

/// Keeps this rank's pieces of every parameter, also in the compute dtype, the buffers, and digests
/// of the full values.
fn cut(
    context: &Context,
    mut init: impl FnMut(&Param) -> Vec<f32>,
) -> Result<InitialTensors, Error> {
    let mut shards = Vec::new();
    let mut values = InitialValues::default();
    for (unit, spec) in context.plan.spec().units().iter().enumerate() {
        let unit = UnitId::new(unit);
        let layout = context.plan.layout(unit);
        let mut shard = {
            let _scope = context.scope_of_parameters(unit);
            hsdp_kernels::zeros(layout.shard_len())?
        };
        let mut pieces: Vec<Piece> = context.pieces(unit).collect();
        pieces.sort_unstable_by_key(|piece| piece.param);
        let mut pieces = pieces.into_iter().peekable();
        for (index, parameter) in spec.params.iter().enumerate() {
            let full = init(parameter);
            check_size(context, parameter, &full)?;
            values.note(parameter, &full);
            while let Some(piece) = pieces.next_if(|piece| piece.param == index) {
                shard[piece.shard_start..][..piece.len]
                    .copy_from_slice(&full[piece.param_start..][..piece.len]);
            }
        }
        shards.push(Shard::new(context.site("init", 0), unit, shard)?);
    }
    let mut buffers = ModelBuffers::zeros(context.plan.spec())?;
    for (id, buffer) in context.plan.spec().buffers() {
        let full = init(buffer);
        check_size(context, buffer, &full)?;
        values.note(buffer, &full);
        buffers.set(id, &full);
    }
    Ok(InitialTensors { shards, buffers, values })
}

/// Checks the number of elements of an initial value.
///
/// # Errors
/// [`Error::Size`] if it is not that of the parameter.
pub(crate) fn check_size(context: &Context, param: &Param, full: &[f32]) -> Result<(), Error> {
    if full.len() == param.numel() {
        return Ok(());
    }
    Err(Error::Size {
        operation: "init",
        name: param.name.clone(),
        rank: context.rank(),
        got: full.len(),
        want: param.numel(),
    })
}

#[cfg(test)]
mod tests {
    use std::num::NonZeroU64;

    use hsdp_comm::{WorldOptions, launch};
    use hsdp_sharding::{Mesh, Unit};

    use super::*;
    use crate::{LossSum, Unused};

    /// Makes a step, flips a bit of a buffer on a rank of four, and begins the next step. Returns
    /// its error on each rank.
    fn flipped(name: &str, on: usize) -> Vec<Option<String>> {
        let norm = Unit::new("bn")
            .param(Param::new("weight", [4]))
            .param(Param::new("mean", [3]).buffer())
            .param(Param::new("own", [2]).averaged_buffer());
        let spec = ModelSpec::new().unit(norm);
        let options = ModelOptions {
            compare_replicas: NonZeroU64::new(1),
            unused: Unused::Zeros,
            ..ModelOptions::on(Mesh::new(2, 2).expect("a mesh"))
        };
        let run = |world: World| -> Result<Option<String>, Error> {
            let initial = |param: &Param| vec![0.5; param.numel()];
            let mut model = ShardedModel::new(world, spec.clone(), options.clone(), initial)?;
            let mut step = model.begin_step(StepOptions::microbatches(1))?;
            let mut pass = step.microbatch()?;
            let _ = pass.loss(LossSum::new(1.0, 1))?;
            pass.finish()?;
            let gradients = step.finish()?;
            model.update(gradients, |_| {})?;
            if let Some(id) = spec.find_buffer(name).filter(|_| model.rank().index() == on) {
                let mut values = model.buffer(name).expect("the model has it");
                values[1] = f32::from_bits(values[1].to_bits() ^ 1);
                model.engine.state().buffers.set(id, &values);
            }
            let next = model.begin_step(StepOptions::microbatches(1));
            Ok(next.map(drop).err().map(|error| error.to_string()))
        };
        let ranks = launch(4, WorldOptions::default(), |world| Ok::<_, Error>(run(world)));
        ranks.into_iter().map(|rank| rank.expect("no panic").expect("a first step")).collect()
    }

    #[test]
    fn a_flipped_bit_of_a_buffer_is_found_by_the_next_comparison_and_named() {
        for (name, on) in [("mean", 1), ("own", 2), ("mean", 3)] {
            for told in flipped(name, on) {
                let told = told.expect("it is found");
                let begin = format!(
                    "the content of a buffer differs between ranks: rank {on} has `{name}` with \
                     digest 0x"
                );
                assert!(told.starts_with(&begin), "{told}");
                assert!(told.contains(&format!("rank 0 has `{name}` with digest 0x")), "{told}");
            }
        }
        assert_eq!(flipped("none", 0), vec![None; 4]);
    }
}
