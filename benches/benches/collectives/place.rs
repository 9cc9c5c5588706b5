//! A rank's part of the data, and the expected result, in closed form of rank and index.

use std::fmt;

use hsdp_benches::size::Size;

/// Which rank of how many, and how much each of them has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Place {
    pub(crate) rank: usize,
    pub(crate) ranks: usize,
    /// Elements of one rank's part.
    pub(crate) part: usize,
    /// Bytes of an element of the larger buffer.
    pub(crate) element: usize,
}

/// A result that is not what it must be.
#[derive(Debug)]
pub(crate) struct Wrong {
    pub(crate) element: usize,
    pub(crate) found: f32,
    pub(crate) expected: f32,
}

impl Place {
    /// Elements of all ranks' parts: of the larger of the two buffers.
    pub(crate) fn whole(self) -> usize {
        self.ranks * self.part
    }

    pub(crate) fn size(self) -> Size {
        Size(self.whole() * self.element)
    }

    pub(crate) fn of(self, rank: usize) -> Self {
        Self { rank, ..self }
    }

    /// The rank that this one hands its elements to.
    pub(crate) fn next(self) -> usize {
        (self.rank + 1) % self.ranks
    }

    /// The rank that hands its elements to this one.
    pub(crate) fn previous(self) -> usize {
        (self.rank + self.ranks - 1) % self.ranks
    }

    /// What this rank brings: `len` elements.
    pub(crate) fn brings(self, len: usize) -> Vec<f32> {
        (0..len).map(|index| brought(self.rank, index)).collect()
    }

    /// What all ranks bring to an index, added up.
    pub(crate) fn total(self, index: usize) -> f32 {
        (0..self.ranks).map(|rank| brought(rank, index)).sum()
    }

    /// Returns an element of the parts of all ranks, one part after the other.
    pub(crate) fn gathered(self, index: usize) -> f32 {
        brought(index / self.part, index % self.part)
    }
}

/// Small whole numbers, in which rank and index show: exact in bf16 for up to 36 ranks, and their
/// sums in f32.
pub(crate) fn brought(rank: usize, index: usize) -> f32 {
    ((rank + 1) * (index % 7 + 1)) as f32
}

/// Compares elements with what is expected of them.
pub(crate) fn check(elements: &[f32], expected: impl Fn(usize) -> f32) -> Result<(), Wrong> {
    let pairs = elements.iter().enumerate().map(|(index, it)| (index, *it, expected(index)));
    match { pairs }.find(|(_, found, expected)| found != expected) {
        Some((element, found, expected)) => Err(Wrong { element, found, expected }),
        None => Ok(()),
    }
}

impl fmt::Display for Wrong {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { element, found, expected } = self;
        write!(f, "element {element} is {found}, not {expected}")
    }
}
