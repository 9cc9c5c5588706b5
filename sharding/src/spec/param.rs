//! The description of one parameter.

use std::fmt;

use crate::DType;

/// Whether a parameter is trained.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Role {
    /// The parameter is gathered, its gradient is reduced, and the optimizer updates it.
    Trainable,
    /// The parameter is gathered. It has no gradient and no optimizer state.
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

/// The places at which a parameter may be cut between two shards.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Granularity {
    /// At any multiple of [`ALIGNMENT`](crate::ALIGNMENT) elements. Costs no further padding.
    Element,
    /// Between groups of this number of rows of dim 0, counted from the parameter's start. The last
    /// group may be shorter. This costs padding: see
    /// [`UnitLayout::padding`](crate::UnitLayout::padding).
    Rows(usize),
}

/// The description of a parameter: its name and shape, whether it is trained, and where it may be
/// cut.
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
    /// Its full name, unique in the model: `h.0.attn.qkv.weight`.
    pub name: String,
    /// Its shape: the size of each dim; empty for a scalar.
    pub shape: Vec<usize>,
    /// Whether it is trained.
    pub role: Role,
    /// The places at which it may be cut.
    pub granularity: Granularity,
    /// The dtype in which it is stored, if that is its only copy; `None` with an f32 master.
    pub stored: Option<DType>,
}

impl Param {
    /// A trainable parameter that may be cut anywhere.
    pub fn new(name: impl Into<String>, shape: impl Into<Vec<usize>>) -> Self {
        Self {
            name: name.into(),
            shape: shape.into(),
            role: Role::Trainable,
            granularity: Granularity::Element,
            stored: None,
        }
    }

    /// Marks the parameter as not trained.
    #[must_use]
    pub fn frozen(self) -> Self {
        Self { role: Role::Frozen, ..self }
    }

    /// Stores a frozen parameter in `dtype` alone, f16 or bf16, without an f32 master: 2 bytes an element and not 6. Its values are
    /// rounded once, when the model is made.
    ///
    /// The plan's `param_dtype` must be the same dtype, and all frozen parameters of a unit are stored alike. A plan refuses anything
    /// else ([`Error::InvalidStorage`](crate::Error::InvalidStorage)).
    ///
    /// ```
    /// use hsdp_sharding::{DType, Param};
    /// let base = Param::new("h.0.attn.qkv.weight", [2304, 768]).frozen().stored_in(DType::BF16);
    /// assert_eq!(base.stored, Some(DType::BF16));
    /// ```
    #[must_use]
    pub fn stored_in(self, dtype: DType) -> Self {
        Self { stored: Some(dtype), ..self }
    }

    /// Lets the parameter be cut only between groups of `rows` rows of dim 0, for optimizers that
    /// need whole rows or blocks of rows.
    #[must_use]
    pub fn rows(self, rows: usize) -> Self {
        Self { granularity: Granularity::Rows(rows), ..self }
    }

    /// The number of its elements: the product of its dims, 1 for a scalar.
    ///
    /// Saturates at `usize::MAX`, which no layout accepts.
    #[must_use]
    pub fn numel(&self) -> usize {
        product(&self.shape)
    }

    /// The number of elements between two places where it may be cut.
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
