//! AdamW, as PyTorch computes it.

use hsdp_kernels::AdamWStep;
use hsdp_kernels::cuda::{CudaError, PieceOfStep};

use crate::optimizer::grouped::Grouped;
use crate::optimizer::options::{OptimizerOptions, Setting};
use crate::optimizer::rule::{Rule, RunState, UnitRun, UnitState};
use crate::optimizer::run::Run;
use crate::options::allowed::Allowed;

/// AdamW (Loshchilov and Hutter, arXiv 1711.05101) on this rank's shards, with two f32 of state for each element.
pub type AdamW = Grouped<AdamWOptions>;

/// The parameters of AdamW. The defaults are PyTorch's.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AdamWOptions {
    /// The learning rate.
    pub learning_rate: f64,
    /// The decay of the first and of the second moment.
    pub betas: (f64, f64),
    /// Added to the root of the corrected second moment. It is above 0: without it an element that has had no gradient would become NaN.
    pub eps: f64,
    /// Before the update, the parameters shrink by learning rate x weight decay.
    pub weight_decay: f64,
}

impl Default for AdamWOptions {
    fn default() -> Self {
        Self { learning_rate: 1e-3, betas: (0.9, 0.999), eps: 1e-8, weight_decay: 1e-2 }
    }
}

impl OptimizerOptions for AdamWOptions {
    const KIND: &'static str = "adamw";

    fn options(&mut self, see: &mut dyn FnMut(&'static str, Setting<'_>)) {
        see("learning_rate", Setting::Rate(&mut self.learning_rate));
        see("betas.0", Setting::Number(&mut self.betas.0, Allowed::Fraction));
        see("betas.1", Setting::Number(&mut self.betas.1, Allowed::Fraction));
        see("eps", Setting::Number(&mut self.eps, Allowed::Positive));
        see("weight_decay", Setting::Number(&mut self.weight_decay, Allowed::NotNegative));
    }
}

impl Rule for AdamWOptions {
    const COUNTS: bool = true;
    const ON_DEVICE: bool = true;

    fn kinds(&self) -> &'static [&'static str] {
        &["exp_avg", "exp_avg_sq"]
    }

    fn update(&self, number: u64, run: Run<'_>, state: RunState<'_>) {
        let [first, second] = state.kinds();
        let step = self.of_step(number, run.clip);
        hsdp_kernels::adamw(&step, run.parameters, run.gradient, first, second);
    }

    fn update_on_device(
        &self,
        UnitRun { stream, update, clip }: UnitRun<'_>,
        pieces: &[PieceOfStep],
        state: UnitState<'_>,
    ) -> Result<(), CudaError> {
        let [first, second] = state.kinds();
        stream.adamw(update, pieces, &self.of_step(1, clip), (first, second))
    }
}

impl AdamWOptions {
    /// An update, the `step`-th of its parameter.
    pub(super) fn of_step(&self, step: u64, clip: f32) -> AdamWStep {
        AdamWStep {
            learning_rate: self.learning_rate,
            beta1: self.betas.0,
            beta2: self.betas.1,
            epsilon: self.eps,
            weight_decay: self.weight_decay,
            step,
            clip,
        }
    }
}
