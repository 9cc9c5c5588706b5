//! A step's gradients update a model once.

use hsdp::{Error, Gradients, Optimizer, Sgd, ShardedModel};

fn update(model: &mut ShardedModel, sgd: &mut Sgd, gradients: Gradients) -> Result<(), Error> {
    sgd.step(model, gradients)?;
    sgd.step(model, gradients)?;
    Ok(())
}

fn main() {}
