//! Rules of optimizers that hsdp does not have.

use std::fmt::{self, Display};

use hsdp::{Error, OptimizerOptions, Rule, Run, RunState};
use serde_json::{Value, json};

/// Moves each element by the sign of its gradient.
#[derive(Clone, Copy, Debug)]
pub struct Signs {
    /// The distance.
    pub rate: f64,
}

impl OptimizerOptions for Signs {
    const KIND: &'static str = "signs";

    fn learning_rate(&mut self) -> &mut f64 {
        &mut self.rate
    }

    fn check(&self, _: &dyn Display) -> Result<(), Error> {
        Ok(())
    }

    fn write(&self, f: &mut fmt::Formatter<'_>, of: &dyn Display) -> fmt::Result {
        writeln!(f, "{of} rate {:?}", self.rate)
    }

    fn json(&self) -> Value {
        json!({ "rate": self.rate })
    }
}

impl Rule for Signs {
    const COUNTS: bool = false;
    const ON_DEVICE: bool = false;

    fn kinds(&self) -> &'static [&'static str] {
        &[]
    }

    fn update(&self, _: u64, run: Run<'_>, _: RunState<'_>) {
        #[expect(clippy::cast_possible_truncation, reason = "a rate of a test")]
        let rate = self.rate as f32;
        for (parameter, gradient) in run.parameters.iter_mut().zip(run.gradient) {
            *parameter -= rate * (gradient * run.clip).signum();
        }
    }
}
