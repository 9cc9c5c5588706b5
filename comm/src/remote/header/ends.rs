//! How steps and worlds ended, as bytes.

use std::sync::Arc;

use hsdp_sharding::Rank;
use serde::{Deserialize, Serialize};

use super::super::message::MOST_STATEMENT;
use super::{bytes, read};
use crate::mismatch::Mismatch;
use crate::{AbortReason, Descriptor, Error, Mistake, WorldError};

/// The end of the world or of a step.
#[derive(Debug, Serialize, Deserialize)]
pub(in crate::remote) enum EncodedEnd {
    Mismatch(Arc<Mismatch>),
    Step(Rank, u64, Arc<str>, Option<Mistake>),
    World(Rank, u64, Option<Arc<Descriptor>>, AbortReason),
    Work(Arc<Descriptor>, AbortReason),
    /// Of a kind that has no variant here: its text is passed on.
    Other(Rank, Arc<str>),
}

/// How the world, or a step in `epoch`, ended, as bytes. `own` is the rank that says so.
pub(in crate::remote) fn end_bytes(epoch: u64, error: &Error, own: Rank) -> Vec<u8> {
    let encoded = bytes(&(epoch, EncodedEnd::of(error, own)));
    if encoded.len() <= MOST_STATEMENT {
        return encoded;
    }
    // A table of many ranks, or the message of a panic that shows all of a tensor.
    let text: String = error.to_string().chars().take(MOST_CHARACTERS).collect();
    bytes(&(epoch, EncodedEnd::Other(own, format!("{text}...").into())))
}

/// The characters that are left of a text that is too long.
const MOST_CHARACTERS: usize = 16 << 10;

/// The end that these bytes say, and its epoch.
///
/// # Errors
/// The problem with them.
pub(in crate::remote) fn end_of(bytes: &[u8]) -> Result<(u64, Error), String> {
    let (epoch, end) = read::<(u64, EncodedEnd)>(bytes)?;
    Ok((epoch, end.into()))
}

impl EncodedEnd {
    pub(in crate::remote) fn of(error: &Error, own: Rank) -> Self {
        match error.clone() {
            Error::World(WorldError::Mismatch(table)) => Self::Mismatch(table),
            Error::StepAborted { rank, step, reason, mistake } => {
                Self::Step(rank, step, reason, mistake)
            }
            Error::World(WorldError::Aborted { rank, step, operation, reason }) => {
                Self::World(rank, step, operation, reason)
            }
            Error::World(WorldError::WorkFailed { operation, reason }) => {
                Self::Work(operation, reason)
            }
            other => Self::Other(own, other.to_string().into()),
        }
    }
}

impl From<EncodedEnd> for Error {
    fn from(end: EncodedEnd) -> Self {
        let end = match end {
            EncodedEnd::Step(rank, step, reason, mistake) => {
                return Self::StepAborted { rank, step, reason, mistake };
            }
            EncodedEnd::Mismatch(table) => WorldError::Mismatch(table),
            EncodedEnd::World(rank, step, operation, reason) => {
                WorldError::Aborted { rank, step, operation, reason }
            }
            EncodedEnd::Work(operation, reason) => WorldError::WorkFailed { operation, reason },
            EncodedEnd::Other(rank, reason) => {
                let reason = AbortReason::Requested { reason };
                WorldError::Aborted { rank, step: 0, operation: None, reason }
            }
        };
        Self::World(end)
    }
}
