//! What a unit has accumulated in a step, and what has been brought for it in a microbatch.

use std::mem;

use hsdp_comm::Pending;
use hsdp_kernels::Fold;

use crate::engine::reductions::UnitGradients;
use crate::error::Error;

/// The partial of one unit, from its first microbatch to the finished gradient.
#[derive(Debug)]
pub(crate) enum Partial {
    /// No microbatch has reached it. A buffer of the step before may lie here for reuse.
    Empty(Vec<f32>),
    /// Nothing is under way, and something has been accumulated.
    Held(Vec<f32>),
    /// A reduce-scatter adds to it.
    Scattering(Pending<Vec<f32>>),
    /// The all-reduce of the step is under way.
    AllReducing(Pending<Vec<f32>>),
}

impl Partial {
    /// What is there, which leaves it empty.
    pub(crate) fn take(&mut self) -> Self {
        mem::replace(self, Self::Empty(Vec::new()))
    }

    /// The buffer, once nothing is under way, and what the next reduce-scatter does with it.
    pub(crate) fn settle(self) -> Result<(Vec<f32>, Fold), Error> {
        match self {
            Self::Empty(buffer) => Ok((buffer, Fold::Replace)),
            Self::Held(buffer) => Ok((buffer, Fold::Add)),
            Self::Scattering(pending) | Self::AllReducing(pending) => {
                Ok((pending.wait()?, Fold::Add))
            }
        }
    }

    pub(crate) fn is_complete(&self) -> bool {
        match self {
            Self::Empty(_) | Self::Held(_) => true,
            Self::Scattering(pending) | Self::AllReducing(pending) => pending.is_complete(),
        }
    }
}

/// What has become of a unit's gradients in this microbatch.
#[derive(Debug, Default)]
pub(crate) enum Offer {
    /// Nobody has brought them.
    #[default]
    Nothing,
    /// They wait for their turn in the plan's order.
    Waiting(UnitGradients),
    /// They were issued, or wait unsharded for the last microbatch.
    Taken,
}

impl Offer {
    /// What waits, which is taken now.
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
