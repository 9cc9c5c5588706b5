//! All ranks make the same mistake between steps, and go on: the next call of each of them takes
//! place, whichever rank was ahead.

use std::mem::ManuallyDrop;
use std::path::Path;
use std::thread;
use std::time::Duration;

use hsdp::checkpoint::{CheckpointOptions, Checkpoints, Import};
use hsdp::{
    Ema, Error, Evaluation, Mesh, ModelOptions, Optimizer, Sgd, SgdOptions, ShardedModel,
    StepOptions, World, WorldOptions,
};
use hsdp_comm::{Between, Channel, Pending, Tag};
use hsdp_tests::support::models::three_units;
use hsdp_tests::support::springs;
use hsdp_tests::support::worlds::{DEADLINE, mesh};
use serde_json::json;

const MESHES: [(usize, usize); 3] = [(2, 1), (2, 2), (1, 3)];

/// The parts of a rank's program.
struct Program<'a> {
    model: ShardedModel,
    /// Another model of the same world.
    other: ShardedModel,
    sgd: Sgd,
    others: Sgd,
    ema: Ema,
    foreign: Ema,
    checkpoints: Checkpoints,
    folder: &'a Path,
}

impl<'a> Program<'a> {
    fn begin(world: &World, mesh: Mesh, folder: &'a Path) -> Result<Self, Error> {
        let make = || {
            let on = ModelOptions::on(mesh);
            springs::model(world.clone(), &on)
        };
        let model = make()?;
        let other = make()?;
        Ok(Self {
            sgd: Sgd::new(&model, SgdOptions::default()),
            others: Sgd::new(&other, SgdOptions::default()),
            ema: Ema::new(&model, 0.5)?,
            foreign: Ema::new(&other, 0.5)?,
            checkpoints: Checkpoints::open(&model, folder, CheckpointOptions::default())?,
            folder,
            model,
            other,
        })
    }
}

/// A mistake that a call refuses on every rank.
type Mistake = fn(&mut Program<'_>) -> Result<(), Error>;

const MISTAKES: [(&str, Mistake); 16] = [
    ("begin_step inside with_shards", |it| {
        it.model
            .with_shards(&it.ema, |model| model.begin_step(StepOptions::microbatches(1)).map(drop))
    }),
    ("a save inside with_shards", |it| {
        let Program { model, sgd, ema, checkpoints, .. } = it;
        model.with_shards(ema, |model| checkpoints.save(model, sgd, &json!(1)).map(drop))
    }),
    ("a load inside with_shards", |it| {
        let Program { model, sgd, ema, checkpoints, .. } = it;
        model.with_shards(ema, |model| checkpoints.load_latest(model, sgd).map(drop))
    }),
    ("with_shards inside with_shards", |it| {
        let Program { model, ema, .. } = it;
        model.with_shards(ema, |model| model.with_shards(ema, |_| Ok::<_, Error>(())))
    }),
    ("with_shards of another model's average", |it| {
        it.model.with_shards(&it.foreign, |_| Ok::<_, Error>(()))
    }),
    ("a step of 0 microbatches", |it| it.model.begin_step(StepOptions::microbatches(0)).map(drop)),
    ("a save of another model's optimizer", |it| {
        it.checkpoints.save(&it.model, &it.others, &json!(1)).map(drop)
    }),
    ("a save in the background of another model's optimizer", |it| {
        it.checkpoints.save_in_background(&it.model, &it.others, &json!(1))
    }),
    ("a load into another model's optimizer", |it| {
        it.checkpoints.load_latest(&mut it.model, &mut it.others).map(drop)
    }),
    ("a step that was leaked", |it| {
        let _leaked = ManuallyDrop::new(it.model.begin_step(StepOptions::microbatches(1))?);
        it.model.begin_step(StepOptions::microbatches(1)).map(drop)
    }),
    ("an evaluation that was leaked", |it| {
        let _leaked = ManuallyDrop::new(it.model.evaluation()?);
        it.model.end_run()
    }),
    ("an evaluation that was dropped", |it| dropped(it.model.evaluation()?)),
    ("a second evaluation that was dropped", |it| {
        it.model.evaluation()?.mean(1.0, 1)?;
        dropped(it.model.evaluation()?)
    }),
    ("gradients of another model", |it| {
        let gradients = springs::gradients(&mut it.model, 1)?;
        gradients.norms(&it.other).map(drop)
    }),
    ("a model on a mesh of another size", |it| {
        let on = ModelOptions::on(mesh(5, 1));
        let world = it.model.world().clone();
        springs::model(world, &on).map(drop)
    }),
    ("an import of a folder that is not there", |it| {
        let on = it.model.options().clone();
        let world = it.model.world().clone();
        let folder = it.folder.join("absent");
        ShardedModel::import(world, three_units(), on, &Import::of(&folder)).map(drop)
    }),
];

/// Drops an evaluation, as a program does that finds its data wrong.
fn dropped(evaluation: Evaluation<'_>) -> Result<(), Error> {
    drop(evaluation);
    Err(Error::Options { what: "its data is wrong".to_owned() })
}

/// Calls that come before the mistake. A rank that is behind may get the mistake of another one
/// there, if that takes no part in the call.
const BEFORE: [Mistake; 4] = [
    |_| Ok(()),
    |it| it.model.full_parameters().map(drop),
    |it| it.model.norms().map(drop),
    |it| it.model.with_shards(&it.ema, |model| model.full_parameters()).map(drop),
];

/// Calls that come next, each collective over the world.
const NEXT: [(&str, Mistake); 4] = [
    ("a step", |it| {
        let gradients = springs::gradients(&mut it.model, 1)?;
        it.sgd.step(&mut it.model, gradients).map(drop)
    }),
    ("a sum", |it| it.model.world().sum(1.0).map(drop).map_err(Error::from)),
    ("an evaluation", |it| it.model.evaluation()?.mean(1.0, 1).map(drop)),
    ("a save", |it| it.checkpoints.save(&it.model, &it.sgd, &json!(1)).map(drop)),
];

/// Lets the other ranks go on to their next calls.
#[expect(clippy::disallowed_methods, reason = "the test is about ranks that are ahead")]
fn fall_behind() {
    thread::sleep(Duration::from_millis(2));
}

fn between_all(between: Between) {
    for (replicate, shard) in MESHES {
        let folder = tempfile::tempdir().expect("a folder");
        let mesh = mesh(replicate, shard);
        let options = WorldOptions { between, deadline: DEADLINE, ..WorldOptions::default() };
        let ends = hsdp::launch(replicate * shard, options, |world| {
            let rank = world.rank().index();
            let mut program = Program::begin(&world, mesh, folder.path())?;
            for (at, (mistake, make)) in MISTAKES.into_iter().enumerate() {
                for (turn, before) in (0..).zip(BEFORE) {
                    for (next, call) in NEXT {
                        // Another rank is ahead each time.
                        if (rank + at + turn) % (replicate * shard) != 0 {
                            fall_behind();
                        }
                        if let Err(error) = before(&mut program) {
                            let is_told = error.to_string().contains(" aborted by rank ");
                            assert!(is_told, "{mistake} on {mesh}, rank {rank}: {error}");
                        }
                        let refused = make(&mut program).expect_err("it is refused");
                        assert!(!refused.is_fatal(), "{mistake}: {refused}");
                        if let Err(error) = call(&mut program) {
                            panic!("{mistake} on {mesh}, rank {rank}, then {next}: {error}");
                        }
                    }
                }
            }
            program.model.end_run()?;
            program.other.end_run()
        });
        ends.into_iter().for_each(|end| end.expect("all go on"));
    }
}

/// Rank 1 alone makes a mistake, and a collective of the user follows. Later rank 0 makes the same
/// mistake. It counts as a new one: rank 1 is notified of it, and does not wait.
#[test]
fn a_mistake_that_another_rank_made_before_a_collective_of_the_user_is_announced() {
    let folder = tempfile::tempdir().expect("a folder");
    let (_, begin) = MISTAKES[0];
    let options = WorldOptions { deadline: Duration::from_secs(20), ..WorldOptions::default() };
    let ends = hsdp::launch(2, options, |world| {
        let mut program = Program::begin(&world, mesh(2, 1), folder.path())?;
        let users = world.world_group(Channel::User);
        let barrier = || users.barrier(Tag::default()).and_then(Pending::wait);
        for round in 0..20 {
            if world.rank().index() == 1 {
                begin(&mut program).expect_err("it is refused");
            } else {
                // The export is of this rank alone, and leaves the epoch when rank 1 has failed.
                while program.model.full_parameters().is_ok() {}
            }
            barrier()?;
            let told = if world.rank().index() == 0 {
                begin(&mut program).expect_err("it is refused")
            } else {
                springs::gradients(&mut program.model, 1).expect_err("rank 0 fails in its call")
            };
            let own = "begin_step on rank 0, step ";
            assert!(told.to_string().contains(own), "round {round}: {told}");
            assert!(!told.is_fatal(), "round {round}: {told}");
            springs::gradients(&mut program.model, 1).map(drop)?;
        }
        Ok::<_, Error>(())
    });
    ends.into_iter().for_each(|end| end.expect("all go on"));
}

/// Rank 1 leaves the first evaluation since rank 0 drops it, and drops the second one itself. Rank
/// 0 waits in that one, and is notified.
#[test]
fn the_drop_of_a_later_evaluation_is_announced() {
    let folder = tempfile::tempdir().expect("a folder");
    let options = WorldOptions { deadline: Duration::from_secs(20), ..WorldOptions::default() };
    let ends = hsdp::launch(2, options, |world| {
        let mut program = Program::begin(&world, mesh(2, 1), folder.path())?;
        for round in 0..20 {
            let by = [0, 1].map(|dropping| {
                if world.rank().index() == dropping {
                    dropped(program.model.evaluation()?)
                } else {
                    program.model.evaluation()?.mean(1.0, 1).map(drop)
                }
            });
            let told = by[1 - world.rank().index()].as_ref().expect_err("the other dropped it");
            let own = format!(" aborted by rank {}", 1 - world.rank().index());
            assert!(told.to_string().contains(&own), "round {round}: {told}");
            springs::gradients(&mut program.model, 1).map(drop)?;
        }
        Ok::<_, Error>(())
    });
    ends.into_iter().for_each(|end| end.expect("all go on"));
}

#[test]
fn ranks_that_are_all_refused_go_on_between_threads() {
    between_all(Between::Memory);
}

#[test]
fn ranks_that_are_all_refused_go_on_between_ranks_apart() {
    between_all(Between::Messages);
}
