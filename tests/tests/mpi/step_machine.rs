//! The engine beside the machine of the step, as in `tests/step/step_machine.rs`, where
//! processes compute on devices: all operations of a rank but exchanges are one sequence.

use hsdp::mpi::Job;
use hsdp::{
    Accumulation, Error, FullCopies, ModelOptions, Offload, Param, Placement, StateOver, Uneven,
    Unit, UnitOrder, Unused, World, WorldOptions,
};
use hsdp_kernels::cuda::Device;
use hsdp_sharding::ModelSpec;
use hsdp_sharding::step::Sequences;
use hsdp_tests::support::comparison::{Comparison, Ran};
use hsdp_tests::support::drawn::Drawn;
use hsdp_tests::support::models::{keeping_the_second, layer, three_units};
use hsdp_tests::support::programs::{Program, plain_step};
use hsdp_tests::support::worlds::mesh;

use crate::Named;
use crate::given_up::{PATIENCE, passes};

pub(crate) const TRIALS: &[Named] = &[
    ("devices::operations_are_those_of_the_machine_of_the_step", || passes("machine")),
    ("devices::whatever_programs_do", || passes("machine-drawn")),
];

/// The last rank has no data in the second step.
const WITHOUT_DATA: usize = 3;

/// Two steps of two microbatches, whose number is given or not.
const GIVEN: Option<usize> = Some(2);
const ASKED: Option<usize> = None;

/// Number of cases that are drawn.
const DRAWN: u64 = 25;

pub(crate) fn as_process(scenario: &str, job: &Job) -> Result<(), String> {
    match scenario {
        "machine-drawn" => (0..DRAWN).try_for_each(|seed| drawn(job, seed)),
        _ => plain(job),
    }
}

fn plain(job: &Job) -> Result<(), String> {
    let cases = [
        (Accumulation::ReduceScatter, 1, GIVEN, three_units()),
        (Accumulation::ReduceScatter, 0, GIVEN, keeping_the_second()),
        (Accumulation::ReduceScatter, 5, ASKED, keeping_the_second()),
        (Accumulation::ReduceScatter, 0, GIVEN, kept_before_frozen()),
        (Accumulation::Every, 1, GIVEN, three_units()),
        (Accumulation::Local, 1, GIVEN, keeping_the_second()),
        (Accumulation::Local, 1, ASKED, three_units()),
    ];
    let cases =
        cases.into_iter().flat_map(|case| StateOver::ALL.map(|state| (state, case.clone())));
    cases.into_iter().try_for_each(|(state, (accumulation, prefetch, given, spec))| {
        let order = UnitOrder::Error;
        let uneven = Uneven::ZeroWeight;
        let on = on_devices(ModelOptions::on(mesh(2, 2)));
        let options = ModelOptions { accumulation, prefetch, state, order, uneven, ..on };
        let program = |rank| -> Program {
            let count = |step| if step == 0 || rank < WITHOUT_DATA { 2 } else { 0 };
            (0..2).map(|step| plain_step(&spec, given, count(step))).collect()
        };
        let programs = (0..4).map(program).collect();
        let compared = Comparison::new(&spec, &options, programs, Sequences::One);
        compare(job, &compared).map_err(|error| {
            format!(
                "{accumulation}, state over {state}, prefetch {prefetch}, {given:?} microbatches: \
                 {error}"
            )
        })
    })
}

fn drawn(job: &Job, seed: u64) -> Result<(), String> {
    hsdp::silence_warnings();
    let Drawn { spec, options, programs } = Drawn::of(seed, |options| {
        options.mesh = mesh(2, 2);
        options.full_copies = FullCopies::PerRank;
        // Gradients may come when their turn in the backward has passed.
        options.unused = Unused::Zeros;
        *options = on_devices(options.clone());
    });
    let compared = Comparison::new(&spec, &options, programs, Sequences::One);
    compare(job, &compared).map_err(|error| {
        let programs = &compared.programs;
        format!("seed {seed}, {error}\n{options:?}\n{spec:?}\n{programs:?}")
    })
}

fn on_devices(options: ModelOptions) -> ModelOptions {
    let placement = Placement::Cuda { ordinal: 0, offload: Offload::None };
    ModelOptions { placement, ..options }
}

/// Returns a unit that is trained and kept, before a frozen one, which is gathered again for its
/// backward.
fn kept_before_frozen() -> ModelSpec {
    let frozen = Unit::new("frozen").param(Param::new("frozen.weight", [5, 9]).frozen());
    let kept = layer("kept", [13, 7]).keep();
    ModelSpec::new().unit(kept).unit(frozen).unit(layer("trained", [31, 3]))
}

fn compare(job: &Job, compared: &Comparison<'_>) -> Result<(), String> {
    let options = WorldOptions { deadline: PATIENCE, ..WorldOptions::default() };
    let world = job.world(4, options).map_err(|error| error.to_string())?.ok_or("no rank")?;
    let ran = run(&world, compared);
    let ran = ran.map_err(|error| format!("rank {}: {error}", world.rank()))?;
    let difference = compared.difference(world.rank(), ran);
    difference.map_or(Ok(()), |it| Err(format!("rank {}: {it}", world.rank())))
}

fn run(world: &World, compared: &Comparison<'_>) -> Result<Ran, Error> {
    world.connect_nccl(&Device::new(0).expect("a device"))?;
    compared.run(world)
}
