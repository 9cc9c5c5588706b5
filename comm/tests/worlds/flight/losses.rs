//! The explanations where records are lost, or rings too short.

use std::sync::Barrier;
use std::time::Duration;

use hsdp_comm::{Channel, Finding, FlightRecord, Presence, Tag, World, WorldOptions, explain};
use hsdp_sharding::Rank;

use super::{gather, reduce, settled, until};
use crate::common::outcomes;

/// The ranks begin together, so all wait before the deadline has passed, also on a busy machine.
fn records(options: WorldOptions, act: impl Fn(&World) + Sync) -> Vec<FlightRecord> {
    let options = WorldOptions { deadline: Duration::from_secs(1), ..options };
    let all = Barrier::new(3);
    let records = outcomes(3, options, |world| {
        all.wait();
        act(&world);
        world.flight_record()
    });
    records.into_iter().map(|record| record.expect("no panic")).collect()
}

fn ring_of(flight_entries: usize) -> WorldOptions {
    WorldOptions { flight_entries, ..WorldOptions::default() }
}

fn without(mut records: Vec<FlightRecord>, rank: usize) -> Vec<FlightRecord> {
    records.retain(|record| record.rank.index() != rank);
    records
}

/// Rank 2 does not come to the second operation.
fn without_rank_2(world: &World) {
    gather(world, 1).expect("all");
    match world.rank().index() {
        2 => until("the end", || world.end().is_some()),
        _ => drop(reduce(world, 1).expect_err("rank 2 does not come")),
    }
}

#[test]
fn a_lost_record_of_a_clean_run() {
    let clean = records(ring_of(64), |world| gather(world, 1).expect("all"));
    let explanation = explain(&without(clean, 1));
    assert_eq!(explanation.finding, Finding::Nothing);
    assert_eq!(explanation.without_record, [Rank::new(1)]);
    assert_eq!((explanation.compared, explanation.partly_known), (0, 1));
    let text = explanation.to_string();
    assert!(
        text.ends_with("\nno record of rank 1\nnot all members of 1 operation could be compared"),
        "{text}"
    );
}

#[test]
fn a_lost_record_of_the_rank_that_is_waited_for() {
    let explanation = explain(&without(records(ring_of(64), without_rank_2), 2));
    let Finding::Missing { waiting, absent, .. } = &explanation.finding else {
        panic!("{explanation}")
    };
    assert_eq!(waiting[..], [0, 1].map(Rank::new));
    assert_eq!((absent[0].rank, &absent[0].presence), (Rank::new(2), &Presence::NoRecord));
    let text = explanation.to_string();
    assert!(text.contains("; there is no record of rank 2, a member\n"), "{text}");
    assert!(text.contains("\nno record of rank 2"), "{text}");
}

#[test]
fn a_lost_record_of_a_rank_that_waits() {
    let explanation = explain(&without(records(ring_of(64), without_rank_2), 0));
    let Finding::Missing { waiting, absent, .. } = &explanation.finding else {
        panic!("{explanation}")
    };
    assert_eq!(waiting[..], [Rank::new(1)]);
    let found: Vec<_> = absent.iter().map(|member| member.rank.index()).collect();
    assert_eq!(found, [0, 2]);
    assert_eq!(absent[0].presence, Presence::NoRecord);
    assert!(matches!(absent[1].presence, Presence::NotIssued(Some(_))));
}

#[test]
fn rings_that_have_overwritten_what_was_before() {
    let records =
        records(ring_of(3), |world| (0..9).for_each(|unit| gather(world, unit).expect("all")));
    let explanation = explain(&records);
    assert_eq!((&explanation.finding, explanation.compared), (&Finding::Nothing, 3));
    assert_eq!(explanation.overwritten, [0, 1, 2].map(|rank| (Rank::new(rank), 6)));
    let text = explanation.to_string();
    assert!(
        text.ends_with("\noverwritten in the ring of ranks 0, 1, 2: up to 6 older entries"),
        "{text}"
    );
}

#[test]
fn a_ring_that_has_overwritten_what_another_still_shows() {
    let records = records(ring_of(4), |world| {
        gather(world, 1).expect("all");
        // Rank 1 goes on, and forgets it.
        let alone = world.group(&[world.rank()], Channel::User).expect("a member");
        let barriers = if world.rank().index() == 1 { 7 } else { 0 };
        (0..barriers).for_each(|_| settled(alone.barrier(Tag::default())).expect("alone"));
    });
    let explanation = explain(&records);
    assert_eq!(explanation.finding, Finding::Nothing, "what was overwritten is not missing");
    assert_eq!((explanation.compared, explanation.partly_known), (0, 1));
    assert_eq!(explanation.overwritten, [(Rank::new(1), 4)]);
    let text = explanation.to_string();
    assert!(text.contains("\noverwritten in the ring of rank 1: 4 older entries"), "{text}");
}

#[test]
fn a_full_ring_still_shows_that_a_rank_is_missing() {
    let explanation = explain(&records(ring_of(4), |world| {
        (2..9).for_each(|unit| gather(world, unit).expect("all"));
        without_rank_2(world);
    }));
    let Finding::Missing { absent, .. } = &explanation.finding else { panic!("{explanation}") };
    assert!(matches!(&absent[..], [member] if matches!(member.presence, Presence::NotIssued(_))));
    assert!(explanation.to_string().contains("; rank 2 has not issued it: its last operation was"));
}

#[test]
fn whether_a_ring_has_overwritten_the_very_operation_that_is_waited_for_is_left_open() {
    let mut records = records(ring_of(4), without_rank_2);
    // Rank 2 has gone on elsewhere, further than its ring goes back.
    let record = &mut records[2];
    let mut busy = *super::last(record);
    record.overwritten = 1000;
    record.groups.clear();
    busy.group = hsdp_comm::GroupId::of(&[Rank::new(2)], Channel::User);
    (busy.number, busy.issued_ns) = (1000, record.taken_ns);
    record.entries = vec![busy];
    let explanation = explain(&records);
    let Finding::Missing { absent, .. } = &explanation.finding else { panic!("{explanation}") };
    assert_eq!(absent[0].presence, Presence::Overwritten);
    let text = explanation.to_string();
    assert!(text.contains("; the ring of rank 2 no longer shows whether it issued it"), "{text}");
}

#[test]
fn records_of_another_world_are_left_out() {
    let other = World::local(5, WorldOptions::default()).remove(4).flight_record();
    let mut records = records(ring_of(64), |world| gather(world, 1).expect("all"));
    let now = u64::MAX / 4;
    records.iter_mut().for_each(|record| record.began_unix_us = now);
    let mut older = records[1].clone();
    older.began_unix_us -= 1_000_000;
    let expected = explain(&records);
    records.splice(0..0, [older, other]);
    let explanation = explain(&records);
    assert_eq!(explanation.left_out, [1, 4].map(Rank::new));
    assert!(
        explanation
            .to_string()
            .contains("\nignored, as older or of another world: a record of ranks 1, 4")
    );
    assert_eq!((explanation.compared, explanation.size), (expected.compared, 3));
}
