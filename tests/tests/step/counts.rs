//! Calls and bytes of every collective, measured where elements are copied, against the plan's
//! formulas.

use hsdp::{
    Accumulation, DType, Error, FullCopies, Mesh, ModelOptions, ModelSpec, Precision, Rank, Sgd,
    SgdOptions, ShardedModel, StateOver, StepOptions, UnitId, World,
};
use hsdp_comm::{Channel, Op};
use hsdp_sharding::{ByteCount, Flow, Traffic};
use hsdp_tests::support::models::{
    computing_in, keeping_the_second, layer, partly_frozen, three_units,
};
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

/// Returns each mode of accumulation with each division of state.
fn modes() -> impl Iterator<Item = (Accumulation, StateOver)> {
    let with = |accumulation| StateOver::ALL.map(|state| (accumulation, state));
    Accumulation::ALL.into_iter().flat_map(with)
}

#[test]
fn what_is_moved_is_what_was_planned_in_every_mode_on_every_mesh() {
    for (accumulation, state) in modes() {
        for (replicate, shard) in MESHES {
            for microbatches in 1..=4 {
                let on = ModelOptions::on(mesh(replicate, shard));
                let options = ModelOptions { accumulation, state, ..on };
                moved_as_planned(&three_units(), &options, microbatches);
            }
        }
    }
}

#[test]
fn what_is_moved_is_what_was_planned_in_every_dtype() {
    for (parameters, wire) in DTYPES {
        for (accumulation, state) in modes() {
            let precision = Precision { parameters, wire, ..Precision::default() };
            let on = ModelOptions::on(mesh(2, 3));
            let options = ModelOptions { accumulation, state, precision, ..on };
            moved_as_planned(&three_units(), &options, 2);
        }
    }
}

#[test]
fn what_is_moved_is_what_was_planned_for_kept_and_frozen_units() {
    for spec in [keeping_the_second(), keeping_all(), partly_frozen()] {
        for (accumulation, state) in modes() {
            let options = ModelOptions { accumulation, state, ..ModelOptions::on(mesh(2, 2)) };
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
            for (accumulation, state) in modes() {
                let options = ModelOptions { accumulation, state, ..on.clone() };
                moved_as_planned(&computing_in(&partly_frozen(), &dtypes), &options, 2);
            }
        }
    }
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
    for measured in measure(&three_units(), &options, unknown, 3) {
        assert_eq!(measured.moved, measured.planned);
    }
}

#[test]
fn a_world_of_one_rank_costs_no_collective() {
    let options = ModelOptions::on(Mesh::SINGLE);
    for measured in measure(&three_units(), &options, StepOptions::microbatches(3), 3) {
        assert_eq!(measured.moved, Traffic::default());
        assert_eq!(measured.control, Flow::NONE);
    }
}

#[test]
fn a_step_after_the_first_costs_the_control_traffic_of_two_small_gathers() {
    let measured =
        measure(&three_units(), &ModelOptions::on(mesh(2, 2)), StepOptions::microbatches(2), 2);
    for measured in measured {
        assert_eq!(measured.control.calls, 2);
        assert!(measured.control.bytes <= ByteCount(3 * 152), "{}", measured.control.bytes);
    }
}

/// A rank of a world of 1,024 whose peers exist on paper only: the bytes that it would have moved
/// are counted all the same.
#[test]
fn a_rank_of_1024_would_move_what_the_plan_says() {
    let options = ModelOptions::on(mesh(8, 128));
    for rank in [0, 513, 1023].map(Rank::new) {
        let world = World::counting(1024, rank).expect("a rank of the world");
        let measured = step_on(world, &three_units(), &options, StepOptions::microbatches(2), 2);
        let measured = measured.expect("nothing can fail where nothing is sent");
        assert_eq!(measured.moved, measured.planned, "rank {rank}");
        assert_eq!(measured.moved.all_gather.calls, 2 * 6);
    }
}

/// Two units whose shards 1, 2, 3 and 4 replicas cut into slices of one length, also those of 2
/// ranks.
fn even_units() -> ModelSpec {
    ModelSpec::new().unit(layer("first", [384, 17])).unit(layer("second", [768, 11]))
}

/// A rank receives the contributions of R - 1 peers to its slice of s/R elements, w bytes each on
/// the wire, in an all-reduce and in a reduce-scatter of sums alike. The other (R - 1)/R of the
/// elements follow as finished sums in the all-reduce, in f32 whatever the wire (decision 1), and
/// as updated parameters of p bytes in the gather of slices. So the bytes are as w + p to w + 4:
/// 0.75 with p = 2 and w = 4, and 2/3 with w = 2. With K all-reduces in a step (mode `every`) they
/// are as K w + p to K (w + 4), since slices are gathered once.
#[test]
fn bytes_between_replicas_that_divide_state_are_to_those_of_all_reduces_as_in_the_formulas() {
    const MICROBATCHES: usize = 3;
    let ratios = [
        (DType::BF16, DType::F32, [3, 4]),
        (DType::BF16, DType::BF16, [2, 3]),
        (DType::F16, DType::F16, [2, 3]),
        (DType::F32, DType::F32, [1, 1]),
        (DType::F32, DType::BF16, [1, 1]),
    ];
    for (parameters, wire, [part, of]) in ratios {
        let [p, w] = [parameters, wire].map(|dtype| dtype.size_bytes() as u64);
        assert_eq!((w + p) * of, (w + 4) * part, "parameters {parameters}, wire {wire}");
        for accumulation in Accumulation::ALL {
            let k = if accumulation == Accumulation::Every { MICROBATCHES as u64 } else { 1 };
            for (replicate, shard) in [(2, 1), (2, 2), (3, 2), (4, 1)] {
                let precision = Precision { parameters, wire, ..Precision::default() };
                let on = ModelOptions::on(mesh(replicate, shard));
                let options = ModelOptions { accumulation, precision, ..on };
                let how = format!("{accumulation} on {}, {precision:?}", options.mesh);
                let [shards, world] = StateOver::ALL.map(|state| {
                    let options = ModelOptions { state, ..options.clone() };
                    let step = StepOptions::microbatches(MICROBATCHES);
                    measure(&even_units(), &options, step, MICROBATCHES)
                });
                for (shards, world) in shards.into_iter().zip(world) {
                    for [shards, world] in
                        [[shards.planned, world.planned], [shards.moved, world.moved]]
                    {
                        let [shards, world] = [shards, world].map(|it| between_replicas(&it));
                        assert!(shards > 0, "{how}");
                        assert_eq!(world * k * (w + 4), shards * (k * w + p), "{how}");
                    }
                }
            }
        }
    }
}

/// Returns the bytes that a rank receives from other replicas in a step and its update.
fn between_replicas(traffic: &Traffic) -> u64 {
    let Traffic { all_reduce, scatter_sums, gather_slices, .. } = *traffic;
    (all_reduce + scatter_sums + gather_slices).bytes.get()
}

/// The traffic of one rank in one step.
struct Measured {
    moved: Traffic,
    planned: Traffic,
    control: Flow,
}

fn moved_as_planned(spec: &ModelSpec, options: &ModelOptions, microbatches: usize) {
    let measured = measure(spec, options, StepOptions::microbatches(microbatches), microbatches);
    for (rank, Measured { moved, planned, .. }) in measured.into_iter().enumerate() {
        let ModelOptions { mesh, accumulation, precision, .. } = options;
        let how = format!(
            "rank {rank} of {mesh}, {accumulation}, {microbatches} microbatches, {precision:?}"
        );
        assert_eq!(moved, planned, "{how}");
    }
}

/// What every rank of the mesh moves in its second step, of so many microbatches.
fn measure(
    spec: &ModelSpec,
    options: &ModelOptions,
    step: StepOptions,
    microbatches: usize,
) -> Vec<Measured> {
    on_ranks(options.mesh.world_size(), |world| step_on(world, spec, options, step, microbatches))
}

fn step_on(
    world: World,
    spec: &ModelSpec,
    options: &ModelOptions,
    step: StepOptions,
    microbatches: usize,
) -> Result<Measured, Error> {
    let mut model = springs::model_of(world, spec, options)?;
    let mut sgd = Sgd::new(&model, SgdOptions::default());
    let mut run = |model: &mut ShardedModel| -> Result<(), Error> {
        let mut begun = model.begin_step(step)?;
        for _ in 0..microbatches {
            slopes::microbatch(&mut begun, 1.0)?;
        }
        let gradients = begun.finish()?;
        hsdp::Optimizer::step(&mut sgd, model, gradients).map(drop)
    };
    // The slices of an update have come when a shard can be read.
    let whole = |model: &ShardedModel| model.shard(UnitId::new(0)).map(drop);
    run(&mut model)?;
    whole(&model)?;
    let before = model.world().ledger();
    run(&mut model)?;
    whole(&model)?;
    let ledger = model.world().ledger().since(&before);

    let flow = |channel, op| {
        assert_eq!(
            ledger.op(channel, op),
            ledger.channel(channel),
            "{channel} carries {op} and nothing else"
        );
        ledger.op(channel, op)
    };
    let over_replicas = |op| ledger.op(Channel::AllReduce, op);
    let moved = Traffic {
        all_gather: flow(Channel::Gather, Op::AllGather),
        reduce_scatter: flow(Channel::Reduce, Op::ReduceScatter),
        all_reduce: over_replicas(Op::AllReduce),
        statistics: flow(Channel::Statistics, Op::AllReduce),
        scatter_sums: over_replicas(Op::ReduceScatter),
        gather_slices: over_replicas(Op::AllGather),
        update: Flow::NONE,
    };
    let Traffic { all_reduce, scatter_sums, gather_slices, .. } = moved;
    assert_eq!(all_reduce + scatter_sums + gather_slices, ledger.channel(Channel::AllReduce));
    let planned = model.plan().traffic(model.rank(), microbatches as u64);
    Ok(Measured { moved, planned, control: ledger.channel(Channel::Control) })
}

fn keeping_all() -> ModelSpec {
    three_units().units().iter().fold(ModelSpec::new(), |spec, unit| spec.unit(unit.clone().keep()))
}
