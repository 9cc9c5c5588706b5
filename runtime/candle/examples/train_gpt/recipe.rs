//! How the model is trained: the command line as options of the runtime.

use std::time::Duration;

use hsdp::prelude::*;
use hsdp::{DynamicScale, LearningRate, LossScaling};

use super::options::Options;

/// The options of the world: its deadline, its faults and the folder of its flight records.
pub(crate) fn world(options: &Options) -> WorldOptions {
    let faults = options.faults.clone();
    let flight_dir = options.out.as_ref().map(|out| out.join("flight"));
    let common = WorldOptions { faults, flight_dir, ..WorldOptions::default() };
    match options.verify {
        // Rank 0 runs the whole unsharded twin while the others wait for it, however long that takes.
        true => {
            let for_ever = Duration::from_hours(365 * 24);
            WorldOptions { deadline: for_ever, late: for_ever, ..common }
        }
        false => {
            let deadline = Duration::from_secs_f64(options.deadline);
            WorldOptions { deadline, ..common }
        }
    }
}

/// The dtypes of parameters and of gradients on the wire.
pub(crate) fn precision(options: &Options) -> Precision {
    Precision {
        parameters: options.param_dtype,
        wire: options.reduce_dtype,
        ..Precision::default()
    }
}

/// How the model is sharded and reduced.
pub(crate) fn model(options: &Options) -> ModelOptions {
    let precision = precision(options);
    // f16 ranges from 6e-8 to 65504: gradients are scaled into its middle.
    let loss_scaling = match [precision.parameters, precision.wire].contains(&DType::F16) {
        true => LossScaling::Dynamic(DynamicScale { initial: 1024.0, ..DynamicScale::default() }),
        false => LossScaling::Off,
    };
    let (accumulation, prefetch) = (options.accumulation, options.prefetch);
    ModelOptions {
        placement: options.device,
        precision,
        accumulation,
        prefetch,
        loss_scaling,
        ..ModelOptions::on(options.mesh)
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
