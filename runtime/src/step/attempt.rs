//! An attempt at a step or at an evaluation: which one a caller means, and how its calls have
//! ended.

use hsdp_comm::Error as CommError;

use crate::error::{DataError, Error};

/// A step or an evaluation that was begun: the step's number, the number of the attempt, and the
/// epoch of the world.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Opened {
    pub(crate) step: u64,
    pub(crate) attempt: u64,
    pub(crate) epoch: u64,
}

/// The microbatch, the attempt and the step that a caller means.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Token {
    pub(crate) opened: Opened,
    pub(crate) microbatch: usize,
}

/// An attempt that is under way.
#[derive(Debug)]
pub(crate) struct Attempt {
    pub(crate) opened: Opened,
    /// The first error of this rank in it, for telling the others why it ended.
    failure: Option<String>,
    state: Wholeness,
}

/// How the calls of an attempt have ended so far.
#[derive(Debug)]
enum Wholeness {
    /// Each has done all of its work, or refused its arguments.
    Whole,
    /// A call is under way, or has failed or panicked in the middle of its work.
    Broken,
    /// All ranks discard the attempt, for this reason, which every later call has too.
    Discarded(CommError),
}

impl Attempt {
    pub(crate) fn new(opened: Opened) -> Self {
        Self { opened, failure: None, state: Wholeness::Whole }
    }

    /// Returns the first error of this rank.
    pub(crate) fn failure(&self) -> Option<&str> {
        self.failure.as_deref()
    }

    /// Notes an error of the caller as the reason for which the attempt will end, unless there is
    /// one.
    pub(crate) fn note_failure(&mut self, reason: impl FnOnce() -> String) {
        self.failure.get_or_insert_with(reason);
    }

    /// Notes that a call begins. Where it panics, and a caller catches that, the attempt stays
    /// broken.
    ///
    /// # Errors
    /// The error of an earlier call, after which no other one can go on.
    pub(crate) fn enter(&mut self) -> Result<(), Stopped> {
        match &self.state {
            Wholeness::Whole => {
                self.state = Wholeness::Broken;
                Ok(())
            }
            Wholeness::Broken => {
                let caught = || "a call panicked, and the panic was caught".to_owned();
                Err(Stopped::Broken(self.failure.clone().unwrap_or_else(caught)))
            }
            Wholeness::Discarded(error) => Err(Stopped::Discarded(error.clone())),
        }
    }

    /// Notes how the call has ended that was entered last.
    pub(crate) fn leave<T>(&mut self, result: &Result<T, Error>) {
        if let Err(error) = result {
            self.note_failure(|| error.to_string());
        }
        self.state = match result {
            Err(Error::Comm(error)) if ends_all_calls(error) => Wholeness::Discarded(error.clone()),
            Err(
                Error::Misuse { .. }
                | Error::Size { .. }
                | Error::Data(DataError::UnevenInputs { .. } | DataError::EndOfData { .. }),
            )
            | Ok(_) => Wholeness::Whole,
            Err(_) => Wholeness::Broken,
        };
    }
}

/// Whether every later call of the attempt has this error too.
fn ends_all_calls(error: &CommError) -> bool {
    error.is_fatal() || matches!(error, CommError::StepAborted { .. })
}

/// The reason why no call of an attempt can go on.
#[derive(Debug)]
pub(crate) enum Stopped {
    /// An earlier call failed in the middle of its work, by this error.
    Broken(String),
    /// All ranks discard the attempt.
    Discarded(CommError),
}
