//! The divisor of a gradient does not change during a step: options are read only.

use hsdp::{Error, Objective, ShardedModel, StepOptions};

fn train(model: &mut ShardedModel) -> Result<(), Error> {
    model.options().objective = Objective::Factor(4.0);
    let _ = model.begin_step(StepOptions::default())?.finish()?;
    Ok(())
}

fn main() {}
