//! How the program ends with a failure: a line on stderr and an exit code.

use std::fmt;
use std::process::ExitCode;

use hsdp_program::stdout::PrintError;

/// The reason for which the program fails.
#[derive(Debug)]
pub(crate) enum Failure {
    /// The options cannot be used. Exit code 2.
    Input(String),
    /// The report cannot be printed. Exit code 1.
    Output(PrintError),
    /// Training failed. Exit code 1.
    Training(String),
    /// A collective failed, most often because another rank gave up. Exit code 1.
    Peer(String),
    /// The ranks differ from one rank with the whole batch. Exit code 1.
    Disagreement(String),
}

impl Failure {
    pub(crate) fn input(what: impl fmt::Display) -> Self {
        Self::Input(what.to_string())
    }

    pub(crate) fn training(what: impl fmt::Display) -> Self {
        Self::Training(what.to_string())
    }

    pub(crate) fn exit_code(&self) -> ExitCode {
        match self {
            Self::Input(_) => ExitCode::from(2),
            Self::Output(_) | Self::Training(_) | Self::Peer(_) | Self::Disagreement(_) => {
                ExitCode::FAILURE
            }
        }
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Input(what) => write!(f, "{what}"),
            Self::Output(error) => write!(f, "{error}"),
            Self::Training(what) | Self::Peer(what) => write!(f, "training failed: {what}"),
            Self::Disagreement(what) => write!(f, "verification failed: {what}"),
        }
    }
}

impl From<hsdp_candle::Error> for Failure {
    fn from(error: hsdp_candle::Error) -> Self {
        match error {
            hsdp_candle::Error::Runtime(hsdp::Error::Comm(echo)) => Self::Peer(echo.to_string()),
            error => Self::Training(error.to_string()),
        }
    }
}

impl From<candle_core::Error> for Failure {
    fn from(error: candle_core::Error) -> Self {
        hsdp_candle::Error::from(error).into()
    }
}
