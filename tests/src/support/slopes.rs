//! A model that is linear in each parameter: its gradients are whatever a test says.

use hsdp::{Error, Gradients, LossSum, Param, ShardedModel, Step, StepOptions, Values};

use crate::support::handmade::{self, Handmade};

/// Every element of a parameter has this derivative; `None` where the parameter is not used.
type Slope<'a> = &'a dyn Fn(&Param) -> Option<f32>;

struct Slopes<'a>(Slope<'a>);

impl Handmade for Slopes<'_> {
    fn forward(&mut self, _: &Param, _: Values<'_>) {}

    fn loss(&self) -> LossSum {
        LossSum::new(0.0, 1)
    }

    fn derivative(&self, param: &Param, values: Values<'_>) -> Option<Vec<f32>> {
        Some(vec![(self.0)(param)?; values.len()])
    }
}

/// Runs a step of one microbatch of weight 1 in which every element of every trainable parameter
/// has the derivative `slope`.
///
/// # Errors
/// The error of the runtime.
pub fn gradients(model: &mut ShardedModel, slope: f32) -> Result<Gradients, Error> {
    let mut step = model.begin_step(StepOptions::microbatches(1))?;
    microbatch(&mut step, slope)?;
    step.finish()
}

/// Runs one microbatch of weight 1 in which every element of every trainable parameter has the
/// derivative `slope`.
///
/// # Errors
/// The error of the runtime.
pub fn microbatch(step: &mut Step<'_>, slope: f32) -> Result<(), Error> {
    microbatch_by(step, &|_| Some(slope))
}

/// Runs one microbatch of weight 1 in which `slope` returns the derivative of a parameter, if it
/// has one.
///
/// # Errors
/// The error of the runtime.
pub fn microbatch_by(step: &mut Step<'_>, slope: Slope<'_>) -> Result<(), Error> {
    handmade::microbatch(step, &mut Slopes(slope))
}
