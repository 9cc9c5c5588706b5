//! The end of a program: its exit code, and one line if it fails.

use std::fmt::Display;
use std::process::ExitCode;

use crate::command_line::CommandLineError;
use crate::file::FileError;
use crate::memory::TooMuch;
use crate::stderr::tell;
use crate::stdout::PrintError;

/// The reason why a program fails.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Failure {
    /// The command line or a file cannot be used. Exit code 2.
    #[error("{0}")]
    Input(String),
    /// The work failed. Exit code 1.
    #[error("{0}")]
    Work(String),
}

impl Failure {
    /// A failure of the user's input.
    pub fn input(problem: impl Display) -> Self {
        Self::Input(problem.to_string())
    }

    /// A failure of the work.
    pub fn work(problem: impl Display) -> Self {
        Self::Work(problem.to_string())
    }

    /// The exit code of the program.
    #[must_use]
    pub fn exit_code(&self) -> ExitCode {
        match self {
            Self::Input(_) => ExitCode::from(2),
            Self::Work(_) => ExitCode::FAILURE,
        }
    }
}

impl From<CommandLineError> for Failure {
    fn from(error: CommandLineError) -> Self {
        match error {
            CommandLineError::Invalid { line } => Self::Input(line),
            CommandLineError::Print(error) => error.into(),
        }
    }
}

impl From<FileError> for Failure {
    fn from(error: FileError) -> Self {
        Self::input(error)
    }
}

impl From<TooMuch> for Failure {
    fn from(error: TooMuch) -> Self {
        Self::input(error)
    }
}

impl From<PrintError> for Failure {
    fn from(error: PrintError) -> Self {
        Self::work(error)
    }
}

/// A failure of the work, in words.
impl From<String> for Failure {
    fn from(problem: String) -> Self {
        Self::Work(problem)
    }
}

/// Runs the work of a program. If it fails, prints a line to stderr.
pub fn run(program: &str, work: impl FnOnce() -> Result<ExitCode, Failure>) -> ExitCode {
    work().unwrap_or_else(|failure| {
        tell(program, &failure);
        failure.exit_code()
    })
}
