//! The numbers of one step, from its header to its finish.

use hsdp_sharding::Rank;

use crate::agree::agreement::{Agreement, GradientPresence};
use crate::error::Error;
use crate::options::objective::{LossSum, Objective};
use crate::options::{Input, StepOptions};
use crate::state::context::Context;
use crate::state::gradients::UnitGradients;
use crate::state::sums::GradShards;

/// A step that has begun and not finished.
#[derive(Debug)]
pub(crate) struct StepState {
    /// Number of the step.
    pub(crate) number: u64,
    /// Whether this rank said, when the step began, that it has data for it.
    input: Input,
    /// Ranks that began the step without data.
    pub(super) absent: Vec<Rank>,
    /// The loss of the open microbatch.
    pub(super) loss: Option<LossSum>,
    /// The agreed power of two that is taken out of every seed, once it is known.
    pub(crate) exponent: Option<i32>,
    pub(crate) weight: u64,
    pub(crate) largest_weight: u64,
    /// Sum over the microbatches: of loss sums, or of means where the objective is a mean over
    /// ranks.
    pub(crate) total_loss: f64,
    /// The parameters that got a gradient on this rank.
    pub(super) presence: GradientPresence,
    /// Sums of this rank and statements of all ranks, once they have agreed.
    pub(super) agreed: Option<AgreedStep>,
}

/// A step on which all ranks have agreed.
#[derive(Debug)]
pub(super) struct AgreedStep {
    /// Sums of this rank.
    pub(super) grad_shards: GradShards,
    /// Statements of all ranks.
    pub(super) agreement: Agreement,
}

impl StepState {
    pub(crate) fn new(context: &Context, number: u64, options: StepOptions) -> Self {
        Self {
            number,
            input: options.input,
            absent: Vec::new(),
            loss: None,
            exponent: None,
            weight: 0,
            largest_weight: 0,
            total_loss: 0.0,
            presence: GradientPresence::none(context.parameters()),
            agreed: None,
        }
    }

    /// Checks the weight of a loss. Returns the sum of this rank's weights with it.
    ///
    /// # Errors
    /// [`Error::Misuse`] if the rank began the step without data, or a u64 does not hold the sum.
    pub(crate) fn weight_with(&self, context: &Context, weight: u64) -> Result<u64, Error> {
        let what = if self.input == Input::Exhausted && weight > 0 {
            format!("the loss has weight {weight}, but the rank began the step without data")
        } else if let Some(sum) = self.weight.checked_add(weight) {
            return Ok(sum);
        } else {
            format!("the weights {} and {weight} add up to 2^64 or more", self.weight)
        };
        Err(context.misuse("loss", self.number, what))
    }

    /// Takes the loss of the open microbatch, with which this rank's weights add up to `weight`.
    pub(crate) fn take_loss(&mut self, context: &Context, loss: LossSum, weight: u64) {
        self.loss = Some(loss);
        self.weight = weight;
        self.largest_weight = self.largest_weight.max(loss.weight());
        self.total_loss += match context.options.objective {
            Objective::RankMean => loss.mean(),
            _ => loss.sum(),
        };
    }

    /// Refuses gradients of a backward that started without a seed, which has a loss scale: they
    /// have another size than those of its peers.
    ///
    /// # Errors
    /// [`Error::Misuse`].
    pub(crate) fn check_seeded(&self, context: &Context, scale: f64) -> Result<(), Error> {
        if self.loss.is_some() || scale == 1.0 {
            return Ok(());
        }
        Err(context.misuse("reduce", self.number, GRADIENTS_BEFORE_LOSS.to_owned()))
    }

    /// Drops the gradients of a microbatch without items, where weights enter: the mean of nothing
    /// may be NaN, and 0 times NaN is NaN too.
    pub(crate) fn of_items(
        &self,
        context: &Context,
        mut gradients: UnitGradients,
    ) -> UnitGradients {
        let is_empty = self.loss.is_some_and(|loss| loss.weight() == 0);
        if is_empty && context.options.objective.is_weighted() {
            gradients.entries.fill(None);
        }
        gradients
    }
}

/// The message for gradients that come before the loss.
pub(super) const GRADIENTS_BEFORE_LOSS: &str =
    "gradients come before the loss: call `loss` and start the backward from its seed";
