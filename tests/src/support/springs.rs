//! A model with a real loss: each element of each parameter is on a spring to a target that depends
//! on the item.
//!
//! The loss of an item is the sum of (w - target)^2 / 2 over all elements; its derivative is w -
//! target. Targets and initial values are small multiples of 1/8, so that the first gradient is
//! exact in f32 whatever the order of sums.

use std::collections::BTreeMap;
use std::ops::Range;

use hsdp::{
    DataError, Error, Gradients, LossSum, ModelOptions, Param, Pass, ShardedModel, Step,
    StepOptions, Values, World,
};
use hsdp_sharding::{ModelSpec, Role};
use xxhash_rust::xxh3::xxh3_64_with_seed;

use crate::support::handmade::{self, Handmade, Until};
use crate::support::models::three_units;

/// The items that one rank sees in one microbatch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Batch(pub Range<u64>);

impl Batch {
    /// Two items, which no other rank, step or microbatch (of 16) has.
    #[must_use]
    pub fn of(rank: usize, step: u64, microbatch: usize) -> Self {
        let first = 2 * ((step * 16 + microbatch as u64) * 1024 + rank as u64);
        Self(first..first + 2)
    }

    fn len(&self) -> u64 {
        self.0.end - self.0.start
    }
}

/// The value that a parameter starts from.
#[must_use]
pub fn initial(param: &Param) -> Vec<f32> {
    (0..param.numel()).map(|element| eighths(&param.name, element, u64::MAX)).collect()
}

/// Where an item pulls the elements of a parameter.
fn target(name: &str, element: usize, item: u64) -> f32 {
    eighths(name, element, item)
}

/// A multiple of 1/8 between -2 and 2 that looks arbitrary.
fn eighths(name: &str, element: usize, item: u64) -> f32 {
    let seed = item.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ element as u64;
    let hash = xxh3_64_with_seed(name.as_bytes(), seed);
    let step = u8::try_from(hash % 33).expect("below 33");
    (f32::from(step) - 16.0) / 8.0
}

struct Springs {
    batch: Batch,
    sum: f64,
}

impl Handmade for Springs {
    fn forward(&mut self, param: &Param, values: Values<'_>) {
        for (element, value) in values.to_f32().into_iter().enumerate() {
            for item in self.batch.0.clone() {
                let stretch = f64::from(value - target(&param.name, element, item));
                self.sum += stretch * stretch / 2.0;
            }
        }
    }

    fn loss(&self) -> LossSum {
        LossSum::new(self.sum, self.batch.len())
    }

    fn derivative(&self, param: &Param, values: Values<'_>) -> Option<Vec<f32>> {
        let pull = |(element, value): (usize, f32)| {
            self.batch.0.clone().map(|item| value - target(&param.name, element, item)).sum()
        };
        Some(values.to_f32().into_iter().enumerate().map(pull).collect())
    }
}

/// Makes a model of `three_units` with springs.
///
/// # Errors
/// The error of the runtime.
pub fn model(world: World, options: &ModelOptions) -> Result<ShardedModel, Error> {
    model_of(world, &three_units(), options)
}

/// Makes a model with springs.
///
/// # Errors
/// The error of the runtime.
pub fn model_of(
    world: World,
    spec: &ModelSpec,
    options: &ModelOptions,
) -> Result<ShardedModel, Error> {
    ShardedModel::new(world, spec.clone(), options.clone(), initial)
}

/// Runs the microbatches of the next step, on batches that no other rank or step has.
///
/// # Errors
/// The error of the runtime.
pub fn gradients(model: &mut ShardedModel, microbatches: usize) -> Result<Gradients, Error> {
    let rank = model.rank().index();
    let number = model.committed_steps();
    let mut step = model.begin_step(StepOptions::microbatches(microbatches))?;
    for index in 0..microbatches {
        microbatch(&mut step, Batch::of(rank, number, index))?;
    }
    step.finish()
}

/// Begins the next microbatch, or returns `None` if ranks have no more data.
///
/// # Errors
/// The error of the runtime.
pub fn next_microbatch<'a>(step: &'a mut Step<'_>) -> Result<Option<Pass<'a>>, Error> {
    match step.microbatch() {
        Err(Error::Data(DataError::EndOfData { .. })) => Ok(None),
        begun => begun.map(Some),
    }
}

/// Runs one microbatch on `batch`.
///
/// # Errors
/// The error of the runtime.
pub fn microbatch(step: &mut Step<'_>, batch: Batch) -> Result<(), Error> {
    microbatch_until(step, batch, Until::End)
}

/// Runs a microbatch that has begun on `batch`.
///
/// # Errors
/// The error of the runtime.
pub fn forward_and_backward(pass: Pass<'_>, batch: Batch) -> Result<(), Error> {
    handmade::run(pass, &mut Springs { batch, sum: 0.0 }, Until::End)
}

/// Runs one microbatch on `batch` as far as `until`.
///
/// # Errors
/// The error of the runtime.
pub fn microbatch_until(step: &mut Step<'_>, batch: Batch, until: Until) -> Result<(), Error> {
    handmade::microbatch_until(step, &mut Springs { batch, sum: 0.0 }, until)
}

/// The reference, without shards or collectives: the gradient of the mean loss over all items of
/// all batches, in f64.
#[must_use]
pub fn mean_gradient(
    spec: &ModelSpec,
    parameters: &BTreeMap<String, Vec<f32>>,
    batches: &[Batch],
) -> BTreeMap<String, Vec<f64>> {
    let items: Vec<u64> = batches.iter().flat_map(|batch| batch.0.clone()).collect();
    let mean = |name: &str, element: usize, value: f32| {
        let pulls =
            items.iter().map(|item| f64::from(value) - f64::from(target(name, element, *item)));
        pulls.sum::<f64>() / f64::from(u32::try_from(items.len()).expect("few items"))
    };
    let trainable =
        spec.params().map(|(_, param)| param).filter(|param| param.role == Role::Trainable);
    let gradient = |param: &Param| {
        let values = parameters[&param.name].iter().enumerate();
        (
            param.name.clone(),
            values.map(|(element, value)| mean(&param.name, element, *value)).collect(),
        )
    };
    trainable.map(gradient).collect()
}
