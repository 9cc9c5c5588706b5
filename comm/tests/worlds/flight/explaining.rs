//! The explanations of worlds in which something went wrong, or nothing did.

use std::sync::Barrier;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use hsdp_comm::{
    Channel, Explanation, Finding, FlightRecord, ModelLabel, Presence, Reduction, Stage, Tag,
    World, WorldOptions, explain,
};
use hsdp_sharding::{Rank, UnitId};

use super::{gather, pass, reduce, reducer, settled, tag, until};
use crate::common::outcomes;

/// The records of a world of four, each taken when its rank has done `act`. All begin together: on
/// a busy machine the first could miss its deadline before the last has a thread.
fn records(options: WorldOptions, act: impl Fn(&World) + Sync) -> Vec<FlightRecord> {
    let all = Barrier::new(4);
    let records = outcomes(4, options, |world| {
        all.wait();
        act(&world);
        world.flight_record()
    });
    records.into_iter().map(|record| record.expect("no panic")).collect()
}

/// Ranks that begin together all wait before it has passed.
const DEADLINE: Duration = Duration::from_secs(1);

fn soon() -> WorldOptions {
    WorldOptions { deadline: DEADLINE, ..WorldOptions::default() }
}

/// Whether `text` has all `parts`, in this order.
#[track_caller]
fn reads(explanation: &Explanation, parts: &[&str]) {
    let text = explanation.to_string();
    let mut rest = &*text;
    for part in parts {
        let at = rest.find(part).unwrap_or_else(|| panic!("`{part}` is missing in:\n{text}"));
        rest = &rest[at + part.len()..];
    }
}

#[test]
fn a_clean_run() {
    let records = records(WorldOptions::default(), |world| {
        for unit in 0..5 {
            gather(world, unit).expect("all");
            reduce(world, unit).expect("all");
        }
    });
    let explanation = explain(&records);
    assert_eq!(explanation.finding, Finding::Nothing);
    assert_eq!((explanation.size, explanation.compared, explanation.partly_known), (4, 10, 0));
    assert_eq!((&explanation.ends[..], &explanation.overwritten[..]), (&[][..], &[][..]));
    assert!(explanation.lateness.is_some());
    reads(
        &explanation,
        &[
            "all ranks agree; 10 operations of 4 ranks compared, and no rank waits in vain",
            "slowest: ",
        ],
    );
    // In any order.
    let backwards: Vec<_> = records.into_iter().rev().collect();
    assert_eq!(explain(&backwards), explanation);
}

#[test]
fn a_mismatch() {
    let records = records(WorldOptions::default(), |world| {
        gather(world, 1).expect("all");
        let unit = if world.rank().index() == 2 { 5 } else { 4 };
        gather(world, unit).expect_err("ranks disagree");
    });
    let explanation = explain(&records);
    let Finding::Mismatch { operation, members } = &explanation.finding else {
        panic!("{explanation:?}")
    };
    assert_eq!((operation.sequence, members.len()), (1, 4));
    let lines = [
        "step 7, microbatch 0: ranks disagree about operation 1 on channel reduce, epoch 0:\n",
        ": all_gather f32 4 elements, unit 4, gather, step 7, microbatch 0\n",
        "the world ended: collective mismatch: ranks disagree about operation 1",
    ];
    reads(&explanation, &lines);
    reads(&explanation, &["rank 2: all_gather f32 4 elements, unit 5, gather, step 7"]);
}

/// The first model is shown where its operation would look like one of no model.
#[test]
fn a_mismatch_of_a_model_and_none() {
    let records = records(WorldOptions::default(), |world| {
        let tag = tag(Stage::Export, 0);
        let tag = if world.rank().index() == 3 { tag.model(ModelLabel::FIRST) } else { tag };
        settled(reducer(world).barrier(tag)).expect_err("ranks disagree");
    });
    let explanation = explain(&records);
    reads(&explanation, &["\n  rank 3: barrier, model 0, unit 0, export, step 7"]);
}

#[test]
fn reductions_and_roots_count_too() {
    for which in 0..2 {
        let records = records(WorldOptions::default(), |world| {
            let group = reducer(world);
            let odd = world.rank().index() == 3;
            let reduction = if odd && which == 0 { Reduction::Max } else { Reduction::Sum };
            let root = usize::from(odd && which == 1);
            let tag = tag(Stage::Export, 0);
            settled(group.reduce(tag, root, reduction, vec![1_f32; 3])).expect_err("a mismatch");
        });
        let explanation = explain(&records);
        assert!(matches!(explanation.finding, Finding::Mismatch { .. }), "{explanation}");
        let expected = ["rank 3: reduce max f32", "rank 3: reduce sum f32 3 elements, root rank 1"];
        reads(&explanation, &[expected[which]]);
    }
}

#[test]
fn a_missing_rank() {
    let records = records(soon(), |world| {
        gather(world, 1).expect("all");
        gather(world, 2).expect("all");
        if world.rank().index() == 1 {
            super::until("the end", || world.end().is_some());
        } else {
            reduce(world, 3).expect_err("rank 1 does not come");
        }
    });
    let explanation = explain(&records);
    let Finding::Missing { operation, waiting, waited, absent } = &explanation.finding else {
        panic!("{explanation:?}")
    };
    assert_eq!((operation.sequence, operation.tag.step), (2, 7));
    assert_eq!(waiting[..], [0, 2, 3].map(Rank::new));
    let waited = waited.expect("they wait");
    assert!(waited >= DEADLINE - Duration::from_millis(50), "{waited:?}");
    let [absent] = &absent[..] else { panic!("one is absent: {explanation}") };
    assert_eq!(absent.rank, Rank::new(1));
    let Presence::NotIssued(Some(last)) = &absent.presence else { panic!("{explanation}") };
    assert_eq!((last.operation.sequence, &last.waits_in), (1, &None));
    assert!(last.ago >= waited);
    let lines = [
        "step 7, microbatch 0: ranks 0, 2, 3 wait in reduce_scatter of unit 3 (sequence 2), for ",
        "; rank 1 has not issued it: its last operation was all_gather of unit 2 (sequence 1), ",
        " ago\nthe world ended: world aborted: rank 1, ",
        "deadline of 1s missed in reduce_scatter sum f32 16 elements",
    ];
    reads(&explanation, &lines);
}

#[test]
fn an_operation_of_a_checkpoint_is_named_in_words() {
    let records = records(soon(), |world| match world.rank().index() {
        0 => super::until("the end", || world.end().is_some()),
        _ => {
            let group = world.world_group(Channel::User);
            let tag = Tag::new(Stage::Export).step(7);
            settled(group.barrier(tag)).expect_err("rank 0 does not come");
        }
    });
    reads(
        &explain(&records),
        &["wait in barrier of a checkpoint, an import, an export or norms (sequence 0)"],
    );
}

#[test]
fn a_sum_of_slices_is_told_from_a_reduction_of_gradients() {
    let records = records(soon(), |world| match world.rank().index() {
        0 => super::until("the end", || world.end().is_some()),
        _ => {
            let group = world.world_group(Channel::User);
            let tag = Tag::new(Stage::ScatterSums).unit(UnitId::new(3)).step(7);
            settled(group.barrier(tag)).expect_err("rank 0 does not come");
        }
    });
    reads(&explain(&records), &["wait in barrier of unit 3, stage scatter_sums, (sequence 0)"]);
}

#[test]
fn a_rank_that_did_nothing_at_all() {
    let records = records(soon(), |world| match world.rank().index() {
        0 => super::until("the end", || world.end().is_some()),
        _ => gather(world, 1).expect_err("rank 0 does not come").to_string().clear(),
    });
    reads(&explain(&records), &["; rank 0 has not issued it, nor anything else\n"]);
}

#[test]
fn a_rank_that_waits_for_another_is_not_the_one_that_is_named() {
    let records = records(soon(), |world| {
        let pair = |ranks: [usize; 2]| {
            world.group(&ranks.map(Rank::new), Channel::User).expect("a member")
        };
        let barrier = |ranks| settled(pair(ranks).barrier(Tag::default())).expect_err("the end");
        match world.rank().index() {
            // 0 waits for 1, who waits for 2, who is busy; 3 has nothing to do with it.
            0 => drop(barrier([0, 1])),
            1 => drop(barrier([1, 2])),
            _ => super::until("the end", || world.end().is_some()),
        }
    });
    let explanation = explain(&records);
    let Finding::Missing { waiting, absent, .. } = &explanation.finding else {
        panic!("{explanation}")
    };
    assert_eq!(waiting[..], [Rank::new(1)]);
    assert_eq!(absent[0].rank, Rank::new(2));
    reads(
        &explanation,
        &["rank 1 waits in barrier (sequence 0), for ", "; rank 2 has not issued it"],
    );
}

#[test]
fn ranks_that_wait_for_each_other() {
    let records = records(soon(), |world| {
        let group = |channel| {
            let pair = world.group(&[0, 1].map(Rank::new), channel).expect("a member");
            settled(pair.barrier(Tag::default())).expect_err("the other is elsewhere")
        };
        match world.rank().index() {
            0 => drop(group(Channel::User)),
            1 => drop(group(Channel::Control)),
            _ => super::until("the end", || world.end().is_some()),
        }
    });
    reads(&explain(&records), &["barrier (sequence 0)", "it waits in barrier (sequence 0) itself"]);
}

#[test]
fn a_slow_rank() {
    // Longer than a busy machine keeps the others from saying that they have issued a unit.
    let late = Duration::from_millis(500);
    let issued = AtomicUsize::new(0);
    let records = records(WorldOptions::default(), |world| {
        for unit in 0..4 {
            let is_slow = world.rank().index() == 2;
            if is_slow {
                until("the others", || issued.load(Ordering::SeqCst) == 3 * (unit + 1));
                pass(if unit == 3 { late } else { Duration::ZERO });
            }
            let pending = reducer(world).all_gather(tag(Stage::Gather, unit), vec![1_f32; 4]);
            issued.fetch_add(usize::from(!is_slow), Ordering::SeqCst);
            settled(pending).expect("all");
        }
    });
    let explanation = explain(&records);
    assert_eq!(explanation.finding, Finding::Nothing);
    let slowest = explanation.lateness.as_ref().expect("there are operations");
    assert_eq!((slowest.rank, slowest.operation.sequence), (Rank::new(2), 3));
    assert!(slowest.late > late / 2 && slowest.late < 24 * late, "{:?}", slowest.late);
    let often = explanation.often_last.expect("there are operations");
    assert_eq!((often.rank, often.of), (Rank::new(2), 4));
    let lines = [
        "slowest: step 7, microbatch 0: rank 2 issued all_gather of unit 3 (sequence 3) ",
        " after the others; it was most often the last to issue, in ",
        " of 4",
    ];
    reads(&explanation, &lines);
}

#[test]
fn work_that_fails_though_all_are_there() {
    let records = records(WorldOptions::default(), |world| {
        // A member sends other elements than the other expects: each knows only its own half.
        let send = if world.rank().index() == 0 { vec![1, 2, 0, 1] } else { vec![1; 4] };
        let values = vec![0_f32; send.iter().sum()];
        let issued = reducer(world).all_to_all(tag(Stage::Setup, 0), values, send, vec![1; 4]);
        settled(issued).expect_err("sizes differ");
    });
    let explanation = explain(&records);
    let Finding::Unfinished { ranks, .. } = &explanation.finding else { panic!("{explanation}") };
    assert_eq!(ranks.len(), 4);
    reads(
        &explanation,
        &[
            "setup: ranks 0, 1, 2, 3 have all issued all_to_all of unit 0",
            "but it failed\nthe world ended: ",
        ],
    );
}

#[test]
fn operations_that_nobody_waits_for_are_not_missed() {
    let worlds = World::local(2, WorldOptions::default());
    let issue = |rank: usize, unit| {
        reducer(&worlds[rank]).all_gather(tag(Stage::Gather, unit), vec![1_f32; 4])
    };
    let both = [issue(0, 1), issue(1, 1)];
    // On its way: the next unit, before the other asks for it.
    let ahead = issue(0, 2);
    let records: Vec<_> = worlds.iter().map(World::flight_record).collect();
    let explanation = explain(&records);
    assert_eq!(explanation.finding, Finding::Nothing);
    assert_eq!((explanation.compared, explanation.partly_known), (1, 0));
    drop((both, ahead));
}

#[test]
fn a_rank_that_ends_the_world() {
    let gathered = AtomicUsize::new(0);
    let records = records(WorldOptions::default(), |world| {
        gather(world, 1).expect("all");
        gathered.fetch_add(1, Ordering::SeqCst);
        if world.rank().index() == 3 {
            // A world that ends fails the operations that other ranks still wait for.
            until("the gather of all ranks", || gathered.load(Ordering::SeqCst) == 4);
            return world.abort("out of batches");
        }
        drop(gather(world, 2));
    });
    let explanation = explain(&records);
    reads(&explanation, &["\nthe world ended: world aborted: rank 3, ", ": out of batches\n"]);
}

#[test]
fn a_world_that_ended_before_anybody_waited() {
    let worlds = World::local(2, WorldOptions::default());
    let pending = reducer(&worlds[0]).all_gather(tag(Stage::Gather, 2), vec![1_f32; 4]);
    worlds[1].abort("out of batches");
    let mut records: Vec<_> = worlds.iter().map(World::flight_record).collect();
    let expected = "step 7, microbatch 0: rank 0 has issued all_gather of unit 2 (sequence 0); \
                    rank 1 has not issued it, nor anything else\n\
                    the world ended: world aborted: rank 1, step 0, before its first operation: out of batches";
    assert_eq!(explain(&records).to_string(), expected);
    records[1].end = Some("out of memory".to_owned());
    let reported = [
        "\nrank 0 reports that the world ended: world aborted: rank 1, ",
        "\nrank 1 reports that the world ended: out of memory",
    ];
    reads(&explain(&records), &reported);
    drop(pending);
}

#[test]
fn no_records_at_all() {
    assert_eq!(explain(&[]).to_string(), "there is no record");
}
