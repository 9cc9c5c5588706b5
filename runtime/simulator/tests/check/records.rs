//! Worlds that were cut off, as flight records show them.

use hsdp_flight::{
    Channel, FlightEntry, FlightGroup, FlightRecord, FlightState, GroupId, Op, Stage, Tag,
};
use hsdp_sharding::{DType, Rank, UnitId};
use hsdp_simulator::{Schedules, judge};

const ALL: [usize; 3] = [0, 1, 2];

/// A group with its members.
fn group(channel: Channel, ranks: &[usize]) -> FlightGroup {
    let ranks: Vec<Rank> = ranks.iter().copied().map(Rank::new).collect();
    FlightGroup { id: GroupId::of(&ranks, channel), channel, ranks }
}

/// An operation of a group that is not complete, issued at a time.
fn issued(group: &FlightGroup, sequence: u64, time: u64) -> FlightEntry {
    let op = match group.channel {
        Channel::Gather => Op::AllGather,
        Channel::Reduce => Op::ReduceScatter,
        _ => Op::Barrier,
    };
    FlightEntry {
        number: 0,
        group: group.id,
        channel: group.channel,
        epoch: 0,
        sequence,
        op,
        reduction: None,
        dtype: (op != Op::Barrier).then_some(DType::F32),
        elements: if op == Op::Barrier { 0 } else { 100 },
        uneven: false,
        bytes: 0,
        root: None,
        peer: None,
        scaling: None,
        tag: Tag::default(),
        state: FlightState::Issued,
        issued_ns: time,
        waited_ns: None,
        settled_ns: None,
    }
}

/// The same, for which the rank waits from a time on.
fn waited(group: &FlightGroup, sequence: u64, [time, wait]: [u64; 2]) -> FlightEntry {
    FlightEntry { waited_ns: Some(wait), ..issued(group, sequence, time) }
}

fn complete(entry: FlightEntry) -> FlightEntry {
    FlightEntry { state: FlightState::Complete, ..entry }
}

/// The record of a rank of three, with all groups of its entries.
fn record(rank: usize, groups: &[&FlightGroup], entries: Vec<FlightEntry>) -> FlightRecord {
    let numbered = (0..).zip(entries).map(|(number, entry)| FlightEntry { number, ..entry });
    FlightRecord {
        rank: Rank::new(rank),
        size: 3,
        step: 0,
        epoch: 0,
        began_unix_us: 0,
        taken_ns: 100,
        end: None,
        overwritten: 0,
        groups: groups.iter().copied().cloned().collect(),
        entries: numbered.collect(),
    }
}

/// As [`record`], of a ring that has overwritten entries.
fn overwritten(record: FlightRecord, count: u64) -> FlightRecord {
    let later = |it: &FlightEntry| FlightEntry { number: it.number + count, ..*it };
    let entries = record.entries.iter().map(later).collect();
    FlightRecord { overwritten: count, entries, ..record }
}

fn said(records: &[FlightRecord]) -> String {
    judge(&Schedules::from_records(records).expect("records of a world")).to_string()
}

fn error_of(records: &[FlightRecord]) -> String {
    Schedules::from_records(records).expect_err("it is refused").to_string()
}

#[test]
fn ranks_that_wait_for_each_other_on_two_channels() {
    let [gather, reduce] = [Channel::Gather, Channel::Reduce].map(|it| group(it, &[0, 1]));
    let tag = Tag::new(Stage::Gather).unit(UnitId::new(3)).step(7);
    let gathered = FlightEntry { tag, ..waited(&gather, 40, [5, 6]) };
    let records = [
        record(0, &[&gather], vec![complete(issued(&gather, 39, 1)), gathered]),
        record(1, &[&reduce], vec![waited(&reduce, 12, [3, 4])]),
    ];
    let expected = "deadlock: ranks 0-1 are stuck: rank 0 waits for \
        all_gather (unit 3, gather, step 7, microbatch 0) #40 of channel gather of ranks 0-1, which rank 1 has not issued: \
        it waits for reduce_scatter #12 of channel reduce of ranks 0-1, which rank 0 has not issued";
    assert_eq!(said(&records), expected);
}

#[test]
fn a_rank_that_was_cut_off_while_it_computed() {
    let user = group(Channel::User, &ALL);
    let all = |times: [u64; 2]| vec![complete(issued(&user, 0, 1)), waited(&user, 1, times)];
    let mut records = vec![
        record(0, &[&user], all([5, 6])),
        record(1, &[&user], all([6, 7])),
        record(2, &[&user], vec![issued(&user, 0, 2)]),
    ];
    let expected = "deadlock: ranks 0-1 are stuck: ranks 0-1 wait for barrier #1 of channel user of ranks 0-2, \
        which rank 2 had not issued when its record ends";
    assert_eq!(said(&records), expected);
    records.pop();
    let without = "which rank 2 may not have issued: there is no record of it";
    assert_eq!(
        said(&records),
        expected.replace("which rank 2 had not issued when its record ends", without)
    );
}

#[test]
fn a_rank_that_does_not_wait_may_go_on() {
    let user = group(Channel::User, &ALL);
    let records = [
        record(0, &[&user], vec![issued(&user, 0, 1)]),
        record(1, &[&user], vec![issued(&user, 0, 1)]),
        record(2, &[&user], Vec::new()),
    ];
    assert_eq!(said(&records), "ok");
    // All members have issued it, so it would have completed.
    let [one, two, three] = ALL.map(|rank| record(rank, &[&user], vec![waited(&user, 0, [1, 2])]));
    assert_eq!(said(&[three, one, two]), "ok");
}

#[test]
fn a_cycle_is_told_rather_than_a_rank_that_might_have_gone_on() {
    let [gather, reduce] = [Channel::Gather, Channel::Reduce].map(|it| group(it, &[0, 1]));
    let user = group(Channel::User, &ALL);
    let records = [
        record(0, &[&gather, &user], vec![waited(&gather, 0, [5, 6])]),
        record(1, &[&reduce], vec![waited(&reduce, 0, [3, 4])]),
        record(2, &[&user], vec![waited(&user, 0, [3, 4])]),
    ];
    let said = said(&records);
    assert!(
        said.starts_with("deadlock: ranks 0-2 are stuck: rank 0 waits for all_gather #0"),
        "{said}"
    );
}

/// When the world has ended, waits fail, and the rank may issue more, which is refused.
#[test]
fn calls_after_a_wait_that_failed_do_not_count() {
    let [gather, reduce] = [Channel::Gather, Channel::Reduce].map(|it| group(it, &[0, 1]));
    let failed = |entry| FlightEntry { state: FlightState::Failed, ..entry };
    let records = [
        record(
            0,
            &[&gather, &reduce],
            vec![failed(waited(&gather, 0, [5, 6])), failed(issued(&reduce, 0, 9))],
        ),
        record(
            1,
            &[&gather, &reduce],
            vec![failed(waited(&reduce, 0, [5, 6])), failed(issued(&gather, 0, 9))],
        ),
    ];
    assert!(
        said(&records).starts_with("deadlock: ranks 0-1 are stuck: rank 0 waits for all_gather #0")
    );
}

#[test]
fn calls_differ_before_all_members_have_come() {
    let gather = group(Channel::Gather, &ALL);
    let other = FlightEntry { elements: 99, ..issued(&gather, 4, 1) };
    let mut records = vec![
        record(0, &[&gather], vec![waited(&gather, 4, [1, 2])]),
        record(1, &[&gather], vec![other]),
    ];
    let expected = "mismatch: operation #4 of channel gather of ranks 0-2: \
        rank 0 issues all_gather f32 100, rank 1 issues all_gather f32 99";
    assert_eq!(said(&records), expected);
    let tag = Tag::default().step(1);
    records[1].entries[0] = FlightEntry { tag, ..issued(&gather, 4, 1) };
    assert!(
        said(&records).ends_with("rank 1 issues all_gather (user, step 1, microbatch 0) f32 100")
    );
    let uneven = |elements| FlightEntry { elements, uneven: true, ..issued(&gather, 4, 1) };
    (records[0].entries[0], records[1].entries[0]) = (uneven(7), uneven(8));
    assert_eq!(said(&records), "ok");
}

#[test]
fn entries_of_aborted_steps_do_not_count() {
    let user = group(Channel::User, &ALL);
    let old = record(0, &[&user], vec![waited(&user, 0, [1, 2])]);
    assert!(said(std::slice::from_ref(&old)).starts_with("deadlock"));
    let new = FlightRecord { epoch: 1, ..record(1, &[], Vec::new()) };
    assert_eq!(said(&[old, new]), "ok");
}

#[test]
fn the_halves_of_a_transfer_meet_by_their_numbers() {
    let pair = FlightGroup {
        id: group(Channel::User, &ALL).id.pair(Rank::new(0), Rank::new(1)),
        ..group(Channel::User, &[0, 1])
    };
    let half = |op, sequence, times| FlightEntry { op, ..waited(&pair, sequence, times) };
    // Two threads of rank 0 have swapped the order of their entries.
    let records = [
        record(
            0,
            &[&pair],
            vec![half(Op::Send, 6, [1, 9]), half(Op::Send, 5, [2, 9]), half(Op::Send, 7, [3, 10])],
        ),
        record(1, &[&pair], vec![half(Op::Recv, 5, [1, 9]), half(Op::Recv, 6, [9, 10])]),
    ];
    let expected = "deadlock: rank 0 is stuck: rank 0 waits for transfer #7 of channel user from rank 0 to rank 1, \
        which rank 1 had not issued when its record ends";
    assert_eq!(said(&records), expected);
    // A transfer to itself meets no other rank.
    let own = FlightGroup { ranks: vec![Rank::new(2); 2], ..pair.clone() };
    let alone = record(2, &[&own], vec![FlightEntry { op: Op::Recv, ..waited(&own, 0, [1, 2]) }]);
    assert_eq!(judge(&Schedules::from_records(&[alone]).expect("a record")).to_string(), "ok");
}

#[test]
fn overwritten_entries_that_matter_are_refused() {
    let [gather, reduce] = [Channel::Gather, Channel::Reduce].map(|it| group(it, &[0, 1]));
    let waits =
        |sequence, time| record(0, &[&gather], vec![waited(&gather, sequence, [time, time + 1])]);
    let with = |entry: FlightEntry| overwritten(record(1, &[&gather, &reduce], vec![entry]), 300);
    let expected = "rank 1 has overwritten 300 entries: its record does not show whether it issued #5 of channel gather of ranks 0-1; \
        WorldOptions::flight_entries is too small";
    assert_eq!(error_of(&[waits(5, 50), with(issued(&gather, 6, 60))]), expected);
    assert_eq!(error_of(&[waits(5, 50), with(complete(issued(&reduce, 6, 60)))]), expected);
    // Its entries begin before the others issued the operation, so it has not issued it.
    for shown in [complete(issued(&gather, 4, 40)), complete(issued(&reduce, 6, 40))] {
        let said = said(&[waits(5, 50), with(shown)]);
        assert!(said.ends_with("which rank 1 had not issued when its record ends"), "{said}");
    }
}

#[test]
fn records_that_do_not_belong_together_are_refused() {
    let user = group(Channel::User, &ALL);
    let [one, two] = [0, 1].map(|rank| record(rank, &[&user], vec![issued(&user, 0, 1)]));
    assert_eq!(error_of(&[]), "there is no record");
    assert_eq!(error_of(&[one.clone(), one.clone()]), "there are two records of rank 0");
    let larger = FlightRecord { size: 4, ..two.clone() };
    let expected = "a record of rank 1 is of a world of 4 ranks, another of a world of 3";
    assert_eq!(error_of(&[one.clone(), larger]), expected);
    let outside = FlightRecord { rank: Rank::new(3), ..two.clone() };
    assert!(error_of(&[outside]).starts_with("a record of rank 3 is of a world of 3 ranks"));
    let others = FlightGroup { ranks: vec![Rank::new(0), Rank::new(1)], ..user.clone() };
    let differs = FlightRecord { groups: vec![others], ..two.clone() };
    let id = user.id;
    assert_eq!(error_of(&[one, differs]), format!("two records differ about the members of {id}"));
    let twice = record(1, &[&user], vec![issued(&user, 0, 1), issued(&user, 0, 2)]);
    let expected = format!("the record of rank 1 has two entries of #0 of group {id}");
    assert_eq!(error_of(&[twice]), expected);
    let unknown = FlightRecord { groups: Vec::new(), ..two };
    assert_eq!(error_of(&[unknown]), format!("no record has the members of group {id}"));
}

/// Rank 1 was killed in this attempt, and its record is that of the attempt before, in another step.
#[test]
fn a_record_of_an_earlier_attempt_is_refused_by_name() {
    let user = group(Channel::User, &ALL);
    let of_step = |rank, step, began_unix_us| {
        let tag = Tag::default().step(step);
        let waits = FlightEntry { tag, ..waited(&user, 0, [1, 2]) };
        FlightRecord { began_unix_us, ..record(rank, &[&user], vec![waits]) }
    };
    let earlier = of_step(1, 3, 7_000_000);
    let refused = error_of(&[of_step(0, 9, 8_500_001), earlier, of_step(2, 9, 8_500_000)]);
    let expected = "the record of rank 1 is of an earlier world: \
        it was taken 1.5000009s before the world of rank 0's record began";
    assert_eq!(refused, expected);
    // The processes of one world begin one after another, and leave their records after that.
    let taken = |record| FlightRecord { taken_ns: 2_000, ..record };
    let of_one_world = [of_step(0, 3, 7_000_001), of_step(1, 3, 7_000_000)].map(taken);
    assert!(said(&of_one_world).starts_with("deadlock"));
}

/// Each rank waits for another operation of the world, of which all others are members without an issue: as many as the ranks times the ranks.
#[test]
fn a_large_world_in_which_all_wait_for_each_other() {
    const SIZE: usize = 20_000;
    let world = group(Channel::User, &(0..SIZE).collect::<Vec<_>>());
    let of_rank = |rank: usize| {
        let groups = if rank == 0 { &[&world][..] } else { &[] };
        let entries = vec![waited(&world, rank as u64, [1, 2])];
        FlightRecord { size: SIZE, ..record(rank, groups, entries) }
    };
    let records: Vec<FlightRecord> = (0..SIZE).map(of_rank).collect();
    let expected = "deadlock: ranks 0-19999 are stuck: rank 0 waits for barrier #0 of channel user of ranks 0-19999, \
        which rank 1 has not issued: it waits for barrier #1 of channel user of ranks 0-19999, which rank 0 has not issued";
    assert_eq!(said(&records), expected);
}
