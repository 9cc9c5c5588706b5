//! The sharded side.

use std::error::Error;
use std::time::Instant;

use hsdp::{AdamW, ModelOptions, Optimizer as _, ShardedModel, StepOptions, World, WorldOptions};
use hsdp_candle::{Pass, gpt};

use crate::data::{TOKENS, batch};
use crate::size::MICROBATCHES;
use crate::{Times, Work};

/// Trains on one thread a rank, and times the steps.
pub(crate) fn run(work: &Work) -> Result<Times, Box<dyn Error>> {
    let ranks =
        hsdp::launch(work.mesh.world_size(), WorldOptions::default(), |world| rank(world, work));
    let mut all = Vec::new();
    for times in ranks {
        all.push(times??);
    }
    Ok(all.swap_remove(0))
}

fn rank(world: World, work: &Work) -> Result<Times, hsdp_candle::Error> {
    let rank = world.rank().index();
    let spec = work.gpt.config().spec();
    let mut model =
        ShardedModel::new(world, spec, ModelOptions::on(work.mesh), |param| gpt::init(param, 0))?;
    let mut adamw = AdamW::new(&model, work.adamw);
    let mut times = Times::new();
    for index in 0..work.steps {
        let start = Instant::now();
        let options = StepOptions { microbatches: Some(MICROBATCHES), weight_hint: Some(TOKENS) };
        let mut step = model.begin_step(options)?;
        for microbatch in 0..MICROBATCHES {
            let (inputs, targets) = batch(index, microbatch, rank)?;
            let pass = Pass::new(step.microbatch()?)?;
            let loss = work.gpt.loss(&pass, &inputs, &targets)?;
            pass.backward(&loss, TOKENS)?;
        }
        let gradients = step.finish()?;
        adamw.step(&mut model, gradients.clip(1.0))?;
        times.push(start.elapsed());
    }
    Ok(times.split_off(1.min(times.len())))
}
