//! The options of Adafactor.

use std::fmt::{self, Display};

use hsdp_kernels::adafactor::AdafactorStep;
use serde_json::{Value, json};

use crate::error::Error;
use crate::optimizer::options::{Allowed, check_options};
use crate::optimizer::rule::OptimizerOptions;

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

    fn check(&self, of: &dyn Display) -> Result<(), Error> {
        let Self { learning_rate, beta2_decay, eps, threshold, weight_decay } = *self;
        let options = [
            ("learning_rate", learning_rate, Allowed::NotNegative),
            ("minus beta2_decay", -beta2_decay, Allowed::NotNegative),
            ("eps.0", eps.0, Allowed::Positive),
            ("eps.1", eps.1, Allowed::NotNegative),
            ("threshold", threshold, Allowed::Positive),
            ("weight_decay", weight_decay, Allowed::NotNegative),
        ];
        check_options(of, options)
    }

    fn write(&self, f: &mut fmt::Formatter<'_>, of: &dyn Display) -> fmt::Result {
        let Self { learning_rate, beta2_decay, eps, threshold, weight_decay } = *self;
        writeln!(f, "{of} learning_rate {learning_rate:?}")?;
        writeln!(f, "{of} beta2_decay {beta2_decay:?}")?;
        writeln!(f, "{of} eps {eps:?}")?;
        writeln!(f, "{of} threshold {threshold:?}")?;
        writeln!(f, "{of} weight_decay {weight_decay:?}")
    }

    fn json(&self) -> Value {
        let Self { learning_rate, beta2_decay, eps, threshold, weight_decay } = *self;
        json!({
            "learning_rate": learning_rate, "beta2_decay": beta2_decay, "eps": eps, "threshold": threshold,
            "weight_decay": weight_decay,
        })
    }
}
