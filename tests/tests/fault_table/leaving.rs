//! Rows 1, 2, 3, 27 and 59: ranks that vanish, leave, panic or give up, and groups that are
//! dropped.

use std::fmt;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::time::Instant;

use hsdp::{Error, GradientValues, ModelOptions, Param, Unit, Values, World, WorldOptions};
use hsdp_comm::WorldError::Aborted;
use hsdp_comm::{
    AbortReason, Accumulator, Channel, Contribution, Error as CommError, FaultKind, Group, Op,
    Pending, Reduced, Scaling, Stage, StepFailure, Tag,
};
use hsdp_kernels::{Fold, Wire};
use hsdp_sharding::UnitLayout;
use hsdp_tests::support::models::unit;
use hsdp_tests::support::sources;
use hsdp_tests::support::worlds::{DEADLINE, mesh};

use crate::runner::{Happened, LIMIT, becomes};
use crate::training::{At, CULPRIT, FAULTY, Go, RANKS, Run, SURVIVORS, Training};

pub(crate) fn vanishes() -> Happened {
    // One shard group and one microbatch: whoever goes on without the culprit waits in a
    // reduce-scatter.
    let in_one_group =
        |it| Training { model: ModelOptions::on(mesh(1, RANKS)), microbatches: 1, ..it };
    let leaves = Training::with_fault((unit(1), Stage::Reduce), FaultKind::Leave);
    let run = in_one_group(leaves).run();
    let (error, happened) = run.told(&SURVIVORS);
    let AbortReason::Left { awaited } = reason_of(error, FAULTY) else { panic!("{error}") };
    assert_eq!((awaited.op, awaited.channel, awaited.tag.step), REDUCE_SCATTER, "{error}");
    // Each step reduces units 2, 1 and 0: of the faulty one, operations 6, 7 and 8. The culprit is
    // gone after 6.
    assert!([7, 8].contains(&awaited.sequence), "{error}");
    let Error::Comm(CommError::World(Aborted { operation: Some(last), .. })) = error else {
        panic!("{error}")
    };
    assert!(last.channel != Channel::Reduce || last.sequence == 6, "it has issued none: {error}");
    run.assert_committed_of(&in_one_group(Training::new()).run(), &SURVIVORS, FAULTY);
    happened
}

const REDUCE_SCATTER: (Op, Channel, u64) = (Op::ReduceScatter, Channel::Reduce, FAULTY);

pub(crate) fn returns_early() -> Happened {
    let returns = |world: &World, at, step| {
        let leaves = (world.rank().index(), at, step) == (CULPRIT, At::Start, FAULTY);
        Ok(if leaves { Go::Home } else { Go::On })
    };
    let run = Training { user: &returns, ..Training::new() }.run();
    // It has not begun the faulty step.
    let (error, happened) = run.told(&SURVIVORS);
    assert!(matches!(reason_of(error, FAULTY - 1), AbortReason::Left { .. }), "{error}");
    assert!(run.fared(CULPRIT).told.is_empty(), "who returns is told nothing");
    run.assert_committed(&SURVIVORS, FAULTY);

    let run = panicked();
    let (error, _) = run.told(&SURVIVORS);
    assert!(matches!(reason_of(error, FAULTY), AbortReason::Panicked { .. }), "{error}");
    happened
}

pub(crate) fn panics() -> Happened {
    let run = panicked();
    let (error, happened) = run.told(&SURVIVORS);
    assert!(matches!(reason_of(error, FAULTY), AbortReason::Panicked { .. }), "{error}");
    let failure = run.ranks[CULPRIT].as_ref().expect_err("it panics").to_string();
    assert_eq!(failure, "rank 2: the data of this rank is broken");
    for rank in SURVIVORS {
        assert_eq!(run.fared(rank).told.len(), 1, "rank {rank} hears of nothing before it");
    }
    run.assert_committed(&SURVIVORS, FAULTY);

    let bad_batch = gives_up_a_step(At::Batch(1), &|world| {
        let reason = BAD_BATCH.to_owned();
        world.abort_step(StepFailure { step: FAULTY, reason });
    });
    assert_eq!(bad_batch.told, format!("step {FAULTY} aborted by rank {CULPRIT}: {BAD_BATCH}"));
    happened
}

pub(crate) fn forgets_the_all_reduce() -> Happened {
    let cannot_be_written = "runtime/tests/compile_fail/optimizer_without_finish";
    let paths: Vec<String> = sources::texts().into_iter().map(|source| source.path).collect();
    for ending in ["rs", "stderr"] {
        let path = format!("{cannot_be_written}.{ending}");
        assert!(paths.contains(&path), "{path} shows that it does not compile");
    }
    gives_up_a_step(At::End, &|_| {})
}

const BAD_BATCH: &str = "batch 17 cannot be read";

fn panicked() -> Run {
    let panics = |world: &World, at, step| {
        let now = (world.rank().index(), at, step) == (CULPRIT, At::Batch(1), FAULTY);
        if now { panic!("the data of this rank is broken") } else { Ok(Go::On) }
    };
    Training { user: &panics, ..Training::new() }.run()
}

/// An error of the user's own, who may say why before it drops the step, ends the step on all
/// ranks, which then go on: in the end there is no trace of it.
fn gives_up_a_step(here: At, says_why: &(dyn Fn(&World) + Sync)) -> Happened {
    let done = AtomicBool::new(false);
    let gives_up = |world: &World, at, step| {
        let now = (world.rank().index(), at, step) == (CULPRIT, here, FAULTY);
        if now && !done.swap(true, Ordering::Relaxed) {
            says_why(world);
            return Err(Error::Options { what: BAD_BATCH.to_owned() });
        }
        Ok(Go::On)
    };
    let run = Training { user: &gives_up, ..Training::new() }.run();
    let (error, happened) = run.told(&SURVIVORS);
    assert!(matches!(error, Error::Comm(CommError::StepAborted { .. })), "{error}");
    run.assert_no_trace();
    happened
}

/// Why the world ended by the culprit, who was in this step.
fn reason_of(error: &Error, expected: u64) -> &AbortReason {
    match error {
        Error::Comm(CommError::World(Aborted { rank, step, operation: Some(_), reason })) => {
            assert_eq!((rank.index(), *step), (CULPRIT, expected), "{error}");
            reason
        }
        other => panic!("{other}"),
    }
}

/// A rank drops all that it has with a reduction in flight, for which another waits. Neither takes
/// long, the gradients that were lent are given back, and the others are told.
pub(crate) fn drops_a_group_in_flight() -> Happened {
    let options = WorldOptions { deadline: DEADLINE, ..WorldOptions::default() };
    let [dropping, waiting, away] =
        <[World; 3]>::try_from(World::local(3, options)).expect("three ranks");
    let started = Instant::now();
    let (gradients, pending): (Vec<_>, Vec<_>) =
        [&dropping, &waiting].map(in_flight).into_iter().unzip();
    let [dropped, waited_for] = <[Pending<Reduced>; 2]>::try_from(pending).expect("two are issued");
    let waiter = std::thread::spawn(move || {
        let ended = waited_for.wait();
        drop(waiting);
        (ended.expect_err("rank 2 never comes"), Instant::now())
    });
    let before = Instant::now();
    drop((dropped, dropping));
    assert!(before.elapsed() < LIMIT, "a drop takes {:?}", before.elapsed());
    drop(away);
    let (error, told) = waiter.join().expect("no thread panics");
    let given_back = |gradient: &Weak<Ones>| gradient.upgrade().is_none();
    assert!(becomes(|| gradients.iter().all(given_back)), "gradients are held for ever");
    assert!(matches!(error, CommError::World(Aborted { .. })), "{error}");
    Happened::in_time(&error, told.duration_since(started))
}

/// A gradient of ones.
struct Ones;

const ELEMENTS: usize = 300_000;

impl fmt::Debug for Ones {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Ones")
    }
}

impl GradientValues for Ones {
    fn len(&self) -> usize {
        ELEMENTS
    }

    fn read(&self, range: Range<usize>, visit: &mut dyn FnMut(Values<'_>)) {
        visit(Values::F32(&vec![1.0; range.len()]));
    }
}

/// A reduction for which another rank is missing, of a gradient that can be watched.
fn in_flight(world: &World) -> (Weak<Ones>, Pending<Reduced>) {
    let gradient = Arc::new(Ones);
    let watched = Arc::downgrade(&gradient);
    let group: Group = world.world_group(Channel::Reduce);
    let unit = Unit::new("unit").param(Param::new("weight", [ELEMENTS]));
    let layout = Arc::new(UnitLayout::new(&unit, world.size()).expect("a layout"));
    let partial = vec![0.0; layout.trainable().shard_len];
    let contribution =
        Contribution { gradients: vec![Some(gradient)], scaling: Scaling::on(Wire::F32) };
    let accumulator = Accumulator { partial, fold: Fold::Replace };
    let pending = group.reduce_unit(Tag::new(Stage::Reduce), layout, contribution, accumulator);
    (watched, pending.expect("issued"))
}
