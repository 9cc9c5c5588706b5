//! A model with a real loss, and its optimizer.

use std::path::Path;

use hsdp::checkpoint::{CheckpointOptions, Checkpointed, Checkpoints, Resumed, Saved, StateTensor};
use hsdp::{
    AdamW, AdamWOptions, Error, ModelOptions, ModelSpec, Optimizer, Param, ParamId, Piece,
    ShardedModel, StepOptions, Unit, UnitId, World,
};
use hsdp_checkpoint::Hash;
use hsdp_tests::support::models::layer;
use hsdp_tests::support::springs::{self, Batch};
use serde_json::{Value, json};

/// Units of odd shapes with frozen parameters and whole rows; some are small for many ranks.
pub(crate) fn spec() -> ModelSpec {
    let mixed = Unit::new("mixed")
        .param(Param::new("mixed.weight", [37, 19]))
        .param(Param::new("mixed.table", [211]).frozen())
        .param(Param::new("mixed.scale", [1]));
    let rows = Unit::new("rows").param(Param::new("rows.weight", [40, 5]).rows(8));
    ModelSpec::new()
        .unit(layer("first", [13, 7]))
        .unit(mixed)
        .unit(Unit::new("still").param(Param::new("still.weight", [5, 9]).frozen()))
        .unit(rows)
}

/// A rank's part of a training run.
pub(crate) struct Training<O = AdamW> {
    pub(crate) model: ShardedModel,
    pub(crate) optimizer: O,
}

impl Training {
    pub(crate) fn new(world: World, options: &ModelOptions) -> Result<Self, Error> {
        Ok(Self::of(springs::model_of(world, &spec(), options)?))
    }

    /// The same, of a model that is there.
    pub(crate) fn of(model: ShardedModel) -> Self {
        let adamw = AdamWOptions { learning_rate: 0.05, ..AdamWOptions::default() };
        Self { optimizer: AdamW::new(&model, adamw), model }
    }
}

impl<O: Optimizer + Checkpointed> Training<O> {
    pub(crate) fn by(
        world: World,
        options: &ModelOptions,
        optimizer: impl Fn(&ShardedModel) -> O,
    ) -> Result<Self, Error> {
        let model = springs::model_of(world, &spec(), options)?;
        let optimizer = optimizer(&model);
        Ok(Self { model, optimizer })
    }

    /// Makes some steps; the loss of each, and its norm, in bits: what overflows is compared, too.
    pub(crate) fn train(&mut self, steps: u64) -> Result<Vec<[u64; 2]>, Error> {
        (0..steps).map(|_| self.step()).collect()
    }

    fn step(&mut self) -> Result<[u64; 2], Error> {
        let rank = self.model.rank().index();
        let number = self.model.committed_steps();
        let mut step = self.model.begin_step(StepOptions::default())?;
        for microbatch in 0..2 {
            springs::microbatch(&mut step, Batch::of(rank, number, microbatch))?;
        }
        let gradients = step.finish()?;
        let seen = [gradients.loss(), gradients.norm()].map(f64::to_bits);
        self.optimizer.step(&mut self.model, gradients.clip(1.0))?;
        Ok(seen)
    }

    pub(crate) fn checkpoints(&self, directory: &Path) -> Result<Checkpoints, Error> {
        Checkpoints::open(&self.model, directory, CheckpointOptions::default())
    }

    pub(crate) fn save(&self, checkpoints: &mut Checkpoints) -> Result<Saved, Error> {
        checkpoints.save(&self.model, &self.optimizer, &cursor(self.model.committed_steps()))
    }

    pub(crate) fn save_in_background(&self, checkpoints: &mut Checkpoints) -> Result<(), Error> {
        let user = cursor(self.model.committed_steps());
        checkpoints.save_in_background(&self.model, &self.optimizer, &user)
    }

    pub(crate) fn load_latest(&mut self, directory: &Path) -> Result<Option<Resumed>, Error> {
        let mut checkpoints = self.checkpoints(directory)?;
        checkpoints.load_latest(&mut self.model, &mut self.optimizer)
    }

    /// A hash of all that a rank has, bit by bit: shards, and the optimizer's state.
    pub(crate) fn bits(&self) -> Result<Hash, Error> {
        let mut bytes = Vec::new();
        let mut add = |values: &[f32]| values.iter().for_each(|it| bytes.extend(it.to_le_bytes()));
        for unit in self.model.plan().spec().unit_ids() {
            add(&self.model.shard(unit)?);
        }
        let pieces = self.model.plan().pieces_of(self.model.rank());
        for StateTensor { kind, parameter, .. } in self.optimizer.tensors() {
            let is_of = |(unit, piece): &&(UnitId, Piece)| {
                parameter == ParamId { unit: *unit, index: piece.param }
            };
            for (_, piece) in pieces.iter().filter(is_of) {
                let range = piece.param_range();
                let state = self.optimizer.state(&self.model, kind, parameter, range)?;
                add(&state.expect("it has the tensors that it names"));
            }
        }
        let updates = self.optimizer.head(self.model.plan().spec()).updates;
        bytes.extend(updates.into_values().flat_map(u64::to_le_bytes));
        Ok(Hash::of(&bytes))
    }
}

/// Returns the value that the program saves beside the model.
pub(crate) fn cursor(step: u64) -> Value {
    json!({ "cursor": 100 * step, "seed": 0.1 })
}
