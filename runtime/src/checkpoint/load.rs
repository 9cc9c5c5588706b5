//! Loading: each rank reads its own elements, and either all ranks take them or none does.

use std::sync::Arc;

use hsdp_checkpoint::{Generation, Manifest, Training};
use hsdp_sharding::{Role, UnitId, UnitLayout};
use serde_json::Value;

use super::checkpointed::Whose;
use super::portions::{self, Portion};
use super::together::{Failed, Kind, Problem, Together};
use super::{Checkpointed, Checkpoints, Content, SavedState, differences, frozen};
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
    /// the newest, it is of another model or optimizer (the error lists all differences), it has no frozen parameters
    /// ([`Content::Trainable`]) and these checkpoints have [`Content::All`] or the model has other ones, or an earlier save has failed
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
        let together = loading(model, model.committed_steps()).about(self.number);
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
        &mut self,
        model: &mut ShardedModel,
        optimizer: &mut O,
        step: u64,
    ) -> Result<Result<Resumed, Failed>, Error> {
        let read = loading(model, step).about(self.number).attempt(|| {
            let (fabric, generation) = (&model.engine.fabric, self.store.open(step)?);
            let saved = SavedState { fabric, generation: &generation, whose: Whose::One };
            differences::check(&saved, optimizer, self.content)?;
            Ok((read(&saved)?, optimizer.restored(model, &saved)?))
        });
        let read = match read?.inspect_err(|failed| self.note_broken(step, failed)) {
            Ok(read) => read,
            Err(failed) => return Ok(Err(failed)),
        };
        let (Read { parameters, frozen_digest, training, user }, restored) = read;
        if let Err(failed) = self.compare_frozen(model, step, frozen_digest)? {
            return Ok(Err(failed));
        }
        let placed =
            loading(model, step).about(self.number).attempt(|| Ok(parameters.placed(model)?));
        let parameters = match placed? {
            Ok(placed) => placed,
            Err(failed) => return Ok(Err(failed)),
        };
        *optimizer = restored;
        take(model, parameters, (step, training));
        Ok(Ok(Resumed { step, user, broken: Vec::new() }))
    }

    /// Compares the frozen parameters with the digest in a checkpoint that has none. Collective if checkpoints may have none.
    fn compare_frozen(
        &mut self,
        model: &ShardedModel,
        step: u64,
        saved: Option<u64>,
    ) -> Result<Result<(), Failed>, Error> {
        let together = loading(model, step).about(self.number);
        let Some(part) = self.frozen_part(model, together)? else { return Ok(Ok(())) };
        let parts: Vec<u64> = together.tell([part])?.into_iter().map(|[part]| part).collect();
        let here = frozen::of_parts(&model.engine.fabric, &parts);
        together.agree(match saved {
            Some(saved) if saved != here => Err(Problem::lasting(format!(
                "the checkpoint was saved with other frozen parameters than this model has: their digest is {saved:#018x}, and {here:#018x} here"
            ))),
            _ => Ok(()),
        })
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

fn take(model: &ShardedModel, parameters: Parameters, (step, training): (u64, Training)) {
    let mut state = model.engine.state();
    let Training { loss_scale, weight_hint } = training;
    state.loss_scale = state.loss_scale.resumed(loss_scale);
    state.last_weight = weight_hint;
    match parameters {
        Parameters::All(shards) => state.shards = shards,
        Parameters::Trained(units) => {
            for (shard, trained) in state.shards.iter_mut().zip(units) {
                shard.set_trained(&trained);
            }
        }
    }
    (state.next_step, state.committed) = (step, step);
    state.loads += 1;
    // All trained parameters are those of the checkpoint, whatever an update has done to the earlier ones.
    (state.half_updated, state.updated, state.moved) = (None, Updated::default(), None);
    model.engine.fabric.kept.forgive();
}

/// The state that was read.
struct Read {
    parameters: Parameters,
    frozen_digest: Option<u64>,
    training: Training,
    user: Value,
}

/// The parameters that were read, by unit.
enum Parameters {
    All(Vec<Shard>),
    /// The trained elements of this rank's shards, in f32. They take the place of the present ones, and frozen parameters stay.
    Trained(Vec<Vec<f32>>),
}

impl Parameters {
    /// The same, where the model has nothing left to do that can fail: on a device, new shards.
    fn placed(self, model: &ShardedModel) -> Result<Self, Error> {
        let fabric = &model.engine.fabric;
        let Self::Trained(units) = self else { return Ok(self) };
        if fabric.device.is_none() {
            return Ok(Self::Trained(units));
        }
        let shards = units.into_iter().enumerate().map(|(unit, trained)| {
            let unit = UnitId::new(unit);
            let mut parameters = model.shard(unit)?.to_vec();
            parameters[..trained.len()].copy_from_slice(&trained);
            Shard::new(fabric, (unit, parameters))
        });
        Ok(Self::All(shards.collect::<Result<_, _>>()?))
    }
}

fn read(saved: &SavedState<'_>) -> Result<Read, Problem> {
    let SavedState { fabric, generation, .. } = *saved;
    let Manifest { frozen_digest, training, user, .. } = generation.manifest();
    let parameters = match differences::content_of(generation.manifest()) {
        Content::All => Parameters::All(shards_of(fabric, |_, portions, parameters| {
            for Portion { name, offset, range, .. } in portions {
                generation.read(name, *offset, &mut parameters[range.clone()])?;
            }
            Ok(())
        })?),
        Content::Trainable => Parameters::Trained(trained(fabric, generation)?),
    };
    let (frozen_digest, training, user) = (*frozen_digest, *training, user.clone());
    Ok(Read { parameters, frozen_digest, training, user })
}

/// The trained elements of this rank's shards, by unit.
fn trained(fabric: &Fabric, generation: &Generation) -> Result<Vec<Vec<f32>>, Problem> {
    let zeros = |layout: &Arc<UnitLayout>| zeros(layout.trainable().shard_len);
    let mut units = fabric.plan.layouts().iter().map(zeros).collect::<Result<Vec<_>, _>>()?;
    let portions = portions::of_rank(fabric).into_iter();
    for portion in portions.filter(|it| it.role == Role::Trainable) {
        let elements = &mut units[portion.unit.index()][portion.range];
        generation.read(&portion.name, portion.offset, elements)?;
    }
    Ok(units)
}

/// This rank's shards, made unit by unit: `fill` fills the portions of each unit, in f32.
pub(super) fn shards_of(
    fabric: &Fabric,
    fill: impl Fn(UnitId, &[Portion], &mut [f32]) -> Result<(), Problem>,
) -> Result<Vec<Shard>, Problem> {
    let portions = portions::of_rank(fabric);
    let shard = |unit| {
        // The text of an error is made outside of the scope, in which memory may be short.
        let made = {
            let _scope = fabric.scope_of_parameters(unit);
            zeros(fabric.plan.layout(unit).shard_len())
        };
        let mut parameters = made?;
        let [start, end] = [unit, UnitId::new(unit.index() + 1)]
            .map(|unit| portions.partition_point(|portion| portion.unit < unit));
        fill(unit, &portions[start..end], &mut parameters)?;
        Ok(Shard::new(fabric, (unit, parameters))?)
    };
    fabric.plan.spec().unit_ids().map(shard).collect()
}

fn zeros(len: usize) -> Result<Vec<f32>, Error> {
    Ok(hsdp_kernels::zeros(len)?)
}
