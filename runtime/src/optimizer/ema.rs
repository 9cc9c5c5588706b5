//! Exponential moving averages of the parameters and buffers.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use hsdp_checkpoint::OptimizerHead;
use hsdp_comm::{Part, PartKind};
use hsdp_kernels::memory::Category;
use hsdp_sharding::{BufferId, ModelSpec, ParamId, Plan, Role, UnitId};
use parking_lot::Mutex;
use serde_json::json;

use crate::error::Error;
use crate::model::ShardedModel;
use crate::model::updates::Average;
use crate::persist::checkpointed::{BufferState, Checkpointed, Expected, Spread, StateTensor};
use crate::persist::problem::Problem;
use crate::persist::saved::{SavedOptions, SavedState};
use crate::state::context::{ErrorSite, ModelId};
use crate::state::control;
use crate::state::shard::Shard;
use crate::state::slices::SliceGathers;
use crate::state::store::zeros_in;
use crate::step::engine::Engine;

/// An exponential moving average of this rank's trainable parameters and of the model's
/// [buffers](hsdp_sharding::Param::buffer), f32. It begins as a copy of them.
///
/// Each update of the model moves it on, whatever the optimizer, in the optimizer's pass over the
/// parameters:
///
/// ```text
/// average = average + (1 - decay) * (parameter - average)
/// ```
///
/// in f32, where `1 - decay` is computed in f64 and rounded once, as
/// `torch.optim.swa_utils.get_ema_multi_avg_fn` does. A parameter that got no gradient takes part.
/// A skipped step changes nothing. Nothing moves a dropped average on. It takes 4 bytes for each
/// element that this rank [updates](Plan::updated) and for each one of the buffers;
/// `ModelSpec::averaged` tells the plan.
///
/// Buffers take part by the same formula, with their values at the end of the step, as with
/// `use_buffers=True` of `torch.optim.swa_utils.AveragedModel`. Each rank averages all of them on
/// the host, and all ranks get the same bits without an exchange.
///
/// [`ShardedModel::with_shards`] evaluates it. A pair with the optimizer goes into a checkpoint:
/// `checkpoints.save(&model, &(adamw, ema), &user)`, from which `hsdp checkpoint export --average`
/// makes a folder of the averages.
///
/// ```
/// use hsdp::Ema;
/// use hsdp::prelude::*;
/// # fn evaluated(model: &mut ShardedModel) -> Result<(), hsdp::Error> {
/// let ema = Ema::new(model, 0.999)?; // before the first step
/// // ... steps ...
/// let averages = model.with_shards(&ema, |model| model.full_parameters())?;
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
#[must_use = "nothing moves a dropped average on"]
pub struct Ema {
    model: ModelId,
    plan: Arc<Plan>,
    average: Arc<Mutex<Average>>,
    /// Number of the average among all of the model, which operations with it carry. A load keeps
    /// it.
    number: u32,
}

impl Ema {
    /// An average of the parameters and buffers of this moment. `decay` is the fraction of the
    /// average that an update keeps; ranks compare it with the options of optimizers. Not
    /// collective, and the same on all ranks. With [`StateOver::World`](crate::StateOver::World)
    /// behind an update it waits for the updates of other replicas.
    ///
    /// # Errors
    /// [`Error::Options`] if `decay` is not from 0 to below 1, or if the model is updated on a
    /// device and a unit has both trainable and frozen parameters; [`Error::Misuse`] inside
    /// [`ShardedModel::with_shards`]; [`Error::OutOfMemory`]; [`Error::Device`](Error) if the
    /// parameters lie on a device that fails.
    pub fn new(model: &ShardedModel, decay: f64) -> Result<Self, Error> {
        let state = model.engine.state();
        model.engine.check_own_shards(&state, "Ema::new")?;
        drop(state);
        // A copy that fails on one rank alone takes a number there too.
        let number = model.updates.lock().averages.next_number();
        let average = {
            let (state, _) = model.engine.settled_shards()?;
            let site = model.engine.context.site("Ema::new", state.next_step);
            Average::copy_of(site, &state.shards, &state.buffers, decay)?
        };
        Ok(Self::of(model, average, number))
    }

    /// Has the updates of this model move an average on.
    fn of(model: &ShardedModel, average: Average, number: u32) -> Self {
        let average = Arc::new(Mutex::new(average));
        model.updates.lock().averages.add(&average);
        let plan = Arc::clone(&model.engine.context.plan);
        Self { model: model.id().clone(), plan, average, number }
    }

    /// This rank's shards with the averages in place of the trainable parameters.
    fn shards(&self, model: &ShardedModel) -> Result<Vec<Shard>, Error> {
        let context = &model.engine.context;
        let state = model.engine.state();
        let site = context.site("with_shards", state.next_step);
        let average = self.average.lock();
        let shard = |(unit, shard): (usize, &Shard)| {
            let unit = UnitId::new(unit);
            if context.plan.layout(unit).trainable().shard_len == 0 {
                return Ok(shard.clone());
            }
            let own = shard.in_f32(site)?;
            // The text of an error is made outside of the scope, in which memory may be short.
            let made = {
                let _scope = context.scope_of_parameters(unit);
                hsdp_kernels::zeros(own.len())
            };
            let mut parameters = made?;
            parameters.copy_from_slice(&own);
            average.copy_over(site, unit, &mut parameters)?;
            Shard::new(site, unit, parameters)
        };
        let mut shards =
            state.shards.iter().enumerate().map(shard).collect::<Result<Vec<_>, _>>()?;
        if context.plan.divides_state() {
            self.gather_slices(site, &mut shards)?;
        }
        Ok(shards)
    }

    /// Gathers the averages over the replicas. Collective over the replicate group.
    fn gather_slices(&self, site: ErrorSite<'_>, shards: &mut [Shard]) -> Result<(), Error> {
        let mut gathers = SliceGathers::default();
        let units = site.context.plan.reductions();
        for unit in units {
            let part = Part { kind: PartKind::Average, number: self.number };
            let tag = site.context.tag_of_slices(*unit, site.step).part(part);
            gathers.issue(site, tag, *unit, &mut shards[unit.index()])?;
        }
        units.iter().try_for_each(|unit| gathers.wait(*unit, &mut shards[unit.index()]))
    }

    /// Returns a copy of the averages of the buffers.
    fn buffers(&self) -> Result<Vec<f32>, Error> {
        let average = self.average.lock();
        let mut copy = zeros_in(Category::Buffers, average.buffers().len())?;
        copy.copy_from_slice(average.buffers());
        Ok(copy)
    }
}

impl ShardedModel {
    /// Runs `act` with the averages in place of the trainable parameters and of the buffers, for
    /// [`evaluation`](Self::evaluation) and [`full_parameters`](Self::full_parameters). Frozen
    /// parameters are the model's. Afterwards the model has its own parameters and buffers again,
    /// also after an error or a panic. Steps and checkpoints inside are refused.
    ///
    /// Meanwhile there is a second copy of this rank's shards of units with trainable parameters,
    /// in f32 and in the compute dtype, and one more of the buffers.
    ///
    /// Not collective, but `act` may be: all ranks make the same call. With
    /// [`StateOver::World`](crate::StateOver::World) collective over the replicate group, whose
    /// ranks gather the averages. A rank that is refused tells the others.
    ///
    /// # Errors
    /// [`Error::Misuse`] within a step, while its gradients exist, inside another call, or if the
    /// average is of another model; [`Error::Kernel`] without memory for the copy;
    /// [`Error::Device`](Error) if the parameters lie on a device that fails; those of `act`.
    pub fn with_shards<T, E: From<Error>>(
        &mut self,
        ema: &Ema,
        act: impl FnOnce(&mut Self) -> Result<T, E>,
    ) -> Result<T, E> {
        let operation = "with_shards";
        let averages = control::between_steps(self.world(), self.committed_steps(), || {
            self.check_between_steps(operation)?;
            if ema.model != *self.id() {
                let what = "the average is of another model".to_owned();
                return Err(self.engine.context.misuse(operation, self.committed_steps(), what));
            }
            Ok(Averaged { shards: ema.shards(self)?, buffers: ema.buffers()? })
        })?;
        let _replaced = Replaced::by(&self.engine, averages, ema.number);
        act(self)
    }
}

/// This rank's shards with averages in place of the trainable parameters, and the averages of the
/// buffers.
struct Averaged {
    shards: Vec<Shard>,
    buffers: Vec<f32>,
}

/// Has averages in place of a model's shards and buffers, until it is dropped.
struct Replaced(Arc<Engine>);

impl Replaced {
    fn by(engine: &Arc<Engine>, averages: Averaged, number: u32) -> Self {
        let mut state = engine.state();
        engine.context.stand_in(number);
        state.own_shards = Some(std::mem::replace(&mut state.shards, averages.shards));
        state.buffers.stand_in(averages.buffers);
        drop(state);
        Self(Arc::clone(engine))
    }
}

impl Drop for Replaced {
    fn drop(&mut self) {
        let mut state = self.0.state();
        if let Some(own) = state.own_shards.take() {
            self.0.context.restore();
            state.shards = own;
            state.buffers.restore();
        }
    }
}

/// Its state is of kind `ema`. Where a save is not in the background, it makes a copy of the
/// averages for as long as it writes.
impl Checkpointed for Ema {
    fn is_of(&self, model: &ModelId) -> bool {
        self.model == *model
    }

    fn head(&self, _: &ModelSpec) -> OptimizerHead {
        let options = json!({ "decay": self.average.lock().decay() });
        let kind = Average::KIND.to_owned();
        let made_with = Some(options.clone());
        OptimizerHead { kind, options, made_with, updates: BTreeMap::new(), is_open: false }
    }

    fn kinds(&self) -> Vec<&'static str> {
        vec![Average::KIND]
    }

    fn tensors(&self) -> Vec<StateTensor> {
        let params = self.plan.spec().params();
        let trained = params.filter(|(_, param)| param.role == Role::Trainable);
        let kind = Average::KIND;
        let spread = Spread::Elements;
        trained.map(|(parameter, _)| StateTensor { kind, parameter, spread }).collect()
    }

    fn expected(&self, _: &SavedState<'_>) -> Expected {
        Expected { tensors: self.tensors(), counted: Vec::new() }
    }

    fn state<'a>(
        &'a self,
        model: &ShardedModel,
        kind: &str,
        parameter: ParamId,
        range: Range<usize>,
    ) -> Result<Option<Cow<'a, [f32]>>, Error> {
        if kind != Average::KIND {
            return Ok(None);
        }
        let mut copy = hsdp_kernels::zeros(range.len())?;
        let copied = self.copy_state(model, kind, parameter, range.start, &mut copy)?;
        Ok(copied.then_some(Cow::Owned(copy)))
    }

    fn copy_state(
        &self,
        model: &ShardedModel,
        kind: &str,
        parameter: ParamId,
        start: usize,
        into: &mut [f32],
    ) -> Result<bool, Error> {
        if kind != Average::KIND {
            return Ok(false);
        }
        let site = model.site("saving");
        self.average.lock().copy_to(site, parameter, start, into)
    }

    fn buffer_states(&self) -> Vec<BufferState> {
        let buffers = self.plan.spec().buffers();
        buffers.map(|(buffer, _)| BufferState { kind: Average::KIND, buffer }).collect()
    }

    fn copy_buffer_state(&self, state: BufferState, into: &mut [f32]) -> bool {
        if state.kind != Average::KIND {
            return false;
        }
        into.copy_from_slice(self.average.lock().buffer(self.plan.spec(), state.buffer));
        true
    }

    fn restored(&self, model: &ShardedModel, saved: &SavedState<'_>) -> Result<Self, Problem> {
        let mut decay = self.average.lock().decay();
        if let SavedOptions::All { now, .. } = saved.options {
            let saved = now["decay"].as_f64();
            let lacking = || Problem::lasting(format!("ema decay is {} there", now["decay"]));
            decay = saved.ok_or_else(lacking)?;
        }
        let shards = model.engine.state().shards.clone();
        let own_buffer = |buffer: BufferId, into: &mut [f32]| {
            into.copy_from_slice(model.engine.state().buffers.committed_value(buffer));
        };
        let site = saved.site();
        let mut average = Average::zeros(site, decay)?;
        average.fill(site, |unit, piece, into| {
            let parameter = ParamId { unit, index: piece.param };
            if saved.takes_state(parameter) {
                return saved.read(Average::KIND, parameter, piece.param_start, into);
            }
            // It begins as the parameter, as the model has it after the load.
            let own =
                |into: &mut [f32]| shards[unit.index()].copy_to(site, piece.shard_start, into);
            saved.read_parameter(parameter, piece.param_start, own, into)
        })?;
        average.fill_buffers(self.plan.spec(), |buffer, into| {
            match saved.takes_buffer_state(buffer) {
                true => saved.read_buffer_state(Average::KIND, buffer, into),
                // It begins as the buffer, as the model has it after the load.
                false => saved.read_buffer(buffer, |into| own_buffer(buffer, into), into),
            }
        })?;
        Ok(Self::of(model, average, self.number))
    }
}
