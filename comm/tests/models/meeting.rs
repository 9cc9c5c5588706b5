//! Members that meet: all get what they came for.

use hsdp_comm::{Channel, World};
use shuttle::thread;

use super::{
    LARGE, SMALL, all_schedules, ones, options, run, schedules, settled, sum_of_ones, user,
};

/// `size` members sum `len` ones in a world with `workers`.
fn meet(size: u8, len: usize, workers: usize) {
    let worlds = World::local(size.into(), options(workers));
    let sums = run(&worlds, move |world| settled(ones(&user(&world), len)));
    let expected = sum_of_ones(size, len);
    assert!(sums.iter().all(|sum| sum.as_ref() == Ok(&expected)), "{sums:?}");
}

#[test]
fn two_members_of_which_the_last_does_the_work() {
    all_schedules(20_000, || meet(2, SMALL, 0));
}

#[test]
fn three_members_of_which_the_last_does_the_work() {
    schedules(|| meet(3, SMALL, 0));
}

#[test]
fn two_members_and_a_worker() {
    schedules(|| meet(2, LARGE, 1));
}

#[test]
fn three_members_and_two_workers() {
    schedules(|| meet(3, LARGE, 2));
}

#[test]
fn members_that_wait_in_different_orders() {
    schedules(|| {
        let worlds = World::local(2, options(1));
        let sums = run(&worlds, |world| {
            let groups = [Channel::Gather, Channel::Reduce].map(|it| world.world_group(it));
            let [first, second] = groups.map(|group| ones(&group, LARGE).expect("issued"));
            let mut pending = [first, second];
            if world.rank().index() == 1 {
                pending.reverse();
            }
            pending.map(|pending| pending.wait().expect("summed"))
        });
        let expected = sum_of_ones(2, LARGE);
        assert!(sums.iter().flatten().all(|sum| *sum == expected));
    });
}

#[test]
fn operations_of_one_group_one_after_the_other() {
    schedules(|| {
        let worlds = World::local(2, options(1));
        let sums = run(&worlds, |world| {
            let group = user(&world);
            [LARGE, SMALL, LARGE].map(|len| settled(ones(&group, len)).map(|sum| sum.len()))
        });
        assert!(sums.iter().all(|sums| *sums == [LARGE, SMALL, LARGE].map(Ok)));
    });
}

#[test]
fn two_threads_of_a_rank_issue_at_once() {
    schedules(|| {
        let worlds = World::local(2, options(0));
        let sums = run(&worlds, |world| {
            let group = world.world_group(Channel::Gather);
            let other = thread::spawn(move || settled(ones(&group, SMALL)));
            let mine = settled(ones(&world.world_group(Channel::Reduce), SMALL));
            [mine, other.join().expect("no panic")]
        });
        let expected = sum_of_ones(2, SMALL);
        assert!(sums.iter().flatten().all(|sum| sum.as_ref() == Ok(&expected)), "{sums:?}");
    });
}
