//! `--verify`: the same model, unsharded, beside the sharded one.
//!
//! The twin runs each rank's microbatches one by one on whole parameters in plain candle, and adds
//! their gradients in the order in which the mesh adds them. It shares with the sharded run candle,
//! the model's code, and the kernel of AdamW, but no plan, no collective, and no custom op.
//!
//! - If gradients have wire dtype f32, and parameters are f32 or bf16, no bit may differ: losses,
//!   gradients and, after each step, parameters are compared bit by bit. The twin trains on its
//!   own.
//! - Otherwise contributions are rounded on the wire, and two trainings would drift apart. So the
//!   twin takes over the sharded run's parameters after each step. Losses must still be
//!   bit-identical, and each parameter's gradient may differ by at most [`bound`] times its absolute
//!   contributions, both as 2-norms.
//!
//! A step that all ranks skip, because a gradient overflowed, has no gradients to compare. A run that
//! has only such steps has verified nothing, and fails.

use std::collections::BTreeMap;
use std::fmt;

use candle_core::Device;
use hsdp::{DType, Gradients, Verdict};

use super::options::Options;
use super::recipe::learning_rate;
use super::shared::failure::Failure;
use super::train::Job;
use super::unsharded::{Summed, Tensors, Unsharded};

/// How far a gradient may be off, relative to the norm of the absolute contributions; `None` where
/// it must be exact.
///
/// A contribution is rounded to the wire dtype at most twice: once on each axis. f16 parameters
/// round the whole backward, whose order of magnitude depends on the loss scale.
fn bound(options: &Options) -> Option<f64> {
    match (options.run.param_dtype, options.run.reduce_dtype) {
        (DType::F16, _) => Some(1.0 / 256.0),
        (_, DType::F16) => Some(1.0 / 1024.0),
        (_, DType::BF16) => Some(1.0 / 128.0),
        _ => None,
    }
}

/// The unsharded model, in step with the sharded one.
#[derive(Debug)]
pub(crate) struct Twin {
    model: Unsharded,
    bound: Option<f64>,
    /// The largest part of the bound that was used.
    worst: f64,
    step: usize,
    /// Steps whose gradients were compared.
    compared: usize,
}

/// The results of a step of the sharded run.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Sharded<'a> {
    pub(crate) loss: f64,
    pub(crate) norm: f64,
    pub(crate) verdict: &'a Verdict,
    pub(crate) gradients: &'a Tensors,
}

impl<'a> Sharded<'a> {
    pub(crate) fn of(gradients: &'a Gradients, full: &'a Tensors) -> Self {
        let (loss, norm) = (gradients.loss(), gradients.norm());
        Self { loss, norm, verdict: gradients.verdict(), gradients: full }
    }
}

/// The result of the comparison, and the number of steps that were compared.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Verified {
    /// Losses, gradients and parameters are equal bit by bit.
    Exactly { steps: usize },
    /// Losses are equal bit by bit, and gradients differ by at most this part of their bound.
    Within { steps: usize, worst: f64 },
}

impl fmt::Display for Verified {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Exactly { steps } => write!(
                f,
                "losses, gradients and parameters bit-identical to unsharded, in {steps} steps"
            ),
            Self::Within { steps, worst } => write!(
                f,
                "losses bit-identical to unsharded, gradients of {steps} steps within {worst:.2} of \
                 bound"
            ),
        }
    }
}

impl Twin {
    pub(crate) fn new(job: &Job<'_>) -> Self {
        let bound = bound(job.options);
        Self { model: Unsharded::new(job), bound, worst: 0.0, step: 0, compared: 0 }
    }

    /// Compares a step's loss and gradients with the twin's own, computed on `device`, and updates the twin.
    pub(crate) fn check(
        &mut self,
        (job, device): (&Job<'_>, &Device),
        sharded: &Sharded<'_>,
    ) -> Result<(), Failure> {
        let own = self.model.gradients((job, device), self.step)?;
        self.compare_numbers("loss", sharded.loss, own.loss(), 0.0)?;
        if *sharded.verdict != Verdict::Apply {
            return Ok(());
        }
        match self.bound {
            None => {
                self.compare_bits("gradient", sharded.gradients, &own.gradients())?;
                // The same numbers, added up in another order.
                self.compare_numbers("gradient norm", sharded.norm, own.norm(), 1e-12)?;
            }
            Some(bound) => self.compare_norms(sharded.gradients, &own, bound)?,
        }
        let rate = learning_rate(job.options).at(self.compared as u64);
        self.compared += 1;
        self.model.update(&own, job.options, rate);
        Ok(())
    }

    /// After the update: compares the parameters, or takes them over where they may differ.
    pub(crate) fn follow(&mut self, parameters: BTreeMap<String, Vec<f32>>) -> Result<(), Failure> {
        match self.bound {
            None => self.compare_bits("parameter", &parameters, self.model.parameters())?,
            Some(_) => self.model.take_over(parameters),
        }
        self.step += 1;
        Ok(())
    }

    /// The result of the comparison; a failure if no step was compared.
    pub(crate) fn verified(self) -> Result<Verified, Failure> {
        match (self.compared, self.bound) {
            (0, _) => Err(Failure::Disagreement(format!(
                "no gradient was compared: all {} steps were skipped, because a gradient overflowed in each",
                self.step
            ))),
            (steps, None) => Ok(Verified::Exactly { steps }),
            (steps, Some(_)) => Ok(Verified::Within { steps, worst: self.worst }),
        }
    }

    fn compare_numbers(
        &self,
        what: &str,
        sharded: f64,
        own: f64,
        relative: f64,
    ) -> Result<(), Failure> {
        // Not the other way around: a NaN must not pass.
        if (sharded - own).abs() <= relative * own.abs() {
            return Ok(());
        }
        Err(self.disagreement(&format!("{what} is {sharded:e} sharded, {own:e} unsharded")))
    }

    fn compare_bits(&self, what: &str, sharded: &Tensors, own: &Tensors) -> Result<(), Failure> {
        for (name, own) in own {
            let Some(sharded) = sharded.get(name).filter(|sharded| sharded.len() == own.len())
            else {
                return Err(self.disagreement(&format!("there is no {what} of {name}")));
            };
            let pairs = sharded.iter().zip(own);
            let different =
                pairs.enumerate().find(|(_, (sharded, own))| sharded.to_bits() != own.to_bits());
            if let Some((index, (sharded, own))) = different {
                let what =
                    format!("{what} {name}[{index}] is {sharded:e} sharded, {own:e} unsharded");
                return Err(self.disagreement(&what));
            }
        }
        Ok(())
    }

    fn compare_norms(
        &mut self,
        sharded: &Tensors,
        own: &Summed,
        bound: f64,
    ) -> Result<(), Failure> {
        for (name, gradient) in &own.gradients() {
            let Some(sharded) = sharded.get(name).filter(|sharded| sharded.len() == gradient.len())
            else {
                return Err(self.disagreement(&format!("there is no gradient of {name}")));
            };
            let difference = norm(sharded.iter().zip(gradient).map(|(sharded, own)| sharded - own));
            let allowed = bound * own.magnitude(name);
            // Not the other way around: a NaN must not pass.
            let within = difference <= allowed;
            if !within {
                let what = format!(
                    "the gradient of {name} is off by {difference:e}, {allowed:e} is allowed"
                );
                return Err(self.disagreement(&what));
            }
            if allowed > 0.0 {
                self.worst = self.worst.max(difference / allowed);
            }
        }
        Ok(())
    }

    fn disagreement(&self, what: &str) -> Failure {
        Failure::Disagreement(format!("step {}: {what}", self.step))
    }
}

/// The 2-norm of some numbers, in f64.
pub(crate) fn norm(values: impl Iterator<Item = f32>) -> f64 {
    values.map(|value| f64::from(value).powi(2)).sum::<f64>().sqrt()
}
