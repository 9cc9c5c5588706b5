//! The finished gradients of a step: the only thing that drives an optimizer.

use std::borrow::Cow;

use hsdp_sharding::{ParamId, UnitId};

use crate::error::Error;
use crate::error::gradients::NonFiniteGradient;
use crate::options::allowed::is_held_in_f32;
use crate::state::context::{Context, ErrorSite, ModelId};
use crate::state::sums::GradShards;

/// The decision of all ranks about a step's gradients.
#[derive(Clone, Debug, PartialEq)]
pub enum Verdict {
    /// Update the parameters.
    Apply,
    /// Leave the parameters as they are, for this reason.
    Skip(NonFiniteGradient),
}

/// This rank's shard of a step's gradient, reduced over both axes, and agreed on by all ranks.
///
/// The buffers hold sums. The one division of the step happens where they are read: in the
/// optimizer's pass, and in the copies that [`shard`](Self::shard) and [`full`](Self::full) return.
/// Clipping happens in the optimizer's pass only.
///
/// The next step uses this memory again. Drop this value before the next step, or that step
/// allocates as much again. If it is dropped without an update, the next step warns, once, unless
/// it was [discarded](Self::discard).
///
/// Only [`Step::finish`](crate::Step::finish) makes this value, so gradients without the final
/// all-reduce cannot reach an optimizer.
#[derive(Debug)]
#[must_use = "gradients that no optimizer takes change nothing"]
pub struct Gradients {
    pub(crate) model: ModelId,
    pub(crate) step: u64,
    /// The sums by unit, before the division; empty where a unit has no trainable parameter. Also
    /// the parameters that got a gradient.
    pub(crate) grad_shards: GradShards,
    /// The divisor of the sums. It is known only when all ranks have agreed, after the norm of the
    /// sums was computed.
    pub(crate) divisor: f64,
    pub(crate) norm: f64,
    pub(crate) loss: f64,
    pub(crate) weight: u64,
    pub(crate) clip: f32,
    /// The norm to which the gradient was clipped, as given.
    pub(crate) max_norm: Option<f64>,
    pub(crate) verdict: Verdict,
    /// How the gradients are clipped besides.
    pub(crate) clipping: Clipping,
    /// Whether the update is to be measured.
    pub(crate) is_measured: bool,
}

impl Gradients {
    /// Returns the number of the step.
    #[must_use]
    pub fn step(&self) -> u64 {
        self.step
    }

    /// Returns the 2-norm of the whole gradient, over all shards, divided, before clipping. NaN if
    /// an element of a rank's sums was not finite: then the ranks agreed to skip the step.
    #[must_use]
    pub fn norm(&self) -> f64 {
        self.norm
    }

    /// Returns the loss of the step, over all ranks and microbatches: for `WeightedMean` the sum of
    /// the losses over the sum of the weights, for `RankMean` the mean of the mean losses, for
    /// `Sum` the sum of the losses, and for `Factor` that sum over the factor.
    #[must_use]
    pub fn loss(&self) -> f64 {
        self.loss
    }

    /// Returns the sum of the weights of all ranks and microbatches.
    #[must_use]
    pub fn weight(&self) -> u64 {
        self.weight
    }

    /// Returns the factor by which an optimizer multiplies the divided gradients first: that of
    /// [`clip`](Self::clip) and of [`clip_norm`](Self::clip_norm) of all parameters, or 1. It is 1
    /// also if parameters are clipped in different ways, or by value: then the optimizer gets
    /// gradients that are clipped already.
    #[must_use]
    pub fn clip_factor(&self) -> f32 {
        if self.is_clipped_apart() { 1.0 } else { self.clip }
    }

    /// Returns the agreement of all ranks to apply or to skip these gradients.
    #[must_use]
    pub fn verdict(&self) -> &Verdict {
        &self.verdict
    }

    /// Scales the gradient down to `max_norm` if its norm is larger, by max_norm / (norm + 1e-6) as
    /// in PyTorch. Of several calls the one with the least norm counts. Not collective.
    ///
    /// The optimizer applies the factor in its pass over the shard. This comes before
    /// [`clip_norm`](Self::clip_norm), for other norms and groups of parameters, and
    /// [`clip_value`](Self::clip_value).
    ///
    /// # Panics
    /// If `max_norm` is NaN, below 0, or above 0 and 0 in f32; after `clip_norm` or `clip_value`,
    /// since [`norm`](Self::norm) is that of the gradient before them: call this first, or
    /// `clip_norm` with `Norm::P(2.0)`.
    pub fn clip(mut self, max_norm: f64) -> Self {
        assert!(
            self.clipping.lines.is_empty(),
            "`Gradients::clip` comes before `clip_norm` and `clip_value`: call it first, or \
             `clip_norm` with `Norm::P(2.0)`"
        );
        assert!(is_limit(max_norm), "gradients cannot be clipped to a norm of {max_norm}");
        #[expect(
            clippy::cast_possible_truncation,
            reason = "a factor of at most 1, applied in f32"
        )]
        let factor = (max_norm / (self.norm + 1e-6)).min(1.0) as f32;
        self.clip = self.clip.min(factor);
        self.max_norm = Some(self.max_norm.map_or(max_norm, |least| least.min(max_norm)));
        self
    }

    /// Asks the optimizer's pass to [measure](crate::ShardedModel::last_update) how far it moves
    /// each parameter: it copies a block of parameters before it updates them, while they are in
    /// the cache. All ranks ask, or none. Not collective.
    ///
    /// A model that is updated on a device refuses such an update ([`Error::Misuse`]), before any
    /// parameter changes.
    pub fn measured(self) -> Self {
        Self { is_measured: true, ..self }
    }

    /// Drops the gradients of a step that is to update nothing, such as one that only measures
    /// them: the next step does not warn. Not collective.
    pub fn discard(mut self) {
        self.grad_shards.taken();
    }

    /// Returns this rank's sums of a unit's gradients on the host: borrowed, or a copy.
    pub(crate) fn sums_on_host(
        &self,
        site: ErrorSite<'_>,
        unit: UnitId,
    ) -> Result<Cow<'_, [f32]>, Error> {
        let sums = self.grad_shards.of(unit);
        sums.to_host(site, 0..sums.len())
    }

    /// Returns whether the parameter got a gradient on any rank in any microbatch of the step.
    ///
    /// # Panics
    /// If the model has no such parameter.
    #[must_use]
    pub fn has_gradient(&self, parameter: ParamId) -> bool {
        self.grad_shards.present[parameter.unit.index()][parameter.index]
    }

    /// Returns the way in which a parameter's gradient is clipped before an optimizer gets it;
    /// `None` if the optimizer multiplies by [`clip_factor`](Self::clip_factor), the same for all
    /// parameters.
    pub(crate) fn clip_of(&self, context: &Context, parameter: ParamId) -> Option<Clip> {
        self.clipping.of_parameters.get(context.number_of(parameter)).copied()
    }

    /// Returns whether parameters are clipped in different ways, or by value.
    pub(crate) fn is_clipped_apart(&self) -> bool {
        !self.clipping.of_parameters.is_empty()
    }
}

/// The way in which the divided gradient of a parameter is clipped: multiplied by the factor, and
/// then limited in magnitude.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Clip {
    factor: f32,
    limit: f32,
}

impl Clip {
    /// Returns the way of multiplying alone.
    pub(crate) fn by(factor: f32) -> Self {
        Self { factor, limit: f32::INFINITY }
    }

    pub(crate) fn apply(self, elements: &mut [f32]) {
        let Self { factor, limit } = self;
        elements.iter_mut().for_each(|it| *it = (*it * factor).clamp(-limit, limit));
    }

    /// Returns the magnitude of a clipped element. `sum` is the element before the division.
    pub(crate) fn magnitude(self, sum: f32, divisor: f64) -> f64 {
        let clipped = f64::from(sum) / divisor * f64::from(self.factor);
        clipped.abs().min(f64::from(self.limit))
    }

    pub(crate) fn scaled(self, by: f32) -> Self {
        // No limit stays none, also where the factor is 0.
        let limit = if self.limit.is_finite() { self.limit * by } else { self.limit };
        Self { factor: self.factor * by, limit }
    }

    pub(crate) fn limited(self, to: f32) -> Self {
        Self { limit: self.limit.min(to), ..self }
    }
}

/// How gradients are clipped besides [`Gradients::clip`](crate::Gradients::clip).
#[derive(Clone, Debug, Default)]
pub(crate) struct Clipping {
    /// Clips by the number of a parameter in the model; empty while one factor counts for all.
    pub(crate) of_parameters: Vec<Clip>,
    /// A line for each call, which ranks compare.
    pub(crate) lines: String,
}

/// Returns whether gradients can be clipped to `limit`: it is infinity, 0, or a number above 0 that
/// is not 0 in f32.
pub(crate) fn is_limit(limit: f64) -> bool {
    limit > f64::from(f32::MAX) || is_held_in_f32(limit)
}
