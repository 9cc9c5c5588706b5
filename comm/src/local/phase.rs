//! Where an operation is. PROTOCOL.md, "States of an operation".

use std::sync::Arc;

use super::slots::AnySlots;
use crate::{Descriptor, Error};

/// Where an operation is. It only goes forward.
pub(super) enum Phase {
    /// Members arrive, each in its slot.
    Gathering { slots: Box<dyn AnySlots>, missing: usize },
    /// Two of them want different things. Whoever comes now is told so too, until the end of the world gets here:
    /// nobody is ever the last.
    Disagreeing { slots: Box<dyn AnySlots>, about: Disagreement },
    /// All are there; the last one has taken the slots, and blocks are being run.
    Running,
    /// The blocks are done, and the outputs kept back: its channel is slow.
    Held { slots: Box<dyn AnySlots> },
    /// The outputs are in their slots, until their members take them.
    Done { slots: Box<dyn AnySlots>, untaken: usize },
    /// It ended early, for all members alike. Elsewhere in memory: an operation is as small as it can be.
    Failed(Box<Error>),
}

/// What members disagree about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Disagreement {
    /// What they say.
    Said,
    /// They say the same, and mean other work.
    Meant,
}

impl Phase {
    /// What those want who have come, by slot, while members are missing.
    pub(super) fn arrivals(&mut self) -> Option<&mut [Option<Arc<Descriptor>>]> {
        match self {
            Self::Gathering { slots, .. } | Self::Disagreeing { slots, .. } => {
                Some(slots.arrivals())
            }
            _ => None,
        }
    }
}
