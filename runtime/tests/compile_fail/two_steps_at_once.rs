//! A model has one step at a time.

use hsdp::{Error, ShardedModel, StepOptions};

fn train(model: &mut ShardedModel) -> Result<(), Error> {
    let one = model.begin_step(StepOptions::default())?;
    let other = model.begin_step(StepOptions::default())?;
    let _ = one.finish()?;
    let _ = other.finish()?;
    Ok(())
}

fn main() {}
