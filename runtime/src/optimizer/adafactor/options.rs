//! The options of Adafactor.

use hsdp_kernels::adafactor::AdafactorStep;
use serde_json::Value;

use crate::optimizer::options::{OptimizerOptions, Setting, set_number};
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

    fn learning_rate(&mut self) -> &mut f64 {
        &mut self.learning_rate
    }

    fn each(&self, see: &mut dyn FnMut(&'static str, Setting<'_>)) {
        let Self { learning_rate, beta2_decay, eps, threshold, weight_decay } = *self;
        see("learning_rate", Setting::Number(learning_rate, Allowed::NotNegative));
        see("beta2_decay", Setting::Number(beta2_decay, Allowed::NotPositive));
        see("eps.0", Setting::Number(eps.0, Allowed::PositiveSquare));
        see("eps.1", Setting::Number(eps.1, Allowed::NotNegative));
        see("threshold", Setting::Number(threshold, Allowed::Positive));
        see("weight_decay", Setting::Number(weight_decay, Allowed::NotNegative));
    }

    fn set(&mut self, name: &str, saved: &Value) -> bool {
        let number = match name {
            "learning_rate" => &mut self.learning_rate,
            "beta2_decay" => &mut self.beta2_decay,
            "eps.0" => &mut self.eps.0,
            "eps.1" => &mut self.eps.1,
            "threshold" => &mut self.threshold,
            "weight_decay" => &mut self.weight_decay,
            _ => return false,
        };
        set_number(number, saved)
    }
}
