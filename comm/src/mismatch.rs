//! The table that all ranks get when they disagree: the call of each rank.

use std::fmt;
use std::sync::Arc;

use hsdp_sharding::Rank;
use serde::{Deserialize, Serialize};

use crate::{Descriptor, ModelLabel, Part};

/// The calls of all members in one operation, or the operations in which ranks wait for each other.
/// Displayed as a line that names the problem, and a line for each member:
///
/// ```text
/// ranks disagree about operation 4 on channel reduce, epoch 0:
///   rank 0: reduce_scatter sum f32 1003 elements, unit 3, reduce, step 7, microbatch 0
///   rank 1: reduce_scatter max f32 1003 elements, unit 3, reduce, step 7, microbatch 0
///   rank 2: not there; last in all_gather f32 96 elements, unit 2, gather, step 7, microbatch 0
///
/// ranks wait for each other in different operations:
///   rank 0: waits for ranks [1] in barrier, user, step 7, microbatch 0 (operation 3 on channel user, epoch 0)
///   rank 1: waits for ranks [0] in all_gather u64 8 elements, header, step 8, microbatch 0 (operation 9 on channel control, epoch 0)
/// ```
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Mismatch {
    /// The problem, in words.
    pub problem: String,
    /// A row for each member, in member order; or a row for each rank that waits, in rank order.
    pub rows: Vec<MismatchRow>,
}

/// The state of one member.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct MismatchRow {
    /// The member.
    pub rank: Rank,
    /// Its call, if it had arrived.
    pub wanted: Wanted,
}

/// The state of a member when the mismatch was found.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Wanted {
    /// It had arrived with this call.
    Arrived(Arc<Descriptor>),
    /// It had not arrived. This is the last call that it had issued, in any group, if it had issued
    /// one.
    Missing(Option<Arc<Descriptor>>),
    /// It waits in another operation than the others do, until the missing members of that
    /// operation arrive.
    Waiting {
        /// The operation.
        operation: Arc<Descriptor>,
        /// The members that are missing there.
        missing: Vec<Rank>,
    },
}

impl fmt::Display for Mismatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:", self.problem)?;
        match self.is_ambiguous() {
            false => self.rows.iter().try_for_each(|row| write!(f, "\n  {row}")),
            true => self.rows.iter().try_for_each(|row| write!(f, "\n  {row:#}")),
        }
    }
}

impl Mismatch {
    /// Whether rows need the number of the first model of a world, which is left out otherwise:
    /// they are of several models or parts, or differ in having a model.
    fn is_ambiguous(&self) -> bool {
        let mut objects = self.rows.iter().filter_map(MismatchRow::object);
        let first = objects.next();
        let mut arrived = self.rows.iter().filter_map(MismatchRow::arrived);
        let example = arrived.next();
        let is_alike = |it: &Arc<Descriptor>| {
            example.is_some_and(|example| {
                it.tag.model != example.tag.model && it.to_string() == example.to_string()
            })
        };
        objects.any(|object| Some(object) != first) || arrived.any(is_alike)
    }
}

impl MismatchRow {
    /// The row's call, if the rank has issued the operation.
    fn arrived(&self) -> Option<&Arc<Descriptor>> {
        match &self.wanted {
            Wanted::Arrived(operation) => Some(operation),
            _ => None,
        }
    }

    /// The model and its part in the row's operation, if that is an operation of a model.
    fn object(&self) -> Option<(ModelLabel, Option<Part>)> {
        let operation = match &self.wanted {
            Wanted::Arrived(operation) | Wanted::Waiting { operation, .. } => Some(operation),
            Wanted::Missing(last) => last.as_ref(),
        };
        operation.and_then(|it| Some((it.tag.model?, it.tag.part)))
    }
}

impl fmt::Display for MismatchRow {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "rank {}: ", self.rank)?;
        match &self.wanted {
            Wanted::Arrived(descriptor) => descriptor.fmt(f),
            Wanted::Missing(Some(last)) => {
                f.write_str("not there; last in ")?;
                last.fmt(f)
            }
            Wanted::Missing(None) => write!(f, "not there; has issued nothing"),
            Wanted::Waiting { operation, missing } => {
                let missing: Vec<_> = missing.iter().map(|rank| rank.index()).collect();
                write!(f, "waits for ranks {missing:?} in ")?;
                operation.fmt(f)?;
                write!(f, " ({})", operation.place())
            }
        }
    }
}
