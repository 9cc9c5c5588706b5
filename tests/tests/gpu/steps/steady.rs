//! After its first steps, a step allocates no device memory.
//!
//! Of one rank: how many buffers several ranks hold at one time depends on who is where.

use std::sync::Arc;

use hsdp::{
    Accumulation, AdamW, AdamWOptions, DType, Error, GradientValues, LossSum, ModelOptions,
    ModelSpec, Optimizer, Param, Precision, ShardedModel, StepOptions, Unit, UnitId, Values, World,
};

use super::super::{device, device_buffers, stream, upload};
use super::{DEVICE, placed};

const UNIT: UnitId = UnitId::new(0);

/// No other test has buffers of these sizes: of a unit in 4 and in 2 bytes.
const NUMEL: usize = 280_000;
const SIZES: [usize; 2] = [4 * NUMEL, 2 * NUMEL];

fn allocations() -> [u64; 2] {
    SIZES.map(|size| device().allocations(size))
}

struct Training {
    model: ShardedModel,
    adamw: AdamW,
    /// By microbatch: one on the host, and one on the device.
    gradients: [Arc<dyn GradientValues>; 2],
}

impl Training {
    fn new(world: World, options: &ModelOptions) -> Result<Self, Error> {
        let unit = Unit::new("unit").param(Param::new("w", [NUMEL]));
        let spec = ModelSpec::new().unit(unit);
        let model =
            ShardedModel::new(world, spec, options.clone(), |param| vec![0.5; param.numel()])?;
        let adamw = AdamW::new(&model, AdamWOptions::default());
        let gradient = vec![0.25_f32; NUMEL];
        let there = upload(&stream(), Values::F32(&gradient));
        Ok(Self { model, adamw, gradients: [Arc::new(gradient), Arc::new(there)] })
    }

    fn step(&mut self) -> Result<(), Error> {
        let mut step = self.model.begin_step(StepOptions::microbatches(2))?;
        for gradient in &self.gradients {
            let mut pass = step.microbatch()?;
            drop(pass.unshard(UNIT)?);
            let _ = pass.loss(LossSum::new(1.0, 1))?;
            drop(pass.unshard(UNIT)?);
            pass.reduce(UNIT, [Some(Arc::clone(gradient))].into_iter().collect())?;
            pass.finish()?;
        }
        let gradients = step.finish()?;
        self.adamw.step(&mut self.model, gradients).map(drop)
    }
}

#[test]
#[ignore = "needs a CUDA device"]
fn nothing_is_allocated_after_the_first_steps() {
    let _pool = device_buffers::pool();
    let scattered = Accumulation::ReduceScatter;
    let local = Accumulation::Local;
    for (accumulation, dtype) in [(scattered, DType::F32), (local, DType::BF16)] {
        let precision = Precision { parameters: dtype, wire: dtype, output: None };
        let options = ModelOptions { accumulation, precision, ..placed(DEVICE, [1, 1]) };
        let mut training = Training::new(World::single(), &options).expect("a model");
        let mut after = Vec::new();
        for _ in 0..5 {
            training.step().expect("a step");
            after.push(allocations());
        }
        assert!(after[0][0] > 0, "the first step allocates");
        assert!(after[3..].iter().all(|it| *it == after[2]), "{options:?}: {after:?}");
    }
}
