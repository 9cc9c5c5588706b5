//! Loading: each rank reads its own elements, and either all ranks take them or none does.

use std::collections::BTreeSet;
use std::sync::Arc;

use hsdp_checkpoint::{Generation, Manifest, OptimizerHead, STATE, Training, state_tensor};
use hsdp_kernels::memory::{self, Category};
use hsdp_sharding::{Role, UnitId, UnitLayout};
use serde_json::Value;

use super::portions::{self, Portion};
use super::together::{Failed, Kind, Problem, Together};
use super::{Checkpointed, Checkpoints, OptimizerState};
use crate::engine::fabric::Fabric;
use crate::engine::shard::Shard;
use crate::error::Error;
use crate::model::ShardedModel;
use crate::updated::Updated;

/// A checkpoint from which a model goes on.
#[derive(Clone, Debug, PartialEq)]
pub struct Resumed {
    /// Steps that the optimizer had completed when the checkpoint was saved.
    pub step: u64,
    /// The value that the program saved with the checkpoint.
    pub user: Value,
    /// The problems of newer checkpoints that were broken, one text for each.
    pub broken: Vec<String>,
}

/// The value for "no step" where ranks exchange a step.
const NONE: u64 = u64::MAX;

impl Checkpoints {
    /// Loads the newest intact checkpoint into the model and the optimizer, whatever mesh it was saved on. `None` if
    /// there is no checkpoint at all. The result lists newer checkpoints that are broken, and rank 0 logs each
    /// of them as a warning. The call waits for a save in the background that is under way.
    ///
    /// Collective over the model's world, between steps.
    ///
    /// # Errors
    /// [`Error::Checkpoint`], the same on all ranks, if all checkpoints are broken, a newer version of this program wrote
    /// the newest, it is of another model or optimizer (the error lists all differences), or an earlier save has failed
    /// and no call has said so. The model and the optimizer are then as they were. [`Error::Misuse`] as for
    /// [`save`](Self::save); [`Error::Comm`].
    pub fn load_latest<O: Checkpointed>(
        &mut self,
        model: &mut ShardedModel,
        optimizer: &mut O,
    ) -> Result<Option<Resumed>, Error> {
        self.begin_load(model, optimizer)?;
        let mut broken: Vec<Failed> = Vec::new();
        let mut before = NONE;
        while let Some(step) = self.newest_before(model, before)? {
            match self.load_step(model, optimizer, step)? {
                Ok(resumed) => return Ok(Some(Resumed { broken: told(model, broken), ..resumed })),
                Err(failed) if failed.problem.kind == Kind::Damage => broken.push(failed),
                Err(failed) => return Err(loading(model, step).error(failed)),
            }
            before = step;
        }
        match broken.first() {
            None => Ok(None),
            Some(newest) => {
                let rank = newest.rank;
                let what =
                    format!("all checkpoints are broken: {}", told(model, broken).join("; "));
                let problem = Problem { kind: Kind::Damage, what };
                Err(loading(model, before).error(Failed { rank, problem }))
            }
        }
    }

    /// Loads the checkpoint of `step` into the model and the optimizer.
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
        let loaded = self.load_step(model, optimizer, step)?;
        loaded.map_err(|failed| loading(model, step).error(failed))
    }

    /// Waits for a save that is under way: without that it would depend on timing which checkpoint is the latest.
    fn begin_load<O: Checkpointed>(
        &mut self,
        model: &ShardedModel,
        optimizer: &O,
    ) -> Result<(), Error> {
        super::check(model, optimizer, "loading")?;
        self.settle(model)
    }

    /// Keeps a broken generation from taking the place of a readable one in the next save.
    fn note_broken(&self, step: u64, failed: &Failed) {
        if let (Some(lease), Kind::Damage) = (&self.lease, failed.problem.kind) {
            lease.lock().note_broken(step);
        }
    }

    /// The newest generation before a step, by its name, as rank 0 sees it.
    fn newest_before(&self, model: &ShardedModel, before: u64) -> Result<Option<u64>, Error> {
        let together = loading(model, model.committed_steps());
        let is_first = model.rank().index() == 0;
        let newest = together.run(|| {
            let steps = if is_first { self.store.steps()? } else { Vec::new() };
            Ok(steps.into_iter().rev().find(|step| *step < before))
        })?;
        let said = together.tell([newest.unwrap_or(NONE)])?;
        Ok(Some(said[0][0]).filter(|step| *step != NONE))
    }

    /// Reads on all ranks. If all succeed, the model and the optimizer take the state that was read.
    fn load_step<O: Checkpointed>(
        &self,
        model: &mut ShardedModel,
        optimizer: &mut O,
        step: u64,
    ) -> Result<Result<Resumed, Failed>, Error> {
        let read = loading(model, step).attempt(|| {
            let generation = self.store.open(step)?;
            read(&model.engine.fabric, (&generation, optimizer))
        });
        let read = match read?.inspect_err(|failed| self.note_broken(step, failed)) {
            Ok(read) => read,
            Err(failed) => return Ok(Err(failed)),
        };
        let Read { shards, state, training, user } = read;
        let restored = loading(model, step).attempt(|| Ok(optimizer.restored(model, state)?));
        *optimizer = match restored? {
            Ok(restored) => restored,
            Err(failed) => return Ok(Err(failed)),
        };
        take(model, shards, (step, training));
        Ok(Ok(Resumed { step, user, broken: Vec::new() }))
    }
}

fn loading(model: &ShardedModel, step: u64) -> Together<'_> {
    Together::new(&model.engine.fabric, ("loading", step))
}

/// The problems as texts. Rank 0 also logs each as a warning.
fn told(model: &ShardedModel, broken: Vec<Failed>) -> Vec<String> {
    let is_first = model.rank().index() == 0;
    let told = |failed: Failed| {
        let what = format!("on rank {}: {}", failed.rank, failed.problem.what);
        if is_first {
            tracing::warn!(%what, "a checkpoint is broken");
        }
        what
    };
    broken.into_iter().map(told).collect()
}

fn take(model: &ShardedModel, shards: Vec<Shard>, (step, training): (u64, Training)) {
    let mut state = model.engine.state();
    let Training { loss_scale, weight_hint } = training;
    state.loss_scale = state.loss_scale.resumed(loss_scale);
    (state.shards, state.last_weight) = (shards, weight_hint);
    (state.next_step, state.committed) = (step, step);
    state.loads += 1;
    // All shards are those of the checkpoint, whatever an update has done to the earlier ones.
    (state.half_updated, state.updated) = (None, Updated::default());
    model.engine.fabric.recycled.forgive();
}

/// The state that was read.
struct Read {
    /// By unit.
    shards: Vec<Shard>,
    state: OptimizerState,
    training: Training,
    user: Value,
}

fn read<O: Checkpointed>(
    fabric: &Fabric,
    (generation, optimizer): (&Generation, &O),
) -> Result<Read, Problem> {
    let manifest = generation.manifest();
    let wrong = differences(fabric, (manifest, optimizer));
    if !wrong.is_empty() {
        let what =
            format!("{} is of another model: {}", generation.path().display(), wrong.join("; "));
        return Err(Problem { kind: Kind::Lasting, what });
    }
    let portions = portions::of_rank(fabric);
    let shards = shards_of(fabric, |_, portions, parameters| {
        for Portion { name, offset, range, .. } in portions {
            generation.read(name, *offset, &mut parameters[range.clone()])?;
        }
        Ok(())
    })?;
    let of_kind = |kind: &&str| {
        let mut units = zeroed_state(fabric)?;
        for portion in portions.iter().filter(|it| it.role == Role::Trainable) {
            let elements = &mut units[portion.unit.index()][portion.range.clone()];
            generation.read(&state_tensor(kind, &portion.name), portion.offset, elements)?;
        }
        Ok::<_, Problem>(units)
    };
    let elements = optimizer.state_kinds().iter().map(of_kind).collect::<Result<_, _>>()?;
    let state = OptimizerState { elements, updates: updates(fabric, manifest) };
    Ok(Read { shards, state, training: manifest.training, user: manifest.user.clone() })
}

/// This rank's shards, made unit by unit: `fill` fills the portions of each unit, in f32.
pub(super) fn shards_of(
    fabric: &Fabric,
    fill: impl Fn(UnitId, &[Portion], &mut [f32]) -> Result<(), Problem>,
) -> Result<Vec<Shard>, Problem> {
    let portions = portions::of_rank(fabric);
    let shard = |unit| {
        let mut parameters = {
            let _scope = fabric.scope_of_parameters(unit);
            zeros(fabric.plan.layout(unit).shard_len())?
        };
        let [start, end] = [unit, UnitId::new(unit.index() + 1)]
            .map(|unit| portions.partition_point(|portion| portion.unit < unit));
        fill(unit, &portions[start..end], &mut parameters)?;
        Ok(Shard::new(fabric, (unit, parameters))?)
    };
    fabric.plan.spec().unit_ids().map(shard).collect()
}

/// Zeros for one kind of an optimizer's state, by unit.
fn zeroed_state(fabric: &Fabric) -> Result<Vec<Vec<f32>>, Error> {
    let of_unit = |layout: &Arc<UnitLayout>| {
        let _scope = memory::scope(Category::Optimizer);
        zeros(layout.trainable().shard_len)
    };
    fabric.plan.layouts().iter().map(of_unit).collect()
}

fn zeros(len: usize) -> Result<Vec<f32>, Error> {
    Ok(hsdp_kernels::zeros(len)?)
}

fn updates(fabric: &Fabric, manifest: &Manifest) -> Vec<Vec<u64>> {
    let counted = manifest.optimizer.as_ref().map(|optimizer| &optimizer.updates);
    let of = |name: &str| counted.and_then(|counted| counted.get(name)).copied().unwrap_or(0);
    let units = fabric.plan.spec().units().iter();
    units.map(|unit| unit.params.iter().map(|param| of(&param.name)).collect()).collect()
}

/// All differences between a checkpoint and this model and optimizer.
fn differences<O: Checkpointed>(
    fabric: &Fabric,
    (manifest, optimizer): (&Manifest, &O),
) -> Vec<String> {
    let mut wrong = Vec::new();
    match &manifest.optimizer {
        Some(OptimizerHead { kind, .. }) if kind == O::KIND => {}
        Some(OptimizerHead { kind, .. }) => {
            wrong.push(format!("its optimizer is {}, not {}", kind.escape_debug(), O::KIND));
            return wrong;
        }
        None => wrong.push("it has no optimizer".to_owned()),
    }
    wrong.extend(missing_counts(fabric, (manifest, optimizer)));
    let mut expected = BTreeSet::new();
    for param in fabric.plan.spec().units().iter().flat_map(|unit| &unit.params) {
        let kinds = if param.role == Role::Trainable { optimizer.state_kinds() } else { &[] };
        let states = kinds.iter().map(|kind| state_tensor(kind, &param.name));
        for name in [param.name.clone()].into_iter().chain(states) {
            let shape: Vec<u64> = param.shape.iter().map(|size| *size as u64).collect();
            match manifest.tensors.get(&name) {
                None => wrong.push(format!("`{name}` is missing")),
                Some(tensor) if tensor.shape != shape => {
                    wrong.push(format!("`{name}` has shape {:?}, not {shape:?}", tensor.shape));
                }
                Some(_) => {}
            }
            expected.insert(name);
        }
    }
    let left_over = manifest.tensors.keys().filter(|name| !expected.contains(*name));
    wrong.extend(left_over.map(|name| {
        let what = if name.starts_with(STATE) { "state" } else { "a parameter" };
        format!("`{}` is {what} that this model does not have", name.escape_debug())
    }));
    wrong
}

/// The parameters whose updates the optimizer counts and the checkpoint does not, one text for each.
fn missing_counts<O: Checkpointed>(
    fabric: &Fabric,
    (manifest, optimizer): (&Manifest, &O),
) -> Vec<String> {
    let Some(OptimizerHead { updates, .. }) = &manifest.optimizer else { return Vec::new() };
    let spec = fabric.plan.spec();
    let counted = spec.unit_ids().filter(|unit| !optimizer.updates(*unit).is_empty());
    let names = counted.flat_map(|unit| spec[unit].params.iter().map(|param| &param.name));
    let missing = names.filter(|name| !updates.contains_key(*name));
    missing.map(|name| format!("the number of updates of `{name}` is missing")).collect()
}
