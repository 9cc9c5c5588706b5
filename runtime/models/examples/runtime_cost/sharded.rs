//! The sharded side.

use std::error::Error;
use std::time::Instant;

use hsdp::prelude::*;
use hsdp_candle::Pass;
use hsdp_models::gpt;
use tracing::info_span;

use crate::data::{TOKENS, batch};
use crate::size::MICROBATCHES;
use crate::update::MAX_NORM;
use crate::{Times, Work, account};

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
    let spec = work.gpt.config().spec();
    let mut model =
        ShardedModel::new(world, spec, ModelOptions::on(work.mesh), |param| gpt::init(param, 0))?;
    let mut adamw = AdamW::new(&model, work.adamw);
    let mut times = Times::new();
    for index in 0..work.steps {
        let start = Instant::now();
        account::counted(index).in_scope(|| step(work, &mut model, &mut adamw, index))?;
        times.push(start.elapsed());
    }
    Ok(times.split_off(1.min(times.len())))
}

fn step(
    work: &Work,
    model: &mut ShardedModel,
    adamw: &mut AdamW,
    index: usize,
) -> Result<(), hsdp_candle::Error> {
    let rank = model.rank().index();
    let options =
        StepOptions { weight_hint: Some(TOKENS), ..StepOptions::microbatches(MICROBATCHES) };
    let mut step = info_span!("begin").in_scope(|| model.begin_step(options))?;
    for microbatch in 0..MICROBATCHES {
        let (inputs, targets) = batch(index, microbatch, rank)?;
        let pass = Pass::new(step.microbatch()?)?;
        let forward = || work.gpt.loss(&pass, &inputs, &targets);
        let loss = info_span!("forward").in_scope(forward)?;
        pass.backward(&loss, TOKENS)?;
    }
    let gradients = info_span!("finish").in_scope(|| step.finish())?;
    info_span!("optimizer").in_scope(|| adamw.step(model, gradients.clip(MAX_NORM)))?;
    Ok(())
}
