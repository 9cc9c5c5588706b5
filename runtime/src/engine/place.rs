//! Where in a step a reduction takes place.

/// Where in a step a reduction takes place.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Place {
    pub(crate) step: u64,
    pub(crate) microbatch: usize,
    pub(crate) turn: Turn,
}

/// Whether another microbatch follows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Turn {
    /// Yes, or it is not known.
    MayFollow,
    /// No: all-reduces may start.
    Last,
}

impl Place {
    pub(crate) fn microbatches_so_far(self) -> usize {
        self.microbatch + 1
    }
}
