//! The description of one parameter.

use super::{Matrices, State};
use crate::DType;

/// Whether a parameter is trained.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Role {
    /// The parameter is gathered, its gradient is reduced, and the optimizer updates it.
    Trainable,
    /// The parameter is gathered. It has no gradient and no optimizer state.
    Frozen,
}

/// The rule by which a buffer is equal on all ranks at the end of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum BufferRule {
    /// All ranks that write it write the same values. Digests of the values show it.
    Equal,
    /// It becomes the mean over the ranks that have written it in the step.
    Averaged,
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
    /// Between blocks of this number of elements, counted from the parameter's start. The last
    /// block may be shorter. This costs padding, as `Rows` does.
    Blocks(usize),
}

/// The description of a parameter: its name and shape, whether it is trained, where it may be cut,
/// and what state an optimizer keeps for it.
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
    /// The [declared](Self::matrices) view as a stack of matrices; `None` if none is declared.
    pub view: Option<Matrices>,
    /// The state that the optimizer keeps for it if it is trainable, for the plan's memory and
    /// traffic, and for the places where a shard is cut into slices.
    pub state: State,
    /// The rule that makes it equal on all ranks if it is a [buffer](Self::buffer).
    pub buffer: Option<BufferRule>,
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
            view: None,
            state: State::default(),
            buffer: None,
        }
    }

    /// Marks the parameter as not trained.
    #[must_use]
    pub fn frozen(self) -> Self {
        Self { role: Role::Frozen, ..self }
    }

    /// Makes it a buffer: values in f32, whole on each rank, that no gradient reaches and that the
    /// forward writes, such as the running mean of a batch norm. They are saved, exported, imported
    /// and averaged as parameters are. A write counts at the end of its step.
    ///
    /// All ranks write it in the same microbatches, and the same values, or the step ends with an
    /// error that names the buffer and two ranks; a rank that is out of data takes the values of
    /// the others. Values of a rank's own are
    /// [averaged](Self::averaged_buffer).
    ///
    /// ```
    /// use hsdp_sharding::{ModelSpec, Param, Unit};
    /// let norm = Unit::new("bn")
    ///     .param(Param::new("bn.weight", [64]))
    ///     .param(Param::new("bn.running_mean", [64]).buffer());
    /// assert_eq!((norm.params.len(), norm.buffers.len()), (1, 1));
    /// let spec = ModelSpec::new().unit(norm);
    /// assert!(spec.find("bn.running_mean").is_none(), "a buffer is no parameter");
    /// let id = spec.find_buffer("bn.running_mean").unwrap();
    /// assert_eq!(spec[id].name, "bn.running_mean");
    /// ```
    #[must_use]
    pub fn buffer(self) -> Self {
        Self { role: Role::Frozen, buffer: Some(BufferRule::Equal), ..self }
    }

    /// Makes it a [buffer](Self::buffer) that becomes, at the end of a step, the mean over the
    /// ranks that have written it in the step. The ranks exchange its values with each step.
    #[must_use]
    pub fn averaged_buffer(self) -> Self {
        Self { role: Role::Frozen, buffer: Some(BufferRule::Averaged), ..self }
    }

    /// Stores a frozen parameter in `dtype` alone, f16 or bf16, without an f32 master: 2 bytes an
    /// element and not 6. Its values are rounded once, when the model is made.
    ///
    /// The [compute dtype](crate::Plan::compute_dtype) of its unit must be the same, and all frozen
    /// parameters of a unit must be stored alike. A plan refuses anything else
    /// ([`Error::InvalidStorage`](crate::Error::InvalidStorage)).
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

    /// Lets the parameter be cut only between blocks of `elements` elements, counted from its
    /// start, for optimizers whose state has one scale for each block.
    #[must_use]
    pub fn blocks(self, elements: usize) -> Self {
        Self { granularity: Granularity::Blocks(elements), ..self }
    }

    /// Declares the parameter as a stack of `count` matrices of `rows` x `columns`, row-major and
    /// contiguous, for optimizers that update whole matrices. The three numbers must multiply to
    /// the parameter's elements ([`Error::InvalidMatrices`](crate::Error::InvalidMatrices)).
    ///
    /// ```
    /// use hsdp_sharding::{Matrices, Param};
    /// let conv = Param::new("conv.weight", [64, 3, 3, 3]).matrices(1, 64, 27);
    /// let experts = Param::new("experts.up", [8, 128, 512]).matrices(8, 128, 512);
    /// assert_eq!(experts.as_matrices(), Some(Matrices { count: 8, rows: 128, columns: 512 }));
    /// assert_eq!(conv.as_matrices(), Some(Matrices { count: 1, rows: 64, columns: 27 }));
    /// ```
    #[must_use]
    pub fn matrices(self, count: usize, rows: usize, columns: usize) -> Self {
        Self { view: Some(Matrices { count, rows, columns }), ..self }
    }

    /// The parameter as a stack of matrices: as declared, or one matrix for a parameter of two
    /// dims. `None` for all others.
    #[must_use]
    pub fn as_matrices(&self) -> Option<Matrices> {
        self.view.or(match self.shape[..] {
            [rows, columns] => Some(Matrices { count: 1, rows, columns }),
            _ => None,
        })
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
            Granularity::Blocks(elements) => elements,
        }
    }
}

fn product(dims: &[usize]) -> usize {
    dims.iter().fold(1, |elements, &dim| elements.saturating_mul(dim))
}
