//! The engine beside the machine of the step, which decides its order: whatever programs do, the
//! engine carries out what the machine says, and nothing else.
//!
//! The machines of all ranks are driven by the same programs as the engines. Compared are every
//! operation in the flight records, channel by channel, the engine's events word for word, the
//! values of units, and the norms of gradients with those of the programs. `mpi/step_machine.rs`
//! does the same where a device issues all operations as one sequence. That a unit which is dropped
//! makes room is seen by `planned_memory`.
//!
//! Each of these changes to the engine was made on purpose, one at a time, and found here:
//!
//! | change | found as |
//! |---|---|
//! | a unit is handed out in place of being dropped | another event |
//! | at a hand-out the place before is dropped; a gather is not waited for | a panic |
//! | the first unit is gathered in place of another | other values |
//! | the first unit is reduced in place of another | a panic |
//! | zeros are reduced in place of what was offered | another norm |
//! | gradients are not accumulated; a fold replaces a partial | another norm |
//! | a fold does not happen | a panic |
//! | a partial begins anew in each microbatch | another norm |
//! | a reduce-scatter or an all-reduce is not waited for | a panic |
//! | all-reduces are left out | operations that are missing |
//! | a complete reduce-scatter is not reported | another order of events |
//! | operations behind the last microbatch have the number after it | another tag |

use std::collections::BTreeSet;
use std::sync::Arc;

use hsdp::{
    Accumulation, FullCopies, LossScaling, Mesh, ModelOptions, ModelSpec, Param, Precision, Uneven,
    Unit, UnitOrder,
};
use hsdp_comm::{ModelLabel, Tag};
use hsdp_sharding::step::{Output, Sequences};
use hsdp_sharding::{DType, Plan, Rank, StateOver};
use hsdp_simulator::{Microbatches, ModelPlacement, Order, StepOperation};
use hsdp_tests::support::comparison::Comparison;
use hsdp_tests::support::drawn::Drawn;
use hsdp_tests::support::flights::{Flight, difference_of, expected, members};
use hsdp_tests::support::machines::{self, Placed};
use hsdp_tests::support::models::{
    computing_in, keeping_the_second, layer, partly_frozen, three_units,
};
use hsdp_tests::support::programs::{Program, plain_step};
use hsdp_tests::support::warnings::Said;
use hsdp_tests::support::worlds::{mesh, on_ranks};

/// Settings of steps, besides the model's options.
#[derive(Clone, Copy, Debug)]
struct Case {
    microbatches: Microbatches,
    /// The first rank without data in the second step.
    with_data: usize,
}

const GIVEN: Case = Case { microbatches: Microbatches::Given(3), with_data: usize::MAX };

fn options(mesh: Mesh) -> ModelOptions {
    let order = UnitOrder::Error;
    let uneven = Uneven::ZeroWeight;
    ModelOptions { order, uneven, prefetch: 1, ..ModelOptions::on(mesh) }
}

/// Compares two steps in which each rank uses all units as they are declared.
fn compare(spec: &ModelSpec, options: &ModelOptions, case: Case) {
    let programs: Vec<_> = options.mesh.ranks().map(|rank| program(spec, rank, case)).collect();
    compare_programs(&format!("{case:?}"), spec, options, programs);
}

fn program(spec: &ModelSpec, rank: Rank, case: Case) -> Program {
    let (given, count) = match case.microbatches {
        Microbatches::Given(count) => (Some(count), count),
        Microbatches::Asked(count) => (None, count),
    };
    let [given, count] = [given, Some(count)].map(|it| it.map(|it| it.try_into().expect("few")));
    let count = |step| count.filter(|_| step == 0 || rank.index() < case.with_data).unwrap_or(0);
    (0..2).map(|step| plain_step(spec, given, count(step))).collect()
}

/// Runs programs on the engines of all ranks, and compares them with the machines. Returns the
/// outputs of the machines.
fn compare_programs(
    what: &str,
    spec: &ModelSpec,
    options: &ModelOptions,
    programs: Vec<Program>,
) -> Vec<Vec<Placed>> {
    let compared = Comparison::new(spec, options, programs, Sequences::OfEachChannel);
    let ran = on_ranks(options.mesh.world_size(), |world| compared.run(&world));
    for (rank, ran) in ran.into_iter().enumerate() {
        if let Some(difference) = compared.difference(Rank::new(rank), ran) {
            let programs = &compared.programs;
            panic!("{what}, rank {rank}: {difference}\n{options:?}\n{spec:?}\n{programs:?}");
        }
    }
    compared.said
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

/// Returns a frozen unit that no gradient reaches, and a unit that is trained.
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
        let options = ModelOptions { accumulation, loss_scaling, ..options(mesh(2, 2)) };
        compare(&three_units(), &options, GIVEN);
        compare(&three_units(), &options, Case { microbatches: Microbatches::Asked(2), ..GIVEN });
    }
}

/// Random models, meshes, options and programs, each from one number. Machines say in them whatever
/// they can say, except after an overflow.
#[test]
fn whatever_programs_do() {
    let _warnings = Said::default();
    let mut kinds = BTreeSet::new();
    for seed in 0..300 {
        let Drawn { spec, options, programs } = Drawn::of(seed, |_| ());
        let said = compare_programs(&format!("seed {seed}"), &spec, &options, programs);
        kinds.extend(said.iter().flatten().map(|placed| kind(placed.output)));
    }
    let expected = [
        "(a) (c) (g) (h) (r) a c d f g h l u <headers> <samples> <replicas> <weights>",
        "<microbatch> <unit> <interim> <statement> <batch> <mean> r:Offered:NewPartial",
        "r:Offered:Partial r:Offered:Microbatch r:Zeros:NewPartial r:Zeros:Partial",
        "r:Zeros:Microbatch r:Accumulated:NewPartial <no-microbatch> <no-unit> <any-unit> <no-batch>",
    ];
    let expected = expected.iter().flat_map(|it| it.split(' ')).map(str::to_owned).collect();
    assert_eq!(kinds, expected);
}

/// Returns the word of an output without its unit, and the buffers of a reduce-scatter.
fn kind(output: Output) -> String {
    let word: String =
        output.to_string().chars().filter(|it| !it.is_ascii_digit() && *it != '\'').collect();
    match output {
        Output::ReduceScatter { from, into, .. } => format!("{word}:{from:?}:{into:?}"),
        _ => word.replace(" >", ">").replace(' ', "-"),
    }
}

/// The simulator has a script of its own around the machine.
#[test]
fn the_simulator_lists_what_the_machine_says() {
    let placements = [
        (ModelPlacement::Host, Sequences::OfEachChannel),
        (ModelPlacement::Device, Sequences::One),
    ];
    for (placement, sequences) in placements {
        for accumulation in Accumulation::ALL {
            for microbatches in [Microbatches::Given(3), Microbatches::Asked(2)] {
                for state in StateOver::ALL {
                    let options = ModelOptions { accumulation, state, ..options(mesh(2, 2)) };
                    compare_with_simulator(&options, sequences, microbatches, placement);
                }
            }
        }
    }
}

/// Compares the second step of a world.
fn compare_with_simulator(
    options: &ModelOptions,
    sequences: Sequences,
    microbatches: Microbatches,
    placement: ModelPlacement,
) {
    let spec = keeping_the_second();
    let case = Case { microbatches, ..GIVEN };
    let plan = Plan::new(spec.clone(), options.mesh, options.plan_options()).expect("a plan");
    let plan = Arc::new(plan);
    let programs: Vec<_> = options.mesh.ranks().map(|rank| program(&spec, rank, case)).collect();
    let said = machines::outputs(&plan, machines::rules(options, sequences), &programs);
    let order = Order::of(&plan, microbatches, placement);
    for (rank, said) in plan.mesh().ranks().zip(said) {
        let said: Vec<Placed> = said.into_iter().filter(|it| it.step == 1).collect();
        let listed = listed(&plan, rank, &order);
        let difference = difference_of(&listed, &expected(&plan, rank, &said));
        assert_eq!(difference, None, "rank {rank}, {sequences:?}, {options:?}");
    }
}

/// Returns the operations that the simulator lists for the second step.
fn listed(plan: &Plan, rank: Rank, order: &Order) -> Vec<Flight> {
    let flight = |microbatch: u64, it: &StepOperation| {
        let microbatch = usize::try_from(microbatch).expect("few");
        let tag = Tag::new(it.stage).model(ModelLabel::FIRST).step(1).microbatch(microbatch);
        Flight {
            channel: it.channel,
            members: members(plan, rank, it.members),
            op: it.op,
            dtype: Some(it.dtype),
            elements: it.elements,
            tag: Tag { unit: it.unit, ..tag },
        }
    };
    let mut listed = Vec::new();
    for block in &order.blocks {
        for microbatch in block.microbatch..block.microbatch + block.times {
            listed.extend(block.operations.iter().map(|it| flight(microbatch, it)));
        }
    }
    listed
}
