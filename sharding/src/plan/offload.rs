//! The parts of a model on a device that are kept in host memory.

use std::fmt;

/// The parts of a model on a device that are kept in host memory. With any of them, the host computes the updates of the optimizer.
///
/// Displayed and parsed as `none`, `optimizer`, `all`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Offload {
    /// The whole model lies on the device.
    #[default]
    None,
    /// The state of the optimizer is in host memory. For an update, gradients and parameters are copied to the host, and parameters
    /// back.
    Optimizer,
    /// The state of the optimizer and the f32 master shards are in host memory. The device keeps the shards in the compute dtype, which
    /// gathers read. For an update, gradients are copied to the host, and parameters back in the compute dtype.
    All,
}

impl Offload {
    /// All variants.
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
