//! The order of a step as the simulator has it where processes compute on devices: over all channels, beside the flight records of ranks.

use std::sync::Arc;

use hsdp::mpi::Job;
use hsdp::{
    Accumulation, Error, ModelOptions, Offload, Optimizer, Param, Placement, Sgd, SgdOptions,
    ShardedModel, StepOptions, Uneven, Unit, UnitOrder, World, WorldOptions,
};
use hsdp_kernels::cuda::Device;
use hsdp_sharding::{ModelSpec, Plan};
use hsdp_simulator::{Data, LossScale, Microbatches, Order, Step};
use hsdp_tests::support::flights::{expected, of_step};
use hsdp_tests::support::models::{keeping_the_second, layer, three_units};
use hsdp_tests::support::slopes;
use hsdp_tests::support::worlds::mesh;

use crate::Named;
use crate::given_up::{PATIENCE, passes};

pub(crate) const TRIALS: &[Named] =
    &[("devices::operations_are_issued_in_the_order_of_the_simulator", || passes("simulated"))];

/// The step that is compared: the second one.
const STEP: u64 = 1;

/// The last rank has no data in that step.
const WITHOUT_DATA: usize = 3;

const GIVEN: Microbatches = Microbatches::Given(2);
const ASKED: Microbatches = Microbatches::Asked(2);

pub(crate) fn as_process(job: &Job) -> Result<(), String> {
    let cases = [
        (Accumulation::ReduceScatter, 1, GIVEN, three_units()),
        (Accumulation::ReduceScatter, 0, GIVEN, keeping_the_second()),
        (Accumulation::ReduceScatter, 5, ASKED, keeping_the_second()),
        (Accumulation::ReduceScatter, 0, GIVEN, kept_before_frozen()),
        (Accumulation::Every, 1, GIVEN, three_units()),
        (Accumulation::Local, 1, GIVEN, keeping_the_second()),
        (Accumulation::Local, 1, ASKED, three_units()),
    ];
    cases.into_iter().try_for_each(|(accumulation, prefetch, microbatches, spec)| {
        let options = WorldOptions { deadline: PATIENCE, ..WorldOptions::default() };
        let world = job.world(4, options).map_err(|error| error.to_string())?.ok_or("no rank")?;
        let placement = Placement::Cuda { ordinal: 0, offload: Offload::None };
        let (order, uneven) = (UnitOrder::Error, Uneven::ZeroWeight);
        let on = ModelOptions::on(mesh(2, 2));
        let options = ModelOptions { placement, accumulation, prefetch, order, uneven, ..on };
        compare(&world, &spec, &options, microbatches).map_err(|error| {
            format!("{accumulation}, prefetch {prefetch}, {microbatches:?}: {error}")
        })
    })
}

/// A unit that is trained and kept, before a frozen one, which is gathered again for its backward.
fn kept_before_frozen() -> ModelSpec {
    let frozen = Unit::new("frozen").param(Param::new("frozen.weight", [5, 9]).frozen());
    let kept = layer("kept", [13, 7]).keep();
    ModelSpec::new().unit(kept).unit(frozen).unit(layer("trained", [31, 3]))
}

fn compare(
    world: &World,
    spec: &ModelSpec,
    options: &ModelOptions,
    microbatches: Microbatches,
) -> Result<(), String> {
    run(world, spec, options, microbatches).map_err(|error| error.to_string())?;
    let flown = of_step(&world.flight_record(), STEP).of_units();
    let plan = Plan::new(spec.clone(), options.mesh, options.plan_options());
    let plan = Arc::new(plan.map_err(|error| error.to_string())?);
    let data = if world.rank().index() < WITHOUT_DATA { Data::Present } else { Data::Absent };
    let placement = hsdp_simulator::Placement::Device;
    let step = Step { microbatches, placement, data, loss_scale: LossScale::Fixed };
    let expected = expected(&plan, world.rank(), STEP, &Order::of(&plan, step)).of_units();
    let difference = (0..flown.len().max(expected.len()))
        .find(|at| flown.get(*at) != expected.get(*at))
        .map(|at| format!("{at}: flew {:?}, expected {:?}", flown.get(at), expected.get(at)));
    difference.map_or(Ok(()), |it| Err(format!("rank {}, {it}", world.rank())))
}

fn run(
    world: &World,
    spec: &ModelSpec,
    options: &ModelOptions,
    microbatches: Microbatches,
) -> Result<(), Error> {
    world.connect_nccl(&Device::new(0).expect("a device"))?;
    let zeros = |param: &hsdp::Param| vec![0.0; param.numel()];
    let mut model = ShardedModel::new(world.clone(), spec.clone(), options.clone(), zeros)?;
    let mut sgd = Sgd::new(&model, SgdOptions::default());
    let (begin, count) = match microbatches {
        Microbatches::Given(count) => {
            (StepOptions::microbatches(count.try_into().expect("a few")), count)
        }
        Microbatches::Asked(count) => {
            (StepOptions { microbatches: None, ..StepOptions::default() }, count)
        }
    };
    for number in 0..=STEP {
        let has_data = world.rank().index() < WITHOUT_DATA || number < STEP;
        let mut step = model.begin_step(if has_data { begin } else { begin.without_data() })?;
        for _ in (0..count).filter(|_| has_data) {
            slopes::microbatch(&mut step, 1.0)?;
        }
        let gradients = step.finish()?;
        sgd.step(&mut model, gradients)?;
    }
    model.end_run()
}
