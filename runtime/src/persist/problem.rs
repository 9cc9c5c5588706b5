//! The reason why a checkpoint cannot be written or read.

use std::any::Any;
use std::io;

use crate::error::Error;

/// The reason why a rank's part failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Problem {
    pub(crate) kind: ProblemKind,
    pub(crate) what: String,
}

/// Whether another generation could help.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ProblemKind {
    /// Another generation may be intact.
    Damage,
    /// It was removed while it was read: a newer one may be there.
    Removed,
    /// No other generation would help.
    Lasting,
}

impl ProblemKind {
    /// Returns the word that ranks exchange: the worst is the greatest.
    pub(crate) fn code(self) -> u64 {
        match self {
            Self::Damage => 1,
            Self::Removed => 2,
            Self::Lasting => 3,
        }
    }

    pub(crate) fn of_code(code: u64) -> Self {
        match code {
            1 => Self::Damage,
            2 => Self::Removed,
            _ => Self::Lasting,
        }
    }
}

impl From<hsdp_checkpoint::Error> for Problem {
    fn from(error: hsdp_checkpoint::Error) -> Self {
        let kind = match &error {
            hsdp_checkpoint::Error::NoSuchStep { .. } | hsdp_checkpoint::Error::Removed { .. } => {
                ProblemKind::Removed
            }
            error if error.is_damage() => ProblemKind::Damage,
            _ => ProblemKind::Lasting,
        };
        Self { kind, what: error.to_string() }
    }
}

impl From<Error> for Problem {
    fn from(error: Error) -> Self {
        Self { kind: ProblemKind::Lasting, what: error.to_string() }
    }
}

impl Problem {
    pub(crate) fn lasting(what: String) -> Self {
        Self { kind: ProblemKind::Lasting, what }
    }

    pub(crate) fn panicked(panic: &(dyn Any + Send)) -> Self {
        Self { kind: ProblemKind::Lasting, what: format!("it panicked: {}", message(panic)) }
    }

    pub(crate) fn no_thread(error: &io::Error) -> Self {
        Self { kind: ProblemKind::Lasting, what: format!("no thread could be started: {error}") }
    }
}

/// Returns the text of a panic, if it has one.
fn message(panic: &(dyn Any + Send)) -> &str {
    let text = panic.downcast_ref::<&str>().copied();
    text.or_else(|| panic.downcast_ref::<String>().map(String::as_str)).unwrap_or("no message")
}
