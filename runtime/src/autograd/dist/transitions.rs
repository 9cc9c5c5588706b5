//! The same rules as in `rules`, for states that are known at run time.

use super::state::AxisState;
use crate::autograd::operation::{Collective, Copies, Reducer};

/// The advice of an error: a call that is allowed instead.
pub(super) type Hint = &'static str;

const SUM_FIRST: Hint = "sum a Partial value first, by all_reduce or reduce_scatter";
const SHARE: Hint = "an Invariant value becomes Replicate by share; sum a Partial one first";
const ADD: Hint = "a Replicate value is added to a Partial one as only_first, a Varying one as to_partial; an Invariant one \
                   becomes Replicate by share";

impl AxisState {
    /// The state of a function of one value.
    pub(super) fn mapped(self) -> Result<Self, Hint> {
        if self == Self::Partial { Err(SUM_FIRST) } else { Ok(self) }
    }

    /// The state of a function of two values.
    pub(super) fn joined(self, other: Self) -> Result<Self, Hint> {
        match (self, other) {
            (Self::Partial, _) | (_, Self::Partial) => Err(SHARE),
            (one, other) if one == other => Ok(one),
            (Self::Invariant, _) | (_, Self::Invariant) => Err(SHARE),
            _ => Ok(Self::Varying),
        }
    }

    /// The state of a function that is linear in two values together.
    pub(super) fn added(self, other: Self) -> Result<Self, Hint> {
        match (self, other) {
            (Self::Partial, Self::Partial) => Ok(Self::Partial),
            (one, other) => one.joined(other).map_err(|_| ADD),
        }
    }

    /// The state of a function that is linear in each of two values.
    pub(super) fn multiplied(self, other: Self) -> Result<Self, Hint> {
        match (self, other) {
            (Self::Partial, Self::Replicate) | (Self::Replicate, Self::Partial) => {
                Ok(Self::Partial)
            }
            (one, other) => one.joined(other),
        }
    }

    /// Whether a backward may start from it.
    pub(super) fn as_loss(self) -> Result<Self, Hint> {
        match self {
            Self::Partial | Self::Invariant => Ok(self),
            Self::Varying => Err("the sum of the ranks' losses is a Partial loss: to_partial"),
            Self::Replicate => Err(
                "each rank's copy would count once more, as in pytorch issue 58005: only_first counts one copy, \
                     all_reduce_invariant makes a loss that all ranks hold and that counts once",
            ),
        }
    }

    /// The state of the same elements, used in another way: each rank uses its copy in its own way, or values become
    /// terms of a sum.
    pub(super) fn reinterpreted(self, to: Self) -> Result<Self, Hint> {
        match (self, to) {
            (Self::Replicate, Self::Varying) | (Self::Varying, Self::Partial) => Ok(to),
            (Self::Replicate, Self::Partial) => Err("only_first counts one of the copies"),
            _ => Err(
                "only a Replicate value may be taken for a Varying one, and a Varying one for a Partial one",
            ),
        }
    }
}

impl Copies {
    const fn state(self) -> AxisState {
        match self {
            Self::Replicate => AxisState::Replicate,
            Self::Invariant => AxisState::Invariant,
        }
    }
}

impl Reducer {
    /// The state of the values that it reduces.
    const fn input(self) -> AxisState {
        match self {
            Self::Sum | Self::Avg => AxisState::Partial,
            _ => AxisState::Varying,
        }
    }
}

impl Collective {
    /// Whether it is linear: its outputs for the terms of a sum are the terms of its output for the sum.
    pub(super) const fn is_linear(&self) -> bool {
        use Reducer::{Max, Min, Product};
        !matches!(
            self,
            Self::AllReduce { reducer: Product | Min | Max, .. }
                | Self::ReduceScatter { reducer: Product | Min | Max }
                | Self::Reduce { reducer: Product | Min | Max, .. }
        )
    }

    /// The state that it takes and the one that it leaves, along the axis where it goes.
    pub(super) fn states(&self) -> [AxisState; 2] {
        use AxisState::{Invariant, Partial, Replicate, Varying};
        match self {
            Self::AllReduce { reducer, output } => [reducer.input(), output.state()],
            Self::ReduceScatter { reducer } | Self::Reduce { reducer, .. } => {
                [reducer.input(), Varying]
            }
            Self::AllGather { output } | Self::Broadcast { output, .. } => {
                [Varying, output.state()]
            }
            Self::Gather { .. }
            | Self::Scatter { .. }
            | Self::AllToAll { .. }
            | Self::Permute { .. }
            | Self::Send { .. }
            | Self::Receive { .. }
            | Self::Scan => [Varying, Varying],
            Self::Share => [Invariant, Replicate],
            Self::Slice { input } => [input.state(), Varying],
            Self::Place => [Varying, Partial],
            Self::OnlyFirst => [Replicate, Partial],
        }
    }

    /// The advice for a value in another state.
    pub(super) fn hint(&self) -> Hint {
        match self.states()[0] {
            AxisState::Partial => {
                "a Varying value becomes Partial by to_partial, and a Replicate one by only_first"
            }
            AxisState::Varying => {
                "a Replicate value becomes Varying by to_varying, and an Invariant one by slice; sum a Partial one first"
            }
            AxisState::Replicate => "an Invariant value becomes Replicate by share",
            AxisState::Invariant => {
                "an Invariant value is one that all ranks hold and that counts once"
            }
        }
    }
}
