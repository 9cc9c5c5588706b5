//! Operations one after the other: each gives its own outputs.

use hsdp_comm::{Error, Pending, Reduction, Tag, World};

use super::{LARGE, SMALL, options, run, schedules, settled, user};

fn sum(world: &World, round: usize, len: usize) -> Result<Pending<Vec<f32>>, Error> {
    let data_header = (round * 10 + world.rank().index()) as f32;
    user(world).all_reduce(Tag::default(), Reduction::Sum, vec![data_header; len])
}

fn expected(ranks: usize, round: usize, len: usize) -> Vec<f32> {
    let data_header = (0..ranks).map(|rank| round * 10 + rank).sum::<usize>();
    vec![data_header as f32; len]
}

#[test]
fn each_of_many_operations_in_a_row_gives_its_own_outputs() {
    for (len, workers) in [(SMALL, 0), (LARGE, 1)] {
        schedules(move || {
            let worlds = World::local(2, options(workers));
            run(&worlds, move |world| {
                for round in 0..4 {
                    assert_eq!(settled(sum(&world, round, len)), Ok(expected(2, round, len)));
                }
            });
        });
    }
}

#[test]
fn operations_of_other_lengths_in_a_row_give_their_own_outputs() {
    schedules(|| {
        let worlds = World::local(2, options(1));
        run(&worlds, |world| {
            for (round, len) in [SMALL, LARGE, SMALL, LARGE].into_iter().enumerate() {
                let data_header = |rank: usize| vec![(round * 10 + rank) as f32; len];
                let gathered =
                    user(&world).all_gather(Tag::default(), data_header(world.rank().index()));
                assert_eq!(settled(gathered), Ok([data_header(0), data_header(1)].concat()));
            }
        });
    });
}

#[test]
fn an_operation_whose_outputs_wait_keeps_them_while_others_complete() {
    schedules(|| {
        let worlds = World::local(2, options(1));
        run(&worlds, |world| {
            let first = sum(&world, 0, SMALL);
            for round in 1..3 {
                assert_eq!(settled(sum(&world, round, LARGE)), Ok(expected(2, round, LARGE)));
            }
            // One of them is never asked for its output of the first.
            if world.rank().index() == 0 {
                assert_eq!(settled(first), Ok(expected(2, 0, SMALL)));
            }
            assert_eq!(settled(sum(&world, 3, SMALL)), Ok(expected(2, 3, SMALL)));
        });
    });
}

#[test]
fn operations_of_two_kinds_in_turn_give_their_own_outputs() {
    schedules(|| {
        let worlds = World::local(2, options(0));
        run(&worlds, |world| {
            for round in 0..2 {
                assert_eq!(settled(sum(&world, round, SMALL)), Ok(expected(2, round, SMALL)));
                let here = vec![world.rank().get()];
                let gathered = user(&world).all_gather(Tag::default(), here);
                assert_eq!(settled(gathered), Ok(vec![0, 1]));
            }
        });
    });
}
