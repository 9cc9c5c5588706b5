//! The training into which faults are put: four ranks on a 2 x 2 mesh, AdamW, a few steps of two
//! microbatches. And what must hold of it whatever happens: each rank has the parameters of the
//! steps that were committed, bit for bit.

use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use hsdp::{
    AdamW, AdamWOptions, Error, GradientError, ModelOptions, ModelSpec, Optimizer, Rank,
    ShardedModel, Step, StepOptions, Update, World, WorldOptions,
};
use hsdp_comm::{Fault, FaultKind, FaultPlace, RankFailure};
use hsdp_tests::support::models::{Shards, layer, shards};
use hsdp_tests::support::springs::{self, Batch};
use hsdp_tests::support::warnings::Said;
use hsdp_tests::support::worlds::{DEADLINE, launched, mesh};

use crate::runner::{Happened, becomes};

pub(crate) const RANKS: usize = 4;

/// Steps that are applied.
const STEPS: u64 = 5;

const MICROBATCHES: usize = 2;

/// The step in which something goes wrong: two are committed before it.
pub(crate) const FAULTY: u64 = 2;

/// Who does it.
pub(crate) const CULPRIT: usize = 2;

/// The others.
pub(crate) const SURVIVORS: [usize; 3] = [0, 1, 3];

/// All of them.
pub(crate) const ALL: [usize; RANKS] = [0, 1, 2, 3];

/// A step may fail so often before something else is wrong.
const MOST_FAILURES: usize = 4;

/// Where in a step a rank's own code runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum At {
    /// Before the step begins.
    Start,
    /// Before this microbatch.
    Batch(usize),
    /// When all microbatches are done and the step is not finished.
    End,
}

/// What follows from what a rank's own code did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Go {
    On,
    /// The rank returns from its closure.
    Home,
}

/// A rank's own code: where it is, in the how manieth step that is applied.
type User<'a> = &'a (dyn Fn(&World, At, u64) -> Result<Go, Error> + Sync);

/// A training, with what disturbs it.
pub(crate) struct Training<'a> {
    pub(crate) model: ModelOptions,
    pub(crate) spec: ModelSpec,
    pub(crate) world: WorldOptions,
    pub(crate) user: User<'a>,
    /// Who listens to its warnings.
    pub(crate) said: Said,
    /// Steps that are applied.
    pub(crate) steps: u64,
    /// Microbatches of each.
    pub(crate) microbatches: usize,
    /// Whether models record what they do.
    pub(crate) recording: Recording,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Recording {
    Off,
    On,
}

impl Training<'_> {
    /// One that nothing disturbs.
    pub(crate) fn new() -> Self {
        Self {
            model: ModelOptions::on(mesh(2, 2)),
            spec: equal_units(),
            world: WorldOptions { deadline: DEADLINE, ..WorldOptions::default() },
            user: &|_, _, _| Ok(Go::On),
            said: Said::default(),
            steps: STEPS,
            microbatches: MICROBATCHES,
            recording: Recording::Off,
        }
    }

    /// One in which the culprit commits a fault in the faulty step.
    pub(crate) fn with_fault(place: impl Into<FaultPlace>, kind: FaultKind) -> Self {
        let faults = vec![Fault::at(Rank::new(CULPRIT), FAULTY, place, kind)];
        let new = Self::new();
        Self { world: WorldOptions { faults, ..new.world.clone() }, ..new }
    }

    pub(crate) fn run(&self) -> Run {
        let faulty_step = OnceLock::new();
        let rank = |world: World| {
            tracing::subscriber::with_default(self.said.clone(), || self.rank(world, &faulty_step))
        };
        let ranks = launched(self.model.mesh.world_size(), self.world.clone(), rank);
        Run { ranks, faulty_step: faulty_step.get().copied() }
    }

    fn rank(&self, world: World, faulty_step: &OnceLock<Instant>) -> Fared {
        let mut fared = Fared::default();
        if let Err(error) = self.train(world, faulty_step, &mut fared) {
            fared.note(error);
        }
        fared
    }

    fn train(
        &self,
        world: World,
        faulty_step: &OnceLock<Instant>,
        fared: &mut Fared,
    ) -> Result<(), Error> {
        let options = self.model.clone();
        let spec = self.spec.clone();
        let mut model = springs::model_of(world.clone(), &spec, &options)?;
        let mut adamw = AdamW::new(&model, AdamWOptions::default());
        if self.recording == Recording::On {
            model.record_events();
        }
        fared.history.push(shards(&model));
        while fared.applied() < self.steps {
            let number = fared.applied();
            if (world.rank().index(), number) == (CULPRIT, FAULTY) {
                faulty_step.get_or_init(Instant::now);
            }
            if (self.user)(&world, At::Start, number)? == Go::Home {
                break;
            }
            match self.attempt(&mut model, &mut adamw, number) {
                Ok(Update::Applied) => fared.history.push(shards(&model)),
                Ok(Update::Skipped(found)) => {
                    fared.skipped += 1;
                    fared.note(Error::Gradients(GradientError::NonFinite(found)));
                }
                Err(error) if error.is_fatal() => return Err(error),
                Err(error) => fared.note(error),
            }
            assert!(fared.told.len() <= MOST_FAILURES, "steps fail without end: {:?}", fared.told);
        }
        fared.events = model.take_events().len();
        Ok(())
    }

    /// One attempt at the step that is to be applied as the `number`-th.
    fn attempt(
        &self,
        model: &mut ShardedModel,
        adamw: &mut AdamW,
        number: u64,
    ) -> Result<Update, Error> {
        let world = model.world().clone();
        let mut step = model.begin_step(StepOptions::microbatches(self.microbatches))?;
        if let Err(error) = self.microbatches(&world, &mut step, number) {
            if self.vanishes(world.rank()) {
                // Who has vanished announces nothing: that it gives up its step must not be what
                // the others hear.
                becomes(|| world.end().is_some());
                return Err(world.end().map_or(error, Error::Comm));
            }
            return Err(error);
        }
        let gradients = step.finish()?;
        adamw.step(model, gradients.clip(1.0))
    }

    fn microbatches(&self, world: &World, step: &mut Step<'_>, number: u64) -> Result<(), Error> {
        for microbatch in 0..self.microbatches {
            (self.user)(world, At::Batch(microbatch), number)?;
            springs::microbatch(step, Batch::of(world.rank().index(), number, microbatch))?;
        }
        (self.user)(world, At::End, number).map(drop)
    }

    fn vanishes(&self, rank: Rank) -> bool {
        let leaves = |fault: &Fault| fault.rank == rank && fault.kind == FaultKind::Leave;
        self.world.faults.iter().any(leaves)
    }
}

/// Three units of one shape: what is meant for one fits the others.
fn equal_units() -> ModelSpec {
    ["first", "second", "third"]
        .into_iter()
        .fold(ModelSpec::new(), |spec, name| spec.unit(layer(name, [8, 6])))
}

fn bits(shards: &Shards) -> Vec<Vec<u32>> {
    let bits = |shard: &Arc<Vec<f32>>| shard.iter().map(|value| value.to_bits()).collect();
    shards.iter().map(bits).collect()
}

/// How a rank fared.
#[derive(Debug, Default)]
pub(crate) struct Fared {
    /// Errors that it was told, in order, and when.
    pub(crate) told: Vec<(Error, Instant)>,
    /// Its parameters before the first step, and after each that was applied.
    history: Vec<Shards>,
    /// Steps that all ranks agreed to skip, which is no error; what was found is among what it was
    /// told.
    pub(crate) skipped: u64,
    /// How many events were recorded.
    pub(crate) events: usize,
}

impl Fared {
    fn note(&mut self, error: Error) {
        self.told.push((error, Instant::now()));
    }

    /// Steps whose update it has made.
    fn applied(&self) -> u64 {
        self.history.len().saturating_sub(1) as u64
    }
}

/// How a training went.
pub(crate) struct Run {
    pub(crate) ranks: Vec<Result<Fared, RankFailure>>,
    /// When the culprit came to the step in which it does it: the fault is no earlier.
    faulty_step: Option<Instant>,
}

impl Run {
    /// How a rank fared that did not panic.
    pub(crate) fn fared(&self, rank: usize) -> &Fared {
        self.ranks[rank].as_ref().unwrap_or_else(|failure| panic!("{failure}"))
    }

    /// What `ranks` were told in the end, all the same and all within the limit from the fault.
    pub(crate) fn told(&self, ranks: &[usize]) -> (&Error, Happened) {
        let (first, _) = self.last_told(ranks[0]);
        let mut took = Duration::ZERO;
        for rank in ranks {
            let (error, after) = self.last_told(*rank);
            assert_eq!(error.to_string(), first.to_string(), "rank {rank} is told the same");
            took = took.max(after);
        }
        (first, Happened::in_time(first, took))
    }

    fn last_told(&self, rank: usize) -> (&Error, Duration) {
        let told = self.fared(rank).told.last();
        let (error, at) = told.unwrap_or_else(|| panic!("rank {rank} is told nothing"));
        let since = self.faulty_step.expect("the culprit comes to the faulty step");
        (error, at.saturating_duration_since(since))
    }

    /// `ranks` have made `steps` updates, and after each of them they held what they hold in a run
    /// that nothing disturbs.
    pub(crate) fn assert_committed(&self, ranks: &[usize], steps: u64) {
        self.assert_committed_of(undisturbed(), ranks, steps);
    }

    /// `ranks` have made `steps` updates, and after each of them they held what they hold in
    /// another run.
    pub(crate) fn assert_committed_of(&self, other: &Self, ranks: &[usize], steps: u64) {
        for rank in ranks {
            let fared = self.fared(*rank);
            assert_eq!(fared.applied(), steps, "updates of rank {rank}: {:?}", fared.told);
            assert_same(*rank, fared, other.fared(*rank));
        }
    }

    /// All ranks have made the steps that they make in another run, and hold what they hold there.
    pub(crate) fn assert_same_as(&self, other: &Self) {
        for rank in ALL {
            let fared = self.fared(rank);
            let expected = other.fared(rank);
            assert_eq!(fared.applied(), expected.applied(), "updates of rank {rank}");
            assert_same(rank, fared, expected);
        }
    }

    /// All ranks have made all steps, and hold what they hold in a run that nothing disturbs.
    pub(crate) fn assert_no_trace(&self) {
        self.assert_committed(&ALL, STEPS);
    }
}

/// As far as both have come, a rank held the same after each step.
fn assert_same(rank: usize, fared: &Fared, expected: &Fared) {
    for (step, (found, expected)) in fared.history.iter().zip(&expected.history).enumerate() {
        assert_eq!(bits(found), bits(expected), "rank {rank} after {step} steps");
    }
}

/// The run that nothing disturbs.
fn undisturbed() -> &'static Run {
    static UNDISTURBED: OnceLock<Run> = OnceLock::new();
    UNDISTURBED.get_or_init(|| Training::new().run())
}
