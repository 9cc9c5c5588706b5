//! The comparison of a sharded run with its unsharded twin.
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
//!   bit-identical, and each parameter's gradient may differ by at most [`bound`] times its
//!   absolute contributions, both as 2-norms.
//!
//! A step that all ranks skip, because a gradient overflowed, has no gradients to compare. A run
//! that has only such steps has verified nothing, and fails.

use std::fmt;

use hsdp::{DType, Gradients, Verdict};
use hsdp_train::Failure;

use super::Job;
use super::unsharded::{Summed, Tensors, Unsharded, norm};
use crate::train_gpt::{self, Options};

/// Returns how far a gradient may be off, relative to the norm of the absolute contributions;
/// `None` where it must be exact.
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
pub(super) struct Twin<'a> {
    job: Job<'a>,
    model: Unsharded,
    bound: Option<f64>,
    /// Largest part of the bound that was used.
    worst: f64,
    step: u64,
    /// Number of steps whose gradients were compared.
    compared: u64,
}

/// The results of a step of the sharded run.
#[derive(Clone, Copy, Debug)]
pub(super) struct Sharded<'a> {
    pub(super) loss: f64,
    pub(super) norm: f64,
    pub(super) verdict: &'a Verdict,
    pub(super) gradients: &'a Tensors,
}

impl<'a> Sharded<'a> {
    pub(super) fn of(gradients: &'a Gradients, full: &'a Tensors) -> Self {
        let loss = gradients.loss();
        let norm = gradients.norm();
        Self { loss, norm, verdict: gradients.verdict(), gradients: full }
    }
}

/// The result of the comparison, and the number of steps that were compared.
#[derive(Clone, Copy, Debug)]
pub(super) enum Verified {
    /// Losses, gradients and parameters are equal bit by bit.
    Exactly { steps: u64 },
    /// Losses are equal bit by bit, and gradients differ by at most this part of their bound.
    Within { steps: u64, worst: f64 },
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
                "losses bit-identical to unsharded, gradients of {steps} steps within {worst:.2} \
                 of bound"
            ),
        }
    }
}

impl<'a> Twin<'a> {
    pub(super) fn new(job: Job<'a>) -> Self {
        let model = Unsharded::new(&job);
        let bound = bound(job.options);
        Self { job, model, bound, worst: 0.0, step: 0, compared: 0 }
    }

    /// Compares a step's loss and gradients with the twin's own, and updates the twin.
    pub(super) fn check(&mut self, sharded: &Sharded<'_>) -> Result<(), Failure> {
        let own = self.model.gradients(&self.job, self.step)?;
        self.compare_numbers("loss", [sharded.loss, own.loss()], 0.0)?;
        if *sharded.verdict != Verdict::Apply {
            return Ok(());
        }
        match self.bound {
            None => {
                self.compare_bits("gradient", sharded.gradients, &own.gradients())?;
                // The sharded norm adds up its numbers in another order.
                self.compare_numbers("gradient norm", [sharded.norm, own.norm()], 1e-12)?;
            }
            Some(bound) => self.compare_norms(sharded.gradients, &own, bound)?,
        }
        let learning_rate = train_gpt::rate(self.job.options).at(self.compared);
        self.compared += 1;
        self.model.update(&own, self.job.options, learning_rate);
        Ok(())
    }

    /// Compares the parameters after the update, or takes them over where they may differ.
    pub(super) fn follow(&mut self, parameters: Tensors) -> Result<(), Failure> {
        match self.bound {
            None => self.compare_bits("parameter", &parameters, self.model.parameters())?,
            Some(_) => self.model.take_over(parameters),
        }
        self.step += 1;
        Ok(())
    }

    /// Returns the result of the comparison; a failure if no step was compared.
    pub(super) fn verified(self) -> Result<Verified, Failure> {
        match (self.compared, self.bound) {
            (0, _) => Err(Failure::Disagreement(format!(
                "no gradient was compared: all {} steps were skipped, because a gradient \
                 overflowed in each",
                self.step
            ))),
            (steps, None) => Ok(Verified::Exactly { steps }),
            (steps, Some(_)) => Ok(Verified::Within { steps, worst: self.worst }),
        }
    }

    fn compare_numbers(
        &self,
        what: &str,
        [sharded, own]: [f64; 2],
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
            let pairs = self.pairs(what, name, sharded, own)?.enumerate();
            let different = pairs.into_iter().find(|(_, (a, b))| a.to_bits() != b.to_bits());
            if let Some((index, (sharded, own))) = different {
                let place = format!("{what} {name}[{index}]");
                let values = format!("{sharded:e} sharded, {own:e} unsharded");
                return Err(self.disagreement(&format!("{place} is {values}")));
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
            let pairs = self.pairs("gradient", name, sharded, gradient)?;
            let difference = norm(pairs.map(|(sharded, own)| sharded - own));
            let allowed = bound * own.magnitude(name);
            // Not the other way around: a NaN must not pass.
            let within = difference <= allowed;
            if !within {
                return Err(self.disagreement(&format!(
                    "the gradient of {name} is off by {difference:e}, {allowed:e} is allowed"
                )));
            }
            if allowed > 0.0 {
                self.worst = self.worst.max(difference / allowed);
            }
        }
        Ok(())
    }

    /// Returns each number of the sharded run with that of the twin.
    fn pairs<'t>(
        &self,
        what: &str,
        name: &str,
        sharded: &'t Tensors,
        own: &'t [f32],
    ) -> Result<impl Iterator<Item = (f32, f32)> + use<'t>, Failure> {
        let sharded = sharded.get(name).filter(|sharded| sharded.len() == own.len());
        let missing = || self.disagreement(&format!("there is no {what} of {name}"));
        Ok(sharded.ok_or_else(missing)?.iter().copied().zip(own.iter().copied()))
    }

    fn disagreement(&self, what: &str) -> Failure {
        Failure::Disagreement(format!("step {}: {what}", self.step))
    }
}
