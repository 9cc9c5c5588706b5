//! A model whose gradients are there already, and its steps.

use std::sync::Arc;

use hsdp::{
    Error, GradientValues, LossSum, ModelOptions, ModelSpec, Param, ShardedModel, Step,
    StepOptions, Unit, UnitId, World,
};

use crate::stopwatch::{Part, Stopwatch};

/// What every element of every gradient is.
const GRADIENT: f32 = 0.5;

/// How large the steps are.
#[derive(Clone, Copy, Debug)]
pub struct Size {
    /// Of units.
    pub units: u32,
    /// Elements of each.
    pub numel: u32,
    /// Of a step.
    pub microbatches: u32,
}

impl Size {
    /// Units with one parameter each.
    #[must_use]
    pub fn spec(&self) -> ModelSpec {
        let numel = self.numel as usize;
        let unit = |index| {
            Unit::new(format!("unit-{index}")).param(Param::new(format!("w{index}"), [numel]))
        };
        (0..self.units).fold(ModelSpec::new(), |spec, index| spec.unit(unit(index)))
    }
}

/// One rank's model and gradients.
#[derive(Debug)]
pub struct Steps {
    model: ShardedModel,
    size: Size,
    units: Vec<UnitId>,
    gradient: Arc<dyn GradientValues>,
}

impl Steps {
    /// A model of zeros.
    ///
    /// # Errors
    /// What the runtime says.
    pub fn new(world: World, size: Size, options: ModelOptions) -> Result<Self, Error> {
        let model =
            ShardedModel::new(world, size.spec(), options, |param| vec![0.0; param.numel()])?;
        let units = model.plan().spec().unit_ids().collect();
        let gradient = Arc::new(vec![GRADIENT; size.numel as usize]);
        Ok(Self { model, size, units, gradient })
    }

    /// The model, with its plan.
    #[must_use]
    pub fn model(&self) -> &ShardedModel {
        &self.model
    }

    /// Has the steps from now on have so many microbatches.
    pub fn set_microbatches(&mut self, microbatches: u32) {
        self.size.microbatches = microbatches;
    }

    /// Runs a step, and checks the norm of its gradient: the mean over ranks and microbatches, each with as many items.
    ///
    /// # Errors
    /// What the runtime says, or that the norm is another.
    pub fn step(&mut self, watch: &mut Stopwatch) -> Result<(), Error> {
        let microbatches = self.size.microbatches as usize;
        let options =
            StepOptions { weight_hint: Some(1), ..StepOptions::microbatches(microbatches) };
        let mut step = self.model.begin_step(options)?;
        watch.lap(Part::Begin);
        for _ in 0..microbatches {
            microbatch(&mut step, (&self.units, &self.gradient), watch)?;
        }
        let norm = step.finish()?.norm();
        watch.lap(Part::Finish);
        let elements = f64::from(self.size.units) * f64::from(self.size.numel);
        let expected = f64::from(GRADIENT) * elements.sqrt();
        if (norm - expected).abs() > 1e-6 * expected {
            return Err(Error::Options { what: format!("a norm of {norm}, not {expected}") });
        }
        Ok(())
    }
}

fn microbatch(
    step: &mut Step<'_>,
    (units, gradient): (&[UnitId], &Arc<dyn GradientValues>),
    watch: &mut Stopwatch,
) -> Result<(), Error> {
    let mut pass = step.microbatch()?;
    watch.lap(Part::Microbatch);
    for unit in units {
        drop(pass.unshard(*unit)?);
        watch.lap(Part::Forward);
    }
    // The gradients are there already: no backward starts from the seed, which is 1.
    let _ = pass.loss(LossSum::new(1.0, 1))?;
    watch.lap(Part::Loss);
    for unit in units.iter().rev() {
        drop(pass.unshard(*unit)?);
        watch.lap(Part::Backward);
        pass.reduce(*unit, vec![Some(Arc::clone(gradient))])?;
        watch.lap(Part::Reduce);
    }
    pass.finish()?;
    watch.lap(Part::MicrobatchEnd);
    Ok(())
}
