//! The cost of the flight recorder: the same operations in worlds that keep 1024 entries and in
//! worlds that keep none.
//!
//! ```text
//! cargo bench -p hsdp-benches --bench flight
//! ```
//!
//! One thread issues for all ranks, so no thread waits and none is woken: two lines of a group
//! differ only in the recorder. An entry is written at the issue, gets a handle to the end of its
//! operation, and is closed by the rank that waits. The clock is read once for each issue, and once
//! for each settled operation, by the thread that settles it. After each group comes the
//! difference, measured by turns: nanoseconds an entry, for all of its writes. Results are checked
//! before they are timed.

use std::time::{Duration, Instant};

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use hsdp_comm::{Channel, Group, Reduction, Tag, World, WorldOptions};

/// Entries of a ring that is kept, which is what worlds have by default.
const KEPT: usize = 1024;

/// Operations in a round: few, so that some rounds of each kind are never interrupted.
const OPERATIONS: u32 = 64;

/// Rounds of each kind.
const ROUNDS: usize = 4001;

/// The groups of a world of `ranks`, each of whose rings has `entries`.
fn groups(ranks: usize, entries: usize) -> Vec<Group> {
    let options = WorldOptions { flight_entries: entries, ..WorldOptions::default() };
    let worlds = World::local(ranks, options);
    let groups: Vec<Group> = worlds.iter().map(|world| world.world_group(Channel::User)).collect();
    operate(&groups);
    let kept: Vec<usize> = worlds.iter().map(|world| world.flight_record().entries.len()).collect();
    assert_eq!(kept, vec![entries.min(1); ranks], "an entry for each rank, or none");
    groups
}

/// A small sum, from its issue on all ranks to its output on all ranks.
fn operate(groups: &[Group]) {
    let issue = |group: &Group| group.all_reduce(Tag::default(), Reduction::Sum, vec![1_f32; 4]);
    let pending: Vec<_> = groups.iter().map(issue).collect();
    for pending in pending {
        let sum = pending.expect("issued").wait().expect("all are there");
        assert_eq!(sum, [groups.len() as f32; 4]);
    }
}

fn flight(criterion: &mut Criterion) {
    for ranks in [1, 2, 4] {
        let mut group = criterion.benchmark_group(format!("all_reduce of {ranks}"));
        group.throughput(Throughput::Elements(ranks as u64));
        for (name, entries) in [("not recorded", 0), ("recorded", KEPT)] {
            let groups = groups(ranks, entries);
            let id = BenchmarkId::from_parameter(name);
            group.bench_function(id, |bencher| bencher.iter(|| operate(&groups)));
        }
        group.finish();
        difference(ranks);
    }
}

/// Prints what an entry costs: what recording adds to the fastest round, and the median of what it
/// adds to two rounds that follow each other.
#[expect(clippy::print_stderr, reason = "a result that criterion has no place for")]
fn difference(ranks: usize) {
    let [without, with] = [0, KEPT].map(|entries| groups(ranks, entries));
    let rounds: Vec<[f64; 2]> =
        (0..ROUNDS).map(|_| [&without, &with].map(|groups| per_entry(groups))).collect();
    let fastest = |kind: usize| rounds.iter().map(|it| it[kind]).fold(f64::INFINITY, f64::min);
    let mut added: Vec<f64> = rounds.iter().map(|[without, with]| with - without).collect();
    added.sort_unstable_by(f64::total_cmp);
    let fastest = fastest(1) - fastest(0);
    let median = added[ROUNDS / 2];
    eprintln!(
        "an entry of {ranks} ranks: {fastest:.0} ns (fastest rounds), {median:.0} ns (median)"
    );
}

/// Nanoseconds of a round, for each operation and rank.
fn per_entry(groups: &[Group]) -> f64 {
    time(groups).as_secs_f64() * 1e9 / f64::from(OPERATIONS) / groups.len() as f64
}

fn time(groups: &[Group]) -> Duration {
    let started = Instant::now();
    (0..OPERATIONS).for_each(|_| operate(groups));
    started.elapsed()
}

criterion_group!(benches, flight);
criterion_main!(benches);
