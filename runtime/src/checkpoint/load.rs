//! Loading: each rank reads its own elements, and either all ranks take them or none does.

use std::collections::BTreeMap;

use hsdp_checkpoint::{Generation, OptimizerHead, TrainingHead};
use hsdp_kernels::memory::{self, Category};
use hsdp_sharding::{ParamId, Rank, Role, UnitId};

use super::checkpoints::{Checkpoints, check_optimizer};
use super::portions::{self, Portion};
use super::settings::{Content, Resumed};
use super::together::{Failed, JointOperation, OpenedLines, Undone};
use super::{differences, frozen, options};
use crate::error::Error;
use crate::model::{ShardedModel, export};
use crate::options::precision::LossScaling;
use crate::persist::checkpointed::Checkpointed;
use crate::persist::problem::{Problem, ProblemKind};
use crate::persist::saved::{FittingParts, SavedOptions, SavedState, Unmatched, Whose};
use crate::state::context::{Context, ErrorSite};
use crate::state::control;
use crate::state::shard::{HostShard, Shard};

/// The value for "no step" where ranks exchange a step.
const NONE: u64 = u64::MAX;

/// Maximum number of looks for the newest checkpoint, where another job may have removed the one
/// that was found.
const MOST_LOOKS: usize = 16;

impl Checkpoints {
    /// Loads the newest intact checkpoint into the model and the optimizer, whatever mesh it was
    /// saved on. `None` if there is no checkpoint at all. The result lists newer checkpoints that
    /// are broken, and rank 0 logs each of them as a warning. The call waits for a save in the
    /// background that is under way.
    ///
    /// Collective over the model's world, between steps.
    ///
    /// # Errors
    /// [`Error::Checkpoint`], the same on all ranks, if all checkpoints are broken, a newer version
    /// of this program wrote the newest, it is of another model or optimizer (the error lists the
    /// differences: all [settings](hsdp_sharding::ModelSpec::setting), and the first few tensors of
    /// each kind), it has no frozen parameters ([`Content::Trainable`]) and these checkpoints have
    /// [`Content::All`] or the model has other ones, or an earlier save has failed and no call has
    /// returned that failure. The model and the optimizer are then as they were.
    /// [`Error::Misuse`] as for [`save`](Self::save); [`Error::Comm`].
    pub fn load_latest<O: Checkpointed>(
        &mut self,
        model: &mut ShardedModel,
        optimizer: &mut O,
    ) -> Result<Option<Resumed>, Error> {
        self.begin_load(model, optimizer)?;
        self.load_newest(model, |this, model, step| this.load_step(model, optimizer, step))
    }

    /// Loads the newest intact checkpoint by `load_step`.
    pub(super) fn load_newest(
        &mut self,
        model: &mut ShardedModel,
        mut load_step: impl FnMut(&mut Self, &mut ShardedModel, u64) -> Result<Resumed, Undone>,
    ) -> Result<Option<Resumed>, Error> {
        let mut broken: Vec<Failed> = Vec::new();
        let mut before = NONE;
        let mut looks = 1;
        while let Some(step) = self.newest_before(model, before)? {
            before = match load_step(self, model, step) {
                Ok(resumed) => return Ok(Some(Resumed { broken: told(model, broken), ..resumed })),
                Err(Undone::Failed(failed)) if failed.problem.kind == ProblemKind::Damage => {
                    broken.push(failed);
                    step
                }
                // The job that writes there has newer ones by now.
                Err(Undone::Failed(failed))
                    if failed.problem.kind == ProblemKind::Removed && looks < MOST_LOOKS =>
                {
                    looks += 1;
                    broken.clear();
                    NONE
                }
                Err(undone) => return Err(self.loading(model, step).error(undone)),
            };
        }
        match broken.first() {
            None => Ok(None),
            Some(newest) => {
                let rank = newest.rank;
                let what =
                    format!("all checkpoints are broken: {}", told(model, broken).join("; "));
                let problem = Problem { kind: ProblemKind::Damage, what };
                Err(self.loading(model, before).error(Failed { rank, problem }))
            }
        }
    }

    /// Loads the checkpoint of `step` into the model and the optimizer. The result has the steps of
    /// [later](Resumed::later) checkpoints, which keep this job from saving.
    ///
    /// Collective over the model's world, between steps.
    ///
    /// # Errors
    /// As [`load_latest`](Self::load_latest), for this checkpoint alone.
    pub fn load<O: Checkpointed>(
        &mut self,
        model: &mut ShardedModel,
        optimizer: &mut O,
        step: u64,
    ) -> Result<Resumed, Error> {
        self.begin_load(model, optimizer)?;
        let later = self.later_than(model, step)?;
        let loaded = self.load_step(model, optimizer, step);
        let loaded = loaded.map_err(|undone| self.loading(model, step).error(undone))?;
        Ok(self.told_of_later(model, Resumed { later, ..loaded }))
    }

    /// Waits for a save that is under way: without that it would depend on timing which checkpoint
    /// is the latest.
    fn begin_load<O: Checkpointed>(
        &mut self,
        model: &ShardedModel,
        optimizer: &O,
    ) -> Result<(), Error> {
        check_optimizer(model, optimizer, "loading")?;
        self.settle(model)
    }

    /// Keeps a broken generation from taking the place of a readable one in the next save.
    fn note_broken(&self, step: u64, undone: &Undone) {
        if let (Some(lease), Undone::Failed(failed)) = (&self.lease, undone)
            && failed.problem.kind == ProblemKind::Damage
        {
            lease.lock().note_broken(step);
        }
    }

    /// Returns the step of the newest generation before a step that any rank sees, if each rank has
    /// it under its name.
    ///
    /// Ranks list a folder at different moments, between which another job may save, and a file
    /// system may list a new entry late. It is there under its name all the same, unless the rank's
    /// folder is another one. Each look compares anew, since the job may have removed what was
    /// listed.
    fn newest_before(&self, model: &ShardedModel, before: u64) -> Result<Option<u64>, Error> {
        let together = self.loading(model, model.committed_steps());
        let mut looks = 1;
        loop {
            let steps = together.run(|| Ok(self.store.steps()?))?;
            let newest = steps.into_iter().rev().find(|step| *step < before);
            // 0 stands for no generation. A step is less than `before`, so this does not overflow.
            let said = together.tell([newest.map_or(0, |step| step + 1)])?.concat();
            let latest = said.iter().max().and_then(|step| step.checked_sub(1));
            let Some(latest) = latest.filter(|_| said.iter().any(|step| *step != said[0])) else {
                return Ok(newest);
            };
            let found = together.run(|| {
                let is_there = newest == Some(latest) || self.store.has(latest)?;
                Ok(if is_there { Some(latest) } else { newest })
            })?;
            let found = match found {
                Some(step) => format!("step {step} as its newest checkpoint"),
                None => "no checkpoint".to_owned(),
            };
            let line = match before {
                NONE => found,
                before => format!("{found} before step {before}"),
            };
            let path = self.store.root().display().to_string();
            match together.compare(&OpenedLines { path, lines: vec![line] })? {
                Ok(()) => return Ok(Some(latest)),
                Err(_) if looks < MOST_LOOKS => looks += 1,
                Err(differ) => return Err(together.error(differ)),
            }
        }
    }

    /// Opens the generation of a step on all ranks, which compare what they have found.
    fn open_step(&self, model: &ShardedModel, step: u64) -> Result<Generation, Undone> {
        let together = self.loading(model, step);
        let opened = together.attempt(|| Ok(self.store.open(step)?));
        let generation = opened.inspect_err(|undone| self.note_broken(step, undone))?;
        let path = generation.path().join("manifest.json").display().to_string();
        let lines = vec![format!("the hash {}", generation.hash())];
        together.compare(&OpenedLines { path, lines })??;
        Ok(generation)
    }

    /// Opens the checkpoint of a step, and calls `read`, on all ranks. If all succeed, the model
    /// takes the parameters that were read. Returns what `read` has read beside them, too.
    pub(super) fn load_one<T: Send>(
        &mut self,
        model: &ShardedModel,
        step: u64,
        read: impl FnOnce(SavedState<'_>) -> Result<(LoadedState, T), Problem> + Send,
    ) -> Result<(Resumed, T), Undone> {
        // The load may keep parameters that the checkpoint lacks.
        model.engine.await_slices()?;
        let generation = self.open_step(model, step)?;
        let saved = SavedState {
            context: &model.engine.context,
            generation: &generation,
            whose: Whose::One,
            options: SavedOptions::Own,
            fitting: None,
        };
        let read = self.loading(model, step).attempt(|| read(saved));
        let (loaded, beside) = read.inspect_err(|undone| self.note_broken(step, undone))?;
        let LoadedState { parameters, buffers, fitting, notes } = loaded;
        let frozen_digest = generation.manifest().frozen_digest;
        self.compare_left_out(model, step, frozen_digest, fitting.as_ref())?;
        for note in notes.iter().filter(|_| model.rank().index() == 0) {
            hsdp_warnings::warn!(step, "{note}");
        }
        take_tensors(model, parameters, &buffers);
        let unmatched = fitting.map_or_else(Unmatched::default, |fitting| fitting.lists);
        let new_parameters = [unmatched.new_parameters, unmatched.new_buffers].concat();
        let new_states = [unmatched.new_states, unmatched.new_buffer_states].concat();
        let left_over = unmatched.left_over;
        let user = generation.manifest().user.clone();
        let broken = Vec::new();
        let later = Vec::new();
        let resumed = Resumed { step, user, broken, later, new_parameters, new_states, left_over };
        Ok((resumed, beside))
    }

    /// Loads the model and the optimizer.
    fn load_step<O: Checkpointed>(
        &mut self,
        model: &mut ShardedModel,
        optimizer: &mut O,
        step: u64,
    ) -> Result<Resumed, Undone> {
        let wanted = self.wanted;
        let (resumed, (restored, applied, training)) = self.load_one(model, step, |saved| {
            let (options, fitting) = differences::check(saved, optimizer, wanted)?;
            let saved = SavedState { options, fitting: fitting.as_ref(), ..saved };
            let manifest = saved.generation.manifest();
            let applied = manifest.applied_steps();
            let training = manifest.training;
            let notes = notes(&saved, &optimizer.head(saved.context.plan.spec()));
            let parameters = parameters_of(model, &saved, saved.fitting, str::to_owned)?;
            let buffers = buffers_of(model, &saved, saved.fitting, str::to_owned)?;
            let restored = optimizer.restored(model, &saved)?;
            let loaded = LoadedState { parameters, buffers, fitting, notes };
            Ok((loaded, (restored, applied, training)))
        })?;
        *optimizer = restored;
        take(model, step, applied, training);
        Ok(resumed)
    }

    /// Compares the frozen parameters with the digest in a checkpoint that has none. Collective if
    /// checkpoints may have none.
    fn compare_frozen(
        &mut self,
        model: &ShardedModel,
        step: u64,
        saved: Option<u64>,
    ) -> Result<(), Undone> {
        let together = self.loading(model, step);
        let Some(part) = self.frozen_part(model, together)? else {
            // The model has no frozen parameters if the checkpoint may lack them. Their digest is
            // 0.
            let compared = same_frozen(saved, [0]);
            return Ok(compared.map_err(|problem| Failed { rank: Rank::new(0), problem })?);
        };
        let parts = together.tell([part])?.concat();
        let here = frozen::of_parts(&model.engine.context, &parts);
        together.agree(same_frozen(saved, [here]))
    }

    /// Compares the parameters that a checkpoint leaves out, frozen ones or those that do not fit,
    /// with its digest of frozen ones. Collective if there may be any.
    fn compare_left_out(
        &mut self,
        model: &ShardedModel,
        step: u64,
        saved: Option<u64>,
        fitting: Option<&FittingParts>,
    ) -> Result<(), Undone> {
        match fitting {
            None => self.compare_frozen(model, step, saved),
            Some(fitting) => compare_lacking(self.loading(model, step), model, saved, fitting),
        }
    }

    /// Returns the operation that loads the checkpoint of a step.
    pub(super) fn loading<'a>(&self, model: &'a ShardedModel, step: u64) -> JointOperation<'a> {
        JointOperation::new(&model.engine.context, "loading", step).about(self.number)
    }
}

/// Checks that the frozen parameters have the digest of the checkpoint, if it leaves these out.
fn same_frozen<const N: usize>(saved: Option<u64>, here: [u64; N]) -> Result<(), Problem> {
    match saved {
        Some(saved) if !here.contains(&saved) => Err(Problem::lasting(format!(
            "the checkpoint was saved with other frozen parameters than this model has: their \
             digest is {saved:#018x}, and {:#018x} here",
            here[0]
        ))),
        _ => Ok(()),
    }
}

/// Compares the parameters that a checkpoint lacks with its digest of frozen ones, where the model
/// takes what fits. The frozen parameters of the model that was saved are all of these, or those of
/// them that are frozen here. Collective.
///
/// A trained parameter that the model keeps is one of its last update, so that is compared first: a
/// load forgets it.
fn compare_lacking(
    together: JointOperation<'_>,
    model: &ShardedModel,
    saved: Option<u64>,
    fitting: &FittingParts,
) -> Result<(), Undone> {
    let context = &model.engine.context;
    let mut params = context.plan.spec().params();
    if params.any(|(id, param)| param.role == Role::Trainable && fitting.lacks(id)) {
        model.engine.check_updated()?;
        let said = together.tell([model.engine.digest_of_update()])?;
        model.engine.compare_updates(&said.concat())?;
    }
    let shards = model.engine.state().shards.clone();
    let site = together.site();
    let lacks = |unit: UnitId| {
        let mut params = context.plan.spec().params();
        params.any(|(id, _)| id.unit == unit && fitting.lacks(id))
    };
    // Replicas that divide masters gather those that the checkpoint lacks.
    let divided = |unit: &UnitId| shards[unit.index()].divides_masters() && lacks(*unit);
    let gather = |unit: UnitId| {
        let whole = export::whole_masters(site, unit, &shards[unit.index()])?;
        Ok((unit, HostShard::of_masters(whole)))
    };
    let gathered: BTreeMap<UnitId, HostShard> =
        control::between_steps(&context.world, site.step, || {
            context.plan.spec().unit_ids().filter(divided).map(gather).collect()
        })?;
    let kept = |unit: UnitId| match gathered.get(&unit) {
        Some(whole) => Ok(whole.clone()),
        None => shards[unit.index()].on_host(site),
    };
    let parts = together.run(|| {
        let is_frozen = |id: ParamId| context.plan.spec()[id].role == Role::Frozen;
        let all = frozen::part(site, kept, |id| fitting.lacks(id))?;
        let frozen = frozen::part(site, kept, |id| fitting.lacks(id) && is_frozen(id))?;
        Ok([all, frozen])
    })?;
    let parts = together.tell(parts)?;
    let here = [0, 1].map(|word| {
        let parts: Vec<u64> = parts.iter().map(|parts| parts[word]).collect();
        frozen::of_parts(context, &parts)
    });
    together.agree(same_frozen(saved, here))
}

/// Returns what a person should know of a load: values of the program that it replaces, and values
/// in the checkpoint that it leaves out.
fn notes(saved: &SavedState<'_>, own: &OptimizerHead) -> Vec<String> {
    let manifest = saved.generation.manifest();
    let takes_rates = !matches!(saved.options, SavedOptions::Own);
    let rates = options::replaced_rates(manifest, own).filter(|_| takes_rates);
    let rates = rates.map(|[ours, there]| {
        format!(
            "the learning rates of the checkpoint, {there}, replace those that the program has \
             set, {ours}: set a rate after the load, or \
             choose OtherOptions::KeepOwn"
        )
    });
    let scale = manifest.training.loss_scale;
    let scaling = saved.context.options.loss_scaling;
    let is_other = scale.is_some() != matches!(scaling, LossScaling::Dynamic(_));
    let scale = is_other.then(|| {
        let there =
            scale.map_or("none".to_owned(), |scale| format!("a dynamic one, {}", scale.value));
        format!(
            "the checkpoint has another kind of loss scale ({there}) than this model \
             ({scaling:?}), which begins with its own"
        )
    });
    let unmatched = saved.fitting.and_then(|fitting| fitting.lists.text());
    rates.into_iter().chain(scale).chain(unmatched).collect()
}

/// The problems as texts. Rank 0 also logs each as a warning.
fn told(model: &ShardedModel, broken: Vec<Failed>) -> Vec<String> {
    let is_first = model.rank().index() == 0;
    let told = |failed: Failed| {
        let what = format!("on rank {}: {}", failed.rank, failed.problem.what);
        if is_first {
            hsdp_warnings::warn!(%what, "a checkpoint is broken");
        }
        what
    };
    broken.into_iter().map(told).collect()
}

fn take(model: &ShardedModel, step: u64, applied: u64, training: TrainingHead) {
    let mut state = model.engine.state();
    let TrainingHead { loss_scale, weight_hint, .. } = training;
    state.loss_scale = state.loss_scale.resumed(loss_scale);
    state.last_weight = weight_hint;
    (state.next_step, state.committed, state.applied) = (step, step, applied);
    model.engine.context.unused.note_load(applied);
}

/// Replaces the parameters and buffers of a model, and forgets its last update: all trained
/// parameters are those of the checkpoint, or of an update that was compared.
fn take_tensors(model: &ShardedModel, parameters: Vec<Shard>, buffers: &[f32]) {
    let mut state = model.engine.state();
    // Each copy is freed once it is taken.
    for (shard, read) in state.shards.iter_mut().zip(parameters) {
        shard.take(read);
    }
    state.buffers.set_all(buffers);
    state.loads += 1;
    state.forget_update();
    model.updates.lock().moved = None;
    state.kept.forgive();
}

/// The state of a model that was read.
pub(super) struct LoadedState {
    pub(super) parameters: Vec<Shard>,
    /// The buffers, one after the other in declared order.
    pub(super) buffers: Vec<f32>,
    /// Parts that fit, if only these are taken.
    pub(super) fitting: Option<FittingParts>,
    /// Texts for a warning.
    pub(super) notes: Vec<String>,
}

/// Reads the parameters of a checkpoint. With `fitting`, those that it lacks are the model's own.
/// `source` maps the name of a parameter to that of the tensor with its values.
pub(super) fn parameters_of(
    model: &ShardedModel,
    saved: &SavedState<'_>,
    fitting: Option<&FittingParts>,
    source: impl Fn(&str) -> String,
) -> Result<Vec<Shard>, Problem> {
    let context = &model.engine.context;
    let site = saved.site();
    let generation = saved.generation;
    let has_all = differences::content_of(generation.manifest()) == Content::All;
    let lacks = |portion: &Portion| match fitting {
        Some(fitting) => fitting.lacks(portion.parameter),
        None => !has_all && portion.role == Role::Frozen,
    };
    let own = model.engine.state().shards.clone();
    let fill = |unit: UnitId, portions: &[Portion], parameters: &mut [f32]| {
        for portion in portions {
            // The frozen parameters are last, and may be left out.
            let Some(into) = parameters.get_mut(portion.range.clone()) else { break };
            match lacks(portion) {
                true => own[unit.index()].copy_to(site, portion.range.start, into)?,
                false => generation.read(&source(&portion.name), portion.offset, into)?,
            }
        }
        Ok(())
    };
    if context.device.is_some() {
        return shards_of(site, fill);
    }
    each_unit(context, |unit, portions| {
        let layout = context.plan.layout(unit);
        let len = match fitting.is_some() || has_all {
            true => layout.shard_len(),
            false => layout.trainable().shard_len,
        };
        // The copy of stored parameters is rounded when all are read.
        let is_stored = layout.stored().is_some() && len > layout.master_len();
        let made = {
            let _scope = memory::scope(if is_stored { Category::Other } else { Category::Load });
            zeros(len)
        };
        let mut parameters = made?;
        fill(unit, portions, &mut parameters)?;
        Ok(Shard::to_take(parameters, layout).map_err(Error::from)?)
    })
}

/// Reads the buffers of a checkpoint, one after the other in declared order. With `fitting`, those
/// that it lacks are the model's own. `source` maps the name of a buffer to that of the tensor with
/// its values.
pub(super) fn buffers_of(
    model: &ShardedModel,
    saved: &SavedState<'_>,
    fitting: Option<&FittingParts>,
    source: impl Fn(&str) -> String,
) -> Result<Vec<f32>, Problem> {
    let spec = saved.context.plan.spec();
    let len = spec.buffers().map(|(_, buffer)| buffer.numel()).sum();
    // The text of an error is made outside of the scope, in which memory may be short.
    let made = {
        let _scope = memory::scope(Category::Load);
        zeros(len)
    };
    let mut buffers = made?;
    let mut rest = &mut *buffers;
    for (id, buffer) in spec.buffers() {
        let (into, behind) = rest.split_at_mut(buffer.numel());
        match fitting.is_some_and(|fitting| fitting.lacking_buffers.contains(&id)) {
            true => into.copy_from_slice(model.engine.state().buffers.committed_value(id)),
            false => saved.generation.read(&source(&buffer.name), 0, into)?,
        }
        rest = behind;
    }
    Ok(buffers)
}

/// This rank's shards, made unit by unit: `fill` fills the portions of each unit, in f32.
pub(super) fn shards_of(
    site: ErrorSite<'_>,
    fill: impl Fn(UnitId, &[Portion], &mut [f32]) -> Result<(), Problem>,
) -> Result<Vec<Shard>, Problem> {
    let context = site.context;
    each_unit(context, |unit, portions| {
        // The text of an error is made outside of the scope, in which memory may be short.
        let made = {
            let _scope = context.scope_of_parameters(unit);
            zeros(context.plan.layout(unit).shard_len())
        };
        let mut parameters = made?;
        fill(unit, portions, &mut parameters)?;
        Ok(Shard::new(site, unit, parameters)?)
    })
}

/// Makes a value of each unit's portions on this rank.
fn each_unit<T>(
    context: &Context,
    make: impl Fn(UnitId, &[Portion]) -> Result<T, Problem>,
) -> Result<Vec<T>, Problem> {
    let portions = portions::of_rank(context);
    let of_unit = |unit: UnitId| {
        let [start, end] = [unit, UnitId::new(unit.index() + 1)]
            .map(|unit| portions.partition_point(|portion| portion.parameter.unit < unit));
        make(unit, &portions[start..end])
    };
    context.plan.spec().unit_ids().map(of_unit).collect()
}

fn zeros(len: usize) -> Result<Vec<f32>, Error> {
    Ok(hsdp_kernels::zeros(len)?)
}
