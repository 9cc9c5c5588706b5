//! A model whose gradients exist already, and its steps.

use std::sync::Arc;

use hsdp::kernels::Values;
use hsdp::kernels::cuda::{CudaError, Device, DeviceBuffer};
use hsdp::{
    DType, Error, GradientValues, LossSum, ModelOptions, ModelSpec, Objective, Optimizer, Param,
    Placement, Plan, ShardedModel, Step, StepOptions, Unit, UnitId, World,
};
use hsdp_train::Failure;
use hsdp_train::memory::{Need, product};

use crate::stopwatch::{StepPart, Stopwatch};

/// The value of every element of every gradient.
pub const GRADIENT: f32 = 0.5;

/// The number of gradients that a rank has.
#[derive(Clone, Copy, Debug)]
pub enum GradientCount {
    /// One for all units, for benches that do not measure their traffic.
    OneForAll,
    /// One for each unit, as after a backward.
    OfEachUnit,
}

/// The size of the steps.
#[derive(Clone, Copy, Debug)]
pub struct StepsSize {
    /// The number of units.
    pub units: u32,
    /// The number of elements of each unit.
    pub numel: u32,
    /// The number of microbatches in a step.
    pub microbatches: u32,
    /// The gradients that are reduced.
    pub gradients: GradientCount,
}

impl StepsSize {
    /// Units with one parameter each.
    #[must_use]
    pub fn spec(&self) -> ModelSpec {
        let numel = self.numel as usize;
        let unit = |index| {
            Unit::new(format!("unit-{index}")).param(Param::new(format!("w{index}"), [numel]))
        };
        (0..self.units).fold(ModelSpec::new(), |spec, index| spec.unit(unit(index)))
    }

    /// The memory of steps on all ranks of this process.
    ///
    /// # Errors
    /// [`Failure::Input`] if the model cannot be planned.
    pub fn need(&self, options: &ModelOptions) -> Result<Need, Failure> {
        let plan = Plan::new(self.spec(), options.mesh, options.plan_options());
        let model = plan.map_err(Failure::input)?.memory().total().get();
        let units = match self.gradients {
            GradientCount::OneForAll => 1,
            GradientCount::OfEachUnit => self.units as usize,
        };
        let ranks = options.mesh.world_size();
        let gradients = product(&[ranks, units, self.numel as usize, size_of::<f32>()]);
        let need = Need::default().with("the gradients of all ranks", gradients);
        Ok(need.with("the models of all ranks", model.saturating_mul(ranks as u64)))
    }
}

/// One rank's model and gradients.
#[derive(Debug)]
pub struct Steps {
    model: ShardedModel,
    size: StepsSize,
    units: Vec<UnitId>,
    /// The gradient of each unit.
    gradients: Vec<Arc<dyn GradientValues>>,
}

impl Steps {
    /// A model whose parameters are zeros.
    ///
    /// # Errors
    /// The errors of the runtime.
    pub fn new(world: World, size: StepsSize, options: ModelOptions) -> Result<Self, Error> {
        let model =
            ShardedModel::new(world, size.spec(), options, |param| vec![0.0; param.numel()])?;
        let units = model.plan().spec().unit_ids().collect();
        let gradients = gradients(size, model.options().placement)?;
        Ok(Self { model, size, units, gradients })
    }

    /// The model, with its plan.
    #[must_use]
    pub fn model(&self) -> &ShardedModel {
        &self.model
    }

    /// Sets the number of microbatches of later steps.
    pub fn set_microbatches(&mut self, microbatches: u32) {
        self.size.microbatches = microbatches;
    }

    /// Runs a step, and checks the norm of its gradient: all ranks and microbatches have the same
    /// number of items and the same gradient.
    ///
    /// # Errors
    /// The errors of the runtime, and an error if the norm is not the expected one.
    pub fn step(&mut self, watch: &mut Stopwatch) -> Result<(), Error> {
        self.gradients(watch).map(hsdp::Gradients::discard)
    }

    /// As [`step`](Self::step), with an update.
    ///
    /// # Errors
    /// As [`step`](Self::step).
    pub fn train(&mut self, optimizer: &mut impl Optimizer) -> Result<(), Error> {
        let gradients = self.gradients(&mut Stopwatch::still())?;
        optimizer.step(&mut self.model, gradients).map(drop)
    }

    fn gradients(&mut self, watch: &mut Stopwatch) -> Result<hsdp::Gradients, Error> {
        let microbatches = self.size.microbatches as usize;
        let options =
            StepOptions { weight_hint: Some(1), ..StepOptions::microbatches(microbatches) };
        let mut step = self.model.begin_step(options)?;
        watch.lap(StepPart::Begin);
        for _ in 0..microbatches {
            microbatch(&mut step, &self.units, &self.gradients, watch)?;
        }
        let gradients = step.finish()?;
        let norm = gradients.norm();
        watch.lap(StepPart::Finish);
        let expected = self.expected_norm();
        if (norm - expected).abs() > 1e-6 * expected {
            return Err(Error::Options { what: format!("a norm of {norm}, not {expected}") });
        }
        Ok(gradients)
    }

    /// A mean over items, or over ranks and summed over microbatches.
    fn expected_norm(&self) -> f64 {
        let elements = f64::from(self.size.units) * f64::from(self.size.numel);
        let microbatches = match self.model.options().objective {
            Objective::RankMean => f64::from(self.size.microbatches),
            _ => 1.0,
        };
        f64::from(GRADIENT) * elements.sqrt() * microbatches
    }
}

fn gradients(size: StepsSize, placement: Placement) -> Result<Vec<Arc<dyn GradientValues>>, Error> {
    let made = match size.gradients {
        GradientCount::OneForAll => 1,
        GradientCount::OfEachUnit => size.units as usize,
    };
    let made: Vec<_> =
        (0..made).map(|_| gradient(size.numel, placement)).collect::<Result<_, _>>()?;
    Ok(made.iter().cycle().take(size.units as usize).map(Arc::clone).collect())
}

/// A gradient where the model lies.
fn gradient(numel: u32, placement: Placement) -> Result<Arc<dyn GradientValues>, Error> {
    let values = vec![GRADIENT; numel as usize];
    match placement {
        Placement::Cuda { ordinal, .. } => {
            on_device(&values, ordinal).map_err(|error| Error::Options { what: error.to_string() })
        }
        _ => Ok(Arc::new(values)),
    }
}

fn on_device(values: &[f32], ordinal: usize) -> Result<Arc<dyn GradientValues>, CudaError> {
    let stream = Device::new(ordinal)?.stream()?;
    let mut buffer =
        DeviceBuffer::new(stream.device(), DType::F32, values.len(), "the gradients of a bench")?;
    buffer.write(&stream, Values::F32(values))?;
    Ok(Arc::new(buffer))
}

fn microbatch(
    step: &mut Step<'_>,
    units: &[UnitId],
    gradients: &[Arc<dyn GradientValues>],
    watch: &mut Stopwatch,
) -> Result<(), Error> {
    let mut pass = step.microbatch()?;
    watch.lap(StepPart::Microbatch);
    for unit in units {
        drop(pass.unshard(*unit)?);
        watch.lap(StepPart::Forward);
    }
    // The gradients are there already: no backward starts from the seed, which is 1.
    let _ = pass.loss(LossSum::new(1.0, 1))?;
    watch.lap(StepPart::Loss);
    for (unit, gradient) in units.iter().zip(gradients).rev() {
        drop(pass.unshard(*unit)?);
        watch.lap(StepPart::Backward);
        pass.reduce(*unit, [Some(Arc::clone(gradient))].into_iter().collect())?;
        watch.lap(StepPart::Reduce);
    }
    pass.finish()?;
    watch.lap(StepPart::MicrobatchEnd);
    Ok(())
}
