//! The counters and hashes of operations that NCCL carries between processes: several threads of a rank count while another takes
//! its word.

use std::sync::Arc;

use hsdp_comm::testing::note_operation;
use hsdp_comm::{Counts, Descriptor, Op, Tag, World};
use hsdp_sharding::DType;
use shuttle::thread;

use super::{Group, options, run, schedules, user};

fn note(world: &World, group: &Group) {
    let operation = Descriptor {
        group: group.id(),
        channel: group.channel(),
        epoch: 0,
        sequence: 0,
        op: Op::AllGather,
        reduction: None,
        dtype: Some(DType::F32),
        counts: Counts::Each(8),
        root: None,
        peer: None,
        scaling: None,
        tag: Tag::default(),
    };
    note_operation(world, &Arc::new(operation));
}

fn word(world: &World) -> u128 {
    let [low, high] = world.operations_word(&[&user(world)]);
    u128::from(low) | u128::from(high) << 64
}

/// Equal operations of several threads: in whatever order they are counted, none is lost, and a word that is taken meanwhile is
/// that of none, one or two of them.
#[test]
fn threads_of_a_rank_lose_no_operation() {
    schedules(|| {
        let worlds = World::local(2, options(0));
        let words = run(&worlds, |world| {
            let other = world.clone();
            let noting = thread::spawn(move || note(&other, &user(&other)));
            note(&world, &user(&world));
            let between = word(&world);
            noting.join().expect("no panic");
            [between, word(&world)]
        });
        assert_eq!(words[0][1].wrapping_add(words[1][1]), 0, "all have counted two");
        assert!(words.iter().all(|[between, _]| *between != 0), "its own has been counted");
        let betweens = words[0][0].wrapping_add(words[1][0]);
        let [one, other] = [0, 1].map(|rank| words[rank][0] == words[rank][1]);
        assert_eq!(betweens == 0, one == other, "words agree where counts do");
    });
}

/// A comparison beside a thread that goes on ends alike on both ranks, in whatever schedule.
#[test]
fn a_comparison_has_one_end() {
    schedules(|| {
        let worlds = World::local(2, options(0));
        let ends = run(&worlds, |world| {
            let other = world.clone();
            let noting = thread::spawn(move || note(&other, &user(&other)));
            let end = world.compare_operations(&[&user(&world)]);
            noting.join().expect("no panic");
            end
        });
        assert_eq!(ends[0], ends[1]);
    });
}
