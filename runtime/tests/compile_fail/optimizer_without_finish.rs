//! An optimizer takes gradients, and only `finish` makes those: no step can forget its all-reduce.

use hsdp::{AdamW, Error, Optimizer, ShardedModel, StepOptions};

fn train(model: &mut ShardedModel, adamw: &mut AdamW) -> Result<(), Error> {
    let mut step = model.begin_step(StepOptions::default())?;
    step.microbatch()?.finish()?;
    adamw.step(model, step)?;
    Ok(())
}

fn main() {}
