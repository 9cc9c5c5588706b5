//! The next action of a host, and the collective that it issues.

use std::fmt;

use super::exchange::Exchange;
use crate::{DType, FullCopies, Mesh, Phase, Plan, UnitId};

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
    /// Issues the sum of statistics of a unit, over all ranks.
    Statistics {
        /// The unit.
        unit: UnitId,
        /// Their index in the unit.
        index: usize,
        /// The half of the microbatch that they are of.
        phase: Phase,
        /// The statistics: those that the program has given, or zeros.
        from: Source,
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
    /// Issues the reduce-scatter of a unit's sums over its replicate group, each of which gets its
    /// slice.
    ScatterSums(UnitId),
    /// Issues the gather of a unit's updated slices, over its replicate group.
    GatherSlices(UnitId),
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
    /// The sum of statistics of a unit.
    Statistics {
        /// The unit.
        unit: UnitId,
        /// Their index in the unit.
        index: usize,
        /// The half of the microbatch that they are of.
        phase: Phase,
    },
    /// The reduce-scatter of a unit.
    ReduceScatter(UnitId),
    /// The all-reduce of a unit.
    AllReduce(UnitId),
    /// The reduce-scatter of a unit's sums over the replicas.
    ScatterSums(UnitId),
    /// The gather of a unit's slices. It may have been issued after an earlier step.
    GatherSlices(UnitId),
}

/// The gradients that a reduce-scatter takes, or the statistics that are summed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Source {
    /// Those that the program has offered.
    Offered,
    /// The unsharded sums of all microbatches so far; zeros if there are none.
    Accumulated,
    /// Zeros: this rank has no gradients of the unit in the microbatch, or no statistics.
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

/// Shows the word of the operation: see [the table](super#text).
impl fmt::Display for Operation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Gather { unit, phase, .. } => write!(f, "g{unit}{}", prime(*phase)),
            Self::Statistics { unit, index, phase } => {
                write!(f, "s{unit}.{index}{}", prime(*phase))
            }
            Self::ReduceScatter(unit) => write!(f, "r{unit}"),
            Self::AllReduce(unit) => write!(f, "a{unit}"),
            Self::ScatterSums(unit) => write!(f, "c{unit}"),
            Self::GatherSlices(unit) => write!(f, "h{unit}"),
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
            Self::Statistics { unit, index, phase, .. } => {
                write!(f, "s{unit}.{index}{}", prime(*phase))
            }
            Self::Accumulate(unit) => write!(f, "l{unit}"),
            Self::ReduceScatter { unit, .. } => write!(f, "r{unit}"),
            Self::AllReduce(unit) => write!(f, "a{unit}"),
            Self::ScatterSums(unit) => write!(f, "c{unit}"),
            Self::GatherSlices(unit) => write!(f, "h{unit}"),
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

/// The ranks that take part in a collective of a rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Members {
    /// The rank's shard group.
    Shard,
    /// The rank's replicate group.
    Replicate,
    /// All ranks.
    World,
}

impl Members {
    /// Returns the number of them.
    #[must_use]
    pub const fn count(self, mesh: Mesh) -> usize {
        match self {
            Self::Shard => mesh.shard_size(),
            Self::Replicate => mesh.replicate_size(),
            Self::World => mesh.world_size(),
        }
    }
}

/// The kind of a collective.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// An all-gather of a unit's shards.
    Gather,
    /// A reduce-scatter of a unit's gradients.
    ReduceScatter,
    /// An all-reduce of a unit's sums.
    AllReduce,
    /// A reduce-scatter of a unit's sums.
    ScatterSums,
    /// An all-gather of a unit's slices.
    GatherSlices,
    /// An all-reduce of statistics.
    Statistics,
    /// An all-gather of records.
    Exchange(Exchange),
}

/// A collective, as each of its members calls it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Call {
    /// Its kind.
    pub kind: Kind,
    /// Its members.
    pub members: Members,
    /// Dtype of its elements on the wire.
    pub dtype: DType,
    /// Number of elements that a member gives: a shard, a whole unit of gradients, its sums,
    /// statistics, or a record. For a gather of slices it is that of all members together, whose
    /// slices differ in length.
    pub elements: usize,
    /// The unit, if it is of one unit.
    pub unit: Option<UnitId>,
}

impl Output {
    /// Returns the collective that is issued in a step of `plan`, if one is.
    #[must_use]
    pub fn call(self, plan: &Plan) -> Option<Call> {
        Some(match self {
            Self::Gather { unit, .. } => Call {
                kind: Kind::Gather,
                members: match plan.options().full_copies {
                    FullCopies::PerRank => Members::Shard,
                    FullCopies::PerProcess => Members::World,
                },
                dtype: plan.compute_dtype(unit),
                elements: plan.layout(unit).shard_len(),
                unit: Some(unit),
            },
            Self::ReduceScatter { unit, .. } => Call {
                kind: Kind::ReduceScatter,
                members: Members::Shard,
                dtype: plan.options().reduce_dtype,
                elements: plan.layout(unit).trainable().len,
                unit: Some(unit),
            },
            Self::AllReduce(unit) => Call {
                kind: Kind::AllReduce,
                members: Members::Replicate,
                dtype: plan.options().reduce_dtype,
                elements: plan.layout(unit).trainable().shard_len,
                unit: Some(unit),
            },
            Self::ScatterSums(unit) => Call {
                kind: Kind::ScatterSums,
                members: Members::Replicate,
                dtype: plan.options().reduce_dtype,
                elements: plan.layout(unit).trainable().shard_len,
                unit: Some(unit),
            },
            Self::GatherSlices(unit) => Call {
                kind: Kind::GatherSlices,
                members: Members::Replicate,
                dtype: plan.compute_dtype(unit),
                elements: plan.layout(unit).trainable().shard_len,
                unit: Some(unit),
            },
            Self::Statistics { unit, index, phase, .. } => Call {
                kind: Kind::Statistics,
                members: Members::World,
                dtype: DType::F64,
                elements: plan.spec()[unit].statistics[index].elements(phase),
                unit: Some(unit),
            },
            Self::Exchange(exchange) => Call {
                kind: Kind::Exchange(exchange),
                members: Members::World,
                dtype: DType::U64,
                elements: exchange.words(plan.spec()),
                unit: None,
            },
            Self::Hand { .. }
            | Self::Free { .. }
            | Self::Accumulate(_)
            | Self::Fold(_)
            | Self::Await(_)
            | Self::Follow(_) => return None,
        })
    }
}
