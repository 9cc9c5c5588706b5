//! The table that all ranks get when they disagree: who wanted what.

use std::fmt;
use std::sync::Arc;

use hsdp_sharding::Rank;

use crate::Descriptor;

/// Who wanted what of one operation. Displayed as a line that says what is wrong and a line per member:
///
/// ```text
/// ranks disagree about operation 4 on channel reduce, epoch 0:
///   rank 0: reduce_scatter sum f32 1003 elements, unit 3, reduce, step 7, microbatch 0
///   rank 1: reduce_scatter max f32 1003 elements, unit 3, reduce, step 7, microbatch 0
///   rank 2: not there; last in all_gather f32 96 elements, unit 2, gather, step 7, microbatch 0
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct Mismatch {
    /// What is wrong, in words.
    pub problem: String,
    /// A row for each member, in member order.
    pub rows: Vec<MismatchRow>,
}

/// What one member wanted.
#[derive(Clone, Debug, PartialEq)]
pub struct MismatchRow {
    /// The member.
    pub rank: Rank,
    /// Whether it had come, and with what.
    pub wanted: Wanted,
}

/// What a member wanted when the operation was judged.
#[derive(Clone, Debug, PartialEq)]
pub enum Wanted {
    /// It had arrived, with this.
    Arrived(Arc<Descriptor>),
    /// It had not arrived; what it had issued last, anywhere, if anything.
    Missing(Option<Arc<Descriptor>>),
}

impl fmt::Display for Mismatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:", self.problem)?;
        self.rows.iter().try_for_each(|row| write!(f, "\n  {row}"))
    }
}

impl fmt::Display for MismatchRow {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "rank {}: ", self.rank)?;
        match &self.wanted {
            Wanted::Arrived(descriptor) => write!(f, "{descriptor}"),
            Wanted::Missing(Some(last)) => write!(f, "not there; last in {last}"),
            Wanted::Missing(None) => write!(f, "not there; has issued nothing"),
        }
    }
}
