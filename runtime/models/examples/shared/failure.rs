//! How the program ends with a failure: a line on stderr, for a failed run also the operations that led to it, and an exit
//! code.

use std::fmt;
use std::process::ExitCode;

use hsdp::{CommError, FlightRecord, explain};
use hsdp_program::command_line::CommandLineError;
use hsdp_program::stdout::PrintError;
use hsdp_program::{tell, tell_with};

/// The number of the signal.
const SIGTERM: u8 = 15;

/// The reason for which the program fails.
#[derive(Debug)]
pub(crate) enum Failure {
    /// The options or the input cannot be used. Exit code 2.
    Input(String),
    /// The same, reported by rank 0 with its exit code. Exit code 0 here: with any other, a launcher would end rank 0 before its
    /// report.
    Elsewhere,
    /// The report cannot be printed. Exit code 1.
    Output(PrintError),
    /// Training failed. Exit code 1.
    Training(String),
    /// A collective failed, most often because another rank gave up. Exit code 1.
    Peer(String),
    /// A signal has ended the run after `steps` steps. Exit code 128 plus the signal's number; SIGTERM's number if the signal
    /// came to another process.
    Stopped { signal: Option<u8>, steps: usize },
    /// The sharded run differs from its unsharded twin, or from its plan. Exit code 1.
    Disagreement(String),
    /// A failure, with the lines of an explanation from the ranks' last operations.
    Explained(Box<Self>, String),
}

impl Failure {
    pub(crate) fn input(what: impl fmt::Display) -> Self {
        Self::Input(what.to_string())
    }

    pub(crate) fn training<E: fmt::Display>(what: E) -> Self {
        Self::Training(what.to_string())
    }

    /// The same failure, with an explanation from the ranks' last operations.
    pub(crate) fn explained(self, records: &[FlightRecord]) -> Self {
        match self {
            Self::Training(_) | Self::Peer(_) if !records.is_empty() => {
                Self::Explained(Box::new(self), explain(records).to_string())
            }
            other => other,
        }
    }

    /// Prints the failure of a program, unless another process does. Returns the exit code.
    pub(crate) fn tell(&self, program: &str) -> ExitCode {
        match self {
            Self::Elsewhere => {}
            Self::Explained(failure, lines) => tell_with(program, failure, lines),
            failure => tell(program, failure),
        }
        self.exit_code()
    }

    pub(crate) fn exit_code(&self) -> ExitCode {
        match self {
            Self::Input(_) => ExitCode::from(2),
            Self::Elsewhere => ExitCode::SUCCESS,
            Self::Explained(failure, _) => failure.exit_code(),
            Self::Stopped { signal, .. } => ExitCode::from(128 + signal.unwrap_or(SIGTERM)),
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
            Self::Elsewhere => f.write_str("rank 0 reports the failure"),
            Self::Training(what) | Self::Peer(what) => write!(f, "training failed: {what}"),
            Self::Stopped { signal: Some(signal), steps } => {
                write!(f, "stopped by signal {signal} after step {steps}")
            }
            Self::Stopped { signal: None, steps } => {
                write!(f, "stopped by a signal to another rank after step {steps}")
            }
            Self::Disagreement(what) => write!(f, "verification failed: {what}"),
            Self::Explained(failure, _) => write!(f, "{failure}"),
        }
    }
}

impl From<CommandLineError> for Failure {
    fn from(error: CommandLineError) -> Self {
        match error {
            CommandLineError::Print(error) => Self::Output(error),
            invalid => Self::input(invalid),
        }
    }
}

/// The failure of a rank with this error.
impl From<hsdp_candle::Error> for Failure {
    fn from(error: hsdp_candle::Error) -> Self {
        match error {
            // A fault that the world or the model cannot have comes from the command line.
            hsdp_candle::Error::Runtime(hsdp::Error::Comm(bad @ CommError::BadFault { .. })) => {
                Self::Input(bad.to_string())
            }
            hsdp_candle::Error::Runtime(hsdp::Error::Comm(echo)) => Self::Peer(echo.to_string()),
            error => Self::Training(error.to_string()),
        }
    }
}

impl From<hsdp::Error> for Failure {
    fn from(error: hsdp::Error) -> Self {
        hsdp_candle::Error::from(error).into()
    }
}

impl From<candle_core::Error> for Failure {
    fn from(error: candle_core::Error) -> Self {
        hsdp_candle::Error::from(error).into()
    }
}
