//! Errors that a rank has before it takes part in an exchange between steps. The other ranks get
//! them, and do not wait.

use std::mem::ManuallyDrop;

use hsdp::checkpoint::{CheckpointOptions, Checkpoints};
use hsdp::{Error, ModelOptions, Param, Rank, Sgd, SgdOptions, ShardedModel, StepOptions, World};
use hsdp_comm::Error as CommError;
use hsdp_tests::support::models::three_units;
use hsdp_tests::support::springs::{self, Batch};
use hsdp_tests::support::worlds::{DEADLINE, mesh, outcomes};

use std::time::Instant;

/// Asserts that rank 3 of four ranks has an error, and that the others are told of it.
fn assert_told(told: Vec<Result<(), Error>>, own: &str) {
    for (rank, told) in told.into_iter().enumerate() {
        let told = told.expect_err("rank 3 fails");
        if rank == 3 {
            assert_eq!(told.to_string(), own);
            continue;
        }
        let Error::Comm(CommError::StepAborted { rank: culprit, reason, .. }) = &told else {
            panic!("rank {rank}: {told}");
        };
        assert_eq!((*culprit, &**reason), (Rank::new(3), own), "rank {rank}");
    }
}

fn make(world: World, init: impl FnMut(&Param) -> Vec<f32>) -> Result<ShardedModel, Error> {
    ShardedModel::new(world, three_units(), ModelOptions::on(mesh(2, 2)), init)
}

/// Whether this rank makes the mistake.
fn errs(world: &World) -> bool {
    world.rank().index() == 3
}

#[test]
fn a_model_or_a_step_that_one_rank_alone_is_refused_is_told_to_all() {
    type Act = fn(World) -> Result<(), Error>;
    let acts: [(Act, &str); 3] = [
        (
            |world| {
                let missing = usize::from(errs(&world));
                make(world, |param| vec![0.5; param.numel() - missing]).map(drop)
            },
            "init of first.weight on rank 3: got 90 elements, the plan has 91",
        ),
        (
            |world| {
                let shards = if errs(&world) { 3 } else { 2 };
                springs::model(world, &ModelOptions::on(mesh(2, shards))).map(drop)
            },
            "a mesh of 2x3 has 6 ranks, the world has 4",
        ),
        (
            |world| {
                let microbatches = if errs(&world) { 0 } else { 1 };
                let mut model = make(world, springs::initial)?;
                model.begin_step(StepOptions::microbatches(microbatches)).map(drop)
            },
            "begin_step on rank 3, step 0: a step of 0 microbatches has nothing to reduce",
        ),
    ];
    for (act, own) in acts {
        assert_told(outcomes(4, act), own);
    }
}

#[test]
fn a_save_that_one_rank_alone_is_refused_is_told_to_all() {
    let folder = tempfile::tempdir().expect("a folder");
    let told = outcomes(4, |world| {
        let rank = world.rank().index();
        let [model, other] = [world.clone(), world].map(|world| make(world, springs::initial));
        let model = model?;
        let other = other?;
        let [own, others] = [&model, &other].map(|of| Sgd::new(of, SgdOptions::default()));
        let options = CheckpointOptions::default();
        let mut checkpoints = Checkpoints::open(&model, folder.path(), options)?;
        let optimizer = if rank == 3 { &others } else { &own };
        checkpoints.save(&model, optimizer, &serde_json::Value::Null).map(drop)
    });
    assert_told(told, "saving on rank 3, step 0: the optimizer was made for another model");
}

/// A step that is leaked cannot be finished by anyone. It costs this step, not the run.
#[test]
fn a_step_that_is_leaked_is_told_to_all_and_the_next_takes_place() {
    let started = Instant::now();
    let told = outcomes(4, |world| {
        let rank = world.rank().index();
        let mut model = make(world, springs::initial)?;
        let step = model.begin_step(StepOptions::microbatches(1))?;
        let told = if rank == 3 {
            let _leaked = ManuallyDrop::new(step);
            model.begin_step(StepOptions::microbatches(1)).map(drop)
        } else {
            let mut step = step;
            let passed = springs::microbatch(&mut step, Batch::of(rank, 0, 0));
            passed.and_then(|()| step.finish().map(drop))
        };
        assert_eq!(springs::gradients(&mut model, 1)?.step(), 0);
        told
    });
    assert_told(told, "begin_step on rank 3, step 0: step 0 was neither finished nor dropped");
    assert!(started.elapsed() < DEADLINE / 4, "no rank waits for its deadline");
}
