//! The early ends: deadlines, panics, ranks that leave, steps and worlds that are given up.

use std::fmt::Debug;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Barrier, Mutex};
use std::time::{Duration, Instant};

use hsdp_kernels::{Fold, GradientValues, Values, Wire};
use hsdp_sharding::{Param, Unit, UnitLayout};
use tracing::field::Field;
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Level, Metadata, Subscriber};

use hsdp_comm::{
    AbortReason, Accumulator, Channel, Contribution, Error, Pending, Reduction, Scaling, Stage,
    StepFailure, Tag, Workers, World, WorldOptions, launch,
};
use hsdp_sharding::Rank;

/// What a fault may take to be known by everybody: a second, and what a busy machine adds. The deadline is 120 s.
const PROMPTLY: Duration = Duration::from_secs(5);

fn tag() -> Tag {
    Tag::new(Stage::AllReduce).step(7)
}

fn settled<T>(issued: Result<Pending<T>, Error>) -> Result<T, Error> {
    issued?.wait()
}

fn sum(world: &World, values: Vec<f32>) -> Result<Vec<f32>, Error> {
    settled(world.world_group(Channel::User).all_reduce(tag(), Reduction::Sum, values))
}

#[test]
fn a_missed_deadline_names_who_is_missing_on_all_ranks() {
    let options = WorldOptions { deadline: Duration::from_millis(200), ..WorldOptions::default() };
    // On a busy machine ranks may start late: nobody waits before all that come have come.
    let (all, two, over) = (Barrier::new(3), Barrier::new(2), Barrier::new(3));
    let ends = launch(3, options, |world| {
        world.set_step(7);
        let group = world.world_group(Channel::User);
        let first = group.all_reduce(tag(), Reduction::Sum, vec![1_f32]);
        all.wait();
        settled(first).expect("the first one is complete");
        let end = if world.rank().index() == 1 {
            // Comes too late: when the others have given up.
            over.wait();
            sum(&world, vec![1.0])
        } else {
            let second = group.all_reduce(tag(), Reduction::Sum, vec![1_f32]);
            two.wait();
            let end = settled(second);
            over.wait();
            end
        };
        end.expect_err("the deadline passes")
    });
    for end in ends {
        let Ok(Error::WorldAborted { rank, step, operation, reason }) = end else {
            panic!("{end:?}")
        };
        assert_eq!((rank, step), (Rank::new(1), 7));
        assert_eq!(operation.expect("it was in one before").sequence, 0);
        assert_eq!(
            reason.to_string(),
            "deadline of 200ms missed in all_reduce sum f32 1 element, all_reduce, step 7, microbatch 0 \
             (operation 1 on channel user, epoch 0); arrived: ranks [0, 2], missing: ranks [1]"
        );
    }
}

/// Notes when it is dropped.
struct Stamp<'a>(&'a Mutex<Option<Instant>>);

impl Drop for Stamp<'_> {
    fn drop(&mut self) {
        *self.0.lock().expect("not poisoned") = Some(Instant::now());
    }
}

#[test]
fn a_panic_reaches_all_others_with_its_message_promptly() {
    let panicked = Mutex::new(None);
    let ends = launch(4, WorldOptions::default(), |world| {
        world.set_step(7);
        sum(&world, vec![1.0]).expect("the first one is complete");
        if world.rank().index() == 2 {
            // The panic's hook runs first, and may take its time for a backtrace.
            let _unwinding = Stamp(&panicked);
            panic!("batch {} is bad", 12);
        }
        let end = sum(&world, vec![1.0]).expect_err("rank 2 panics");
        (end, Instant::now())
    });
    let panicked = panicked.into_inner().expect("not poisoned").expect("rank 2 panicked");
    for (rank, end) in ends.into_iter().enumerate() {
        if rank == 2 {
            assert_eq!(end.expect_err("it panicked").to_string(), "rank 2: batch 12 is bad");
            continue;
        }
        let (end, when) = end.expect("no panic");
        assert!(when - panicked < PROMPTLY);
        assert_eq!(
            end.to_string(),
            "world aborted: rank 2, step 7, last in all_reduce sum f32 1 element, all_reduce, step 7, \
             microbatch 0: it panicked: batch 12 is bad"
        );
    }
}

#[test]
fn a_rank_that_leaves_while_others_wait_ends_the_world() {
    // Whether it leaves before the others arrive, or after.
    for leaves_first in [true, false] {
        let gone = AtomicBool::new(false);
        let ends = launch(3, WorldOptions::default(), |world| {
            let group = world.world_group(Channel::User);
            if world.rank().index() == 0 {
                while !leaves_first && !gone.load(Ordering::SeqCst) {
                    std::thread::yield_now();
                }
                drop((group, world));
                gone.store(true, Ordering::SeqCst);
                return None;
            }
            while leaves_first && !gone.load(Ordering::SeqCst) {
                std::thread::yield_now();
            }
            let started = Instant::now();
            let issued = group.all_reduce(tag(), Reduction::Sum, vec![1_f32]);
            gone.store(true, Ordering::SeqCst);
            let end = settled(issued).expect_err("rank 0 leaves");
            assert!(started.elapsed() < PROMPTLY);
            Some(end)
        });
        for end in ends.into_iter().skip(1) {
            let Ok(Some(Error::WorldAborted { rank, reason, .. })) = end else { panic!("{end:?}") };
            assert_eq!(rank, Rank::new(0));
            assert!(matches!(reason, AbortReason::Left { .. }), "{reason}");
        }
    }
}

#[test]
fn a_rank_that_nobody_waits_for_may_leave() {
    let ends = launch(3, WorldOptions::default(), |world| {
        if world.rank().index() == 0 {
            return Ok(vec![]);
        }
        let group = world.group(&[1, 2].map(Rank::new), Channel::User)?;
        let mut sum = vec![];
        for _ in 0..100 {
            sum = settled(group.all_reduce(tag(), Reduction::Sum, vec![1_f32]))?;
        }
        Ok::<_, Error>(sum)
    });
    assert_eq!(ends, [Ok(Ok(vec![])), Ok(Ok(vec![2.0])), Ok(Ok(vec![2.0]))]);
}

#[test]
fn what_a_rank_had_issued_before_it_left_completes() {
    let ends = launch(2, WorldOptions::default(), |world| {
        let group = world.world_group(Channel::User);
        let issued = group.all_gather(tag(), vec![world.rank().get()])?;
        if world.rank().index() == 0 {
            return Ok(vec![]);
        }
        issued.wait()
    });
    assert_eq!(ends[1], Ok(Ok(vec![0, 1])));
}

#[test]
fn an_aborted_step_ends_everywhere_and_the_next_epoch_is_clean() {
    let ends = launch(4, WorldOptions::default(), |world| {
        let gather = world.world_group(Channel::Gather);
        // Numbers differ between the ranks when the step is given up: they must not afterwards.
        let ahead = world.rank().index();
        let pending: Vec<_> = (0..ahead).map(|_| gather.all_gather(tag(), vec![1_u32])).collect();
        if world.rank().index() == 0 {
            world.abort_step(StepFailure { step: 7, reason: "the data loader broke".to_owned() });
        }
        for pending in pending {
            let end = settled(pending).expect_err("the step is aborted");
            assert_eq!(end.to_string(), "step 7 aborted by rank 0: the data loader broke");
            assert!(!end.is_fatal());
        }
        // Calls in the old epoch are refused until this rank goes on.
        let refused = sum(&world, vec![1.0]).expect_err("rank 0 takes no part in this epoch");
        assert!(matches!(refused, Error::StepAborted { step: 7, .. }), "{refused}");
        assert_eq!(world.next_epoch(), 1);
        assert_eq!(world.next_epoch(), 1, "an epoch that is not aborted is not left");
        let gathered = settled(gather.all_gather(tag(), vec![world.rank().get()]))?;
        Ok::<_, Error>((gathered, sum(&world, vec![1.0])?))
    });
    for end in ends {
        assert_eq!(end, Ok(Ok((vec![0, 1, 2, 3], vec![4.0]))));
    }
}

#[test]
fn ranks_that_abort_at_once_all_name_the_same_rank() {
    for _ in 0..50 {
        let ends = launch(4, WorldOptions::default(), |world| {
            for step in 0..5 {
                let rank = world.rank();
                if rank.index().is_multiple_of(2) {
                    world.abort_step(StepFailure { step, reason: format!("rank {rank} gives up") });
                }
                let end = sum(&world, vec![1.0]).expect_err("the step is aborted");
                let Error::StepAborted { rank, reason, .. } = &end else { panic!("{end}") };
                assert_eq!(**reason, format!("rank {rank} gives up"));
                assert_eq!(world.next_epoch(), step + 1);
                assert_eq!(sum(&world, vec![1.0]), Ok(vec![4.0]));
            }
        });
        assert!(ends.iter().all(Result::is_ok), "{ends:?}");
    }
}

#[test]
fn a_rank_in_the_next_epoch_waits_for_those_in_the_old_one() {
    let ends = launch(2, WorldOptions::default(), |world| {
        if world.rank().index() == 0 {
            world.abort_step(StepFailure { step: 0, reason: "first".to_owned() });
            world.next_epoch();
            // Rank 1 is still in epoch 0.
            return sum(&world, vec![1.0]);
        }
        while sum(&world, vec![1.0]).is_ok() {}
        world.next_epoch();
        sum(&world, vec![2.0])
    });
    assert_eq!(ends, [Ok(Ok(vec![3.0])), Ok(Ok(vec![3.0]))]);
}

#[test]
fn work_that_has_begun_completes_when_the_step_is_aborted() {
    let worlds = World::local(2, WorldOptions::default());
    let values = vec![1_f32; 1 << 20];
    let pending: Vec<_> = worlds
        .iter()
        .map(|world| {
            world.world_group(Channel::User).all_reduce(tag(), Reduction::Sum, values.clone())
        })
        .collect();
    worlds[0].abort_step(StepFailure { step: 0, reason: "too late for this one".to_owned() });
    for pending in pending {
        assert!(settled(pending).is_ok_and(|sum| sum == vec![2_f32; 1 << 20]));
    }
}

#[test]
fn an_abort_ends_what_is_pending_and_what_comes_later() {
    let ends = launch(3, WorldOptions::default(), |world| {
        let group = world.world_group(Channel::User);
        if world.rank().index() == 1 {
            world.abort("out of memory: 4096 bytes for wte");
        }
        let first = settled(group.barrier(tag())).expect_err("aborted");
        let second = settled(group.barrier(tag())).expect_err("aborted");
        assert_eq!(first, second);
        assert_eq!(world.end().as_ref(), Some(&first));
        first.to_string()
    });
    for end in ends {
        let end = end.expect("no panic");
        assert!(end.starts_with("world aborted: rank 1, step 0, "), "{end}");
        assert!(end.ends_with("out of memory: 4096 bytes for wte"), "{end}");
    }
}

#[test]
fn groups_of_one_end_with_their_world_too() {
    let world = World::single();
    assert_eq!(sum(&world, vec![1.0]), Ok(vec![1.0]));
    world.abort_step(StepFailure { step: 3, reason: "no data".to_owned() });
    assert!(matches!(sum(&world, vec![1.0]), Err(Error::StepAborted { step: 3, .. })));
    assert_eq!(world.next_epoch(), 1);
    assert_eq!(sum(&world, vec![1.0]), Ok(vec![1.0]));
    world.abort("enough");
    assert!(matches!(sum(&world, vec![1.0]), Err(Error::WorldAborted { .. })));
}

/// What was warned of, in the threads that it is the default of.
#[derive(Clone, Default)]
struct Warnings(Arc<Mutex<Vec<String>>>);

impl Subscriber for Warnings {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        *metadata.level() == Level::WARN
    }

    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }

    fn record(&self, _: &Id, _: &Record<'_>) {}

    fn record_follows_from(&self, _: &Id, _: &Id) {}

    fn event(&self, event: &Event<'_>) {
        let mut fields = String::new();
        event.record(&mut |field: &Field, value: &dyn Debug| {
            fields.push_str(&format!("{field}={value:?} "));
        });
        self.0.lock().expect("not poisoned").push(fields);
    }

    fn enter(&self, _: &Id) {}

    fn exit(&self, _: &Id) {}
}

#[test]
fn a_late_rank_is_named_in_a_warning_and_nothing_ends() {
    let options = WorldOptions { late: Duration::from_millis(50), ..WorldOptions::default() };
    let warnings = Warnings::default();
    let sums = launch(2, options, |world| {
        // Rank 1 comes when rank 0 has warned.
        while world.rank().index() == 1 && warnings.0.lock().expect("not poisoned").is_empty() {
            std::thread::yield_now();
        }
        tracing::subscriber::with_default(warnings.clone(), || sum(&world, vec![1.0]))
    });
    assert_eq!(sums, [Ok(Ok(vec![2.0])), Ok(Ok(vec![2.0]))]);
    let warnings = warnings.0.lock().expect("not poisoned");
    assert_eq!(warnings.len(), 1, "once: {warnings:?}");
    for expected in ["rank=0", "all_reduce sum f32 1 element", "missing=[1]", "waited=50ms"] {
        assert!(warnings[0].contains(expected), "`{expected}` is missing in {}", warnings[0]);
    }
}

#[test]
fn a_worker_that_hangs_for_ever_does_not_hold_up_the_end_of_its_world() {
    let deadline = Duration::from_millis(100);
    let options = WorldOptions { deadline, workers: Workers::Count(1), ..WorldOptions::default() };
    let (started, worlds) = (Instant::now(), World::local(2, options));
    let unit = Unit::new("unit").param(Param::new("weight", [100_000]));
    let layout = Arc::new(UnitLayout::new(&unit, 2).expect("a layout"));
    let reduce = |world: &World| {
        let gradients = vec![Some(Arc::new(Hangs) as Arc<dyn GradientValues>)];
        let contribution = Contribution { gradients, scaling: Scaling::on(Wire::F32) };
        let partial = vec![0.0; layout.trainable().shard_len];
        let group = world.world_group(Channel::Reduce);
        group.reduce_unit(
            tag(),
            Arc::clone(&layout),
            contribution,
            Accumulator { partial, fold: Fold::Replace },
        )
    };
    let pending: Vec<_> = worlds.iter().map(reduce).collect();
    drop(worlds);
    drop(pending);
    assert!(started.elapsed() < Duration::from_secs(60));
}

/// A gradient that nobody can read to its end.
#[derive(Debug)]
struct Hangs;

impl GradientValues for Hangs {
    fn len(&self) -> usize {
        100_000
    }

    fn read(&self, _: Range<usize>, _: &mut dyn FnMut(Values<'_>)) {
        loop {
            std::thread::park();
        }
    }
}
