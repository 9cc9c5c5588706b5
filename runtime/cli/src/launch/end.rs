//! The end of a process.

use std::fmt;
use std::os::unix::process::ExitStatusExt as _;
use std::process::ExitStatus;

use nix::sys::signal::Signal;

/// End of a process: an exit code, or a signal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum End {
    /// Exit code of a process that ended by itself.
    Code(i32),
    /// Signal that killed the process.
    Signal(i32),
}

impl End {
    pub(super) fn of(status: ExitStatus) -> Self {
        match (status.code(), status.signal()) {
            (Some(code), _) => Self::Code(code),
            (None, signal) => Self::Signal(signal.unwrap_or(Signal::SIGKILL as i32)),
        }
    }

    /// End of a process that disappeared before it could report its end.
    pub(super) const LOST: Self = Self::Signal(Signal::SIGKILL as i32);

    pub(super) fn is_bad(self) -> bool {
        self != Self::Code(0)
    }

    /// Returns the exit code as in shells, which is 128 plus the signal's number for a signal.
    pub(super) fn exit_code(self) -> u8 {
        let code = match self {
            Self::Code(code) => code,
            Self::Signal(signal) => 128_i32.saturating_add(signal),
        };
        // The system keeps only these bits of an exit code.
        u8::try_from(code & 0xff).unwrap_or(u8::MAX)
    }
}

impl fmt::Display for End {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::Code(code) => write!(f, "ended with exit code {code}"),
            Self::Signal(signal) => match Signal::try_from(signal) {
                Ok(known) => write!(f, "was killed by signal {signal} ({known})"),
                Err(_) => write!(f, "was killed by signal {signal}"),
            },
        }
    }
}
