//! Work of all ranks between steps. A rank that fails in it has no step to drop: it notifies the
//! other ranks here. PROTOCOL.md, "Failures between steps".

use std::fmt::Display;
use std::mem;
use std::panic::Location;

use hsdp_comm::{Error as CommError, Mistake, StepFailure, World};

use crate::error::Error;

/// An error with which a rank ends a part of the work.
pub(crate) trait Failure: Display {
    /// Returns the identity of the mistake that this error of `step` reports: of its kind, of the
    /// operation that was called, and of the place in this crate that ran it. It does not depend on
    /// the rank, nor on the program's values.
    fn mistake(&self, step: u64, place: &Location<'_>) -> Mistake;
}

impl Failure for Error {
    fn mistake(&self, step: u64, place: &Location<'_>) -> Mistake {
        match self {
            Self::Comm(error) => error.mistake(step, place),
            Self::Data(error) => {
                Mistake::of(&(mem::discriminant(self), mem::discriminant(error), step, place))
            }
            Self::Gradients(error) => {
                Mistake::of(&(mem::discriminant(self), mem::discriminant(error), step, place))
            }
            _ => Mistake::of(&(mem::discriminant(self), self.operation(), step, place)),
        }
    }
}

impl Failure for CommError {
    fn mistake(&self, step: u64, place: &Location<'_>) -> Mistake {
        Mistake::of(&(mem::discriminant(self), step, place))
    }
}

/// Runs a part of the work. If it fails, the other ranks get its error, unless they have one
/// already, and this rank leaves the epoch. Where this rank has left an epoch by the same mistake
/// of a rank that was ahead, the others get no error. Never waits for another rank.
#[track_caller]
pub(crate) fn run<T, E: Failure>(
    world: &World,
    step: u64,
    part: impl FnOnce() -> Result<T, E>,
) -> Result<T, E> {
    let (epoch, place) = (world.epoch(), Location::caller());
    part().inspect_err(|error| {
        let failure = StepFailure { step, reason: error.to_string() };
        world.announce_mistake(epoch, failure, error.mistake(step, place));
        world.next_epoch();
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::{DataError, GradientError};

    #[test]
    fn mistakes_of_different_kinds_at_one_place_differ() {
        let place = Location::caller();
        let unused = GradientError::UnusedParameters {
            step: 3,
            parameters: Vec::new(),
            causes: String::new(),
        };
        let mistakes = [
            Error::Data(DataError::EmptyEvaluation { step: 3 }),
            Error::Data(DataError::EmptyStep { step: 3, ranks: Vec::new() }),
            Error::Gradients(unused),
            Error::Options { what: "a value".to_owned() },
        ]
        .map(|error| error.mistake(3, place));
        for (at, mistake) in mistakes.iter().enumerate() {
            assert!(!mistakes[..at].contains(mistake), "{at}");
        }
    }
}
