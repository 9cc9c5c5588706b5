//! The reason for which a candidate does not fit.

use std::fmt;

use hsdp_sharding::ByteCount;

use crate::StepMemory;

/// The reason for which a candidate does not fit: the largest part of a rank's memory, or the memory of the host.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Unfit {
    /// A category of the plan's memory, or `activations` or `gradients`.
    Memory(&'static str),
    /// All ranks of a machine together offload more than its host's memory.
    Host,
}

impl Unfit {
    pub(super) fn of(memory: &StepMemory) -> Self {
        let parts = memory.parts();
        let largest = parts.into_iter().rev().max_by_key(|(_, bytes)| *bytes);
        Self::Memory(largest.map_or("", |(name, _)| name))
    }
}

impl fmt::Display for Unfit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Memory(part) => write!(f, "too much memory, the largest part is {part}"),
            Self::Host => f.write_str("too much of the host's memory"),
        }
    }
}

impl StepMemory {
    /// Its parts where the model lies, by name.
    #[must_use]
    pub fn parts(&self) -> [(&'static str, ByteCount); 9] {
        let planned = self.planned;
        [
            ("shard", planned.shard),
            ("gather_input", planned.gather_input),
            ("full", planned.full),
            ("grad_full", planned.grad_full),
            ("partial", planned.partial),
            ("optimizer", planned.optimizer),
            ("update", planned.update),
            ("activations", self.activations),
            ("gradients", self.gradients),
        ]
    }
}
