//! Calls and bytes of every collective, measured where elements are copied, against the plan's formulas.

use hsdp::{
    Accumulation, DType, Error, FullCopies, Mesh, ModelOptions, ModelSpec, Plan, Precision, Rank,
    ShardedModel, StepOptions, World,
};
use hsdp_comm::{Channel, Op};
use hsdp_sharding::{AfterForward, ByteCount, Flow, Traffic};
use hsdp_tests::support::models::{computing_in, keeping_the_second, partly_frozen, three_units};
use hsdp_tests::support::worlds::{mesh, on_ranks};
use hsdp_tests::support::{slopes, springs};

const MESHES: [(usize, usize); 6] = [(1, 1), (1, 4), (4, 1), (2, 2), (2, 3), (3, 2)];

/// Dtypes of parameters and of the wire.
const DTYPES: [(DType, DType); 4] = [
    (DType::F32, DType::F32),
    (DType::BF16, DType::F32),
    (DType::F16, DType::F16),
    (DType::F32, DType::BF16),
];

#[test]
fn what_is_moved_is_what_was_planned_in_every_mode_on_every_mesh() {
    for accumulation in Accumulation::ALL {
        for (replicate, shard) in MESHES {
            for microbatches in 1..=4 {
                let options =
                    ModelOptions { accumulation, ..ModelOptions::on(mesh(replicate, shard)) };
                moved_as_planned(&three_units(), &options, microbatches);
            }
        }
    }
}

#[test]
fn what_is_moved_is_what_was_planned_in_every_dtype() {
    for (parameters, wire) in DTYPES {
        for accumulation in Accumulation::ALL {
            let precision = Precision { parameters, wire, ..Precision::default() };
            let options = ModelOptions { accumulation, precision, ..ModelOptions::on(mesh(2, 3)) };
            moved_as_planned(&three_units(), &options, 2);
        }
    }
}

#[test]
fn what_is_moved_is_what_was_planned_for_kept_and_frozen_units() {
    for spec in [keeping_the_second(), partly_frozen()] {
        for accumulation in Accumulation::ALL {
            let options = ModelOptions { accumulation, ..ModelOptions::on(mesh(2, 2)) };
            moved_as_planned(&spec, &options, 3);
        }
    }
}

#[test]
fn what_is_moved_is_what_was_planned_for_units_in_several_dtypes() {
    let dtypes = [None, Some(DType::F32), Some(DType::F16)];
    for (parameters, wire) in DTYPES {
        let precision = Precision { parameters, wire, ..Precision::default() };
        for (replicate, shard) in MESHES {
            let on = ModelOptions { precision, ..ModelOptions::on(mesh(replicate, shard)) };
            for full_copies in FullCopies::ALL {
                let options = ModelOptions { full_copies, ..on.clone() };
                moved_as_planned(&computing_in(&keeping_the_second(), &dtypes), &options, 2);
            }
            for accumulation in Accumulation::ALL {
                let options = ModelOptions { accumulation, ..on.clone() };
                moved_as_planned(&computing_in(&partly_frozen(), &dtypes), &options, 2);
            }
        }
    }
}

/// A unit in f32 takes twice the bytes of one in bf16, in gathers alone.
#[test]
fn an_f32_unit_of_a_bf16_model_costs_the_bytes_of_f32() {
    let precision = Precision { wire: DType::BF16, ..Precision::compute_in(DType::BF16) };
    let options = ModelOptions { precision, ..ModelOptions::on(mesh(1, 2)) };
    let moved = |dtypes: &[Option<DType>]| {
        let spec = computing_in(&three_units(), dtypes);
        let measured = measure(&spec, &options, (StepOptions::microbatches(1), 1));
        let padded = measured[0].padded.clone();
        (measured[0].moved, padded)
    };
    let ((narrow, padded), (island, _)) = (moved(&[None]), moved(&[None, None, Some(DType::F32)]));
    let shard = padded[2] / 2;
    let more = island.all_gather.bytes - narrow.all_gather.bytes;
    assert_eq!(more, ByteCount(2 * 2 * shard), "two bytes an element more, in both gathers");
    assert_eq!(island.reduce_scatter, narrow.reduce_scatter);
}

#[test]
fn what_is_moved_is_what_was_planned_where_ranks_share_one_full_copy() {
    for spec in [three_units(), keeping_the_second(), partly_frozen()] {
        for (replicate, shard) in MESHES {
            let on = ModelOptions::on(mesh(replicate, shard));
            moved_as_planned(&spec, &ModelOptions { full_copies: FullCopies::PerProcess, ..on }, 2);
        }
    }
}

#[test]
fn a_step_that_does_not_know_its_microbatches_moves_the_same() {
    let options = ModelOptions::on(mesh(2, 2));
    let unknown = StepOptions { microbatches: None, ..StepOptions::default() };
    for measured in measure(&three_units(), &options, (unknown, 3)) {
        assert_eq!(measured.moved, measured.planned);
    }
}

#[test]
fn a_world_of_one_rank_costs_no_collective() {
    let options = ModelOptions::on(Mesh::SINGLE);
    for measured in measure(&three_units(), &options, (StepOptions::microbatches(3), 3)) {
        assert_eq!(measured.moved, Traffic::default());
        assert_eq!(measured.control, Flow::NONE);
    }
}

#[test]
fn an_axis_of_one_rank_costs_no_collective() {
    let sharded = planned(&three_units(), Accumulation::ReduceScatter, mesh(1, 4), 3);
    assert_eq!(sharded.all_reduce, Flow::NONE);
    let replicated = planned(&three_units(), Accumulation::ReduceScatter, mesh(4, 1), 3);
    assert_eq!((replicated.all_gather, replicated.reduce_scatter), (Flow::NONE, Flow::NONE));
    assert_eq!(replicated.all_reduce.calls, 3);
}

/// The rows of the table of counts for G units of which g are resharded, in steps of K microbatches.
#[test]
fn calls_follow_the_closed_formulas() {
    const K: u64 = 3;
    let (units, resharded) = (3, 2);
    let calls = |accumulation| {
        let options = ModelOptions { accumulation, ..ModelOptions::on(mesh(2, 2)) };
        let measured = measure(&keeping_the_second(), &options, (StepOptions::microbatches(3), 3));
        let Traffic { all_gather, reduce_scatter, all_reduce, update: _ } = measured[0].moved;
        (all_gather.calls, reduce_scatter.calls, all_reduce.calls)
    };
    let gathers = K * (units + resharded);
    assert_eq!(calls(Accumulation::Every), (gathers, K * units, K * units));
    assert_eq!(calls(Accumulation::ReduceScatter), (gathers, K * units, units));
    assert_eq!(calls(Accumulation::Local), (gathers, units, units));
}

/// With every unit kept, a microbatch gathers each unit once and no more.
#[test]
fn a_model_that_is_kept_gathers_each_unit_once_a_microbatch() {
    let mut spec = ModelSpec::new();
    for unit in three_units().units() {
        spec = spec.unit(unit.clone().keep());
    }
    assert!(spec.units().iter().all(|unit| unit.after_forward == AfterForward::Keep));
    assert_eq!(planned(&spec, Accumulation::Local, mesh(2, 2), 4).all_gather.calls, 4 * 3);
    moved_as_planned(&spec, &ModelOptions::on(mesh(2, 2)), 4);
}

/// The payloads of the same table: (S-1) shards, (S-1)/S of the padded unit, and 2(R-1)/R of a shard.
#[test]
fn payloads_follow_the_closed_formulas() {
    let options = ModelOptions::on(mesh(2, 4));
    let measured = &measure(&three_units(), &options, (StepOptions::microbatches(1), 1))[5];
    let padded: u64 = measured.padded.iter().map(|elements| elements * 4).sum();
    let (shards, replicas) = (4, 2);
    assert_eq!(measured.moved.all_gather.bytes.get(), 2 * padded * (shards - 1) / shards);
    assert_eq!(measured.moved.reduce_scatter.bytes.get(), padded * (shards - 1) / shards);
    let shard = padded / shards;
    assert_eq!(measured.moved.all_reduce.bytes.get(), 2 * shard * (replicas - 1) / replicas);
}

#[test]
fn a_16_bit_wire_halves_what_contributions_cost() {
    let precision = Precision { wire: DType::BF16, ..Precision::default() };
    let wide = ModelOptions::on(mesh(1, 4));
    let narrow = ModelOptions { precision, ..wide.clone() };
    let bytes = |options| {
        let measured = measure(&three_units(), options, (StepOptions::microbatches(2), 2));
        measured[3].moved.reduce_scatter.bytes
    };
    assert_eq!(bytes(&narrow) * 2, bytes(&wide));
}

#[test]
fn a_step_after_the_first_costs_the_control_traffic_of_two_small_gathers() {
    let measured =
        measure(&three_units(), &ModelOptions::on(mesh(2, 2)), (StepOptions::microbatches(2), 2));
    for measured in measured {
        assert_eq!(measured.control.calls, 2);
        assert!(measured.control.bytes <= ByteCount(3 * 152), "{}", measured.control.bytes);
    }
}

/// A rank of a world of 1,024 whose peers exist on paper only: the bytes that it would have moved are counted all the same.
#[test]
fn a_rank_of_1024_would_move_what_the_plan_says() {
    let options = ModelOptions::on(mesh(8, 128));
    for rank in [0, 513, 1023].map(Rank::new) {
        let world = World::counting(1024, rank).expect("a rank of the world");
        let measured = step_on(world, &three_units(), &options, (StepOptions::microbatches(2), 2));
        let measured = measured.expect("nothing can fail where nothing is sent");
        assert_eq!(measured.moved, measured.planned, "rank {rank}");
        assert_eq!(measured.moved.all_gather.calls, 2 * 6);
    }
}

/// The traffic of one rank in one step.
struct Measured {
    moved: Traffic,
    planned: Traffic,
    control: Flow,
    /// Elements of each unit, padding included.
    padded: Vec<u64>,
}

fn moved_as_planned(spec: &ModelSpec, options: &ModelOptions, microbatches: usize) {
    let measured = measure(spec, options, (StepOptions::microbatches(microbatches), microbatches));
    for (rank, Measured { moved, planned, .. }) in measured.into_iter().enumerate() {
        let ModelOptions { mesh, accumulation, precision, .. } = options;
        let how = format!(
            "rank {rank} of {mesh}, {accumulation}, {microbatches} microbatches, {precision:?}"
        );
        assert_eq!(moved, planned, "{how}");
    }
}

/// What every rank of the mesh moves in its second step, of so many microbatches.
fn measure(spec: &ModelSpec, options: &ModelOptions, steps: (StepOptions, usize)) -> Vec<Measured> {
    on_ranks(options.mesh.world_size(), |world| step_on(world, spec, options, steps))
}

fn step_on(
    world: World,
    spec: &ModelSpec,
    options: &ModelOptions,
    (step, microbatches): (StepOptions, usize),
) -> Result<Measured, Error> {
    let mut model = ShardedModel::new(world, spec.clone(), options.clone(), springs::initial)?;
    let mut sgd = hsdp::Sgd::new(&model, hsdp::SgdOptions::default());
    let mut run = |model: &mut ShardedModel| -> Result<(), Error> {
        let mut begun = model.begin_step(step)?;
        for _ in 0..microbatches {
            slopes::microbatch(&mut begun, 1.0)?;
        }
        let gradients = begun.finish()?;
        hsdp::Optimizer::step(&mut sgd, model, gradients).map(drop)
    };
    run(&mut model)?;
    let before = model.world().ledger();
    run(&mut model)?;
    let ledger = model.world().ledger().since(&before);

    let flow = |channel, op| {
        assert_eq!(
            ledger.op(channel, op),
            ledger.channel(channel),
            "{channel} carries {op} and nothing else"
        );
        ledger.op(channel, op)
    };
    let moved = Traffic {
        all_gather: flow(Channel::Gather, Op::AllGather),
        reduce_scatter: flow(Channel::Reduce, Op::ReduceScatter),
        all_reduce: flow(Channel::AllReduce, Op::AllReduce),
        update: Flow::NONE,
    };
    let padded = model.plan().layouts().iter().map(|layout| layout.full_len() as u64).collect();
    let planned = model.plan().traffic(model.rank(), microbatches as u64);
    Ok(Measured { moved, planned, control: ledger.channel(Channel::Control), padded })
}

fn planned(spec: &ModelSpec, accumulation: Accumulation, mesh: Mesh, microbatches: u64) -> Traffic {
    let options =
        hsdp_sharding::PlanOptions { accumulation, ..hsdp_sharding::PlanOptions::default() };
    let plan = Plan::new(spec.clone(), mesh, options).expect("a small model can be planned");
    plan.traffic(Rank::new(0), microbatches)
}
