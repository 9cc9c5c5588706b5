//! While a step is under way the model is borrowed: no optimizer changes parameters that are being gathered.

use hsdp::{AdamW, Error, Gradients, Optimizer, ShardedModel, StepOptions};

fn train(model: &mut ShardedModel, adamw: &mut AdamW, older: Gradients) -> Result<(), Error> {
    let step = model.begin_step(StepOptions::default())?;
    adamw.step(model, older)?;
    let _ = step.finish()?;
    Ok(())
}

fn main() {}
