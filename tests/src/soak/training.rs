//! What the ranks of a world do: steps until all are committed or the world is over, each on data of its own.

use std::sync::Arc;
use std::time::Duration;

use hsdp::{
    AdamW, AdamWOptions, Error, Momentum, Optimizer, Sgd, SgdOptions, ShardedModel, StepOptions,
    Update, World, WorldOptions,
};
use hsdp_comm::Fault;

use super::draw::{Count, Recipe, Trial};
use crate::support::models::three_units;
use crate::support::springs::{self, Batch};

/// How long a rank waits before a world that hangs is ended: a freeze, and a call that was skipped, take this long.
const DEADLINE: Duration = Duration::from_millis(300);

/// How often a rank may fail before something is wrong: each fault fires once.
const MOST_FAILURES: u64 = 10;

/// Shards by unit, as they lie in a rank.
pub(super) type Shards = Vec<Arc<Vec<f32>>>;

/// How a rank ended that did not panic.
#[derive(Clone, Debug)]
pub(super) struct Ended {
    /// Steps that it committed.
    pub(super) committed: u64,
    /// Its shards at the end; none if it never had a model.
    pub(super) shards: Shards,
    /// Steps that failed, and after which the world went on.
    pub(super) failed_steps: u64,
    /// Why the world ended early, if it did.
    pub(super) fatal: Option<String>,
}

impl Trial {
    /// Trains for `steps` steps with `faults`; by rank how it ended, or the message of its panic.
    pub(super) fn train(&self, steps: u64, faults: Vec<Fault>) -> Vec<Result<Ended, String>> {
        let options = WorldOptions { deadline: DEADLINE, faults, ..WorldOptions::default() };
        let ranks = self.options.mesh.world_size();
        let ended = hsdp::launch(ranks, options, |world| self.rank(world, steps));
        ended.into_iter().map(|ended| ended.map_err(|failure| failure.to_string())).collect()
    }

    fn rank(&self, world: World, steps: u64) -> Ended {
        let mut ended = Ended { committed: 0, shards: Vec::new(), failed_steps: 0, fatal: None };
        let made = ShardedModel::new(world, three_units(), self.options.clone(), springs::initial);
        let mut model = match made {
            Ok(model) => model,
            Err(error) => return Ended { fatal: Some(error.to_string()), ..ended },
        };
        let mut optimizer = self.optimizer.of(&model);
        ended.shards = shards(&model);
        while ended.committed < steps && ended.fatal.is_none() {
            match self.step(&mut model, &mut *optimizer, ended.committed) {
                Ok(Update::Applied) => {
                    ended.committed += 1;
                    ended.shards = shards(&model);
                }
                // Nothing was updated: what is held is what was committed last. `survivors` compares.
                Ok(Update::Skipped(_)) => ended.failed_steps += 1,
                Err(error) if error.is_fatal() || is_left(&error) => {
                    ended.fatal = Some(error.to_string());
                }
                Err(_) => ended.failed_steps += 1,
            }
            assert!(same_bits(&shards(&model), &ended.shards), "a step that failed left a trace");
            assert!(ended.failed_steps < MOST_FAILURES, "steps fail without end");
        }
        ended
    }

    /// One step on the data of the `number`-th that is committed.
    fn step(
        &self,
        model: &mut ShardedModel,
        optimizer: &mut dyn Optimizer,
        number: u64,
    ) -> Result<Update, Error> {
        let rank = model.rank().index();
        let mut step = model.begin_step(match self.count {
            Count::Given => StepOptions::microbatches(self.microbatches),
            Count::AsManyAsCome => StepOptions::as_many_as_come(),
        })?;
        for microbatch in 0..self.microbatches {
            springs::microbatch(&mut step, Batch::of(rank, number, microbatch))?;
        }
        let gradients = step.finish()?;
        optimizer.step(model, gradients)
    }
}

/// A rank that was told to leave gets no other error.
fn is_left(error: &Error) -> bool {
    matches!(error, Error::Comm(hsdp_comm::Error::Injected { .. }))
}

fn shards(model: &ShardedModel) -> Shards {
    model.plan().spec().unit_ids().map(|unit| model.shard(unit)).collect()
}

/// Whether two ranks, or one at two times, hold the same bits.
pub(super) fn same_bits(one: &Shards, other: &Shards) -> bool {
    let bits = |shards: &Shards| -> Vec<u32> {
        shards.iter().flat_map(|shard| shard.iter().map(|value| value.to_bits())).collect()
    };
    bits(one) == bits(other)
}

impl Recipe {
    fn of(self, model: &ShardedModel) -> Box<dyn Optimizer> {
        match self {
            Self::AdamW => {
                let options = AdamWOptions { learning_rate: 0.01, ..AdamWOptions::default() };
                Box::new(AdamW::new(model, options))
            }
            Self::Momentum => {
                let momentum = Momentum::Classic(0.9);
                let options = SgdOptions { momentum, learning_rate: 1e-3, ..SgdOptions::default() };
                Box::new(Sgd::new(model, options))
            }
        }
    }
}
