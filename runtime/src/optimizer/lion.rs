//! Lion.

use hsdp_kernels::LionStep;
use hsdp_kernels::cuda::CudaError;

use crate::optimizer::grouped::Grouped;
use crate::optimizer::interface::{ClippedGradient, DeviceRun, Run};
use crate::optimizer::rule::{Rule, RunState, Setting};
use crate::options::allowed::Allowed;

/// Lion (Chen et al., arXiv 2302.06675) on this rank's shards, with an f32 of state for each
/// element.
pub type Lion = Grouped<LionOptions>;

/// The parameters of Lion. The defaults are those of the paper.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LionOptions {
    /// The learning rate: the distance by which each element moves in a step. The paper uses a
    /// third to a tenth of that of AdamW.
    pub learning_rate: f64,
    /// The weight of the momentum in the direction of an update, and the decay of the momentum.
    pub betas: (f64, f64),
    /// Before the update, the parameters shrink by learning rate x weight decay.
    pub weight_decay: f64,
}

impl Default for LionOptions {
    fn default() -> Self {
        Self { learning_rate: 1e-4, betas: (0.9, 0.99), weight_decay: 0.0 }
    }
}

impl Rule for LionOptions {
    const KIND: &'static str = "lion";
    const ON_DEVICE: bool = true;

    fn options(&mut self, see: &mut dyn FnMut(&'static str, Setting<'_>)) {
        see("learning_rate", Setting::Rate(&mut self.learning_rate));
        see("betas.0", Setting::Number(&mut self.betas.0, Allowed::Fraction));
        see("betas.1", Setting::Number(&mut self.betas.1, Allowed::Fraction));
        see("weight_decay", Setting::Number(&mut self.weight_decay, Allowed::NotNegative));
    }

    fn kinds(&self) -> &'static [&'static str] {
        &["lion_exp_avg"]
    }

    fn update(&self, _: u64, run: Run<'_>, state: RunState<'_>) {
        let [momentum] = state.kinds();
        let ClippedGradient { values: gradient, clip } = run.gradient;
        hsdp_kernels::lion(&self.of_step(clip), run.parameters, gradient, momentum);
    }

    fn update_on_device(&self, run: DeviceRun<'_>, state: RunState<'_>) -> Result<(), CudaError> {
        let pieces = state.pieces(&run.pieces);
        let [momentum] = state.on_device();
        run.stream.lion(run.update, &pieces, &self.of_step(run.clip), momentum)
    }
}

impl LionOptions {
    /// An update.
    fn of_step(&self, clip: f32) -> LionStep {
        let Self { learning_rate, betas: (beta1, beta2), weight_decay } = *self;
        LionStep { learning_rate, beta1, beta2, weight_decay, clip }
    }
}
