//! The options of Adafactor.

use hsdp_kernels::adafactor::AdafactorStep;

use crate::optimizer::options::{OptimizerOptions, Setting};
use crate::options::allowed::Allowed;

/// The parameters of Adafactor. The defaults are those of PyTorch.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AdafactorOptions {
    /// The largest relative size of a step, and the rate of the weight decay.
    pub learning_rate: f64,
    /// The power of the step's number that is the weight of new squares, at most 0.
    pub beta2_decay: f64,
    /// The least root of a variance, and the least root mean square of a parameter that counts.
    pub eps: (f64, f64),
    /// The root mean square from which an update is scaled down: PyTorch's `d`.
    pub threshold: f64,
    /// Before the update, the parameters shrink by learning rate x weight decay.
    pub weight_decay: f64,
}

impl Default for AdafactorOptions {
    fn default() -> Self {
        let eps = (f64::from(f32::EPSILON), 1e-3);
        Self { learning_rate: 1e-2, beta2_decay: -0.8, eps, threshold: 1.0, weight_decay: 0.0 }
    }
}

impl AdafactorOptions {
    /// An update, the `step`-th of its parameter.
    pub(super) fn of_step(&self, step: u64, clip: f32) -> AdafactorStep {
        let Self { learning_rate, beta2_decay, eps, threshold, weight_decay } = *self;
        let (epsilon1, epsilon2) = eps;
        AdafactorStep {
            learning_rate,
            beta2_decay,
            epsilon1,
            epsilon2,
            threshold,
            weight_decay,
            step,
            clip,
        }
    }
}

impl OptimizerOptions for AdafactorOptions {
    const KIND: &'static str = "adafactor";

    fn options(&mut self, see: &mut dyn FnMut(&'static str, Setting<'_>)) {
        see("learning_rate", Setting::Rate(&mut self.learning_rate));
        see("beta2_decay", Setting::Number(&mut self.beta2_decay, Allowed::NotPositive));
        see("eps.0", Setting::Number(&mut self.eps.0, Allowed::PositiveSquare));
        see("eps.1", Setting::Number(&mut self.eps.1, Allowed::NotNegative));
        see("threshold", Setting::Number(&mut self.threshold, Allowed::Positive));
        see("weight_decay", Setting::Number(&mut self.weight_decay, Allowed::NotNegative));
    }
}
