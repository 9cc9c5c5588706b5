//! The options in a checkpoint that an optimizer takes.

use serde_json::Value;

/// Name of the learning rate in a checkpoint, whatever an optimizer calls it.
pub(crate) const RATE: &str = "learning_rate";

/// The options in a checkpoint that an optimizer takes.
#[derive(Clone, Copy, Debug)]
pub(crate) enum SavedOptions<'a> {
    /// The optimizer's own options.
    Own,
    /// The learning rates. All other options are equal.
    Rates { now: &'a Value },
    /// All options.
    All { now: &'a Value, made_with: &'a Value },
}

impl SavedOptions<'_> {
    /// Returns those of one optimizer of a pair.
    pub(crate) fn part(self, index: usize) -> Self {
        match self {
            Self::Own => Self::Own,
            Self::Rates { now } => Self::Rates { now: &now[index] },
            Self::All { now, made_with } => {
                Self::All { now: &now[index], made_with: &made_with[index] }
            }
        }
    }
}
