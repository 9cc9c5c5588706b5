//! What a host does next.

use std::fmt;

use super::{Conclusion, Input, UnitUse};
use crate::{Phase, UnitId};

/// The next action of a host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Output {
    /// Exchanges records with all ranks. Nothing follows before its conclusion.
    Exchange(Exchange),
    /// Issues the gather of a unit, over its shard group.
    Gather {
        /// Place in the microbatch's sequence of gathers.
        place: usize,
        /// The unit.
        unit: UnitId,
        /// The half of the microbatch that it is for.
        phase: Phase,
    },
    /// Hands a gathered unit to the program.
    Hand {
        /// Place of its gather.
        place: usize,
        /// The unit.
        unit: UnitId,
        /// The half of the microbatch that it was gathered for.
        phase: Phase,
    },
    /// Drops a gathered unit, which the program has not used.
    Free {
        /// Place of its gather.
        place: usize,
        /// The unit.
        unit: UnitId,
        /// The half of the microbatch that it was gathered for.
        phase: Phase,
    },
    /// Adds the unit's gradients to the unsharded sums of the microbatches before.
    Accumulate(UnitId),
    /// Issues the reduce-scatter of a unit, over its shard group.
    ReduceScatter {
        /// The unit.
        unit: UnitId,
        /// The gradients.
        from: Source,
        /// The sums that they are added to.
        into: Target,
    },
    /// Issues the all-reduce of a unit's sums, over its replicate group.
    AllReduce(UnitId),
    /// Adds the all-reduced sums of a microbatch to the unit's partial.
    Fold(UnitId),
    /// Waits for the result of an operation. Nothing follows before it is
    /// [done](super::StepMachine::done).
    Await(Operation),
    /// Waits for an operation whose result the next operation on the same buffer works on. Nothing
    /// follows before it is [done](super::StepMachine::done), at once where the buffer itself keeps
    /// the order, as a device's stream does.
    Follow(Operation),
}

/// An operation that was issued in the microbatch, or is under way on a unit's sums.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Operation {
    /// The gather at a place.
    Gather {
        /// Place in the microbatch's sequence of gathers.
        place: usize,
        /// The unit.
        unit: UnitId,
        /// The half of the microbatch that it is for.
        phase: Phase,
    },
    /// The reduce-scatter of a unit.
    ReduceScatter(UnitId),
    /// The all-reduce of a unit.
    AllReduce(UnitId),
}

/// The gradients that a reduce-scatter takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Source {
    /// Those that the program has offered.
    Offered,
    /// The unsharded sums of all microbatches so far; zeros if there are none.
    Accumulated,
    /// Zeros: this rank has no gradients of the unit in the microbatch.
    Zeros,
}

/// The sums that a reduce-scatter adds to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Target {
    /// The unit's partial, which begins with it.
    NewPartial,
    /// The unit's partial.
    Partial,
    /// Sums of this microbatch alone.
    Microbatch,
}

/// An exchange of records between all ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Exchange {
    /// Step headers.
    Headers,
    /// Digests of samples, if a header names some.
    Samples,
    /// Digests of the shards of replicas.
    Replicas,
    /// Whether the rank has another microbatch.
    Microbatch(Input),
    /// The unit that the rank needs next, in a forward that finds the order.
    Unit {
        /// Next operation of the rank.
        says: UnitUse,
        /// Number of units that it has used before.
        place: usize,
    },
    /// The weights of the first microbatch.
    Weights,
    /// Overflows of partials.
    Interim {
        /// Number of all-reduces that the rank has issued.
        all_reduces: usize,
    },
    /// The end of the step.
    Statement,
    /// Whether the rank has another batch of an evaluation.
    Batch(Input),
    /// Sums of an evaluation.
    Mean,
}

impl Exchange {
    /// Returns whether the conclusion is one of this exchange.
    pub(super) fn has(self, conclusion: &Conclusion) -> bool {
        match self {
            Self::Headers => matches!(conclusion, Conclusion::Headers(_)),
            Self::Microbatch(_) | Self::Batch(_) => matches!(conclusion, Conclusion::Supply(_)),
            Self::Unit { .. } => matches!(conclusion, Conclusion::Unit(..)),
            Self::Interim { .. } => matches!(conclusion, Conclusion::Overflow(_)),
            _ => *conclusion == Conclusion::Agreed,
        }
    }
}

/// Shows the word of the exchange: see [the table](super#text).
impl fmt::Display for Exchange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Headers => f.write_str("<headers>"),
            Self::Samples => f.write_str("<samples>"),
            Self::Replicas => f.write_str("<replicas>"),
            Self::Microbatch(Input::Ready) => f.write_str("<microbatch>"),
            Self::Microbatch(Input::Exhausted) => f.write_str("<no microbatch>"),
            Self::Unit { says: UnitUse::Needs(unit), .. } => write!(f, "<unit {unit}>"),
            Self::Unit { says: UnitUse::Ends, .. } => f.write_str("<no unit>"),
            Self::Unit { says: UnitUse::Follows, .. } => f.write_str("<any unit>"),
            Self::Weights => f.write_str("<weights>"),
            Self::Interim { .. } => f.write_str("<interim>"),
            Self::Statement => f.write_str("<statement>"),
            Self::Batch(Input::Ready) => f.write_str("<batch>"),
            Self::Batch(Input::Exhausted) => f.write_str("<no batch>"),
            Self::Mean => f.write_str("<mean>"),
        }
    }
}

/// Shows the word of the operation: see [the table](super#text).
impl fmt::Display for Operation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Gather { unit, phase, .. } => write!(f, "g{unit}{}", prime(*phase)),
            Self::ReduceScatter(unit) => write!(f, "r{unit}"),
            Self::AllReduce(unit) => write!(f, "a{unit}"),
        }
    }
}

/// Shows the word of the output: see [the table](super#text).
impl fmt::Display for Output {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Exchange(exchange) => exchange.fmt(f),
            Self::Gather { unit, phase, .. } => write!(f, "g{unit}{}", prime(*phase)),
            Self::Hand { unit, phase, .. } => write!(f, "u{unit}{}", prime(*phase)),
            Self::Free { unit, phase, .. } => write!(f, "d{unit}{}", prime(*phase)),
            Self::Accumulate(unit) => write!(f, "l{unit}"),
            Self::ReduceScatter { unit, .. } => write!(f, "r{unit}"),
            Self::AllReduce(unit) => write!(f, "a{unit}"),
            Self::Fold(unit) => write!(f, "f{unit}"),
            Self::Await(operation) | Self::Follow(operation) => write!(f, "({operation})"),
        }
    }
}

fn prime(phase: Phase) -> &'static str {
    match phase {
        Phase::Forward => "",
        Phase::Backward => "'",
    }
}
