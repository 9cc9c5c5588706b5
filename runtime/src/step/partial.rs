//! The gradients that a unit has accumulated in a step, and those that were offered for it in a microbatch.

use std::mem;

use hsdp_comm::NonFiniteAt;
use hsdp_kernels::Fold;

use crate::error::Error;
use crate::state::sums::{AllReducing, Scattered, Scattering, Sums};
use crate::step::unit_gradients::UnitGradients;

/// The partial of one unit, from its first microbatch to the finished gradient.
#[derive(Debug)]
pub(crate) enum Partial {
    /// No microbatch has reached it. A buffer of the step before may lie here for reuse.
    Empty(Sums),
    /// Nothing is under way, and something has been accumulated.
    Held(Sums),
    /// A reduce-scatter adds to it.
    Scattering { pending: Scattering, microbatch: usize },
    /// The all-reduce of the step is under way.
    AllReducing(AllReducing),
}

/// Nothing, and no buffer.
impl Default for Partial {
    fn default() -> Self {
        Self::Empty(Sums::default())
    }
}

impl Partial {
    /// Takes the partial out, and leaves it empty.
    pub(crate) fn take(&mut self) -> Self {
        mem::take(self)
    }

    /// Waits until nothing is under way, and returns the partial.
    pub(crate) fn settle(self) -> Result<Settled, Error> {
        let held = |partial| Settled { partial, fold: Fold::Add, non_finite: None };
        Ok(match self {
            Self::Empty(partial) => Settled { fold: Fold::Replace, ..held(partial) },
            Self::Held(partial) => held(partial),
            Self::AllReducing(pending) => held(pending.wait()?),
            Self::Scattering { pending, microbatch } => {
                let Scattered { sums, non_finite } = pending.wait()?;
                let non_finite = non_finite.map(|it| (microbatch, it));
                Settled { non_finite, ..held(sums) }
            }
        })
    }

    pub(crate) fn is_complete(&self) -> bool {
        match self {
            Self::Empty(_) | Self::Held(_) => true,
            Self::Scattering { pending, .. } => pending.is_complete(),
            Self::AllReducing(pending) => pending.is_complete(),
        }
    }
}

/// A partial on which nothing is under way.
#[derive(Debug)]
pub(crate) struct Settled {
    pub(crate) partial: Sums,
    /// Whether the next reduce-scatter adds to it or replaces it.
    pub(crate) fold: Fold,
    /// The microbatch whose reduce-scatter found it not to be finite, and why.
    pub(crate) non_finite: Option<(usize, NonFiniteAt)>,
}

/// The state of a unit's gradients in this microbatch.
#[derive(Debug, Default)]
pub(crate) enum Offer {
    /// They were not offered.
    #[default]
    Nothing,
    /// They wait for their turn in the plan's order.
    Waiting(UnitGradients),
    /// They were issued, or wait unsharded for the last microbatch.
    Taken,
    /// Zeros were issued in their place.
    Missed,
}

impl Offer {
    /// Takes the gradients, if they wait.
    pub(crate) fn take(&mut self) -> Option<UnitGradients> {
        match mem::replace(self, Self::Taken) {
            Self::Waiting(gradients) => Some(gradients),
            other => {
                *self = other;
                None
            }
        }
    }
}
