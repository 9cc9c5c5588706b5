//! How a process ended.

use std::fmt;
use std::os::unix::process::ExitStatusExt as _;
use std::process::ExitStatus;

use nix::sys::signal::Signal;

/// By its own will, or by a signal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum End {
    /// With this exit code.
    Code(i32),
    /// Killed by this signal.
    Signal(i32),
}

impl End {
    pub(super) fn of(status: ExitStatus) -> Self {
        match (status.code(), status.signal()) {
            (Some(code), _) => Self::Code(code),
            (None, signal) => Self::Signal(signal.unwrap_or(Signal::SIGKILL as i32)),
        }
    }

    /// Of a process that was gone before it could say so.
    pub(super) const LOST: Self = Self::Signal(Signal::SIGKILL as i32);

    pub(super) fn is_bad(self) -> bool {
        self != Self::Code(0)
    }

    /// As shells have it: 128 and the signal.
    pub(super) fn exit_code(self) -> u8 {
        let code = match self {
            Self::Code(code) => code,
            Self::Signal(signal) => 128_i32.saturating_add(signal),
        };
        // The system keeps no more of a code than this.
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
