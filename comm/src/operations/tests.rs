use std::time::Duration;

use hsdp_sharding::Rank;

use super::*;
use crate::WorldError::Mismatch;
use crate::engine::Record;
use crate::rolling::tests::base;
use crate::rolling::{KEPT, signature};
use crate::{Between, Op, RankFailure, Tag, Wanted, WorldOptions, launch};

/// For each rank of a mesh of 2 x 2: its sum of operations words, and the end of its world.
type Ends = Vec<(u128, Result<(), Error>)>;

/// Every rank issues `calls`, each with the group in which it does: of its row (0) or of its column
/// (1).
fn compared(between: Between, calls: impl Fn(usize) -> Vec<(usize, Descriptor)> + Sync) -> Ends {
    let deadline = Duration::from_secs(20);
    let options = WorldOptions { between, deadline, ..WorldOptions::default() };
    let ends = launch(4, options, |world| {
        let groups = groups(&world);
        for (position, call) in calls(world.rank().index()) {
            let group = groups[position].id();
            note_operation(&world, &Arc::new(Descriptor { group, ..call }));
        }
        let groups = groups.each_ref();
        let [low, high] = world.operations_word(&groups);
        let end = world.compare_operations(&groups);
        assert_eq!(world.end().map_or(Ok(()), Err), end);
        Ok::<_, RankFailure>((u128::from(low) | u128::from(high) << 64, end))
    });
    ends.into_iter().map(|end| end.expect("no rank panics")).collect()
}

fn groups(world: &World) -> [Group; 2] {
    let row = world.rank().index() / 2 * 2;
    let column = world.rank().index() % 2;
    [([row, row + 1], Channel::Reduce), ([column, column + 2], Channel::AllReduce)]
        .map(|(ranks, channel)| world.group(&ranks.map(Rank::new), channel).expect("a group"))
}

fn call(sequence: u64) -> Descriptor {
    Descriptor { sequence, tag: base().tag.step(sequence), ..base() }
}

/// The table that all ranks have, both between threads and between ranks that share no memory.
fn table(calls: impl Fn(usize) -> Vec<(usize, Descriptor)> + Sync) -> String {
    let of = |between| {
        let ends = compared(between, &calls);
        let total = ends.iter().fold(0_u128, |sum, (word, _)| sum.wrapping_add(*word));
        assert_ne!(total, 0, "the check fails");
        assert!(ends.iter().all(|(_, end)| *end == ends[0].1), "all ranks have the same");
        match &ends[0].1 {
            Err(Error::World(Mismatch(table))) => table.to_string(),
            other => panic!("{other:?}"),
        }
    };
    let tables = [Between::Memory, Between::Messages].map(of);
    assert_eq!(tables[0], tables[1]);
    tables[0].clone()
}

#[test]
fn ranks_that_agree_go_on() {
    let calls = |rank: usize| {
        let row = (0..300).map(move |sequence| (0, call(sequence + rank as u64 / 2)));
        row.chain((0..3).map(|sequence| (1, call(sequence)))).collect()
    };
    for between in [Between::Memory, Between::Messages] {
        let ends = compared(between, calls);
        assert_eq!(ends.iter().fold(0_u128, |sum, (word, _)| sum.wrapping_add(*word)), 0);
        assert!(ends.iter().all(|(word, end)| *word != 0 && end.is_ok()));
        let nothing = compared(between, |_| Vec::new());
        assert!(nothing.iter().all(|end| *end == (0, Ok(()))), "{nothing:?}");
    }
}

#[test]
fn the_first_difference_of_the_first_group_is_found() {
    let said = |first: u64, place: &str, [one, other]: [&str; 2]| {
        let problem = format!("ranks disagree about operation {first} {place}");
        let step = first;
        let row = |rank, op| {
            format!(
                "rank {rank}: {op} sum bf16 1003 elements, wire bf16, / 2 / 1, unit 3, reduce, step {step}, microbatch 1"
            )
        };
        format!("{problem}:\n  {}\n  {}", row(1, one), row(3, other))
    };
    for first in [0, 1, 5, 200, 254, 255] {
        let calls = |rank| {
            let odd = move |sequence| match (rank, sequence >= first) {
                (3, true) => Descriptor { op: Op::AllReduce, ..call(sequence) },
                _ => call(sequence),
            };
            (0..256).map(|sequence| (1, odd(sequence))).chain([(0, call(0))]).collect()
        };
        let place = "on channel reduce, epoch 1";
        assert_eq!(table(calls), said(first, place, ["reduce_scatter", "all_reduce"]));
    }
}

#[test]
fn a_rank_that_has_issued_less_is_not_there() {
    let calls = |rank: usize| {
        let count = if rank == 0 { 2 } else { 3 };
        (0..count).map(|sequence| (0, call(sequence))).collect()
    };
    let table = table(calls);
    let [problem, absent, present] = lines(&table);
    assert_eq!(problem, "ranks disagree about operation 2 on channel reduce, epoch 1:");
    assert!(absent.starts_with("  rank 0: not there; last in reduce_scatter"), "{absent}");
    assert!(absent.ends_with("step 1, microbatch 1"), "{absent}");
    assert!(present.starts_with("  rank 1: reduce_scatter"), "{present}");
    assert!(present.ends_with("step 2, microbatch 1"), "{present}");
}

#[test]
fn a_rank_that_has_issued_nothing_is_not_there() {
    let calls = |rank: usize| if rank == 2 { vec![(1, call(0))] } else { Vec::new() };
    let table = table(calls);
    let [problem, absent, present] = lines(&table);
    assert_eq!(problem, "ranks disagree about operation 0 on channel reduce, epoch 1:");
    assert_eq!(absent, "  rank 0: not there; has issued nothing");
    assert!(present.starts_with("  rank 2: reduce_scatter"), "{present}");
}

#[test]
fn a_difference_that_is_not_kept_is_one_before_the_first_that_is() {
    let calls = |rank: usize| {
        let first = call(if rank == 1 { 7 } else { 0 });
        let calls = (1..=KEPT as u64).map(|sequence| (0, call(sequence)));
        [(0, first)].into_iter().chain(calls).collect()
    };
    let table = table(calls);
    let problem = "ranks disagree about an operation before operation 1 on channel reduce, epoch 1, the first that all keep:";
    assert_eq!(lines(&table)[0], problem);
}

#[test]
fn equal_calls_of_different_layouts_are_said_to_be_that() {
    let ends = launch(2, WorldOptions::default(), |world| {
        let group = world.world_group(Channel::Gather);
        let call = Arc::new(Descriptor { group: group.id(), tag: Tag::default(), ..base() });
        let function = u8::try_from(world.rank().index()).expect("two ranks");
        world.handle().own.record.rolling.note(&call, signature(function, None, None));
        let error = world.compare_operations(&[&group]).expect_err("they differ");
        Ok::<_, RankFailure>(error.to_string())
    });
    let ends: Vec<_> = ends.into_iter().map(|end| end.expect("no rank panics")).collect();
    let problem = "ranks have different layouts of one unit, or call different functions, in operation 4 on channel reduce, epoch 1:";
    assert!(ends[0].contains(problem), "{}", ends[0]);
    assert_eq!(ends[0], ends[1]);
}

#[test]
fn a_drained_operation_is_one_that_its_rank_has_not_called() {
    let records = [(); 3].map(|()| Arc::new(Record::default()));
    let note = |rank: usize, sequence| records[rank].rolling.note(&Arc::new(call(sequence)), 0);
    records[0].rolling.adopt(note(1, 0));
    note(2, 1);
    let Error::World(Mismatch(table)) = find_difference(&records) else {
        panic!("ranks 1 and 2 differ")
    };
    assert_eq!(table.rows[0].wanted, Wanted::Missing(None));
    assert!(table.rows[1..].iter().all(|row| matches!(row.wanted, Wanted::Arrived(_))));
}

fn lines(table: &str) -> [&str; 3] {
    table.lines().collect::<Vec<_>>().try_into().expect("a problem and two rows")
}
