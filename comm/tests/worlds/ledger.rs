//! Bytes of patterns, against closed formulas, the plan, and the counting backend.

use std::sync::Arc;

use half::bf16;
use hsdp_comm::{
    Accumulator, Channel, Contribution, Error, Group, LedgerSnapshot, Op, Pending, Reduction,
    Scaling, Tag, World,
};
use hsdp_kernels::{Fold, GradientValues, HostBuffer, Wire};
use hsdp_sharding::{
    Axis, ByteCount, DType, Flow, Mesh, ModelSpec, Param, Plan, PlanOptions, Rank, Unit, balanced,
};

use crate::common::results;

const SIZES: [usize; 4] = [2, 3, 4, 8];
const LEN: usize = 1003;

fn tag() -> Tag {
    Tag::default()
}

fn wait<T>(issued: Result<Pending<T>, Error>) -> T {
    issued.and_then(Pending::wait).expect("the collective")
}

/// One call of every general collective, with `LEN` elements of f64, or one of bf16 where noted.
fn every_collective(group: &Group) {
    let size = group.size();
    let index = group.index();
    let values = || vec![1_f64; LEN];
    wait(group.all_gather(tag(), values()));
    wait(group.reduce_scatter(tag(), Reduction::Sum, vec![1_f64; LEN * size]));
    wait(group.all_reduce(tag(), Reduction::Max, vec![bf16::ONE; LEN]));
    wait(group.broadcast(tag(), 1, values()));
    wait(group.reduce(tag(), 1, Reduction::Sum, values()));
    wait(group.gather(tag(), 1, values()));
    wait(group.scatter(tag(), 1, (index == 1).then(|| vec![1_f64; LEN * size]), LEN));
    let counts: Vec<usize> = (0..size).map(|other| index + other).collect();
    wait(group.all_to_all(tag(), vec![1_f64; counts.iter().sum()], counts.clone(), counts));
    wait(group.permute(tag(), Some((index + 1) % size), values()));
    let sent = group.send(tag(), (index + 1) % size, values());
    wait(group.recv::<f64>(tag(), (index + size - 1) % size, LEN));
    wait(sent);
    wait(group.barrier(tag()));
}

/// The bytes that member `index` of `size` receives in [`every_collective`].
fn formula(op: Op, size: usize, index: usize) -> usize {
    let others = size - 1;
    let is_root = index == 1;
    let owned = balanced(LEN, size, index).len();
    let from_others: usize =
        (0..size).filter(|other| *other != index).map(|other| other + index).sum();
    match op {
        Op::AllGather | Op::ReduceScatter => others * LEN * 8,
        Op::AllReduce => (others * owned + LEN - owned) * 2,
        Op::Broadcast | Op::Scatter if is_root => 0,
        Op::Broadcast | Op::Scatter => LEN * 8,
        Op::Reduce | Op::Gather if is_root => others * LEN * 8,
        Op::AllToAll => from_others * 8,
        Op::Permute | Op::Recv => LEN * 8,
        _ => 0,
    }
}

#[test]
fn every_collective_counts_what_comes_from_other_ranks() {
    for size in SIZES {
        let ledgers = results(size, |world| {
            every_collective(&world.world_group(Channel::User));
            world.ledger()
        });
        for (index, ledger) in ledgers.iter().enumerate() {
            for op in Op::ALL {
                let bytes = ByteCount::of(formula(op, size, index));
                assert_eq!(
                    ledger.op(Channel::User, op),
                    Flow { calls: 1, bytes },
                    "{op}, rank {index} of {size}"
                );
                assert_eq!(
                    ledger.op(Channel::Gather, op),
                    Flow::default(),
                    "{op}, on another channel"
                );
            }
        }
    }
}

#[test]
fn the_counting_backend_counts_what_the_local_one_measures() {
    for size in SIZES {
        let measured = results(size, |world| {
            every_collective(&world.world_group(Channel::Control));
            world.ledger()
        });
        for (index, measured) in measured.into_iter().enumerate() {
            let world = World::counting(size, Rank::new(index)).expect("a rank of the world");
            every_collective(&world.world_group(Channel::Control));
            // No other member is there to hand elements over in a permutation.
            let without_permute = |ledger: &LedgerSnapshot| {
                Op::ALL.map(|op| {
                    if op == Op::Permute {
                        Flow::default()
                    } else {
                        ledger.op(Channel::Control, op)
                    }
                })
            };
            assert_eq!(without_permute(&world.ledger()), without_permute(&measured));
        }
    }
}

#[test]
fn a_group_of_one_counts_nothing() {
    let world = World::single();
    let group = world.world_group(Channel::User);
    wait(group.all_gather(tag(), vec![1_f32; 100]));
    wait(group.all_reduce(tag(), Reduction::Sum, vec![1_f32; 100]));
    wait(group.all_reduce_scaled(tag(), vec![1.0; 100], Scaling::on(Wire::BF16)));
    assert_eq!(world.ledger(), LedgerSnapshot::default());
}

#[test]
fn snapshots_subtract() {
    let ledgers = results(2, |world| {
        let group = world.world_group(Channel::User);
        wait(group.all_gather(tag(), vec![1_u32; 10]));
        let before = world.ledger();
        wait(group.all_gather(tag(), vec![1_u32; 20]));
        wait(group.barrier(tag()));
        world.ledger().since(&before)
    });
    for ledger in ledgers {
        assert_eq!(
            ledger.op(Channel::User, Op::AllGather),
            Flow { calls: 1, bytes: ByteCount(80) }
        );
        assert_eq!(ledger.channel(Channel::User), Flow { calls: 2, bytes: ByteCount(80) });
    }
}

fn plan(mesh: Mesh) -> Plan {
    let first = Unit::new("first")
        .param(Param::new("weight", [37, 19]))
        .param(Param::new("table", [77]).frozen());
    let second = Unit::new("second")
        .param(Param::new("wide", [301, 100]))
        .param(Param::new("bias", [1]))
        .keep();
    let options = PlanOptions {
        param_dtype: DType::BF16,
        reduce_dtype: DType::F16,
        ..PlanOptions::default()
    };
    Plan::new(ModelSpec::new().unit(first).unit(second), mesh, options).expect("a plan")
}

/// The collectives of a step of `microbatches`, as the plan says.
fn step(world: &World, plan: &Plan, microbatches: usize) -> Result<(), Error> {
    let ranks = |axis| plan.mesh().group(axis, world.rank());
    let gather = world.group(&ranks(Axis::Shard), Channel::Gather)?;
    let reduce = world.group(&ranks(Axis::Shard), Channel::Reduce)?;
    let all_reduce = world.group(&ranks(Axis::Replicate), Channel::AllReduce)?;
    for _ in 0..microbatches {
        for entry in plan.gathers() {
            let layout = plan.layout(entry.unit);
            let zeros = |slot: &hsdp_sharding::ParamSlot| {
                HostBuffer::zeros(DType::BF16, slot.len).expect("real")
            };
            let targets: Vec<_> = layout.params().iter().map(zeros).collect();
            let shard = HostBuffer::zeros(DType::BF16, layout.shard_len()).expect("real");
            gather.gather_unit(tag(), Arc::clone(layout), shard, targets)?.wait()?;
        }
        for unit in plan.reductions() {
            let layout = plan.layout(*unit);
            let mut gradients: Vec<Option<Arc<dyn GradientValues>>> =
                vec![None; layout.params().len()];
            // Absent gradients are sent as zeros, and count.
            if world.rank().index() == 0 {
                gradients[0] = Some(Arc::new(vec![1.0_f32; layout.params()[0].len]));
            }
            let contribution = Contribution { gradients, scaling: Scaling::on(Wire::F16) };
            let partial = vec![0.0; layout.trainable().shard_len];
            let accumulator = Accumulator { partial, fold: Fold::Replace };
            let layout = Arc::clone(layout);
            reduce.reduce_unit(tag(), layout, contribution, accumulator)?.wait()?;
        }
    }
    for unit in plan.reductions() {
        let partial = vec![1.0; plan.layout(*unit).trainable().shard_len];
        all_reduce.all_reduce_scaled(tag(), partial, Scaling::on(Wire::F16))?.wait()?;
    }
    Ok(())
}

fn matches_plan(world: &World, plan: &Plan, microbatches: u64) {
    let ledger = world.ledger();
    let planned = plan.traffic(world.rank(), microbatches);
    assert_eq!(ledger.op(Channel::Gather, Op::AllGather), planned.all_gather);
    assert_eq!(ledger.op(Channel::Reduce, Op::ReduceScatter), planned.reduce_scatter);
    assert_eq!(ledger.op(Channel::AllReduce, Op::AllReduce), planned.all_reduce);
}

#[test]
fn the_calls_on_units_count_what_the_plan_says() {
    for (replicate, shard) in [(1, 1), (1, 4), (4, 1), (2, 2), (2, 3), (3, 2)] {
        let plan = plan(Mesh::new(replicate, shard).expect("a mesh"));
        results(replicate * shard, |world| {
            step(&world, &plan, 3).expect("a step");
            matches_plan(&world, &plan, 3);
        });
    }
}

#[test]
fn a_world_of_a_thousand_ranks_is_counted_on_one() {
    let plan = plan(Mesh::new(8, 128).expect("a mesh"));
    for rank in [0, 500, 1023] {
        let world = World::counting(1024, Rank::new(rank)).expect("a rank of the world");
        step(&world, &plan, 2).expect("a step");
        matches_plan(&world, &plan, 2);
    }
    let refused = World::counting(1024, Rank::new(1024)).map(drop).expect_err("refused");
    assert_eq!(
        refused.to_string(),
        "rank 1024 of a world of 1024: ranks are numbered from 0 to the size less 1"
    );
}

#[test]
fn the_counting_backend_answers_as_if_all_ranks_were_like_this_one() {
    let world = World::counting(5, Rank::new(2)).expect("a rank of the world");
    let group = world.world_group(Channel::Control);
    assert_eq!(wait(group.all_gather(tag(), vec![7_u64, 8])), [7, 8].repeat(5));
    assert_eq!(wait(group.all_reduce(tag(), Reduction::Sum, vec![3_u64])), [15]);
    assert_eq!(wait(group.all_reduce(tag(), Reduction::Avg, vec![3_f32])), [3.0]);
    assert_eq!(wait(group.reduce(tag(), 1, Reduction::Max, vec![3_u64])), None);
    assert_eq!(wait(group.broadcast(tag(), 1, vec![9_i32])), [9]);
    world.abort("enough");
    assert!(group.barrier(tag()).is_err());
}
