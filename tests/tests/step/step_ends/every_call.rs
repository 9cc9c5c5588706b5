//! A call that fails on one rank alone, at every call of a run: all other ranks get an error that
//! names this rank and its reason, and the run goes on. A call in the middle of an update ends the
//! world instead.

use std::num::NonZeroU64;
use std::path::Path;

use hsdp::checkpoint::{CheckpointOptions, Checkpoints};
use hsdp::{
    AdamW, AdamWOptions, DType, DynamicScale, Error, LossScaling, ModelOptions, Optimizer,
    Precision, Rank, Samples, ShardedModel, StateOver, StepOptions, World, WorldOptions,
};
use hsdp_comm::{Between, Error as CommError, Fault, FaultKind, FaultPlace, Stage};
use hsdp_tests::support::models::{one_parameter, shards};
use hsdp_tests::support::springs::{self, Batch};
use hsdp_tests::support::worlds::{DEADLINE, launched, mesh};
use serde_json::json;

const RANKS: usize = 4;
const STEPS: u64 = 2;

/// Calls that a rank makes in a step at the most, more than there are.
const MANY: u64 = 400;

/// The course of a rank after an error that is not fatal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Then {
    /// It makes the call again.
    Again,
    /// It returns it, and so leaves the world.
    Leave,
}

/// The course of a run.
#[derive(Clone, Copy, Debug)]
struct Course {
    between: Between,
    state: StateOver,
    then: Then,
}

#[test]
fn ranks_that_go_on_are_told_of_every_call_that_fails_between_threads() {
    fail_everywhere(Between::Memory, Then::Again);
}

#[test]
fn ranks_that_go_on_are_told_of_every_call_that_fails_between_ranks_apart() {
    fail_everywhere(Between::Messages, Then::Again);
}

#[test]
fn ranks_that_leave_are_told_of_every_call_that_fails_between_threads() {
    fail_everywhere(Between::Memory, Then::Leave);
}

#[test]
fn ranks_that_leave_are_told_of_every_call_that_fails_between_ranks_apart() {
    fail_everywhere(Between::Messages, Then::Leave);
}

/// Has each stage of each step fail in each way, and then each call of a rank, and checks the
/// errors of all ranks.
fn fail_everywhere(between: Between, then: Then) {
    for state in StateOver::ALL {
        fail_everywhere_in(Course { between, state, then });
    }
}

fn fail_everywhere_in(course: Course) {
    let Course { state, then, .. } = course;
    let stages = stages(state);
    let undisturbed = run(None, course);
    let undisturbed = ended(&undisturbed);
    let fails = |fault: Fault| -> Option<Stage> {
        let ranks = run(Some(fault), course);
        let (own, is_half_updated) = match ranks[fault.rank.index()].told.first()? {
            Told::Call { error, .. } => (error, false),
            Told::Update { error } => (error, true),
        };
        let others = ranks.iter().enumerate().filter(|(rank, _)| *rank != fault.rank.index());
        if is_half_updated {
            others.for_each(|(rank, fared)| assert_ended(&fault, rank, fared, own));
            return Some(stage_of(&stages, own));
        }
        others.for_each(|(rank, fared)| assert_told(&fault, rank, fared, own));
        if then == Then::Again {
            assert_eq!(ended(&ranks), undisturbed, "{fault}, {course:?}: {own}");
        }
        Some(stage_of(&stages, own))
    };
    let ways = [(3, FaultKind::Error), (0, FaultKind::OutOfMemory)];
    for (culprit, kind) in ways {
        let at_step = |step| move |stage: &Stage| Fault::at(Rank::new(culprit), step, *stage, kind);
        let faults = (0..=STEPS).flat_map(|step| stages.iter().map(at_step(step)));
        let failed: Vec<Stage> = faults.filter_map(&fails).collect();
        for stage in &stages {
            assert!(failed.contains(stage), "{kind}, {course:?}: no call failed in {stage}");
        }
    }
    let (culprit, kind) = ways[usize::from(then == Then::Leave)];
    for step in 0..=STEPS {
        let at = |call| Fault::at(Rank::new(culprit), step, FaultPlace::Call(call), kind);
        let calls = (0..MANY).take_while(|call| fails(at(*call)).is_some()).count();
        let least = [16, 28, 1].into_iter().nth(usize::try_from(step).expect("few"));
        assert!(Some(calls) >= least, "step {step} has {calls} calls, not {least:?}: {course:?}");
    }
}

/// Returns the stages of a run.
fn stages(state: StateOver) -> Vec<Stage> {
    let over_replicas = match state {
        StateOver::Shards => &[Stage::AllReduce][..],
        StateOver::World => &[Stage::ScatterSums, Stage::GatherSlices],
    };
    let others = [
        Stage::Setup,
        Stage::Header,
        Stage::Gather,
        Stage::Reduce,
        Stage::Agreement,
        Stage::Export,
    ];
    [&others[..], over_replicas].concat()
}

/// The stage in the error of a call that was made to fail.
fn stage_of(stages: &[Stage], own: &str) -> Stage {
    let names = |stage: &&Stage| own.contains(&format!(" {stage}, step"));
    *stages.iter().find(names).unwrap_or_else(|| panic!("{own}"))
}

/// The first error of a rank is that of the culprit.
fn assert_told(fault: &Fault, rank: usize, fared: &Fared, own: &str) {
    let Some(Told::Call { error, aborted, .. }) = fared.told.first() else {
        panic!("{fault}: rank {rank} is told nothing of {own}, but {:?}", fared.told);
    };
    assert_eq!(*aborted, Some(fault.rank), "{fault}: rank {rank} is told {error}");
    let expected = format!(" aborted by rank {}: {own}", fault.rank);
    assert!(error.ends_with(&expected), "{fault}: rank {rank} is told {error}");
}

/// The update of the culprit has failed in its middle: the first error of a rank is the end of the
/// world.
fn assert_ended(fault: &Fault, rank: usize, fared: &Fared, own: &str) {
    let Some(Told::Call { error, is_fatal, .. }) = fared.told.first() else {
        panic!("{fault}: rank {rank} is told nothing of {own}, but {:?}", fared.told);
    };
    assert!(*is_fatal, "{fault}: rank {rank} is told {error}");
    assert!(error.contains(own), "{fault}: rank {rank} is told {error}, not of {own}");
}

/// An error of a rank.
#[derive(Debug)]
enum Told {
    /// Of a call that is made again.
    Call {
        error: String,
        /// The rank that has aborted the step by it.
        aborted: Option<Rank>,
        is_fatal: bool,
    },
    /// Of an update.
    Update { error: String },
}

/// How a rank fared.
#[derive(Debug, Default)]
struct Fared {
    /// Its errors.
    told: Vec<Told>,
    /// The bits of its parameters in the end.
    bits: Vec<Vec<u32>>,
}

fn ended(ranks: &[Fared]) -> Vec<&[Vec<u32>]> {
    let bits: Vec<&[Vec<u32>]> = ranks.iter().map(|fared| &*fared.bits).collect();
    assert!(bits.iter().all(|bits| !bits.is_empty()), "a rank has not ended: {ranks:?}");
    bits
}

/// Trains, saves and loads on all ranks.
fn run(fault: Option<Fault>, course: Course) -> Vec<Fared> {
    let Course { between, state, then } = course;
    let folder = tempfile::tempdir().expect("a folder");
    let faults = fault.into_iter().collect();
    let options = WorldOptions { faults, between, deadline: DEADLINE, ..WorldOptions::default() };
    let ends = launched(RANKS, options, |world| {
        let mut rank = Attempts { then, state, fared: Fared::default() };
        let ended = rank.train(world, folder.path());
        // The others learn of an update that fails in its middle by the end of the world.
        let is_over = matches!(&ended, Err(error) if error.is_fatal());
        let has_failed = matches!(rank.fared.told.last(), Some(Told::Update { .. }));
        let may_fail = state == StateOver::World && (is_over || has_failed);
        assert!(then == Then::Leave || may_fail || ended.is_ok(), "{ended:?}");
        rank.fared
    });
    ends.into_iter().map(|end| end.expect("no panic")).collect()
}

/// The calls of a rank, each repeated after an error.
struct Attempts {
    then: Then,
    state: StateOver,
    fared: Fared,
}

impl Attempts {
    fn of<T>(&mut self, mut call: impl FnMut() -> Result<T, Error>) -> Result<T, Error> {
        loop {
            let error = match call() {
                Ok(done) => return Ok(done),
                Err(error) => error,
            };
            let aborted = match &error {
                Error::Comm(CommError::StepAborted { rank, .. }) => Some(*rank),
                _ => None,
            };
            let is_fatal = error.is_fatal();
            self.fared.told.push(Told::Call { error: error.to_string(), aborted, is_fatal });
            let often = self.fared.told.len() > 3;
            if self.then == Then::Leave || is_fatal || often {
                return Err(error);
            }
        }
    }

    fn train(&mut self, world: World, folder: &Path) -> Result<(), Error> {
        let on = ModelOptions {
            precision: Precision { wire: DType::F16, ..Precision::default() },
            loss_scaling: LossScaling::Dynamic(DynamicScale::default()),
            compare_replicas: NonZeroU64::new(1),
            state: self.state,
            ..ModelOptions::on(mesh(2, 2))
        };
        let make =
            || ShardedModel::new(world.clone(), one_parameter(20), on.clone(), springs::initial);
        let mut model = self.of(make)?;
        let mut adamw = AdamW::new(&model, AdamWOptions::default());
        let with = CheckpointOptions::default();
        let mut checkpoints = self.of(|| Checkpoints::open(&model, folder, with.clone()))?;
        self.step(&mut model, &mut adamw, StepOptions::as_many_as_come())?;
        self.of(|| checkpoints.save_in_background(&model, &adamw, &json!(1)))?;
        self.step(&mut model, &mut adamw, StepOptions::microbatches(1))?;
        self.of(|| checkpoints.poll(&model))?;
        self.of(|| checkpoints.finish(&model))?;
        let saved = self.of(|| checkpoints.save(&model, &adamw, &json!(2)))?;
        assert_eq!(saved.path.is_some(), model.rank().index() == 0);
        self.of(|| checkpoints.load_latest(&mut model, &mut adamw))?;
        self.of(|| model.full_parameters())?;
        self.of(|| model.end_run())?;
        let bits = |shard: &std::sync::Arc<Vec<f32>>| shard.iter().map(|it| it.to_bits()).collect();
        self.fared.bits = shards(&model).iter().map(bits).collect();
        Ok(())
    }

    fn step(
        &mut self,
        model: &mut ShardedModel,
        adamw: &mut AdamW,
        options: StepOptions,
    ) -> Result<(), Error> {
        let rank = model.rank().index();
        let number = model.committed_steps();
        let samples = Some(Samples::of([rank as u64]));
        let gradients = self.of(|| {
            let mut step = model.begin_step(StepOptions { samples, ..options })?;
            springs::microbatch(&mut step, Batch::of(rank, number, 0))?;
            step.finish()
        })?;
        self.of(|| gradients.full(model))?;
        let updated = adamw.step(model, gradients.clip(1.0));
        updated.map(drop).inspect_err(|error| {
            self.fared.told.push(Told::Update { error: error.to_string() });
        })
    }
}
