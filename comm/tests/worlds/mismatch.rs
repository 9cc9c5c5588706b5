//! Ranks that disagree all get the same table of who wanted what, and the world is over.

use std::sync::Arc;

use hsdp_comm::WorldError::Mismatch;
use hsdp_comm::{
    Accumulator, Channel, Contribution, Error, Group, ModelLabel, Pending, Reduction, Scaling,
    Stage, Tag, Wanted, WorldOptions,
};
use hsdp_kernels::{Divisor, Fold, HostBuffer, Wire};
use hsdp_sharding::{DType, Param, Unit, UnitId, UnitLayout};

use crate::common::outcomes;

fn tag() -> Tag {
    Tag::new(Stage::Reduce).unit(UnitId::new(3)).step(7)
}

fn settled<T>(issued: Result<Pending<T>, Error>) -> Result<(), Error> {
    issued?.wait().map(drop)
}

/// Runs a world of three in which each rank calls `call` with its index, and checks that all get one error, the table,
/// whose lines are `expected`.
fn all_get(expected: &[&str], call: impl Fn(&Group, usize) -> Result<(), Error> + Sync) {
    let ends = outcomes(3, WorldOptions::default(), |world| {
        let group = world.world_group(Channel::User);
        let end = call(&group, world.rank().index()).expect_err("the ranks disagree");
        // The world is over, for calls that would have been right, too.
        let later = settled(group.barrier(Tag::default())).expect_err("the world is over");
        assert_eq!(later, end);
        assert!(end.is_fatal());
        end
    });
    let ends: Vec<Error> = ends.into_iter().map(|end| end.expect("no panic")).collect();
    assert!(ends.iter().all(|end| *end == ends[0]), "all ranks get one error");
    let text = ends[0].to_string();
    for line in expected {
        assert!(text.contains(line), "`{line}` is missing in:\n{text}");
    }
}

#[test]
fn operations() {
    let expected = [
        "collective mismatch: ranks disagree about operation 0 on channel user, epoch 0:",
        "rank 1: all_reduce sum f32 6 elements, unit 3, reduce, step 7, microbatch 0",
    ];
    all_get(&expected, |group, rank| match rank {
        1 => settled(group.all_reduce(tag(), Reduction::Sum, vec![0_f32; 6])),
        _ => settled(group.all_gather(tag(), vec![0_f32; 6])),
    });
}

#[test]
fn reductions() {
    let expected = ["rank 2: reduce_scatter max f32 1002", "reduce_scatter sum f32 1002"];
    all_get(&expected, |group, rank| {
        let reduction = if rank == 2 { Reduction::Max } else { Reduction::Sum };
        settled(group.reduce_scatter(tag(), reduction, vec![0_f32; 1002]))
    });
}

#[test]
fn dtypes() {
    all_get(&["rank 0: all_gather i64 5 elements", "all_gather u64 5 elements"], |group, rank| {
        match rank {
            0 => settled(group.all_gather(tag(), vec![0_i64; 5])),
            _ => settled(group.all_gather(tag(), vec![0_u64; 5])),
        }
    });
}

#[test]
fn counts() {
    all_get(&["rank 1: all_gather f32 6 elements", "all_gather f32 5 elements"], |group, rank| {
        settled(group.all_gather(tag(), vec![0_f32; 5 + usize::from(rank == 1)]))
    });
}

#[test]
fn roots() {
    all_get(&["rank 1: broadcast f32 5 elements, root rank 1", "root rank 0"], |group, rank| {
        settled(group.broadcast(tag(), usize::from(rank == 1), vec![0_f32; 5]))
    });
}

#[test]
fn tags() {
    let expected = [
        "rank 2: all_gather f32 5 elements, unit 3, reduce, step 8, microbatch 0",
        "step 7, microbatch 0",
    ];
    all_get(&expected, |group, rank| {
        let tag = if rank == 2 { tag().step(8) } else { tag() };
        settled(group.all_gather(tag, vec![0_f32; 5]))
    });
}

/// The first model of a world is shown where its operation would look like one of no model.
#[test]
fn an_operation_of_the_first_model_and_one_of_no_model() {
    let expected = "rank 1: barrier, model 0, unit 3, reduce, step 7, microbatch 0";
    all_get(&[expected], |group, rank| match rank {
        1 => settled(group.barrier(tag().model(ModelLabel::FIRST))),
        _ => settled(group.barrier(tag())),
    });
}

#[test]
fn an_order_that_one_rank_swapped() {
    let expected =
        ["operation 1 on channel user", "rank 0: all_gather f32 5 elements, unit 4", "unit 5"];
    all_get(&expected, |group, rank| {
        settled(group.all_gather(tag(), vec![0_f32; 5]))?;
        let [first, second] = if rank == 0 { [4, 5] } else { [5, 4] };
        let first = group.all_gather(tag().unit(UnitId::new(first)), vec![0_f32; 5]);
        let second = group.all_gather(tag().unit(UnitId::new(second)), vec![0_f32; 5]);
        settled(first).and(settled(second))
    });
}

#[test]
fn divisors_and_wires() {
    let expected = ["all_reduce sum bf16 5 elements, wire bf16, / 1 / 2,", ", wire bf16, / 2 / 1,"];
    all_get(&expected, |group, rank| {
        let two = Divisor::new(2.0).expect("a divisor");
        let (pre, post) = if rank == 1 { (two, Divisor::ONE) } else { (Divisor::ONE, two) };
        let scaling = Scaling { wire: Wire::BF16, pre, post };
        settled(group.all_reduce_scaled(tag(), vec![0.0; 5], scaling))
    });
}

#[test]
fn a_general_and_a_scaled_all_reduce() {
    all_get(
        &["rank 1: all_reduce sum f32 5 elements, unit 3", "wire f32, / 1 / 1"],
        |group, rank| match rank {
            1 => settled(group.all_reduce(tag(), Reduction::Sum, vec![0_f32; 5])),
            _ => settled(group.all_reduce_scaled(tag(), vec![0.0; 5], Scaling::on(Wire::F32))),
        },
    );
}

fn layout(unit: &Unit) -> Arc<UnitLayout> {
    Arc::new(UnitLayout::new(unit, 3).expect("a layout"))
}

#[test]
fn layouts_of_one_size() {
    let one = layout(&Unit::new("unit").param(Param::new("a", [32])).param(Param::new("b", [64])));
    let other =
        layout(&Unit::new("unit").param(Param::new("a", [64])).param(Param::new("b", [32])));
    all_get(&["ranks have different layouts of one unit in operation 0"], |group, rank| {
        let layout = Arc::clone(if rank == 1 { &other } else { &one });
        let gradients = vec![None, None];
        let contribution = Contribution { gradients, scaling: Scaling::on(Wire::F32) };
        let partial = vec![0.0; layout.trainable().shard_len];
        let accumulator = Accumulator { partial, fold: Fold::Replace };
        settled(group.reduce_unit(tag(), layout, contribution, accumulator))
    });
}

#[test]
fn a_unit_and_a_vector_of_its_size() {
    let layout = layout(&Unit::new("unit").param(Param::new("a", [96])));
    all_get(&["ranks call different functions in operation 0"], |group, rank| match rank {
        0 => settled(group.all_gather(tag(), vec![0_f32; 32])),
        _ => {
            let targets = vec![HostBuffer::zeros(DType::F32, 96).expect("real")];
            settled(group.gather_unit(tag(), Arc::clone(&layout), Arc::new(vec![0.0; 32]), targets))
        }
    });
}

#[test]
fn splits_of_an_all_to_all() {
    let expected =
        ["member 0 sends 2 elements to member 1, which expects 1, in operation 0 on channel user"];
    all_get(&expected, |group, rank| {
        let send = if rank == 0 { vec![1, 2, 1] } else { vec![1, 1, 1] };
        settled(group.all_to_all(tag(), vec![0_f32; send.iter().sum()], send, vec![1, 1, 1]))
    });
}

#[test]
fn two_sources_for_one_destination() {
    all_get(
        &["members 0 and 2 both send their elements to member 1 in operation 0"],
        |group, rank| {
            let destination = [Some(1), None, Some(1)][rank];
            settled(group.permute(tag(), destination, vec![0_f32; 5]))
        },
    );
}

#[test]
fn what_is_sent_and_what_is_expected() {
    let expected =
        ["rank 0: send f32 5 elements to rank 1", "rank 1: recv f32 6 elements from rank 0"];
    all_get(&expected, |group, rank| match rank {
        0 => settled(group.send(tag(), 1, vec![0_f32; 5])),
        1 => settled(group.recv::<f32>(tag(), 0, 6)),
        _ => settled(group.barrier(tag())),
    });
}

#[test]
fn the_table_says_where_a_missing_rank_was_last() {
    let ends = outcomes(3, WorldOptions::default(), |world| {
        let group = world.world_group(Channel::User);
        let _ = settled(group.all_gather(tag(), vec![0_f32; 5]));
        match world.rank().index() {
            0 => settled(group.all_gather(tag(), vec![0_f32; 5])).expect_err("a mismatch"),
            1 => settled(group.barrier(tag())).expect_err("a mismatch"),
            // Comes only when the others have met.
            _ => loop {
                match world.end() {
                    Some(end) => break end,
                    None => std::thread::yield_now(),
                }
            },
        }
    });
    for end in ends {
        let Ok(Error::World(Mismatch(table))) = end else { panic!("{end:?}") };
        assert!(matches!(table.rows[0].wanted, Wanted::Arrived(_)));
        assert!(
            table.rows[2]
                .to_string()
                .starts_with("rank 2: not there; last in all_gather f32 5 elements")
        );
    }
}
