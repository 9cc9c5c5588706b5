//! The verdict of the judge, and its words.

use std::fmt;

use hsdp_sharding::Rank;

use super::ranks::{listed, ranges};

/// The most different calls of a mismatch that are shown.
const SHOWN: usize = 4;

/// Whether all operations of some schedules complete. Displayed as one line: `ok`, or `mismatch: ...`, or `deadlock: ...`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// Every operation that is issued completes. Of a world that was cut off: no rank waits in vain.
    Ok,
    /// Members issue different calls for one operation.
    Mismatch(Mismatch),
    /// Some operations never complete.
    Deadlock(Deadlock),
}

/// An operation for which members issue different calls. All that it needs besides completes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mismatch {
    /// The operation, such as `operation #4 of shard0`: the fifth on that communicator.
    pub operation: String,
    /// The calls, in the order of their first ranks, each with its ranks in ascending order.
    pub calls: Vec<(Call, Vec<Rank>)>,
}

/// Kind, dtype and number of elements of an operation.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Call {
    /// The kind of operation.
    pub op: String,
    /// The dtype of its elements; empty if it has none.
    pub dtype: String,
    /// The number of elements.
    pub count: u64,
}

/// Ranks that never come to their end.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Deadlock {
    /// The ranks whose host waits forever, or whose operations never complete; in ascending order.
    pub ranks: Vec<Rank>,
    /// The operations of the shortest explanation, such as `all_gather #3 of shard0`. Each waits for the next one, and the last for the
    /// first, or for a rank that never issues it.
    pub operations: Vec<String>,
    /// The shortest explanation, in words.
    pub explanation: String,
}

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Ok => f.write_str("ok"),
            Self::Mismatch(Mismatch { operation, calls }) => {
                write!(f, "mismatch: {operation}: ")?;
                for (index, (call, ranks)) in calls.iter().take(SHOWN).enumerate() {
                    let verb = if ranks.len() == 1 { "issues" } else { "issue" };
                    let comma = if index == 0 { "" } else { ", " };
                    write!(f, "{comma}{} {verb} {call}", listed(ranks))?;
                }
                match calls.len().checked_sub(SHOWN + 1) {
                    Some(more) => write!(f, ", and {} other calls", more + 1),
                    None => Ok(()),
                }
            }
            Self::Deadlock(Deadlock { ranks, explanation, .. }) => match &**ranks {
                [rank] => write!(f, "deadlock: rank {rank} is stuck: {explanation}"),
                ranks => write!(f, "deadlock: ranks {} are stuck: {explanation}", ranges(ranks)),
            },
        }
    }
}

/// Displayed as `all_gather f32 1000`.
impl fmt::Display for Call {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { op, dtype, count } = self;
        match &**dtype {
            "" if *count == 0 => f.write_str(op),
            "" => write!(f, "{op} {count}"),
            dtype => write!(f, "{op} {dtype} {count}"),
        }
    }
}
