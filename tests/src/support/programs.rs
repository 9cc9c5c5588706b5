//! Programs of ranks: what each does in its steps and evaluations, call by call. The engine runs
//! them, and so do [`machines`](crate::support::machines) alone.

use hsdp::{
    Error, Full, LossSum, ModelSpec, Optimizer, Param, Pass, Samples, Seed, Sgd, SgdOptions,
    ShardedModel, StepOptions, UnitGradients, UnitId, Values,
};
use hsdp_sharding::step::{EvaluationKind, Input};
use hsdp_sharding::{AfterForward, Role};

use crate::support::handmade::in_f32;
use crate::support::springs;

/// The program of a rank, part by part, until it ends its run.
pub type Program = Vec<Part>;

/// A step or an evaluation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Part {
    /// A step, behind which parameters stay.
    Step(StepProgram),
    /// An evaluation: the units that each batch needs, for the backward of another model, too.
    Evaluation(EvaluationKind, Vec<Vec<UnitId>>),
}

/// A rank's part in a step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StepProgram {
    /// Number of microbatches with which the step begins.
    pub given: Option<usize>,
    /// Whether the rank has data for the step.
    pub input: Input,
    /// Digest of the rank's samples, if it names them.
    pub samples: Option<Samples>,
    /// The rank's own microbatches, unless other ranks end the step before.
    pub microbatches: Vec<Vec<Call>>,
}

/// A call in a microbatch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Call {
    /// The rank needs a unit's parameters.
    Need(UnitId),
    /// It has the loss, of weight 1.
    Loss,
    /// It has a unit's gradients.
    Offer(UnitId),
}

/// Returns a step of `count` plain microbatches, which use the units as they are declared. Without
/// any, the rank has no data.
#[must_use]
pub fn plain_step(spec: &ModelSpec, given: Option<usize>, count: usize) -> Part {
    let order: Vec<UnitId> = spec.unit_ids().collect();
    let input = if count > 0 { Input::Ready } else { Input::Exhausted };
    let microbatches = vec![plain_microbatch(spec, &order); count];
    Part::Step(StepProgram { given, input, samples: None, microbatches })
}

/// Returns the calls of a microbatch that uses these units in this order, and then in reverse.
#[must_use]
pub fn plain_microbatch(spec: &ModelSpec, order: &[UnitId]) -> Vec<Call> {
    let mut calls: Vec<Call> = order.iter().copied().map(Call::Need).collect();
    calls.push(Call::Loss);
    for unit in order.iter().rev() {
        let reshards = spec[*unit].after_forward == AfterForward::Reshard;
        calls.extend(reshards.then_some(Call::Need(*unit)));
        calls.extend(spec[*unit].is_trainable().then_some(Call::Offer(*unit)));
    }
    calls
}

/// Returns the initial values of a parameter, which tell it from others.
#[must_use]
pub fn initial(param: &Param) -> Vec<f32> {
    let name = param.name.bytes().fold(0_u8, |sum, byte| sum.wrapping_mul(3) ^ byte);
    (0..7).cycle().take(param.numel()).map(|element| f32::from(name ^ element)).collect()
}

/// Runs a program, and ends the run. Returns the norm of each step's gradients.
///
/// # Errors
/// The error of the runtime.
///
/// # Panics
/// If the values of a unit are not its initial ones.
pub fn run(model: &mut ShardedModel, program: &Program) -> Result<Vec<f64>, Error> {
    let mut sgd = Sgd::new(model, SgdOptions { learning_rate: 0.0, ..SgdOptions::default() });
    let mut norms = Vec::new();
    for part in program {
        match part {
            Part::Step(step) => norms.push(run_step(model, &mut sgd, step)?),
            Part::Evaluation(kind, batches) => run_evaluation(model, *kind, batches)?,
        }
    }
    model.end_run()?;
    Ok(norms)
}

fn run_step(model: &mut ShardedModel, sgd: &mut Sgd, program: &StepProgram) -> Result<f64, Error> {
    let rank = model.rank().index();
    let options = StepOptions {
        microbatches: program.given,
        input: program.input,
        samples: program.samples,
        ..StepOptions::default()
    };
    let mut step = model.begin_step(options)?;
    for (number, calls) in program.microbatches.iter().enumerate() {
        // Other ranks may have no more data, and end the step.
        let Some(mut pass) = springs::next_microbatch(&mut step)? else { break };
        let mut seed = None;
        let mut kept = Vec::new();
        for call in calls {
            match call {
                Call::Need(unit) => kept.extend(need(&mut pass, *unit)?),
                Call::Loss => seed = Some(pass.loss(LossSum::new(0.0, 1))?),
                Call::Offer(unit) => {
                    let gradients = gradients(&pass, *unit, slope(rank, number, *unit), seed);
                    pass.reduce(*unit, gradients)?;
                }
            }
        }
        drop(kept);
        pass.finish()?;
    }
    let gradients = step.finish()?;
    let norm = gradients.norm();
    sgd.step(model, gradients)?;
    Ok(norm)
}

fn run_evaluation(
    model: &mut ShardedModel,
    kind: EvaluationKind,
    batches: &[Vec<UnitId>],
) -> Result<(), Error> {
    let mut evaluation = match kind {
        EvaluationKind::ForwardOnly => model.evaluation()?,
        EvaluationKind::WithBackward => model.evaluation_with_backward()?,
    };
    for units in batches {
        let mut pass = evaluation.batch()?;
        units.iter().try_for_each(|unit| need(&mut pass, *unit).map(drop))?;
        pass.finish()?;
    }
    evaluation.finish()
}

/// Needs a unit, and checks its values. Returns it if it is kept.
fn need(pass: &mut Pass<'_>, unit: UnitId) -> Result<Option<Full>, Error> {
    let full = pass.unshard(unit)?;
    let handle = pass.handle();
    let spec = &handle.plan().spec()[unit];
    for (index, param) in spec.params.iter().enumerate() {
        let values: Values<'_> = full.values(index);
        assert_eq!(values.to_f32(), initial(param), "{} as gathered", param.name);
    }
    Ok((spec.after_forward == AfterForward::Keep).then_some(full))
}

/// The derivative by each element of a unit that a rank has in its microbatch of this number: it
/// tells units, ranks and microbatches apart.
fn slope(rank: usize, microbatch: usize, unit: UnitId) -> f32 {
    [1.0, 2.0, 3.0, 5.0, 7.0][(rank + 2 * microbatch + 3 * unit.index()) % 5]
}

fn gradients(pass: &Pass<'_>, unit: UnitId, slope: f32, seed: Option<Seed>) -> UnitGradients {
    let seed = seed.map_or(1.0, |seed| in_f32(seed.value()));
    let handle = pass.handle();
    let params = &handle.plan().spec()[unit].params;
    params.iter().fold(UnitGradients::new(), |gradients, param| match param.role {
        Role::Frozen => gradients.without(),
        Role::Trainable => gradients.with(vec![slope * seed; param.numel()]),
    })
}

/// Returns the norm of a step's gradients where the objective is a sum, for the microbatches of all
/// ranks.
#[must_use]
pub fn norm_of_sum<'a>(spec: &ModelSpec, ranks: impl Iterator<Item = &'a [Vec<Call>]>) -> f64 {
    let mut sums = vec![0.0; spec.units().len()];
    for (rank, microbatches) in ranks.enumerate() {
        for (number, calls) in microbatches.iter().enumerate() {
            for call in calls {
                if let Call::Offer(unit) = call {
                    sums[unit.index()] += f64::from(slope(rank, number, *unit));
                }
            }
        }
    }
    let squared = |(unit, sum): (UnitId, f64)| {
        let trainable = spec[unit].params.iter().filter(|param| param.role == Role::Trainable);
        trainable.map(|param| sum * sum * param.numel() as f64).sum::<f64>()
    };
    spec.unit_ids().zip(sums).map(squared).sum::<f64>().sqrt()
}
