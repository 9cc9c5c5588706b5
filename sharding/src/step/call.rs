//! The collectives that outputs issue: with whom, of what, and how much.

use super::{Exchange, Output};
use crate::{DType, FullCopies, Mesh, Plan, UnitId};

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
    /// Number of elements that a member gives: a shard, a whole unit of gradients, its sums, or a
    /// record.
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
            Self::Exchange(exchange) => Call {
                kind: Kind::Exchange(exchange),
                members: Members::World,
                dtype: DType::U64,
                elements: exchange.words(plan.spec().params().count()),
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

/// Numbers of u64 in the record of a rank.
impl Exchange {
    /// In a step header.
    pub const HEADER: usize = 9;
    /// In a microbatch header, and in that of a batch.
    pub const MICROBATCH: usize = 2;
    /// In the record of a rank's next unit.
    pub const UNIT: usize = 3;
    /// In an interim record.
    pub const INTERIM: usize = 4;
    /// In a statement, without the bits of its parameters.
    pub const STATEMENT: usize = 9;
    /// In the record of a mean.
    pub const MEAN: usize = 5;

    /// Returns the number of u64 in the record of a rank, whose model has so many parameters.
    #[must_use]
    pub const fn words(self, parameters: usize) -> usize {
        match self {
            Self::Headers => Self::HEADER,
            Self::Samples | Self::Replicas | Self::Weights => 1,
            Self::Microbatch(_) | Self::Batch(_) => Self::MICROBATCH,
            Self::Unit { .. } => Self::UNIT,
            Self::Interim { .. } => Self::INTERIM,
            Self::Statement => Self::STATEMENT + parameters.div_ceil(u64::BITS as usize),
            Self::Mean => Self::MEAN,
        }
    }
}
