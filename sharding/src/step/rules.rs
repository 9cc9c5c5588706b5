//! Rules of the order of a step, besides the plan, and the ranks that have data.

use std::num::NonZeroU64;

use crate::{Accumulation, Plan, Rank};

/// Rules of the order of a step, besides the plan. All ranks must have the same rules.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Rules {
    /// The order of a rank's operations in different channels.
    pub sequences: Sequences,
    /// The policy for a forward that uses the units in another order than the declared one.
    pub order: UnitOrder,
    /// The policy for steps in which some ranks have data and others have none.
    pub uneven: Uneven,
    /// Time of reductions, where all operations are one sequence.
    pub reductions: ReductionTime,
    /// Whether weights enter the objective.
    pub weights: MicrobatchWeights,
    /// Whether the loss scale is dynamic.
    pub loss_scale: LossScale,
    /// Number of steps between comparisons of replicas; `None` for no comparison.
    pub compare_replicas: Option<NonZeroU64>,
}

/// The order of a rank's operations in different channels.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Sequences {
    /// Gathers, reductions and all-reduces are a sequence each.
    #[default]
    OfEachChannel,
    /// They are one sequence, equal on all ranks, whatever gradients a rank has: so it is where
    /// processes compute on devices.
    One,
}

/// The policy for a forward that uses the units in another order than the declared one. A unit that
/// is needed before its turn makes all units before it wait in memory, in the worst case the whole
/// model.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum UnitOrder {
    /// The order of use becomes the schedule. The first microbatch has no prefetch, and the ranks
    /// agree at the end of its forward. If that forward leaves the declared order, they agree
    /// there, and on each unit that follows before they gather it: then the call that needs a unit
    /// is collective over the world. The model's plan is in that order once the step is finished.
    /// Ids of units, layouts, checkpoints and the order of norms stay as declared. If ranks use the
    /// units in different orders, the declared order stays, with a warning. Later forwards in
    /// another order are correct, and need more memory.
    #[default]
    Follow,
    /// A unit that is used after a unit that is declared behind it is refused, with both names.
    Error,
}

/// Time of reductions, where all operations are one sequence.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum ReductionTime {
    /// Before the next unit of the backward is needed.
    #[default]
    InTurn,
    /// As late as the end of the microbatch: reductions follow all gathers.
    AtTheEnd,
}

/// Whether weights of microbatches enter the objective.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum MicrobatchWeights {
    /// Ranks agree on their size, by a hint or with the first loss. Gradients follow the loss.
    #[default]
    Enter,
    /// Each rank counts once.
    Ignored,
}

/// Whether the loss scale is dynamic.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum LossScale {
    /// It stays.
    #[default]
    Fixed,
    /// It changes with overflows, about which ranks ask each other before they all-reduce.
    Dynamic,
}

impl Rules {
    pub(super) fn is_one_sequence(&self) -> bool {
        self.sequences == Sequences::One
    }

    /// Returns whether ranks ask each other for overflows before they all-reduce.
    pub(super) fn asks_for_overflow(&self, plan: &Plan) -> bool {
        self.loss_scale == LossScale::Dynamic && reduces_once(plan)
    }

    /// Returns whether replicas are compared before a step.
    pub(super) fn compares_replicas(&self, step: u64) -> bool {
        step > 0 && self.compare_replicas.is_some_and(|every| step.is_multiple_of(every.get()))
    }
}

/// Returns whether partials are all-reduced at the end of a step.
pub(super) fn reduces_once(plan: &Plan) -> bool {
    has_replicas(plan) && plan.options().accumulation != Accumulation::Every
}

/// Returns whether partials are all-reduced in each microbatch.
pub(super) fn reduces_every_microbatch(plan: &Plan) -> bool {
    has_replicas(plan) && plan.options().accumulation == Accumulation::Every
}

fn has_replicas(plan: &Plan) -> bool {
    plan.mesh().replicate_size() > 1
}

/// The gathers of an evaluation. It is equal on all ranks, which compare it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum EvaluationKind {
    /// Each unit is gathered once in a batch, for the forward.
    #[default]
    ForwardOnly,
    /// Units are gathered again as in a microbatch of training, for the backward of another model
    /// whose loss depends on the batch.
    WithBackward,
}

/// The policy for steps in which some ranks have data and others have none. It is equal on all
/// ranks, which compare it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Uneven {
    /// An error on all ranks, which lists the ranks with data and the ranks without.
    #[default]
    Error,
    /// The run ends on all ranks when the first rank has no more data. No item counts twice; the
    /// remaining data of the other ranks is not used. A step without a given number of microbatches
    /// ends in the same way.
    Stop,
    /// Ranks without data take part with weight 0 until no rank has data. Gradients are those of
    /// the available data, and every rank updates its shards. Not allowed for an objective in which
    /// weights do not enter.
    ZeroWeight,
}

/// Whether a rank has data.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Input {
    /// The rank has data.
    #[default]
    Ready,
    /// The rank has no more data.
    Exhausted,
}

/// The ranks that have data and the ranks that have none.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Supply {
    /// Ranks with data.
    pub ready: Vec<Rank>,
    /// Ranks without data.
    pub exhausted: Vec<Rank>,
}

/// Whether there is a next step, or a next microbatch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Course {
    /// All ranks go on.
    Goes,
    /// All ranks end here.
    Ends,
}

impl Supply {
    /// Returns the supply of these inputs, in rank order.
    pub fn of(inputs: impl Iterator<Item = Input>) -> Self {
        let mut supply = Self::default();
        for (rank, input) in inputs.enumerate() {
            match input {
                Input::Ready => supply.ready.push(Rank::new(rank)),
                Input::Exhausted => supply.exhausted.push(Rank::new(rank)),
            }
        }
        supply
    }

    /// Returns the course that follows; `None` if the policy refuses the supply.
    pub(super) fn course(&self, policy: Uneven) -> Option<Course> {
        match policy {
            _ if self.exhausted.is_empty() => Some(Course::Goes),
            _ if self.ready.is_empty() => Some(Course::Ends),
            Uneven::Error => None,
            Uneven::Stop => Some(Course::Ends),
            Uneven::ZeroWeight => Some(Course::Goes),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn supply(inputs: [Input; 3]) -> Supply {
        Supply::of(inputs.into_iter())
    }

    #[test]
    fn what_follows_from_who_has_data() {
        use Input::{Exhausted, Ready};
        let course = |inputs| {
            [Uneven::Error, Uneven::Stop, Uneven::ZeroWeight]
                .map(|policy| supply(inputs).course(policy))
        };
        let goes = Some(Course::Goes);
        let ends = Some(Course::Ends);
        assert_eq!(course([Ready, Ready, Ready]), [goes, goes, goes]);
        assert_eq!(course([Ready, Exhausted, Ready]), [None, ends, goes]);
        assert_eq!(course([Exhausted, Exhausted, Exhausted]), [ends, ends, ends]);
    }

    #[test]
    fn ranks_are_named() {
        let supply = supply([Input::Ready, Input::Exhausted, Input::Ready]);
        assert_eq!(supply.ready, [0, 2].map(Rank::new));
        assert_eq!(supply.exhausted, [1].map(Rank::new));
    }
}
