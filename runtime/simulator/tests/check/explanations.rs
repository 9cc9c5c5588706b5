//! The words of verdicts, exactly.

use std::num::NonZeroU32;

use hsdp_sharding::Rank;
use hsdp_simulator::{Deadlock, Issue, ScheduleVerdict, Schedules, judge};

/// Schedules on the communicators `a` to `d` of all ranks. A list has `a1` for an all_gather on `a` and stream 1, and `w2` for a wait for
/// action 2.
fn lists<const RANKS: usize>(kernels: u32, lists: [&str; RANKS]) -> Schedules {
    let mut schedules = Schedules::new(RANKS, NonZeroU32::new(kernels)).expect("few ranks");
    let ranks: Vec<Rank> = (0..RANKS).map(Rank::new).collect();
    let communicators =
        ["a", "b", "c", "d"].map(|name| schedules.communicator(name, &ranks).expect("a new name"));
    for (rank, list) in ranks.iter().zip(lists) {
        for word in list.split_whitespace() {
            let (kind, number) = word.split_at(1);
            let number: usize = number.parse().expect("a number");
            let Some(communicator) = "abcd".find(kind) else {
                schedules.wait(*rank, number).expect("an action before");
                continue;
            };
            let communicator = communicators[communicator];
            let stream = number as u64;
            let issue = Issue { communicator, op: "all_gather", dtype: "f32", count: 1000, stream };
            schedules.issue(*rank, issue).expect("a member");
        }
    }
    schedules
}

fn said(schedules: &Schedules) -> String {
    judge(schedules).to_string()
}

#[test]
fn two_gathers_that_wait_for_each_other() {
    let crossed = lists(0, ["a0 w0 b0 w2", "b0 w0 a0 w2"]);
    let verdict = judge(&crossed);
    let expected = "deadlock: ranks 0-1 are stuck: rank 0 waits for all_gather #0 of a, which rank 1 has not issued: \
        it waits for all_gather #0 of b, which rank 0 has not issued";
    assert_eq!(verdict.to_string(), expected);
    let ScheduleVerdict::Deadlock(Deadlock { ranks, operations, .. }) = verdict else { panic!() };
    assert_eq!(ranks, [0, 1].map(Rank::new));
    assert_eq!(operations, ["all_gather #0 of a", "all_gather #0 of b"]);
    assert_eq!(judge(&lists(0, ["a0 b0 w0 w1", "b1 a0 w1 w0"])), ScheduleVerdict::Ok);
}

#[test]
fn an_operation_that_a_rank_never_issues() {
    let waited_for = lists(0, ["a0 w0 a0 w2", "a0 w0", "a0 w0 a0"]);
    let expected = "deadlock: ranks 0, 2 are stuck: rank 0 waits for all_gather #1 of a, which rank 1 never issues";
    assert_eq!(said(&waited_for), expected);
    let expected =
        "deadlock: rank 0 is stuck: rank 0 issued all_gather #0 of b, which ranks 1-2 never issue";
    assert_eq!(said(&lists(0, ["b0", "", ""])), expected);
}

#[test]
fn a_rank_that_waits_for_another_is_no_end_of_a_chain() {
    let chain = lists(0, ["a0 w0", "b0 w0 a0 w2", "a0 w0"]);
    let expected = "deadlock: ranks 0-2 are stuck: rank 1 waits for all_gather #0 of b, which ranks 0, 2 never issue";
    assert_eq!(said(&chain), expected);
    // Behind what no other rank issues: nothing waits for that directly.
    let behind = lists(0, ["c0 a0 w1", "a0 w0"]);
    let expected = "deadlock: ranks 0-1 are stuck: ranks 0-1 wait for all_gather #0 of a, \
        which rank 0 issued behind all_gather #0 of c, which rank 1 never issues";
    assert_eq!(said(&behind), expected);
}

#[test]
fn streams_in_another_order() {
    let expected = "deadlock: ranks 0-1 are stuck: ranks 0-1 issued all_gather #0 of a, \
        which rank 1 issued behind all_gather #0 of b, which rank 0 issued behind all_gather #0 of a";
    assert_eq!(said(&lists(0, ["a0 b0", "b0 a0"])), expected);
    assert_eq!(said(&lists(0, ["a0 b1", "b0 a1"])), "ok");
}

#[test]
fn kernels_that_are_all_under_way() {
    let crossed = |kernels| said(&lists(kernels, ["a0 b1", "b0 a1"]));
    let expected = "deadlock: ranks 0-1 are stuck: ranks 0-1 issued all_gather #0 of a, \
        which rank 1 (kernels 1) cannot begin before all_gather #0 of b, which rank 0 (kernels 1) cannot begin before all_gather #0 of a";
    assert_eq!(crossed(1), expected);
    assert_eq!(crossed(2), "ok");
    assert_eq!(crossed(0), "ok");
    let full = said(&lists(2, ["a0 b1 c2 d3", "c0 d1 a2 b3"]));
    let expected = "deadlock: ranks 0-1 are stuck: ranks 0-1 issued all_gather #0 of a, \
        which rank 1 (kernels 2) cannot begin before one of those under way, the first of them all_gather #0 of c, \
        which rank 0 (kernels 2) cannot begin before one of those under way, the first of them all_gather #0 of a";
    assert_eq!(full, expected);
    // A head that was issued first goes first, however late it became one.
    assert_eq!(said(&lists(1, ["a0 b0 c1 w2", "a0 b0 c1 w2"])), "ok");
}

/// Each rank has pairs in which it issues a transfer, and `true` for a wait after it. All are on one stream of each rank.
fn transfers<const RANKS: usize>(lists: [&[(&str, bool)]; RANKS]) -> Schedules {
    let mut schedules = Schedules::new(RANKS, None).expect("few ranks");
    let pairs = [("x", [0, 1]), ("y", [0, 2]), ("z", [2, 3]), ("v", [4, 5]), ("w", [4, 5])];
    let pairs = pairs.map(|(name, ranks)| {
        (name, schedules.communicator(name, &ranks.map(Rank::new)).expect("a new name"))
    });
    for (rank, list) in lists.iter().enumerate() {
        for (name, is_waited_for) in *list {
            let (_, communicator) =
                pairs[pairs.iter().position(|(it, _)| it == name).expect("known")];
            let send = Issue { communicator, op: "send", dtype: "f32", count: 8, stream: 0 };
            let index = schedules.issue(Rank::new(rank), send).expect("a member");
            if *is_waited_for {
                schedules.wait(Rank::new(rank), index).expect("it is issued");
            }
        }
    }
    schedules
}

#[test]
fn the_shorter_of_a_chain_and_a_cycle() {
    const WAITED: bool = true;
    let [zero, one]: [&[_]; 2] = [&[("y", false), ("x", WAITED)], &[("x", WAITED)]];
    let two: &[_] = &[("z", false), ("y", false)];
    let chain = transfers([zero, one, two, &[], &[], &[]]);
    let expected = "deadlock: ranks 0-2 are stuck: ranks 0-1 wait for send #0 of x, which rank 0 issued behind send #0 of y, \
        which rank 2 issued behind send #0 of z, which rank 3 never issues";
    assert_eq!(said(&chain), expected);
    let [four, five]: [&[_]; 2] =
        [&[("v", WAITED), ("w", WAITED)], &[("w", WAITED), ("v", WAITED)]];
    let both = transfers([zero, one, two, &[], four, five]);
    let expected = "deadlock: ranks 0-2, 4-5 are stuck: rank 4 waits for send #0 of v, which rank 5 has not issued: \
        it waits for send #0 of w, which rank 4 has not issued";
    assert_eq!(said(&both), expected);
}

#[test]
fn a_long_cycle_is_cut() {
    let mut schedules = Schedules::new(12, None).expect("few ranks");
    let ring = |rank: usize| [rank, (rank + 1) % 12].map(Rank::new);
    let pairs: Vec<_> = (0..12)
        .map(|rank| schedules.communicator(&format!("p{rank}"), &ring(rank)).expect("a new name"))
        .collect();
    for rank in 0..12 {
        for communicator in [pairs[rank], pairs[(rank + 11) % 12]] {
            let send = Issue { communicator, op: "send", dtype: "f32", count: 8, stream: 0 };
            let index = schedules.issue(Rank::new(rank), send).expect("a member");
            schedules.wait(Rank::new(rank), index).expect("it is issued");
        }
    }
    let clause =
        |rank| format!("which rank {rank} has not issued: it waits for send #0 of p{rank}, ");
    let begin: String = (1..5).map(clause).collect();
    let end: String = (9..12).map(clause).collect();
    let expected = format!(
        "deadlock: ranks 0-11 are stuck: rank 0 waits for send #0 of p0, {begin}... 4 more ..., {end}which rank 0 has not issued"
    );
    assert_eq!(said(&schedules), expected);
}

/// Each rank issues a reduction of one of these counts.
fn of_counts<const RANKS: usize>(counts: [u64; RANKS]) -> Schedules {
    let mut schedules = lists(0, counts.map(|_| ""));
    let ranks: Vec<Rank> = (0..RANKS).map(Rank::new).collect();
    let communicator = schedules.communicator("world", &ranks).expect("a new name");
    for (rank, count) in ranks.into_iter().zip(counts) {
        let issue = Issue { communicator, op: "reduce_scatter", dtype: "bf16", count, stream: 0 };
        schedules.issue(rank, issue).expect("a member");
    }
    schedules
}

#[test]
fn calls_that_differ() {
    let expected = "mismatch: operation #0 of world: ranks 0-1, 3 issue reduce_scatter bf16 8, rank 2 issues reduce_scatter bf16 9";
    assert_eq!(said(&of_counts([8, 8, 9, 8])), expected);
    let many = said(&of_counts([1, 2, 3, 4, 5, 6]));
    let end = "rank 3 issues reduce_scatter bf16 4, and 2 other calls";
    assert!(many.ends_with(end), "{many}");
}

#[test]
fn a_mismatch_wins_only_if_it_is_reached() {
    let with = |before: [&str; 2]| {
        let mut schedules = lists(0, before);
        let b = schedules.communicator("x", &[0, 1].map(Rank::new)).expect("a new name");
        for (rank, op) in ["all_gather", "all_reduce"].into_iter().enumerate() {
            let issue = Issue { communicator: b, op, dtype: "f32", count: 1, stream: 9 };
            schedules.issue(Rank::new(rank), issue).expect("a member");
        }
        said(&schedules)
    };
    let mismatch = "mismatch: operation #0 of x: rank 0 issues all_gather f32 1, rank 1 issues all_reduce f32 1";
    assert_eq!(with(["a0 b0", "b0 a0"]), mismatch);
    assert!(with(["a0 w0 b0", "b0 w0 a0"]).starts_with("deadlock: "));
}
