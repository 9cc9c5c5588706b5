//! The exit codes of the program.

/// Result of a command that could be carried out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Outcome {
    /// Success.
    Well,
    /// Checkpoints are broken or differ, or operations of schedules do not complete, and the output
    /// shows it.
    Wrong,
    /// The launched ranks have ended with this exit code.
    #[cfg(unix)]
    Ended(u8),
}
