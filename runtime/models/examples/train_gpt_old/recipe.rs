//! How the model is trained: the command line as options of the runtime. The part that does not depend on the model is in `shared/recipe`.

use std::time::Duration;

use hsdp::LearningRate;
use hsdp::prelude::*;

use super::options::Options;
use super::shared::recipe;

/// The options of the world. With `--verify` rank 0 runs the whole unsharded twin while the others wait for it, however long that takes.
pub(crate) fn world(options: &Options) -> WorldOptions {
    let for_ever = Duration::from_hours(365 * 24);
    let common = recipe::world(&options.run);
    match options.verify {
        true => WorldOptions { deadline: for_ever, late: for_ever, ..common },
        false => common,
    }
}

/// The optimizer's options, but for the learning rate, which changes.
pub(crate) fn adamw(options: &Options) -> AdamWOptions {
    AdamWOptions {
        learning_rate: options.lr,
        betas: (0.9, 0.95),
        weight_decay: 0.1,
        ..AdamWOptions::default()
    }
}

/// The learning rate rises over the first twentieth of the run, then falls along a cosine to a tenth.
pub(crate) fn learning_rate(options: &Options) -> LearningRate {
    let steps = options.steps as u64;
    LearningRate::warmup_cosine(options.lr, options.lr / 10.0, steps.div_ceil(20), steps)
}
