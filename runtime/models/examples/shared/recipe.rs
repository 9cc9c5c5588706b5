//! The options of a run as options of the runtime.

use std::time::Duration;

use hsdp::prelude::*;
use hsdp::{DynamicScale, LossScaling};

use super::options::RunOptions;

/// The options of the world: its deadline, its faults and the folder of its flight records.
pub(crate) fn world(options: &RunOptions) -> WorldOptions {
    let deadline = Duration::from_secs_f64(options.deadline);
    let faults = options.faults.clone();
    let flight_dir = options.out.as_ref().map(|out| out.join("flight"));
    WorldOptions { deadline, faults, flight_dir, ..WorldOptions::default() }
}

/// The dtypes of parameters and of gradients on the wire.
pub(crate) fn precision(options: &RunOptions) -> Precision {
    Precision {
        parameters: options.param_dtype,
        wire: options.reduce_dtype,
        ..Precision::default()
    }
}

/// How the model is sharded and reduced.
pub(crate) fn model(options: &RunOptions) -> ModelOptions {
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
