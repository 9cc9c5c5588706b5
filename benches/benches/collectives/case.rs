//! A collective, and a collective with the buffers of one rank.

use hsdp_comm::{Error, Group, Pending};

use crate::place::{Place, Wrong};
use hsdp_benches::size::Size;

/// A collective that is measured.
pub(crate) struct Collective {
    pub(crate) name: &'static str,
    pub(crate) bus: Bus,
    /// Bytes of an element of the larger buffer.
    pub(crate) element: usize,
    /// Elements of which a rank's part is a multiple.
    pub(crate) grain: usize,
    /// Makes the buffers of one rank.
    pub(crate) prepare: fn(Place) -> Box<dyn Case>,
}

/// How much of its larger buffer a collective must move over a wire, by nccl-tests'
/// doc/PERFORMANCE.md.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Bus {
    /// Every rank's part of the sum to its owner, and back to all: 2 (n - 1) / n.
    ThereAndBack,
    /// All parts but a rank's own: (n - 1) / n.
    OtherParts,
    /// All of it.
    Whole,
    /// Nothing: buffers are handed over.
    HandedOver,
    /// There are no elements.
    Empty,
}

impl Bus {
    /// Returns the ratio of bus bandwidth to algorithm bandwidth. `None` where no bytes move.
    pub(crate) fn factor(self, ranks: usize) -> Option<f64> {
        let others = (ranks - 1) as f64 / ranks as f64;
        match self {
            Self::ThereAndBack => Some(2.0 * others),
            Self::OtherParts => Some(others),
            Self::Whole => Some(1.0),
            Self::HandedOver | Self::Empty => None,
        }
    }
}

impl Collective {
    /// Rank 0's place where the larger buffer has about `size`: each rank has a part, and all are
    /// alike.
    pub(crate) fn place(&self, ranks: usize, size: Size) -> Place {
        let part = (size.0 / self.element / ranks / self.grain).max(1) * self.grain;
        Place { rank: 0, ranks, part, element: self.element }
    }
}

/// A collective with the buffers of one rank, to be called again and again.
pub(crate) trait Case {
    /// Calls it, and waits.
    fn call(&mut self, group: &Group) -> Result<(), Error>;

    /// Compares what the first call gave with its closed form.
    fn check(&self) -> Result<(), Wrong>;

    /// Has all later calls compute on numbers that stay finite, where a result is the next call's
    /// input.
    fn calm(&mut self);
}

/// The output of a collective that was issued.
pub(crate) fn settled<T>(issued: Result<Pending<T>, Error>) -> Result<T, Error> {
    issued.and_then(Pending::wait)
}
