//! Models on devices whose ranks are processes, and whose gradients are absent or late on some
//! ranks: all ranks issue in one order.

use hsdp::mpi::Job;
use hsdp::{
    Error, Gradients, LossSum, ModelOptions, Objective, Offload, Placement, ShardedModel,
    StepOptions, UnitGradients, UnitId, Unused, World, WorldOptions,
};
use hsdp_kernels::cuda::Device;
use hsdp_tests::support::models::three_units;
use hsdp_tests::support::worlds::mesh;

use crate::Named;
use crate::given_up::{PATIENCE, passes};

pub(crate) const TRIALS: &[Named] = &[
    ("devices::ranks_without_gradients_of_a_unit_contribute_zeros", || passes("absent")),
    ("devices::gradients_that_come_too_late_are_refused", || passes("late")),
    ("devices::gradients_that_come_late_are_reduced_where_parameters_may_be_unused", || {
        passes("late-zeros")
    }),
];

const PREFETCHES: [usize; 3] = [0, 1, 5];

/// A step's microbatches.
const MICROBATCHES: usize = 2;

pub(crate) fn as_process(scenario: &str, job: &Job) -> Result<(), String> {
    let unused = match scenario {
        "late" => Unused::Warn,
        "late-zeros" => Unused::Zeros,
        _ => Unused::default(),
    };
    for prefetch in PREFETCHES {
        let options = WorldOptions { deadline: PATIENCE, ..WorldOptions::default() };
        let world = job.world(4, options).map_err(|error| error.to_string())?.ok_or("no rank")?;
        let rank = world.rank().index();
        let ended = model(world, prefetch, unused).map_err(|error| error.to_string()).and_then(
            |mut model| match scenario {
                "late" | "late-zeros" => late(&mut model, rank),
                _ => absent(&mut model, rank),
            },
        );
        ended.map_err(|error| format!("rank {rank}, prefetch {prefetch}: {error}"))?;
    }
    Ok(())
}

pub(crate) fn model(world: World, prefetch: usize, unused: Unused) -> Result<ShardedModel, Error> {
    world.connect_nccl(&Device::new(0).expect("a device"))?;
    let placement = Placement::Cuda { ordinal: 0, offload: Offload::None };
    let objective = Objective::Sum;
    let on = ModelOptions::on(mesh(2, 2));
    let options = ModelOptions { placement, objective, prefetch, unused, ..on };
    ShardedModel::new(world, three_units(), options, |param| vec![0.0; param.numel()])
}

/// A step in which a rank gives gradients of ones to the units that it `has` in a microbatch, the
/// last unit first.
pub(crate) fn step(
    model: &mut ShardedModel,
    has: impl Fn(usize, usize) -> bool,
) -> Result<Gradients, Error> {
    let mut step = model.begin_step(StepOptions::microbatches(MICROBATCHES))?;
    for microbatch in 0..MICROBATCHES {
        let mut pass = step.microbatch()?;
        for unit in 0..3 {
            drop(pass.unshard(UnitId::new(unit))?);
        }
        let _seed = pass.loss(LossSum::new(0.0, 1))?;
        for unit in (0..3).rev() {
            drop(pass.unshard(UnitId::new(unit))?);
            if has(unit, microbatch) {
                let gradients = ones(&pass.handle().plan().spec()[UnitId::new(unit)].params);
                pass.reduce(UnitId::new(unit), gradients)?;
            }
        }
        pass.finish()?;
    }
    step.finish()
}

fn ones(params: &[hsdp::Param]) -> UnitGradients {
    UnitGradients::of(params.iter().map(|param| vec![1.0_f32; param.numel()]))
}

/// The sums of the first elements of the units.
fn sums(model: &ShardedModel, gradients: &Gradients) -> Result<Vec<f32>, String> {
    let full = gradients.full(model).map_err(|error| error.to_string())?;
    let name = |unit: &hsdp::Unit| unit.params[0].name.clone();
    Ok(three_units().units().iter().map(|unit| full[&name(unit)][0]).collect())
}

fn absent(model: &mut ShardedModel, rank: usize) -> Result<(), String> {
    // Each rank lacks one unit in one microbatch, and rank 2 all of them in the first.
    let has = |unit, microbatch| match rank {
        2 => microbatch == 1,
        _ => (unit, microbatch) != (rank % 3, rank / 2),
    };
    for number in 0..2 {
        let before = model.world().messages();
        let gradients = step(model, has).map_err(|error| error.to_string())?;
        let messages = model.world().messages() - before;
        if messages.data > 0 || (number > 0 && messages.control > 8) {
            return Err(format!("a step of {MICROBATCHES} microbatches has {messages:?}"));
        }
        let found = sums(model, &gradients)?;
        // Of 8 each: ranks 0 and 3 lack the first unit once, rank 1 the second.
        if found != [5.0, 6.0, 7.0] {
            return Err(format!("{found:?}"));
        }
    }
    Ok(())
}

/// Rank 0 has the last unit's gradients when all units were unsharded. Where parameters may be
/// unused, the other ranks have theirs in time.
fn late(model: &mut ShardedModel, rank: usize) -> Result<(), String> {
    let unused = model.options().unused;
    let late: Result<Gradients, Error> = (|| {
        let mut step = model.begin_step(StepOptions::microbatches(1))?;
        let mut pass = step.microbatch()?;
        let _seed = pass.loss(LossSum::new(0.0, 1))?;
        let last = UnitId::new(2);
        let is_in_time = unused == Unused::Zeros && rank > 0;
        for unit in (0..3).rev().map(UnitId::new) {
            drop(pass.unshard(unit)?);
            if is_in_time && unit == last {
                pass.reduce(last, ones(&three_units()[last].params))?;
            }
        }
        if rank == 0 {
            pass.reduce(last, ones(&three_units()[last].params))?;
        }
        pass.finish()?;
        step.finish()
    })();
    // With a prefetch of the whole model there is no gather before which the unit is reduced.
    let options = model.options();
    match (late, options.prefetch, options.unused) {
        (Err(error), 0 | 1, Unused::Warn) if error.to_string().contains("come too late") => {}
        (Ok(gradients), 5, _) | (Ok(gradients), _, Unused::Zeros) => {
            let found = sums(model, &gradients)?;
            let ranks = if unused == Unused::Zeros { 4.0 } else { 1.0 };
            if found != [0.0, 0.0, ranks] {
                return Err(format!("{found:?} of gradients that came late"));
            }
        }
        other => return Err(format!("{other:?}")),
    }
    let gradients = step(model, |_, _| true).map_err(|error| error.to_string())?;
    match sums(model, &gradients)? {
        found if found == [8.0; 3] => Ok(()),
        found => Err(format!("{found:?} after a step that was refused")),
    }
}
