//! When a fault fires: at one call of one step, once.

use std::time::{Duration, Instant};

use hsdp_comm::CallError::Injected;
use hsdp_comm::{
    Channel, Error, Fault, FaultKind, FaultPlace, Stage, StepFailure, Tag, World, WorldOptions,
};
use hsdp_sharding::{Rank, UnitId};

use super::{assert_names, options, settled};
use crate::common::outcomes;

const KIND: FaultKind = FaultKind::Error;

/// A world of one rank with faults, whose calls are all done at once.
fn alone(faults: impl IntoIterator<Item = Fault>) -> World {
    World::local(1, options(faults)).pop().expect("a rank")
}

fn at(step: u64, place: impl Into<FaultPlace>) -> Fault {
    Fault::at(Rank::new(0), step, place, KIND)
}

/// Which calls of a step fail, of those with the given tags: a unit and a stage each.
fn failing(world: &World, step: u64, calls: &[(usize, Stage)]) -> Vec<usize> {
    world.set_step(step);
    let fails = |(unit, stage): (usize, Stage)| {
        let tag = Tag::new(stage).unit(UnitId::new(unit));
        // Over several groups: all count.
        let channel = if stage == Stage::Gather { Channel::Gather } else { Channel::Reduce };
        settled(world.world_group(channel).all_gather(tag, vec![1_f32])).is_err()
    };
    let failed = calls.iter().enumerate().filter(|(_, call)| fails(**call));
    failed.map(|(number, _)| number).collect()
}

/// No call fails.
const NONE: [usize; 0] = [];

const CALLS: [(usize, Stage); 6] = [
    (0, Stage::Gather),
    (1, Stage::Gather),
    (1, Stage::Reduce),
    (0, Stage::Reduce),
    (1, Stage::Reduce),
    (0, Stage::Reduce),
];

#[test]
fn a_fault_fires_once_at_the_first_call_of_its_step_that_fits() {
    let places: [(FaultPlace, usize); 5] = [
        (UnitId::new(1).into(), 1),
        (Stage::Reduce.into(), 2),
        ((UnitId::new(0), Stage::Reduce).into(), 3),
        (0.into(), 0),
        (5.into(), 5),
    ];
    for (place, expected) in places {
        let fault = at(3, place);
        let world = alone([fault]);
        assert_eq!(failing(&world, 2, &CALLS), NONE, "{place}");
        assert_eq!(world.armed_faults(), [fault]);
        assert_eq!(failing(&world, 3, &CALLS), [expected], "{place}");
        assert_eq!(world.armed_faults(), []);
        assert_eq!(failing(&world, 3, &CALLS), NONE, "{place}");
        assert_eq!(failing(&world, 4, &CALLS), NONE, "{place}");
    }
}

#[test]
fn a_fault_that_never_fits_stays_armed() {
    let faults = [at(0, 6), at(0, UnitId::new(2)), at(0, Stage::Export), at(1, 0)];
    let world = alone(faults);
    assert_eq!(failing(&world, 0, &CALLS), NONE);
    assert_eq!(world.armed_faults(), faults);
}

#[test]
fn a_step_that_is_repeated_counts_from_0_again() {
    let world = alone([at(2, 1), at(2, 4)]);
    assert_eq!(failing(&world, 2, &CALLS[..3]), [1]);
    world.abort_step(StepFailure { step: 2, reason: "a test".to_owned() });
    // Refused calls do not count.
    assert_eq!(failing(&world, 2, &CALLS), [0, 1, 2, 3, 4, 5]);
    world.next_epoch();
    assert_eq!(failing(&world, 2, &CALLS), [4]);
}

#[test]
fn all_faults_of_a_call_fire_in_their_order() {
    let first = Rank::new(0);
    let second = Rank::new(1);
    let delay = Duration::from_millis(20);
    let faults = [
        Fault::at(first, 0, 0, FaultKind::ExtraCall),
        Fault::at(second, 0, 0, FaultKind::Delay(delay)),
        Fault::at(first, 0, 0, FaultKind::WrongReduction),
        Fault::at(first, 0, Stage::User, FaultKind::WrongRoot),
    ];
    let started = Instant::now();
    let ends = outcomes(2, options(faults), |world| {
        let group = world.world_group(Channel::User);
        if world.rank() == Rank::new(1) {
            // The extra call is a barrier: both come to it, and meet in what is wrong.
            settled(group.barrier(Tag::default()))?;
        }
        settled(group.barrier(Tag::default()))
    });
    assert!(started.elapsed() >= delay);
    for end in ends {
        let end = end.expect("no panic").expect_err("they disagree").to_string();
        assert_names(
            &end,
            &["operation 1 on channel user", "rank 0: barrier sum, root rank 0, user"],
        );
    }
}

#[test]
fn nothing_comes_after_what_ends_the_call() {
    let kinds = [FaultKind::Error, FaultKind::OutOfMemory];
    let world = alone(kinds.map(|kind| Fault::at(Rank::new(0), 0, 0, kind)));
    let end = settled(world.world_group(Channel::User).barrier(Tag::default()));
    assert!(matches!(end, Err(Error::Call(Injected { .. }))), "{end:?}");
    assert_eq!(world.armed_faults(), [], "they were both due");
}

#[test]
fn a_fault_is_committed_by_its_rank_only() {
    let fault = Fault::at(Rank::new(1), 0, 0, FaultKind::Error);
    let options = WorldOptions { faults: vec![fault], ..WorldOptions::default() };
    let worlds = World::local(2, options);
    assert_eq!(worlds[0].armed_faults(), []);
    assert_eq!(worlds[1].armed_faults(), [fault]);
}

#[test]
fn a_fault_reads_as_a_sentence() {
    let kinds = [
        (FaultKind::Freeze, "freeze"),
        (FaultKind::WrongDType, "wrong dtype"),
        (FaultKind::Delay(Duration::from_millis(50)), "delay of 50ms"),
        (FaultKind::NonFinite(f32::NAN), "a gradient of NaN"),
    ];
    for (kind, name) in kinds {
        let fault = Fault::at(Rank::new(1), 3, (UnitId::new(2), Stage::Reduce), kind);
        assert_eq!(fault.to_string(), format!("rank 1, step 3, unit 2, reduce: {name}"));
    }
    let places = [at(7, UnitId::new(2)), at(7, Stage::Header), at(7, 12)];
    let texts = places.map(|fault| fault.to_string());
    assert_eq!(
        texts,
        [
            "rank 0, step 7, unit 2: error",
            "rank 0, step 7, header: error",
            "rank 0, step 7, call 12: error"
        ]
    );
}
