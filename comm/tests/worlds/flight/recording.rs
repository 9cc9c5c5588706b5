//! The notes of an operation, and their times.

use hsdp_comm::{
    Channel, FlightState, Op, Pending, Reduction, StepFailure, Tag, World, WorldOptions,
};
use hsdp_sharding::{DType, Rank};

use super::{gather, last, reducer, settled, states};
use crate::common::{outcomes, results};

#[test]
fn an_entry_has_the_descriptor_and_three_moments_in_order() {
    let records = results(3, |world| {
        world.set_step(7);
        let group = world.world_group(Channel::User);
        let tag = Tag::default().step(7).microbatch(2);
        let sum = group.all_reduce(tag, Reduction::Max, vec![1_f64; 5]).and_then(Pending::wait);
        assert_eq!(sum, Ok(vec![1.0; 5]));
        (world.flight_record(), group.id())
    });
    for (rank, (record, group)) in records.into_iter().enumerate() {
        assert_eq!((record.rank, record.size), (Rank::new(rank), 3));
        assert_eq!((record.step, record.epoch, &record.end), (7, 0, &None));
        let [entry] = &record.entries[..] else { panic!("one operation: {record:?}") };
        assert_eq!((entry.number, entry.sequence, entry.group), (0, 0, group));
        assert_eq!((entry.op, entry.reduction), (Op::AllReduce, Some(Reduction::Max)));
        assert_eq!((entry.dtype, entry.elements, entry.bytes), (Some(DType::F64), 5, 40));
        assert_eq!((entry.tag.step, entry.tag.microbatch), (7, 2));
        assert_eq!(entry.state, FlightState::Complete);
        let settled = entry.settled_ns.expect("settled");
        assert!(entry.issued_ns <= settled && settled <= record.taken_ns);
        // The rank that came last did not have to.
        assert!(entry.waited_ns.is_none_or(|waited| entry.issued_ns <= waited));
        assert_eq!(record.groups[0].ranks, [0, 1, 2].map(Rank::new));
        assert_eq!((record.groups[0].id, record.groups[0].channel), (group, Channel::User));
        assert_eq!(entry.to_string(), "all_reduce max f64 5 elements, user, step 7, microbatch 2");
    }
}

#[test]
fn a_settled_operation_is_settled_for_all_members_at_one_moment() {
    let worlds = World::local(3, WorldOptions::default());
    let issue = |world: &World| reducer(world).all_gather(Tag::default(), vec![1_f32; 5]);
    let pending: Vec<_> = worlds.iter().map(issue).collect();
    let records: Vec<_> = worlds.iter().map(World::flight_record).collect();
    for record in &records {
        // The last one did the work: nobody waits.
        assert_eq!((last(record).state, last(record).waited_ns), (FlightState::Complete, None));
        assert_eq!(last(record).settled_ns, last(&records[0]).settled_ns);
    }
    pending.into_iter().for_each(|pending| settled(pending).expect("complete"));
    assert!(worlds.iter().all(|world| last(&world.flight_record()).waited_ns.is_none()));
}

#[test]
fn a_rank_that_has_to_wait_says_since_when() {
    let worlds = World::local(2, WorldOptions::default());
    let waited = || last(&worlds[0].flight_record()).waited_ns;
    let pending = reducer(&worlds[0]).barrier(Tag::default());
    assert_eq!(waited(), None);
    std::thread::scope(|scope| {
        let waiter = scope.spawn(|| settled(pending));
        super::until("the wait", || waited().is_some());
        settled(reducer(&worlds[1]).barrier(Tag::default())).expect("both");
        waiter.join().expect("no panic").expect("both");
    });
    let record = worlds[0].flight_record();
    let entry = last(&record);
    assert!(Some(entry.issued_ns) <= entry.waited_ns && entry.waited_ns <= entry.settled_ns);
}

#[test]
fn what_misses_members_is_issued_until_it_fails() {
    let worlds = World::local(2, WorldOptions::default());
    let pending = reducer(&worlds[0]).barrier(Tag::default());
    assert_eq!(states(&worlds[0].flight_record()), [FlightState::Issued]);
    worlds[1].abort("enough");
    let record = worlds[0].flight_record();
    assert_eq!(states(&record), [FlightState::Failed]);
    assert!(record.end.is_some_and(|end| end.contains("enough")));
    assert!(settled(pending).is_err());
    // A call that is refused before it has a number is no operation.
    assert!(gather(&worlds[0], 1).is_err());
    assert_eq!(worlds[0].flight_record().entries.len(), 1);
}

#[test]
fn an_aborted_step_fails_its_entries_and_the_next_epoch_begins_its_own() {
    let epochs = results(2, |world| {
        gather(&world, 1).expect("both");
        if world.rank().index() == 0 {
            let pending = reducer(&world).barrier(Tag::default());
            let failure = StepFailure { step: 7, reason: "a bad batch".to_owned() };
            world.abort_step(failure);
            assert!(settled(pending).is_err());
        } else {
            super::until("the end of the step", || world.next_epoch() == 1);
        }
        assert_eq!(world.next_epoch(), 1);
        gather(&world, 2).expect("both, in the next epoch");
        world.flight_record()
    });
    let places = |rank: usize| {
        let entries = epochs[rank].entries.iter();
        entries.map(|entry| (entry.epoch, entry.sequence, entry.state)).collect::<Vec<_>>()
    };
    let complete = FlightState::Complete;
    let failed = FlightState::Failed;
    assert_eq!(places(0), [(0, 0, complete), (0, 1, failed), (1, 0, complete)]);
    assert_eq!(places(1), [(0, 0, complete), (1, 0, complete)]);
    assert!(epochs.iter().all(|record| record.epoch == 1 && record.end.is_none()));
    assert_eq!(hsdp_comm::explain(&epochs).finding, hsdp_comm::Finding::Nothing);
}

#[test]
fn transfers_have_groups_of_two_and_are_of_one_number() {
    let records = results(3, |world| {
        let group = world.world_group(Channel::User);
        match world.rank().index() {
            0 => settled(group.send(Tag::default(), 2, vec![1_f32; 3])).expect("sent"),
            2 => settled(group.recv::<f32>(Tag::default(), 0, 3)).expect("received"),
            _ => {}
        }
        world.flight_record()
    });
    let [from, to] = [last(&records[0]), last(&records[2])];
    assert_eq!((from.op, to.op), (Op::Send, Op::Recv));
    assert_eq!((from.group, from.sequence), (to.group, to.sequence));
    assert!(from.agrees_with(to));
    assert_eq!((from.peer, to.peer), (Some(Rank::new(2)), Some(Rank::new(0))));
    assert_eq!(records[0].groups[0].ranks, [0, 2].map(Rank::new));
    assert!(records[1].entries.is_empty());
}

#[test]
fn a_rank_that_has_nobody_to_meet_settles_its_own() {
    let single = World::single();
    gather(&single, 1).expect("alone");
    let counting = World::counting(8, Rank::new(3)).expect("rank 3 of 8");
    gather(&counting, 1).expect("imagined");
    let group = counting.world_group(Channel::User);
    settled(group.send(Tag::default(), 2, vec![1_f32; 3])).expect("imagined");
    assert_eq!(states(&single.flight_record()), [FlightState::Complete]);
    assert_eq!(states(&counting.flight_record()), [FlightState::Complete; 2]);
}

#[test]
fn the_ring_is_as_long_as_the_options_say() {
    let options = WorldOptions { flight_entries: 4, ..WorldOptions::default() };
    let records = outcomes(2, options, |world| {
        (0..10).for_each(|unit| gather(&world, unit).expect("both"));
        world.flight_record()
    });
    for record in records {
        let record = record.expect("no panic");
        let units: Vec<_> =
            record.entries.iter().map(|it| it.tag.unit.map(|it| it.get())).collect();
        assert_eq!(units, [6, 7, 8, 9].map(Some));
        assert_eq!((record.overwritten, record.entries[0].number), (6, 6));
        assert_eq!(states(&record), [FlightState::Complete; 4]);
    }
    let options = WorldOptions { flight_entries: 0, ..WorldOptions::default() };
    let world = World::local(1, options).remove(0);
    gather(&world, 1).expect("alone");
    assert_eq!(world.flight_record().entries, []);
}

#[test]
fn a_record_of_a_running_world_can_be_taken_by_any_thread() {
    let records = results(2, |world| {
        let watched = world.clone();
        std::thread::scope(|scope| {
            let watcher = scope.spawn(move || {
                (0..200).map(|_| watched.flight_record()).max_by_key(|it| it.entries.len())
            });
            (0..500).for_each(|unit| gather(&world, unit).expect("both"));
            watcher.join().expect("no panic").expect("some record")
        })
    });
    for record in records {
        let numbers: Vec<u64> = record.entries.iter().map(|entry| entry.number).collect();
        assert_eq!(numbers, (0..numbers.len() as u64).collect::<Vec<_>>());
    }
}
