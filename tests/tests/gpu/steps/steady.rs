//! After its first steps, a step allocates no device memory.
//!
//! Of one rank: how many buffers several ranks hold at one time depends on who is where.

use std::sync::Arc;

use hsdp::{
    Accumulation, AdamW, AdamWOptions, DType, Error, GradientValues, LossSum, ModelOptions,
    ModelSpec, Optimizer, Param, Precision, ShardedModel, StepOptions, Unit, UnitId, Values, World,
};

use super::super::{device, memory, stream, upload};
use super::{DEVICE, placed};

const UNITS: usize = 2;

/// No other test has buffers of these sizes: of a unit in 4 and in 2 bytes.
const NUMEL: usize = 700_000;
const SIZES: [usize; 2] = [4 * NUMEL, 2 * NUMEL];

fn allocations() -> [u64; 2] {
    SIZES.map(|size| device().allocations(size))
}

struct Training {
    model: ShardedModel,
    adamw: AdamW,
    /// One on the host, and one on the device.
    gradients: [Arc<dyn GradientValues>; UNITS],
}

impl Training {
    fn new(world: World, options: &ModelOptions) -> Result<Self, Error> {
        let unit =
            |index| Unit::new(format!("{index}")).param(Param::new(format!("w.{index}"), [NUMEL]));
        let spec = (0..UNITS).map(unit).fold(ModelSpec::new(), ModelSpec::unit);
        let model =
            ShardedModel::new(world, spec, options.clone(), |param| vec![0.5; param.numel()])?;
        let adamw = AdamW::new(&model, AdamWOptions::default());
        let gradient = vec![0.25_f32; NUMEL];
        let there = upload(&stream(), Values::F32(&gradient));
        Ok(Self { model, adamw, gradients: [Arc::new(gradient), Arc::new(there)] })
    }

    fn step(&mut self) -> Result<(), Error> {
        let mut step = self.model.begin_step(StepOptions::microbatches(2))?;
        for _ in 0..2 {
            let mut pass = step.microbatch()?;
            for unit in (0..UNITS).map(UnitId::new) {
                drop(pass.unshard(unit)?);
            }
            let _ = pass.loss(LossSum::new(1.0, 1))?;
            for unit in (0..UNITS).rev().map(UnitId::new) {
                drop(pass.unshard(unit)?);
                let gradient = Arc::clone(&self.gradients[unit.index()]);
                pass.reduce(unit, vec![Some(gradient)])?;
            }
            pass.finish()?;
        }
        let gradients = step.finish()?;
        self.adamw.step(&mut self.model, gradients).map(drop)
    }
}

#[test]
#[ignore = "needs a CUDA device"]
fn nothing_is_allocated_after_the_first_steps() {
    let _pool = memory::pool();
    let modes = Accumulation::ALL.map(|mode| (mode, DType::F32));
    for (accumulation, dtype) in modes.into_iter().chain([(Accumulation::Local, DType::BF16)]) {
        let precision = Precision { parameters: dtype, wire: dtype, output: None };
        let options = ModelOptions { accumulation, precision, ..placed(DEVICE, [1, 1]) };
        let mut training = Training::new(World::single(), &options).expect("a model");
        let mut after = Vec::new();
        for _ in 0..6 {
            training.step().expect("a step");
            after.push(allocations());
        }
        assert!(after[0][0] > 0, "the first step allocates");
        assert!(after[3..].iter().all(|it| *it == after[2]), "{options:?}: {after:?}");
    }
}
