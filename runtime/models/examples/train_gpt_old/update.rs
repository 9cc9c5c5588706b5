//! One update by AdamW without the runtime, for the unsharded twin of a sharded run. `runtime_cost` uses it
//! too.

use hsdp::AdamWOptions;
use hsdp::kernels::AdamWStep;

/// Gradients longer than this are scaled down to it.
pub(crate) const MAX_NORM: f64 = 1.0;

/// Update number `step`, counted from 1, by a gradient of this norm.
pub(crate) fn adamw_step(options: &AdamWOptions, step: u64, norm: f64) -> AdamWStep {
    #[expect(clippy::cast_possible_truncation, reason = "a factor of at most 1, applied in f32")]
    let clip = (MAX_NORM / (norm + 1e-6)).min(1.0) as f32;
    AdamWStep {
        learning_rate: options.learning_rate,
        beta1: options.betas.0,
        beta2: options.betas.1,
        epsilon: options.eps,
        weight_decay: options.weight_decay,
        step,
        clip,
    }
}
