//! The order of a step as the simulator has it, beside the flight records of steps that ran: every operation of every rank, channel by
//! channel. `mpi/simulated_order.rs` compares it where a device issues all channels in one order.

use std::sync::Arc;

use hsdp::{
    Accumulation, Error, FullCopies, LossScaling, Mesh, ModelOptions, ModelSpec, Objective,
    Optimizer, Param, Precision, Sgd, ShardedModel, StepOptions, Uneven, Unit, UnitOrder, World,
};
use hsdp_sharding::{DType, Plan, Rank};
use hsdp_simulator::{Data, LossScale, Microbatches, Order, Placement, Step};
use hsdp_tests::support::flights::{Flown, expected, first_difference, of_step};
use hsdp_tests::support::models::{
    computing_in, keeping_the_second, layer, partly_frozen, three_units,
};
use hsdp_tests::support::slopes;
use hsdp_tests::support::worlds::{mesh, on_ranks};

/// The step that is compared: the second one.
const STEP: u64 = 1;

/// What a step is like, besides the model's options.
#[derive(Clone, Copy, Debug)]
struct Case {
    microbatches: Microbatches,
    /// Ranks from this one on have no data.
    with_data: usize,
}

const GIVEN: Case = Case { microbatches: Microbatches::Given(3), with_data: usize::MAX };

fn options(mesh: Mesh) -> ModelOptions {
    let (order, uneven) = (UnitOrder::Error, Uneven::ZeroWeight);
    ModelOptions { order, uneven, prefetch: 1, ..ModelOptions::on(mesh) }
}

/// Runs two steps, and compares the operations of the second one with the simulator's.
fn compare(spec: &ModelSpec, options: &ModelOptions, case: Case) {
    let plan = Plan::new(spec.clone(), options.mesh, options.plan_options()).expect("a plan");
    let plan = Arc::new(plan);
    let flown = on_ranks(options.mesh.world_size(), |world| run(world, spec, options, case));
    for (rank, flown) in flown.into_iter().enumerate() {
        let data = if rank < case.with_data { Data::Present } else { Data::Absent };
        let loss_scale = match options.loss_scaling {
            LossScaling::Dynamic(_) => LossScale::Dynamic,
            _ => LossScale::Fixed,
        };
        let microbatches = case.microbatches;
        let step = Step { microbatches, placement: Placement::Host, data, loss_scale };
        let expected = expected(&plan, Rank::new(rank), STEP, &Order::of(&plan, step));
        let difference = first_difference(&flown, &expected.by_channel());
        assert_eq!(difference, None, "rank {rank}, {case:?}, {options:?}");
    }
}

fn run(world: World, spec: &ModelSpec, options: &ModelOptions, case: Case) -> Result<Flown, Error> {
    let rank = world.rank().index();
    let mut model = ShardedModel::new(world.clone(), spec.clone(), options.clone(), |it| {
        vec![0.0; it.numel()]
    })?;
    let mut sgd = Sgd::new(&model, hsdp::SgdOptions::default());
    for number in 0..=STEP {
        let has_data = rank < case.with_data || number < STEP;
        let begin = match case.microbatches {
            Microbatches::Given(count) => StepOptions::microbatches(count.try_into().expect("few")),
            Microbatches::Asked(_) => StepOptions { microbatches: None, ..StepOptions::default() },
        };
        let begin = if has_data { begin } else { begin.without_data() };
        let mut step = model.begin_step(begin)?;
        let (Microbatches::Given(count) | Microbatches::Asked(count)) = case.microbatches;
        for _ in (0..count).filter(|_| has_data) {
            slopes::microbatch(&mut step, 1.0)?;
        }
        let gradients = step.finish()?;
        sgd.step(&mut model, gradients)?;
    }
    model.end_run()?;
    Ok(of_step(&world.flight_record(), STEP).by_channel())
}

#[test]
fn every_mesh_in_every_mode() {
    for (replicas, shards) in [(1, 1), (1, 2), (2, 1), (1, 4), (4, 1), (2, 2), (2, 3), (4, 4)] {
        for accumulation in Accumulation::ALL {
            let options = ModelOptions { accumulation, ..options(mesh(replicas, shards)) };
            compare(&three_units(), &options, GIVEN);
            compare(
                &three_units(),
                &options,
                Case { microbatches: Microbatches::Given(1), ..GIVEN },
            );
        }
    }
}

#[test]
fn steps_whose_number_of_microbatches_is_not_given() {
    for on in [mesh(1, 2), mesh(2, 1), mesh(2, 2)] {
        for accumulation in Accumulation::ALL {
            let options = ModelOptions { accumulation, ..options(on) };
            compare(
                &three_units(),
                &options,
                Case { microbatches: Microbatches::Asked(2), ..GIVEN },
            );
        }
    }
}

#[test]
fn prefetch_keep_and_frozen_units() {
    for prefetch in [0, 1, 2, 100] {
        let options = ModelOptions { prefetch, ..options(mesh(2, 2)) };
        for spec in [three_units(), keeping_the_second(), partly_frozen(), forward_only()] {
            compare(&spec, &options, GIVEN);
        }
    }
}

/// A frozen unit that no gradient reaches, and a unit that is trained.
fn forward_only() -> ModelSpec {
    let frozen = Unit::new("frozen").param(Param::new("frozen.weight", [5, 9]).frozen());
    ModelSpec::new().unit(frozen.forward_only()).unit(layer("trained", [13, 7]))
}

#[test]
fn ranks_without_data() {
    for microbatches in [Microbatches::Given(2), Microbatches::Asked(2)] {
        for accumulation in Accumulation::ALL {
            for spec in [three_units(), keeping_the_second()] {
                let options = ModelOptions { accumulation, ..options(mesh(2, 2)) };
                compare(&spec, &options, Case { microbatches, with_data: 3 });
                compare(&spec, &options, Case { microbatches, with_data: 1 });
            }
        }
    }
}

#[test]
fn one_copy_for_all_ranks_and_narrow_wires() {
    let shared = ModelOptions { full_copies: FullCopies::PerProcess, ..options(mesh(2, 2)) };
    compare(&three_units(), &shared, GIVEN);
    let precision = Precision { wire: DType::BF16, ..Precision::compute_in(DType::BF16) };
    let narrow = ModelOptions { precision, ..options(mesh(2, 2)) };
    compare(&three_units(), &narrow, GIVEN);
    compare(&computing_in(&three_units(), &[None, Some(DType::F32)]), &narrow, GIVEN);
}

#[test]
fn a_dynamic_loss_scale_asks_for_overflows() {
    let loss_scaling = LossScaling::Dynamic(hsdp::DynamicScale::default());
    for accumulation in Accumulation::ALL {
        let objective = Objective::WeightedMean;
        let options = ModelOptions { accumulation, loss_scaling, objective, ..options(mesh(2, 2)) };
        compare(&three_units(), &options, GIVEN);
        compare(&three_units(), &options, Case { microbatches: Microbatches::Asked(2), ..GIVEN });
    }
}
