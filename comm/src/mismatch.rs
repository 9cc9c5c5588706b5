//! The table that all ranks get when they disagree: who wanted what.

use std::fmt;
use std::sync::Arc;

use hsdp_sharding::Rank;

use crate::Descriptor;

/// Who wanted what of one operation, or in which operations ranks wait for each other. Displayed as a line that says what is wrong and a line per member:
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
#[derive(Clone, Debug, PartialEq)]
pub struct Mismatch {
    /// What is wrong, in words.
    pub problem: String,
    /// A row for each member, in member order; or one for each rank that waits, in rank order.
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
    /// It waits in another operation than the others do, and does not go on before those who are missing there come.
    Waiting {
        /// The operation.
        operation: Arc<Descriptor>,
        /// Who is missing there.
        missing: Vec<Rank>,
    },
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
            Wanted::Waiting { operation, missing } => {
                let missing: Vec<_> = missing.iter().map(|rank| rank.index()).collect();
                write!(f, "waits for ranks {missing:?} in {operation} ({})", operation.place())
            }
        }
    }
}
