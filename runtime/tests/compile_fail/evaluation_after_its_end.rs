//! An evaluation whose mean was taken, or that was finished, is over.

use hsdp::{Error, ShardedModel};

fn batch_after_the_mean(model: &mut ShardedModel) -> Result<(), Error> {
    let mut evaluation = model.evaluation()?;
    evaluation.mean(1.0, 1)?;
    evaluation.batch()?.finish()
}

fn two_means(model: &mut ShardedModel) -> Result<[f64; 2], Error> {
    let evaluation = model.evaluation()?;
    Ok([evaluation.mean(1.0, 1)?, evaluation.mean(2.0, 1)?])
}

fn mean_after_the_end(model: &mut ShardedModel) -> Result<f64, Error> {
    let evaluation = model.evaluation()?;
    evaluation.finish()?;
    evaluation.mean(1.0, 1)
}

fn main() {}
