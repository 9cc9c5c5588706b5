//! Rules of optimizers that hsdp does not have, and the step of the kernel of one that it has.

use hsdp::{AdamWOptions, Rule, Run, RunState, Setting};
use hsdp_kernels::AdamWStep;

/// Moves each element by the sign of its gradient.
#[derive(Clone, Copy, Debug)]
pub struct Signs {
    /// The distance.
    pub rate: f64,
    /// A value that ranks compare, and that nothing else uses.
    pub mark: f64,
}

impl Rule for Signs {
    const KIND: &'static str = "signs";

    fn options(&mut self, see: &mut dyn FnMut(&'static str, Setting<'_>)) {
        see("rate", Setting::Rate(&mut self.rate));
        see("mark", Setting::Choice(&self.mark, &mut |_| false));
    }

    fn update(&self, _: u64, run: Run<'_>, _: RunState<'_>) {
        #[expect(clippy::cast_possible_truncation, reason = "a rate of a test")]
        let rate = self.rate as f32;
        for (parameter, gradient) in run.parameters.iter_mut().zip(run.gradient.iter()) {
            *parameter -= rate * gradient.signum();
        }
    }
}

/// Returns update number `step` of AdamW, counted from 1.
#[must_use]
pub fn adamw_step(options: AdamWOptions, step: u64, clip: f32) -> AdamWStep {
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
