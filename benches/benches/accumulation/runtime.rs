//! The step by hsdp.

use std::sync::Arc;

use hsdp::{
    GradientValues, LossSum, ModelOptions, ModelSpec, Objective, Param, Precision, ShardedModel,
    StepOptions, Unit, UnitId, World,
};

use crate::options::Options;

/// What every element of every gradient is.
pub(crate) const GRADIENT: f32 = 0.5;

/// A model whose gradients are there already.
pub(crate) struct Steps {
    model: ShardedModel,
    microbatches: usize,
    gradients: Vec<Arc<dyn GradientValues>>,
    last: Option<f64>,
}

impl Steps {
    pub(crate) fn new(world: World, options: &Options) -> Result<Self, hsdp::Error> {
        let numel = options.numel();
        let unit = |index| {
            Unit::new(format!("unit-{index}")).param(Param::new(format!("w{index}"), [numel]))
        };
        let spec = (0..options.units).fold(ModelSpec::new(), |spec, index| spec.unit(unit(index)));
        let model_options = ModelOptions {
            precision: Precision {
                parameters: options.param_dtype,
                wire: options.reduce_dtype,
                ..Precision::default()
            },
            accumulation: options.mode,
            prefetch: options.prefetch,
            full_copies: options.full_copies,
            // As FSDP2 does: losses have no weights, and the mean over ranks is what is wanted.
            objective: Objective::RankMean,
            ..ModelOptions::on(options.mesh)
        };
        let model =
            ShardedModel::new(world, spec, model_options, |param| vec![0.0; param.numel()])?;
        let gradient = |_| Arc::new(vec![GRADIENT; numel]) as Arc<dyn GradientValues>;
        let gradients = (0..options.units).map(gradient).collect();
        Ok(Self { model, microbatches: options.microbatches as usize, gradients, last: None })
    }

    pub(crate) fn step(&mut self) -> Result<(), hsdp::Error> {
        let units: Vec<UnitId> = self.model.plan().spec().unit_ids().collect();
        let mut step = self.model.begin_step(StepOptions::microbatches(self.microbatches))?;
        for _ in 0..self.microbatches {
            let mut pass = step.microbatch()?;
            for unit in &units {
                drop(pass.unshard(*unit)?);
            }
            // The gradients are there already: no backward starts from the seed.
            let _ = pass.loss(LossSum::new(1.0, 1))?;
            for (unit, gradient) in units.iter().zip(&self.gradients).rev() {
                drop(pass.unshard(*unit)?);
                pass.reduce(*unit, vec![Some(Arc::clone(gradient))])?;
            }
            pass.finish()?;
        }
        self.last = Some(step.finish()?.norm());
        Ok(())
    }

    /// Whether the last step's gradient is what it must be: each element the mean over ranks, summed over microbatches.
    pub(crate) fn check(&self) -> Result<(), hsdp::Error> {
        let element = f64::from(GRADIENT) * self.microbatches as f64;
        let elements = self.model.plan().spec().numel().get() as f64;
        let (expected, norm) = (element * elements.sqrt(), self.last.unwrap_or(f64::NAN));
        if (norm - expected).abs() <= 1e-6 * expected {
            return Ok(());
        }
        Err(hsdp::Error::Options { what: format!("a gradient of norm {norm}, not {expected}") })
    }
}
