//! What of a model on a device is kept in host memory.

use std::fmt;
use std::str::FromStr;

use crate::Error;

/// What of a model that lies on a device is kept in the memory of the host, where units are then updated.
///
/// Displayed and parsed as `none`, `optimizer`, `all`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Offload {
    /// Nothing: all of it lies on the device.
    #[default]
    None,
    /// The state of the optimizer. Gradients and parameters go to the host for an update, and parameters back.
    Optimizer,
    /// That, and the f32 master shards: on the device is what gathers read. Gradients go to the host for an update, and parameters back in
    /// the compute dtype.
    All,
}

impl Offload {
    /// Every choice.
    pub const EVERY: [Self; 3] = [Self::None, Self::Optimizer, Self::All];

    /// Its name on a command line.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Optimizer => "optimizer",
            Self::All => "all",
        }
    }
}

impl fmt::Display for Offload {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for Offload {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        Self::EVERY.into_iter().find(|offload| offload.name() == text).ok_or_else(|| {
            Error::Unparsable {
                what: "choice of what is offloaded",
                text: text.to_owned(),
                expected: "none, optimizer or all",
            }
        })
    }
}
