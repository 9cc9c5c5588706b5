//! How steps and worlds ended, as bytes.

use std::sync::Arc;
use std::time::Duration;

use hsdp_sharding::Rank;
use serde::{Deserialize, Serialize};

use super::super::message::MOST_STATEMENT;
use super::{Encoded, bytes, read, shared};
use crate::encoding::rank;
use crate::mismatch::{Mismatch, MismatchRow, Wanted};
use crate::{AbortReason, Error};

/// The end of a step, and of which epoch: or the end of the world.
#[derive(Debug, Serialize, Deserialize)]
struct EncodedEnd {
    epoch: u64,
    error: EncodedError,
}

#[derive(Debug, Serialize, Deserialize)]
enum EncodedError {
    Mismatch {
        problem: String,
        rows: Vec<EncodedRow>,
    },
    Step {
        rank: u32,
        step: u64,
        reason: String,
    },
    World {
        rank: u32,
        step: u64,
        operation: Option<Encoded>,
        reason: EncodedReason,
    },
    Work {
        operation: Encoded,
        reason: EncodedReason,
    },
    /// One that no variant is for: its text is passed on.
    Other {
        rank: u32,
        text: String,
    },
}

type EncodedRow = (u32, EncodedWanted);

#[derive(Debug, Serialize, Deserialize)]
enum EncodedWanted {
    Arrived(Encoded),
    Missing(Option<Encoded>),
    Waiting { operation: Encoded, missing: Vec<u32> },
}

#[derive(Debug, Serialize, Deserialize)]
enum EncodedReason {
    Panicked(String),
    Left(Encoded),
    Deadline { awaited: Encoded, deadline: Duration, arrived: Vec<u32>, missing: Vec<u32> },
    Requested(String),
    Gone,
    Unreachable(String),
    Garbled(String),
}

/// How the world, or a step in `epoch`, ended, as bytes. `own` is who says so.
pub(crate) fn end_bytes(epoch: u64, error: &Error, own: Rank) -> Vec<u8> {
    let encoded = bytes(&EncodedEnd { epoch, error: EncodedError::of(error, own) });
    if encoded.len() <= MOST_STATEMENT {
        return encoded;
    }
    // A table of many ranks, or the message of a panic that shows all of a tensor.
    let text: String = error.to_string().chars().take(MOST_CHARACTERS).collect();
    let (rank, text) = (own.get(), format!("{text}..."));
    bytes(&EncodedEnd { epoch, error: EncodedError::Other { rank, text } })
}

/// What is left of a text that is too long.
const MOST_CHARACTERS: usize = 16 << 10;

/// The end that these bytes say, and its epoch.
///
/// # Errors
/// What is wrong with them.
pub(crate) fn end_of(bytes: &[u8]) -> Result<(u64, Error), String> {
    let EncodedEnd { epoch, error } = read(bytes)?;
    Ok((epoch, error.try_into()?))
}

fn encoded_rows(rows: &[MismatchRow]) -> Vec<EncodedRow> {
    rows.iter().map(|row| (row.rank.get(), (&row.wanted).into())).collect()
}

fn decoded_rows(rows: Vec<EncodedRow>) -> Result<Vec<MismatchRow>, String> {
    let row = |(number, wanted): EncodedRow| {
        Ok(MismatchRow { rank: rank(number), wanted: wanted.try_into()? })
    };
    rows.into_iter().map(row).collect()
}

impl EncodedError {
    fn of(error: &Error, own: Rank) -> Self {
        match error {
            Error::CollectiveMismatch { table } => {
                Self::Mismatch { problem: table.problem.clone(), rows: encoded_rows(&table.rows) }
            }
            Error::StepAborted { rank, step, reason } => {
                Self::Step { rank: rank.get(), step: *step, reason: reason.to_string() }
            }
            Error::WorldAborted { rank, step, operation, reason } => Self::World {
                rank: rank.get(),
                step: *step,
                operation: operation.as_deref().map(Encoded::from),
                reason: reason.into(),
            },
            Error::WorkFailed { operation, reason } => {
                Self::Work { operation: (&**operation).into(), reason: reason.into() }
            }
            other => Self::Other { rank: own.get(), text: other.to_string() },
        }
    }
}

impl TryFrom<EncodedError> for Error {
    type Error = String;

    fn try_from(encoded: EncodedError) -> Result<Self, String> {
        Ok(match encoded {
            EncodedError::Mismatch { problem, rows } => {
                let rows = decoded_rows(rows)?;
                Self::CollectiveMismatch { table: Arc::new(Mismatch { problem, rows }) }
            }
            EncodedError::Step { rank: number, step, reason } => {
                Self::StepAborted { rank: rank(number), step, reason: reason.into() }
            }
            EncodedError::World { rank: number, step, operation, reason } => Self::WorldAborted {
                rank: rank(number),
                step,
                operation: operation.map(shared).transpose()?,
                reason: reason.try_into()?,
            },
            EncodedError::Work { operation, reason } => {
                Self::WorkFailed { operation: shared(operation)?, reason: reason.try_into()? }
            }
            EncodedError::Other { rank: number, text } => Self::WorldAborted {
                rank: rank(number),
                step: 0,
                operation: None,
                reason: AbortReason::Requested { reason: text.into() },
            },
        })
    }
}

impl From<&Wanted> for EncodedWanted {
    fn from(wanted: &Wanted) -> Self {
        match wanted {
            Wanted::Arrived(descriptor) => Self::Arrived((&**descriptor).into()),
            Wanted::Missing(last) => Self::Missing(last.as_deref().map(Encoded::from)),
            Wanted::Waiting { operation, missing } => {
                Self::Waiting { operation: (&**operation).into(), missing: numbers(missing) }
            }
        }
    }
}

impl TryFrom<EncodedWanted> for Wanted {
    type Error = String;

    fn try_from(encoded: EncodedWanted) -> Result<Self, String> {
        Ok(match encoded {
            EncodedWanted::Arrived(descriptor) => Self::Arrived(shared(descriptor)?),
            EncodedWanted::Missing(last) => Self::Missing(last.map(shared).transpose()?),
            EncodedWanted::Waiting { operation, missing } => {
                Self::Waiting { operation: shared(operation)?, missing: ranks(missing) }
            }
        })
    }
}

impl From<&AbortReason> for EncodedReason {
    fn from(reason: &AbortReason) -> Self {
        match reason {
            AbortReason::Panicked { message } => Self::Panicked(message.to_string()),
            AbortReason::Left { awaited } => Self::Left((&**awaited).into()),
            AbortReason::Deadline { awaited, deadline, arrived, missing } => Self::Deadline {
                awaited: (&**awaited).into(),
                deadline: *deadline,
                arrived: numbers(arrived),
                missing: numbers(missing),
            },
            AbortReason::Requested { reason } => Self::Requested(reason.to_string()),
            AbortReason::Gone => Self::Gone,
            AbortReason::Unreachable { problem } => Self::Unreachable(problem.to_string()),
            AbortReason::Garbled { problem } => Self::Garbled(problem.to_string()),
        }
    }
}

impl TryFrom<EncodedReason> for AbortReason {
    type Error = String;

    fn try_from(encoded: EncodedReason) -> Result<Self, String> {
        Ok(match encoded {
            EncodedReason::Panicked(message) => Self::Panicked { message: message.into() },
            EncodedReason::Left(awaited) => Self::Left { awaited: shared(awaited)? },
            EncodedReason::Deadline { awaited, deadline, arrived, missing } => Self::Deadline {
                awaited: shared(awaited)?,
                deadline,
                arrived: ranks(arrived),
                missing: ranks(missing),
            },
            EncodedReason::Requested(reason) => Self::Requested { reason: reason.into() },
            EncodedReason::Gone => Self::Gone,
            EncodedReason::Unreachable(problem) => Self::Unreachable { problem: problem.into() },
            EncodedReason::Garbled(problem) => Self::Garbled { problem: problem.into() },
        })
    }
}

fn numbers(ranks: &[Rank]) -> Vec<u32> {
    ranks.iter().map(|rank| rank.get()).collect()
}

fn ranks(numbers: Vec<u32>) -> Vec<Rank> {
    numbers.into_iter().map(rank).collect()
}
