//! The options of a plan, and the parts of a model on a device that are kept in host memory.

use std::fmt;

use crate::{DType, Unit};

/// When gradients are reduced across ranks.
///
/// Displayed and parsed as `reduce-scatter`, `every`, `local`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Accumulation {
    /// Reduce-scatter in each microbatch, all-reduce once a step.
    #[default]
    ReduceScatter,
    /// Reduce-scatter and all-reduce in each microbatch.
    Every,
    /// No reduction before the last microbatch: gradients accumulate unsharded, in f32. With the
    /// last microbatch, one reduce-scatter and one all-reduce of each unit.
    Local,
}

impl Accumulation {
    /// All modes.
    pub const ALL: [Self; 3] = [Self::ReduceScatter, Self::Every, Self::Local];

    /// Its name on a command line.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::ReduceScatter => "reduce-scatter",
            Self::Every => "every",
            Self::Local => "local",
        }
    }
}

impl fmt::Display for Accumulation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// The number of copies of a gathered unit where ranks share a process.
///
/// Displayed and parsed as `per-rank`, `per-process`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum FullCopies {
    /// One copy for each rank, for the use of that rank alone.
    #[default]
    PerRank,
    /// One copy that all ranks of the world read, since replicas hold the same parameters. All
    /// ranks must be threads of one process.
    PerProcess,
}

impl FullCopies {
    /// All variants.
    pub const ALL: [Self; 2] = [Self::PerRank, Self::PerProcess];

    /// Its name on a command line.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::PerRank => "per-rank",
            Self::PerProcess => "per-process",
        }
    }
}

impl fmt::Display for FullCopies {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// The ranks over which masters, gradients and optimizer state of trainable parameters are divided.
///
/// Displayed and parsed as `shards`, `world`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum StateOver {
    /// Over the shard group. Each replica holds the state of whole shards, and updates them.
    #[default]
    Shards,
    /// Over all ranks: each replica updates its [slice](crate::Plan::slice) of a shard, and the
    /// slices are gathered over the replicas in the compute dtype.
    World,
}

impl StateOver {
    /// All variants.
    pub const ALL: [Self; 2] = [Self::Shards, Self::World];

    /// Its name on a command line.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Shards => "shards",
            Self::World => "world",
        }
    }
}

impl fmt::Display for StateOver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// The options that a plan depends on besides model and mesh. All ranks must use the same options.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct PlanOptions {
    /// The compute dtype of units that [declare](crate::Unit::compute_in) none, of full parameters
    /// on the wire and in the forward: f32, f16 or bf16. Master shards are f32.
    pub param_dtype: DType,
    /// The wire dtype of gradients: f32, f16 or bf16. Sums are f32.
    pub reduce_dtype: DType,
    /// When gradients are reduced across ranks.
    pub accumulation: Accumulation,
    /// The number of gathers that are issued ahead of the one that is needed, within a microbatch.
    pub prefetch: usize,
    /// The number of copies of a gathered unit where ranks share a process.
    pub full_copies: FullCopies,
    /// The ranks over which optimizer state is divided.
    pub state: StateOver,
}

impl PlanOptions {
    /// Returns the compute dtype of a unit: its own, or `param_dtype`.
    pub(crate) fn compute_dtype(&self, unit: &Unit) -> DType {
        unit.compute_dtype.unwrap_or(self.param_dtype)
    }
}

impl Default for PlanOptions {
    /// f32 in all dtypes, reduce-scatter in each microbatch, one gather ahead, a full copy per
    /// rank, state over the shard group.
    fn default() -> Self {
        Self {
            param_dtype: DType::F32,
            reduce_dtype: DType::F32,
            accumulation: Accumulation::default(),
            prefetch: 1,
            full_copies: FullCopies::default(),
            state: StateOver::default(),
        }
    }
}

/// The parts of a model on a device that are kept in host memory. With any of them, the host
/// computes the updates of the optimizer.
///
/// Displayed and parsed as `none`, `optimizer`, `all`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Offload {
    /// The whole model lies on the device.
    #[default]
    None,
    /// The state of the optimizer is in host memory. For an update, gradients and parameters are
    /// copied to the host, and parameters back.
    Optimizer,
    /// The state of the optimizer and the f32 master shards are in host memory. The device keeps
    /// the shards in the compute dtype, which gathers read. For an update, gradients are copied to
    /// the host, and parameters back in the compute dtype.
    All,
}

impl Offload {
    /// All variants.
    pub const EVERY: [Self; 3] = [Self::None, Self::Optimizer, Self::All];

    /// Its name on a command line.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Optimizer => "optimizer",
            Self::All => "all",
        }
    }
}

impl fmt::Display for Offload {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}
