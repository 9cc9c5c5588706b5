//! The optimizer state of a parameter.

use std::fmt;

/// The state that an optimizer keeps for a trainable parameter, from which a plan computes memory,
/// copies and the exchange of an update. No optimizer reads it. Only blocks of 8-bit state have
/// another effect: the [slices](crate::Plan::slice) of replicas do not cut them.
///
/// A piece is the part of the parameter that a rank [updates](crate::Plan::updated): its elements
/// in the rank's shard, or in the rank's slice if replicas divide state. Buffers of pieces are
/// padded to a multiple of [`ALIGNMENT`](crate::ALIGNMENT) elements.
///
/// | state | bytes on a rank |
/// |---|---|
/// | `Elements(k)` | 4 · k · padded length of its piece |
/// | `EightBit` | 2 · padded length of its piece + 8 · ⌈length / block⌉ |
/// | `Factored` | 4 · count · (rows + columns) on every rank; with fewer than two dims as `Elements(1)` |
/// | `Muon` | as `Elements(1)` |
/// | `Owned(n)` | 4 · n on the owner, 0 on the others |
///
/// ```
/// use hsdp_sharding::{ModelSpec, Param, State, Unit};
/// let unit = Unit::new("h.0").param(Param::new("w", [64, 64])).param(Param::new("b", [64]));
/// let muon = |param: &Param| match param.as_matrices() {
///     Some(_) => State::Muon,
///     None => State::Elements(2),
/// };
/// let spec = ModelSpec::new().unit(unit).updated_by(muon);
/// assert_eq!(spec.units()[0].params[0].state, State::Muon);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum State {
    /// This number of f32 for each element, at most 1024: AdamW 2, SGD with momentum and Lion 1,
    /// SGD 0.
    Elements(usize),
    /// Two bytes for each element, and two f32 for each block of elements: AdamW in 8 bits. Blocks
    /// are counted from the start of a piece; with
    /// [`Granularity::Blocks`](crate::Granularity::Blocks) of the same number they are the blocks
    /// of the parameter.
    EightBit {
        /// Elements of a block, at least 1.
        block: usize,
    },
    /// Adafactor (Shazeer and Stern, [arXiv 1804.04235](https://arxiv.org/abs/1804.04235)): an f32
    /// for each row and one for each column of the last two dims, for each index of the dims
    /// before. Every rank keeps all of them, whichever part of the parameter it holds. A parameter
    /// of fewer than two dims has an f32 for each element. In an update all ranks add up partial
    /// sums over rows and columns of their slices ([`UpdatePlan`](crate::UpdatePlan)).
    Factored,
    /// Muon: an f32 for each element. Each of the parameter's [matrices](crate::Param::as_matrices)
    /// goes to one of the ranks that divide the update, its owner ([`Owners`](crate::Owners)). The
    /// owner computes the update of the whole matrix and sends it back.
    Muon,
    /// The values and the gradient of the whole parameter go to one of the ranks that divide the
    /// update, its owner, which keeps this number of f32 for the whole parameter, and sends new
    /// values back.
    /// All of these numbers of a model add up to at most 2^48.
    Owned(usize),
}

impl State {
    /// Returns the number of elements of a block of 8-bit state; `None` for other state.
    pub(crate) const fn block(self) -> Option<usize> {
        match self {
            Self::EightBit { block } => Some(block),
            _ => None,
        }
    }
}

/// The most f32 of state for an element. With more the memory plan of the largest model would not
/// fit a `u64`.
const MOST_SLOTS: usize = 1024;

impl State {
    pub(crate) const fn is_valid(self) -> bool {
        match self {
            Self::Elements(slots) => slots <= MOST_SLOTS,
            Self::EightBit { block } => block > 0,
            Self::Factored | Self::Muon | Self::Owned(_) => true,
        }
    }
}

impl Default for State {
    /// That of AdamW: two f32 for each element.
    fn default() -> Self {
        Self::Elements(2)
    }
}

impl fmt::Display for State {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Elements(slots) => write!(f, "{slots} f32 an element"),
            Self::EightBit { block } => {
                write!(f, "two bytes an element and two f32 a block of {block} elements")
            }
            Self::Factored => f.pad("an f32 a row and a column"),
            Self::Muon => f.pad("an f32 an element, for Muon"),
            Self::Owned(words) => write!(f, "{words} f32 at its owner"),
        }
    }
}

/// A parameter as a stack of matrices of one shape: row-major, contiguous, one behind the other.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Matrices {
    /// The number of matrices.
    pub count: usize,
    /// The rows of each matrix.
    pub rows: usize,
    /// The columns of each matrix: consecutive elements.
    pub columns: usize,
}

impl Matrices {
    /// The elements of all matrices. Saturates at `usize::MAX`, which no layout accepts.
    #[must_use]
    pub const fn numel(&self) -> usize {
        self.count.saturating_mul(self.rows).saturating_mul(self.columns)
    }
}

impl fmt::Display for Matrices {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { count, rows, columns } = self;
        f.pad(&format!("{count} of {rows} x {columns}"))
    }
}
