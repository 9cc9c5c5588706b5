//! The same rules as in `rules`, for states that are known at run time.

use super::state::AxisState;
use crate::collective::{Collective, Copies, Reducer};

/// What to do instead.
pub(super) type Hint = &'static str;

const SUM_FIRST: Hint = "of a Partial value make the sum first, by all_reduce or reduce_scatter";
const SHARE: Hint =
    "an Invariant value becomes Replicate by share; of a Partial one make the sum first";
const ADD: Hint = "a Replicate value is added to a Partial one as only_first, a Varying one as to_partial; an Invariant one \
                   becomes Replicate by share";

impl AxisState {
    /// What comes out of a function of one value.
    pub(super) fn mapped(self) -> Result<Self, Hint> {
        if self == Self::Partial { Err(SUM_FIRST) } else { Ok(self) }
    }

    /// What comes out of a function of two values.
    pub(super) fn joined(self, other: Self) -> Result<Self, Hint> {
        match (self, other) {
            (Self::Partial, _) | (_, Self::Partial) => Err(SHARE),
            (one, other) if one == other => Ok(one),
            (Self::Invariant, _) | (_, Self::Invariant) => Err(SHARE),
            _ => Ok(Self::Varying),
        }
    }

    /// What comes out of a function that is linear in two values together.
    pub(super) fn added(self, other: Self) -> Result<Self, Hint> {
        match (self, other) {
            (Self::Partial, Self::Partial) => Ok(Self::Partial),
            (one, other) => one.joined(other).map_err(|_| ADD),
        }
    }

    /// What comes out of a function that is linear in each of two values.
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
                "each rank's copy would count once more, as in pytorch issue 58005: only_first counts one, \
                     all_reduce_invariant makes a loss that all hold and that counts once",
            ),
        }
    }

    /// What becomes of it without any change of the elements: each copy goes its own way, or is a term of a sum.
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
    /// The state of what it reduces.
    const fn input(self) -> AxisState {
        match self {
            Self::Sum | Self::Avg => AxisState::Partial,
            _ => AxisState::Varying,
        }
    }
}

impl Collective {
    /// Whether what it makes of terms are terms of what it makes of their sum.
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

    /// What to do with a value in another state.
    pub(super) fn hint(&self) -> Hint {
        match self.states()[0] {
            AxisState::Partial => {
                "it makes the sum of Partial terms: a Varying value is one by to_partial, and a Replicate one by only_first"
            }
            AxisState::Varying => {
                "it takes what each rank has of its own: a Replicate value is Varying by to_varying, an Invariant one by \
                 slice, and of a Partial one make the sum first"
            }
            AxisState::Replicate => {
                "it takes what all ranks hold, each for itself: an Invariant value becomes Replicate by share"
            }
            AxisState::Invariant => "it takes what all ranks hold and what counts once",
        }
    }
}
