//! Units: the parameters that are gathered and reduced together.

use std::fmt;

use super::{Param, Role};
use crate::{DType, ElemCount};

/// Whether a unit's full parameters are freed after its forward.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum AfterForward {
    /// The full parameters are freed, and gathered again for the backward (FSDP's
    /// `reshard_after_forward=True`).
    #[default]
    Reshard,
    /// The full parameters are kept until the unit's backward is done, which saves a gather and
    /// takes more memory.
    Keep,
    /// The full parameters are freed, and not gathered for the backward. Only for units without a
    /// trainable parameter whose output needs no gradient: all that goes into it is data, or comes
    /// from other such units.
    Discard,
}

impl fmt::Display for AfterForward {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Reshard => "reshard",
            Self::Keep => "keep",
            Self::Discard => "discard",
        })
    }
}

/// One half of a microbatch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Phase {
    /// From the batch to the loss.
    Forward,
    /// From the loss to the gradients.
    Backward,
}

/// Statistics of a batch that a unit sums over all ranks, such as those of a batch norm: in the
/// forward a count, and sums and sums of squares of each channel; in the backward two sums of each
/// channel.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Statistics {
    /// The name of the layer, unique in the model.
    pub name: String,
    /// The number of channels.
    pub channels: usize,
}

impl Statistics {
    /// Returns the number of f64 that a rank gives. Saturates at `usize::MAX`.
    #[must_use]
    pub const fn elements(&self, phase: Phase) -> usize {
        let sums = self.channels.saturating_mul(2);
        match phase {
            Phase::Forward => sums.saturating_add(1),
            Phase::Backward => sums,
        }
    }
}

/// The parameters that are gathered and reduced together, for example those of a transformer block.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct Unit {
    /// Its name, unique in the model.
    pub name: String,
    /// Its parameters, in declared order: a parameter's index in its unit is its place here.
    pub params: Vec<Param>,
    /// Its buffers, in declared order. They lie whole on each rank, and are never gathered.
    pub buffers: Vec<Param>,
    /// The statistics that its forward and its backward sum over all ranks, in the order of the
    /// forward.
    pub statistics: Vec<Statistics>,
    /// Whether its full parameters are freed after its forward.
    pub after_forward: AfterForward,
    /// The dtype in which it is gathered and computes; `None` for the plan's `param_dtype`.
    pub compute_dtype: Option<DType>,
}

impl Unit {
    /// A unit without parameters, which is resharded after its forward.
    pub fn new(name: impl Into<String>) -> Self {
        Self {
            name: name.into(),
            params: Vec::new(),
            buffers: Vec::new(),
            statistics: Vec::new(),
            after_forward: AfterForward::Reshard,
            compute_dtype: None,
        }
    }

    /// Appends a parameter, or a [buffer](Param::buffer).
    #[must_use]
    pub fn param(mut self, param: Param) -> Self {
        match param.buffer {
            None => self.params.push(param),
            Some(_) => self.buffers.push(param),
        }
        self
    }

    /// Appends a batch norm over `channels` whose statistics are those of all ranks: the parameters
    /// `{name}.weight` and `{name}.bias`, the buffers `{name}.running_mean` and
    /// `{name}.running_var`, and the exchange of its statistics.
    #[must_use]
    pub fn batch_norm(mut self, name: &str, channels: usize) -> Self {
        self.statistics.push(Statistics { name: name.to_owned(), channels });
        let tensor = |what| Param::new(format!("{name}.{what}"), [channels]);
        let buffers = ["running_mean", "running_var"].map(|what| tensor(what).buffer());
        let params = ["weight", "bias"].map(tensor);
        params.into_iter().chain(buffers).fold(self, Self::param)
    }

    /// Keeps the full parameters from the unit's forward to its backward.
    #[must_use]
    pub fn keep(self) -> Self {
        Self { after_forward: AfterForward::Keep, ..self }
    }

    /// Gathers the unit for the forward alone: no gradient reaches it. For example the frozen
    /// embedding below trained blocks.
    #[must_use]
    pub fn forward_only(self) -> Self {
        Self { after_forward: AfterForward::Discard, ..self }
    }

    /// Gathers the unit in `dtype`, f32, f16 or bf16, in place of the plan's `param_dtype`: an f32
    /// head in a bf16 model, for example. Its gradients travel in the plan's `reduce_dtype`, as
    /// those of all units do.
    ///
    /// ```
    /// use hsdp_sharding::{DType, Mesh, ModelSpec, Param, Plan, PlanOptions, Unit, UnitId};
    /// let block = Unit::new("h.0").param(Param::new("h.0.weight", [64, 64]));
    /// let head = Unit::new("head").param(Param::new("head.weight", [256, 64]));
    /// let spec = ModelSpec::new().unit(block).unit(head.compute_in(DType::F32));
    /// let options = PlanOptions { param_dtype: DType::BF16, ..PlanOptions::default() };
    /// let plan = Plan::new(spec, Mesh::new(1, 2)?, options)?;
    /// let dtypes = [0, 1].map(|unit| plan.compute_dtype(UnitId::new(unit)));
    /// assert_eq!(dtypes, [DType::BF16, DType::F32]);
    /// # Ok::<(), hsdp_sharding::Error>(())
    /// ```
    #[must_use]
    pub fn compute_in(self, dtype: DType) -> Self {
        Self { compute_dtype: Some(dtype), ..self }
    }

    /// The number of elements of all its parameters, without padding. Saturates at `u64::MAX`,
    /// which no layout accepts.
    #[must_use]
    pub fn numel(&self) -> ElemCount {
        sum(self.params.iter())
    }

    /// The number of elements of its trainable parameters, without padding. Saturates like
    /// [`numel`](Self::numel).
    #[must_use]
    pub fn trainable_numel(&self) -> ElemCount {
        sum(self.params.iter().filter(|param| param.role == Role::Trainable))
    }

    /// Whether any parameter is trainable. A unit without one is gathered and never reduced.
    #[must_use]
    pub fn is_trainable(&self) -> bool {
        self.params.iter().any(|param| param.role == Role::Trainable)
    }
}

fn sum<'a>(params: impl Iterator<Item = &'a Param>) -> ElemCount {
    ElemCount(params.fold(0u64, |total, param| total.saturating_add(param.numel() as u64)))
}
