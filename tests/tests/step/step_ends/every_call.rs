//! A call that fails on one rank alone, at every call of a run: all other ranks get an error that
//! names this rank and its reason, and the run goes on.

use std::collections::BTreeSet;
use std::num::NonZeroU64;
use std::path::Path;

use hsdp::checkpoint::{CheckpointOptions, Checkpoints};
use hsdp::{
    AdamW, AdamWOptions, DType, DynamicScale, Error, LossScaling, ModelOptions, Optimizer,
    Precision, Rank, Samples, ShardedModel, StepOptions, World, WorldOptions,
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
    let undisturbed = run(None, between, then);
    let undisturbed = ended(&undisturbed);
    let fails = |fault: Fault| -> Option<String> {
        let ranks = run(Some(fault), between, then);
        let own = &ranks[fault.rank.index()].told.first()?.0;
        for (rank, fared) in
            ranks.iter().enumerate().filter(|(rank, _)| *rank != fault.rank.index())
        {
            assert_told(&fault, rank, fared, own);
        }
        if then == Then::Again {
            assert_eq!(ended(&ranks), undisturbed, "{fault}: {own}");
        }
        Some(stage_of(own))
    };
    let ways = [(3, FaultKind::Error), (0, FaultKind::OutOfMemory)];
    for (culprit, kind) in ways {
        let at_step = |step| move |stage| Fault::at(Rank::new(culprit), step, stage, kind);
        let faults = (0..=STEPS).flat_map(|step| STAGES.into_iter().map(at_step(step)));
        let failed: BTreeSet<String> = faults.filter_map(&fails).collect();
        assert_eq!(failed, STAGES.iter().map(ToString::to_string).collect(), "{kind}");
    }
    let (culprit, kind) = ways[usize::from(then == Then::Leave)];
    for step in 0..=STEPS {
        let at = |call| Fault::at(Rank::new(culprit), step, FaultPlace::Call(call), kind);
        let calls = (0..MANY).take_while(|call| fails(at(*call)).is_some()).count();
        let least = [16, 28, 1].into_iter().nth(usize::try_from(step).expect("few"));
        assert!(Some(calls) >= least, "step {step} has {calls} calls, not {least:?}");
    }
}

const STAGES: [Stage; 7] = [
    Stage::Setup,
    Stage::Header,
    Stage::Gather,
    Stage::Reduce,
    Stage::AllReduce,
    Stage::Agreement,
    Stage::Export,
];

/// The stage in the error of a call that was made to fail.
fn stage_of(own: &str) -> String {
    let names = |stage: &Stage| own.contains(&format!(" {stage}, step"));
    let named = STAGES.into_iter().find(names);
    named.unwrap_or_else(|| panic!("{own}")).to_string()
}

/// The first error of a rank is that of the culprit.
fn assert_told(fault: &Fault, rank: usize, fared: &Fared, own: &str) {
    let Some((told, aborted)) = fared.told.first() else {
        panic!("{fault}: rank {rank} is told nothing of {own}");
    };
    assert_eq!(*aborted, Some(fault.rank), "{fault}: rank {rank} is told {told}");
    let expected = format!(" aborted by rank {}: {own}", fault.rank);
    assert!(told.ends_with(&expected), "{fault}: rank {rank} is told {told}");
}

/// How a rank fared.
#[derive(Debug, Default)]
struct Fared {
    /// Its errors, each with the rank that has aborted the step by it.
    told: Vec<(String, Option<Rank>)>,
    /// The bits of its parameters in the end.
    bits: Vec<Vec<u32>>,
}

fn ended(ranks: &[Fared]) -> Vec<&[Vec<u32>]> {
    let bits: Vec<&[Vec<u32>]> = ranks.iter().map(|fared| &*fared.bits).collect();
    assert!(bits.iter().all(|bits| !bits.is_empty()), "a rank has not ended: {ranks:?}");
    bits
}

/// Trains, saves and loads on all ranks.
fn run(fault: Option<Fault>, between: Between, then: Then) -> Vec<Fared> {
    let folder = tempfile::tempdir().expect("a folder");
    let faults = fault.into_iter().collect();
    let options = WorldOptions { faults, between, deadline: DEADLINE, ..WorldOptions::default() };
    let ends = launched(RANKS, options, |world| {
        let mut rank = Attempts { then, fared: Fared::default() };
        let ended = rank.train(world, folder.path());
        assert!(then == Then::Leave || ended.is_ok(), "{ended:?}");
        rank.fared
    });
    ends.into_iter().map(|end| end.expect("no panic")).collect()
}

/// The calls of a rank, each repeated after an error.
struct Attempts {
    then: Then,
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
            self.fared.told.push((error.to_string(), aborted));
            let often = self.fared.told.len() > 3;
            if self.then == Then::Leave || error.is_fatal() || often {
                return Err(error);
            }
        }
    }

    fn train(&mut self, world: World, folder: &Path) -> Result<(), Error> {
        let on = ModelOptions {
            precision: Precision { wire: DType::F16, ..Precision::default() },
            loss_scaling: LossScaling::Dynamic(DynamicScale::default()),
            compare_replicas: NonZeroU64::new(1),
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
        adamw.step(model, gradients.clip(1.0)).map(drop)
    }
}
