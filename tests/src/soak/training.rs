//! The work of the ranks of a world: steps until all are committed or the world is over, each on
//! data of its own.

use std::time::Duration;

use hsdp::{
    AdamW, AdamWOptions, DataError, Error, NextStep, Optimizer, Sgd, SgdOptions, ShardedModel,
    StepOptions, Update, Workers, World, WorldOptions,
};
use hsdp_comm::CallError::Injected;
use hsdp_comm::{Error as CommError, Fault};

use super::draw::{Count, Recipe, Trial, Width};
use super::survivors::workers;
use crate::support::models::{Shards, shards};
use crate::support::springs::{self, Batch};
use crate::support::worlds::launched;

/// How long a rank waits before a world that hangs is ended: a freeze, and a call that was skipped,
/// take this long.
const DEADLINE: Duration = Duration::from_millis(300);

/// The same in a world without faults.
const UNDISTURBED: Duration = Duration::from_secs(60);

/// How often a rank may fail in a row before something is wrong: each fault fires once, and a loss
/// scale of 2^16 is halved until it fits.
const MOST_FAILURES: u64 = 20;

/// How a rank ended that did not panic.
#[derive(Clone, Debug, Default)]
pub(super) struct Ended {
    /// Steps that it committed.
    pub(super) committed: u64,
    /// Its shards at the end; none if it never had a model.
    pub(super) shards: Shards,
    /// Steps that failed, and after which the world went on.
    pub(super) failed_steps: u64,
    /// Why the world ended early, if it did.
    pub(super) fatal: Option<String>,
    /// Its faults that have not fired.
    pub(super) armed: Vec<Fault>,
    /// Whether its last update has failed in its middle. The others have made theirs.
    pub(super) is_half_updated: bool,
    /// Worker threads that there were at the end, where they are expected and can be counted.
    pub(super) workers: usize,
}

/// The outcome of a step.
enum Made {
    /// This.
    Update(Update),
    /// One that has failed in its middle, for this reason: the world ends.
    HalfUpdate(String),
    /// There is none: ranks are out of data.
    End,
}

impl Trial {
    /// Trains for as many steps as there are data for, but for no more than `steps`, with `faults`;
    /// by rank how it ended, or the message of its panic.
    pub(super) fn train(&self, steps: u64, faults: Vec<Fault>) -> Vec<Result<Ended, String>> {
        // Where nothing goes wrong nobody waits in vain, however busy the machine is.
        let deadline = if faults.is_empty() { UNDISTURBED } else { DEADLINE };
        let workers = match self.width {
            // Also where ranks outnumber the cores, and would do without.
            Width::Wide => Workers::Count(2),
            Width::Narrow => Workers::Auto,
        };
        let between = self.between;
        let options =
            WorldOptions { deadline, faults, workers, between, ..WorldOptions::default() };
        let ranks = self.options.mesh.world_size();
        let ended = launched(ranks, options, |world| self.rank(world, steps));
        ended.into_iter().map(|ended| ended.map_err(|failure| failure.to_string())).collect()
    }

    fn rank(&self, world: World, steps: u64) -> Ended {
        let mut ended = self.train_on(world.clone(), steps);
        ended.armed = world.armed_faults();
        if self.width == Width::Wide {
            ended.workers = workers();
        }
        ended
    }

    fn train_on(&self, world: World, steps: u64) -> Ended {
        let mut ended = Ended::default();
        let made = ShardedModel::new(world, self.spec(), self.options.clone(), springs::initial);
        let mut model = match made {
            Ok(model) => model,
            // A world that is refused would be skipped in silence: nothing of it is tested.
            Err(error @ Error::Options { .. }) => panic!("the model is refused: {error}"),
            Err(error) => return Ended { fatal: Some(error.to_string()), ..ended },
        };
        let mut optimizer = self.optimizer.of(&model);
        ended.shards = shards(&model);
        let mut failed_in_a_row = 0;
        while ended.committed < steps && ended.fatal.is_none() {
            match self.step(&mut model, &mut *optimizer, ended.committed) {
                Ok(Made::Update(Update::Applied)) => {
                    ended.committed += 1;
                    ended.shards = held(&model).unwrap_or_default();
                    failed_in_a_row = 0;
                }
                Ok(Made::End) | Err(Error::Data(DataError::UnevenInputs { .. })) => break,
                Ok(Made::HalfUpdate(reason)) => {
                    ended.is_half_updated = true;
                    ended.fatal = Some(reason);
                }
                // Nothing was updated: what is held is what was committed last. `survivors`
                // compares.
                Ok(Made::Update(Update::Skipped(_))) => failed_in_a_row += 1,
                Err(error) if error.is_fatal() || is_left(&error) => {
                    ended.fatal = Some(error.to_string());
                }
                Err(_) => failed_in_a_row += 1,
            }
            ended.failed_steps += u64::from(failed_in_a_row > 0);
            if let Some(held) = held(&model).filter(|_| !ended.shards.is_empty()) {
                assert!(same_bits(&held, &ended.shards), "a step that failed left a trace");
            }
            assert!(failed_in_a_row < MOST_FAILURES, "steps fail without end");
        }
        ended
    }

    /// One step on the data of the `number`-th that is committed.
    fn step(
        &self,
        model: &mut ShardedModel,
        optimizer: &mut dyn Optimizer,
        number: u64,
    ) -> Result<Made, Error> {
        let rank = model.rank().index();
        let begin = match self.count {
            Count::Given => StepOptions::microbatches(self.microbatches),
            Count::AsManyAsCome => StepOptions::as_many_as_come(),
        };
        let has_data = number < self.data[rank];
        let begin = if has_data { begin } else { begin.without_data() };
        let NextStep::Step(mut step) = model.next_step(begin)? else { return Ok(Made::End) };
        for microbatch in (0..self.microbatches).filter(|_| has_data) {
            springs::microbatch(&mut step, Batch::of(rank, number, microbatch))?;
        }
        let gradients = step.finish()?;
        match optimizer.step(model, gradients) {
            // A gather of slices was refused on this rank alone.
            Err(Error::Comm(CommError::Call(reason))) if model.plan().divides_state() => {
                Ok(Made::HalfUpdate(reason.to_string()))
            }
            updated => updated.map(Made::Update),
        }
    }
}

/// Returns the shards of a rank; `None` if gathers of slices of the last update were lost, and are
/// not made again yet.
fn held(model: &ShardedModel) -> Option<Shards> {
    if !model.plan().divides_state() {
        return Some(shards(model));
    }
    model.plan().spec().unit_ids().map(|unit| model.shard(unit).ok()).collect()
}

/// A rank that was told to leave gets no other error.
fn is_left(error: &Error) -> bool {
    matches!(error, Error::Comm(CommError::Call(Injected { .. })))
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
                let learning_rate = 1e-3;
                let options = SgdOptions { momentum: 0.9, learning_rate, ..SgdOptions::default() };
                Box::new(Sgd::new(model, options))
            }
        }
    }
}
