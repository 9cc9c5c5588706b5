//! The end of a program: its exit code, and one line on stderr if it fails.

use std::error::Error;
use std::fmt::{self, Display};
use std::process::ExitCode;

use hsdp::comm::Finding;
use hsdp::{CommError, FlightRecord, Launched, WorldError, explain};

use crate::command_line::CommandLineError;
use crate::file::FileError;
use crate::lock::LockError;
use crate::memory::TooMuch;
use crate::stderr::{tell, tell_with};

/// Number of the signal.
const SIGTERM: u8 = 15;

/// The reason why a program fails. It determines the exit code.
///
/// `?` converts every error. Errors in a user's options and files ([`CommandLineError`],
/// [`FileError`], a folder to which another run writes, [`TooMuch`], a fault that the world cannot
/// have) become [`Input`](Self::Input). An error that usually means that another rank gave up
/// becomes [`Peer`](Self::Peer). Every other error becomes [`Work`](Self::Work).
#[derive(Debug)]
#[non_exhaustive]
pub enum Failure {
    /// The command line or a file cannot be used. Exit code 2.
    Input(String),
    /// The work failed. Exit code 1.
    Work(String),
    /// A collective failed, most often because another rank gave up. Exit code 1.
    Peer(String),
    /// Results differ from those of a reference computation, or from the plan. Exit code 1.
    Disagreement(String),
    /// A signal has ended the run. Exit code 128 plus the number of the signal, or plus the number
    /// of SIGTERM if the signal arrived at another process.
    Stopped {
        /// The signal, if it arrived at this process.
        signal: Option<u8>,
        /// Number of completed steps.
        steps: u64,
    },
    /// Rank 0 reports the failure and returns its exit code. The exit code is 0 here, because a
    /// launcher that sees another code would end rank 0 before its report.
    Elsewhere,
    /// A failure with an explanation, which is derived from the last operations of the ranks.
    Explained(Box<Self>, String),
}

impl Failure {
    /// Returns a failure of the user's input.
    pub fn input(problem: impl Display) -> Self {
        Self::Input(problem.to_string())
    }

    /// Returns a failure of the work.
    pub fn work(problem: impl Display) -> Self {
        Self::Work(problem.to_string())
    }

    /// Returns the program's exit code.
    #[must_use]
    pub fn exit_code(&self) -> ExitCode {
        match self {
            Self::Input(_) => ExitCode::from(2),
            Self::Elsewhere => ExitCode::SUCCESS,
            Self::Explained(failure, _) => failure.exit_code(),
            Self::Stopped { signal, .. } => ExitCode::from(128 + signal.unwrap_or(SIGTERM)),
            Self::Work(_) | Self::Peer(_) | Self::Disagreement(_) => ExitCode::FAILURE,
        }
    }

    /// Prints the failure to stderr, unless another process does. Returns the exit code.
    pub fn tell(&self, program: &str) -> ExitCode {
        match self {
            Self::Elsewhere => {}
            Self::Explained(failure, lines) => tell_with(program, failure, lines),
            failure => tell(program, failure),
        }
        self.exit_code()
    }

    /// Returns the failure of a program that cannot read its inputs. An error of any type is one of
    /// input there.
    pub(crate) fn in_reading(self) -> Self {
        match self {
            Self::Work(what) | Self::Peer(what) => Self::Input(what),
            other => other,
        }
    }

    /// Adds to the text that training failed.
    pub(crate) fn in_training(self) -> Self {
        let failed = |what| format!("training failed: {what}");
        match self {
            Self::Work(what) => Self::Work(failed(what)),
            Self::Peer(what) => Self::Peer(failed(what)),
            other => other,
        }
    }

    /// Adds an explanation that is derived from the last operations of the ranks. A process that
    /// has its own record alone can compare nothing. It explains a failure only if its rank waits.
    pub(crate) fn explained(self, records: &[FlightRecord]) -> Self {
        let explanation = explain(records);
        let is_empty = explanation.compared == 0 && explanation.finding == Finding::Nothing;
        match self {
            Self::Work(_) | Self::Peer(_) if !is_empty => {
                Self::Explained(Box::new(self), explanation.to_string())
            }
            other => other,
        }
    }

    /// Returns the failure to report in the process of rank 0. [`Elsewhere`](Self::Elsewhere) is an
    /// error there, because no other process reports it.
    pub(crate) fn with_first_rank(self) -> Self {
        match self {
            Self::Elsewhere => Self::work(
                "a rank has left a refusal to rank 0, which has refused nothing: all ranks have \
                 to refuse the same input",
            )
            .in_training(),
            other => other,
        }
    }

    /// Adds the rank that a launcher has given to this process. Used for failures before the ranks
    /// have joined.
    pub(crate) fn with_launched_rank(self) -> Self {
        let launched = Launched::from_env().ok().flatten().filter(|launched| launched.size > 1);
        match (self, launched) {
            (Self::Input(what), Some(launched)) => {
                Self::Input(format!("rank {}: {what}", launched.rank))
            }
            (failure, _) => failure,
        }
    }
}

impl Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Input(what) | Self::Work(what) | Self::Peer(what) => write!(f, "{what}"),
            Self::Disagreement(what) => write!(f, "verification failed: {what}"),
            Self::Elsewhere => f.write_str("rank 0 reports the failure"),
            Self::Stopped { signal: Some(signal), steps } => {
                write!(f, "stopped by signal {signal} after step {steps}")
            }
            Self::Stopped { signal: None, steps } => {
                write!(f, "stopped by a signal to another rank after step {steps}")
            }
            Self::Explained(failure, _) => write!(f, "{failure}"),
        }
    }
}

impl<E: Error + Send + Sync + 'static> From<E> for Failure {
    fn from(error: E) -> Self {
        let text = error.to_string();
        if is_input(&error) {
            return Self::Input(text);
        }
        match cause(&error) {
            Some(CommError::World(WorldError::BadFault { .. })) => Self::Input(text),
            Some(CommError::RankFailed(_)) | None => Self::Work(text),
            Some(_) => Self::Peer(text),
        }
    }
}

fn is_input(error: &(dyn Error + 'static)) -> bool {
    matches!(error.downcast_ref(), Some(CommandLineError::Invalid { .. }))
        || error.is::<FileError>()
        || error.is::<LockError>()
        || error.is::<TooMuch>()
}

/// Returns the collective's error that caused `error`, if there is one.
fn cause<'e>(error: &'e (dyn Error + 'static)) -> Option<&'e CommError> {
    let mut next = Some(error);
    while let Some(error) = next {
        if let Some(hsdp::Error::Comm(cause)) = error.downcast_ref() {
            return Some(cause);
        }
        if let Some(cause) = error.downcast_ref() {
            return Some(cause);
        }
        next = error.source();
    }
    None
}

/// Runs the work of a program that has no ranks. If it fails, prints a line to stderr.
pub fn program(name: &str, work: impl FnOnce() -> Result<ExitCode, Failure>) -> ExitCode {
    work().unwrap_or_else(|failure| failure.tell(name))
}

#[cfg(test)]
mod tests {
    use std::io;

    use hsdp::{Channel, Rank, RankFailure, Tag, WorldOptions};

    use super::*;

    #[derive(Debug, thiserror::Error)]
    #[error("{0}")]
    struct Adapter(#[source] hsdp::Error);

    fn bad_fault() -> hsdp::Error {
        let fault = "rank 9".to_owned();
        let problem = "there are 2 ranks".to_owned();
        hsdp::Error::Comm(WorldError::BadFault { fault, problem }.into())
    }

    #[test]
    fn a_record_that_is_compared_with_none_explains_nothing() {
        let records = hsdp::launch(2, WorldOptions::default(), |world| {
            world.world_group(Channel::User).barrier(Tag::default())?.wait()?;
            Ok::<_, hsdp::Error>(world.flight_record())
        });
        let records: Vec<_> = records.into_iter().map(|it| it.expect("a record")).collect();
        let explained = |records| Failure::work("it is wrong").explained(records);
        for alone in [&records[..1], &[]] {
            let failure = explained(alone);
            assert!(matches!(failure, Failure::Work(_)), "{failure:?}");
        }
        let failure = explained(&records);
        assert!(matches!(failure, Failure::Explained(..)), "{failure:?}");
    }

    #[test]
    fn an_error_is_classified_by_its_causes() {
        assert!(matches!(Failure::from(bad_fault()), Failure::Input(_)));
        assert!(matches!(Failure::from(Adapter(bad_fault())), Failure::Input(_)));
        let carried = io::Error::other(Adapter(bad_fault()));
        assert!(matches!(Failure::from(carried), Failure::Input(_)));
        assert!(matches!(Failure::from(io::Error::other("a cable")), Failure::Work(_)));
        let panicked = RankFailure { rank: Rank::new(1), message: "on purpose".into() };
        let panicked = Adapter(hsdp::Error::from(panicked));
        assert!(matches!(Failure::from(panicked), Failure::Work(_)));
        let invalid = CommandLineError::Invalid { line: "--colour".to_owned() };
        assert!(matches!(Failure::from(invalid), Failure::Input(_)));
    }
}
