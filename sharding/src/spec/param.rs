//! One parameter.

use std::fmt;

/// Whether a parameter is trained.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Role {
    /// Gathered and reduced; the optimizer updates it.
    Trainable,
    /// Gathered, never reduced; has neither gradient nor optimizer state.
    Frozen,
}

impl fmt::Display for Role {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Trainable => "trainable",
            Self::Frozen => "frozen",
        })
    }
}

/// Where a parameter may be cut between two shards.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Granularity {
    /// Anywhere that the alignment allows. Costs no padding.
    Element,
    /// Between groups of so many rows of dim 0, counted from the parameter's start; the last group
    /// may be short. The planner pays padding for it:
    /// [`UnitLayout::padding`](crate::UnitLayout::padding).
    Rows(usize),
}

/// A parameter: its name, shape and treatment.
///
/// ```
/// use hsdp_sharding::{Granularity, Param, Role};
/// let weight = Param::new("h.0.mlp.weight", [3072, 768]).rows(128);
/// assert_eq!(weight.numel(), 3072 * 768);
/// assert_eq!(weight.granularity, Granularity::Rows(128));
/// assert_eq!(weight.frozen().role, Role::Frozen);
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct Param {
    /// Its full name, unique over the model: `h.0.attn.qkv.weight`.
    pub name: String,
    /// Elements of each dim; empty for a scalar.
    pub shape: Vec<usize>,
    /// Whether it is trained.
    pub role: Role,
    /// Where it may be cut.
    pub granularity: Granularity,
}

impl Param {
    /// A trainable parameter that may be cut anywhere.
    pub fn new(name: impl Into<String>, shape: impl Into<Vec<usize>>) -> Self {
        Self {
            name: name.into(),
            shape: shape.into(),
            role: Role::Trainable,
            granularity: Granularity::Element,
        }
    }

    /// The same parameter, not trained.
    #[must_use]
    pub fn frozen(self) -> Self {
        Self { role: Role::Frozen, ..self }
    }

    /// The same parameter, with pieces that start and end on multiples of `rows` rows of dim 0 (or
    /// at the parameter's end), for optimizers that need whole rows or blocks of rows.
    #[must_use]
    pub fn rows(self, rows: usize) -> Self {
        Self { granularity: Granularity::Rows(rows), ..self }
    }

    /// Its elements: the product of its dims, 1 for a scalar.
    ///
    /// Saturates at `usize::MAX`, which no layout accepts.
    #[must_use]
    pub fn numel(&self) -> usize {
        product(&self.shape)
    }

    /// Elements between two places where it may be cut.
    pub(crate) fn chunk(&self) -> usize {
        match self.granularity {
            Granularity::Element => 1,
            Granularity::Rows(rows) => {
                rows.saturating_mul(product(self.shape.get(1..).unwrap_or_default()))
            }
        }
    }
}

fn product(dims: &[usize]) -> usize {
    dims.iter().fold(1, |elements, &dim| elements.saturating_mul(dim))
}
