//! How a model is sharded and reduced, and how a step is begun.

use std::num::NonZeroU64;

use hsdp_sharding::{Accumulation, DType, FullCopies, Mesh, PlanOptions};

use crate::description;
use crate::digest;
use crate::error::Error;
use crate::objective::Objective;
use crate::placement::Placement;
use crate::precision::{LossScaling, Precision};
use crate::samples::Samples;
use crate::uneven::{Input, Shutdown, Uneven};

/// How a model is sharded and its gradients reduced. The same on all ranks; they compare.
#[derive(Clone, Debug)]
pub struct ModelOptions {
    /// The replicate x shard mesh; its product is the world's size.
    pub mesh: Mesh,
    /// Where each rank's part of it lies.
    pub placement: Placement,
    /// The dtypes.
    pub precision: Precision,
    /// When microbatches are communicated.
    pub accumulation: Accumulation,
    /// How many units ahead parameters are gathered.
    pub prefetch: usize,
    /// How many copies of a gathered unit there are. One for all ranks of a process costs the memory traffic of one. It takes
    /// room for `2 * prefetch + 2` units, since ranks may be that far apart, where copies of their own take `prefetch + 1` for
    /// each rank. No rank may write to it.
    pub full_copies: FullCopies,
    /// What the gradient is of.
    pub objective: Objective,
    /// By what losses are multiplied before the backward pass.
    pub loss_scaling: LossScaling,
    /// What happens to trainable parameters without a gradient.
    pub unused: Unused,
    /// What happens to a step with a NaN or an infinity. Dynamic loss scaling skips as long as
    /// its scale can be halved.
    pub non_finite: NonFinite,
    /// What happens when some ranks have data and others have none.
    pub uneven: Uneven,
    /// After how many steps, again and again, replicas compare the bits of their shards; `None` for never. It finds a
    /// rank whose memory or arithmetic went wrong without a word, for one small exchange and one pass over the shard.
    pub compare_replicas: Option<NonZeroU64>,
    /// f32 words of optimizer state per trainable element, for the memory plan: AdamW 2, SGD with momentum 1.
    pub optimizer_slots: usize,
}

impl ModelOptions {
    /// The defaults on a mesh: f32 throughout, one reduce-scatter a microbatch, one unit ahead, the weighted mean.
    #[must_use]
    pub fn on(mesh: Mesh) -> Self {
        Self {
            mesh,
            placement: Placement::default(),
            precision: Precision::default(),
            accumulation: Accumulation::ReduceScatter,
            prefetch: 1,
            full_copies: FullCopies::default(),
            objective: Objective::default(),
            loss_scaling: LossScaling::default(),
            unused: Unused::default(),
            non_finite: NonFinite::default(),
            uneven: Uneven::default(),
            compare_replicas: None,
            optimizer_slots: 2,
        }
    }

    pub(crate) fn checked(self) -> Result<Self, Error> {
        self.precision.check()?;
        self.objective.check()?;
        self.loss_scaling.check()?;
        self.uneven.check(self.objective)?;
        Ok(self)
    }

    pub(crate) fn plan_options(&self) -> PlanOptions {
        PlanOptions {
            param_dtype: self.precision.parameters,
            reduce_dtype: self.precision.wire,
            accumulation: self.accumulation,
            prefetch: self.prefetch,
            full_copies: self.full_copies,
            optimizer_slots: self.optimizer_slots,
        }
    }

    pub(crate) fn wire(&self) -> DType {
        self.precision.wire
    }

    /// A number that differs where an option differs, for ranks to compare.
    pub(crate) fn digest(&self) -> u64 {
        digest::of_lines(&description::of_options(self))
    }
}

/// What happens to a trainable parameter that gets no gradient.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Unused {
    /// It contributes zeros. If it got none on any rank in the whole step, the optimizer leaves it alone.
    #[default]
    Zeros,
    /// The step is refused on all ranks, naming the parameter and the ranks without it. Ranks that had no items (whose
    /// weights in the step add up to 0) need none, unless the objective is `RankMean`.
    Error,
}

/// What happens to a step whose gradient holds a NaN or an infinity, or whose loss is one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum NonFinite {
    /// `Step::finish` fails on all ranks, naming parameter, rank and microbatch, or the rank whose loss it is; no parameter changes.
    #[default]
    Abort,
    /// The optimizer skips the step on all ranks.
    Skip,
}

/// How a step is begun.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StepOptions {
    /// How many microbatches the step has. Known, a unit's all-reduce starts as soon as its last
    /// reduce-scatter is done; `None` runs them all at the end.
    pub microbatches: Option<usize>,
    /// About what weight a microbatch has on this rank. It decides only the size that gradients have on
    /// the wire; without it, the last step's is taken, and ranks ask one another in the first.
    pub weight_hint: Option<u64>,
    /// Whether this rank has data for the step; see [`Uneven`] for what follows where ranks differ.
    pub input: Input,
    /// Whether this rank asks that the step be the last: all ranks hear of it, by [`Step::shutdown`](crate::Step::shutdown).
    pub shutdown: Shutdown,
    /// Which samples this rank has in the step, if it says so: two ranks with the same are an error on all. Costs an exchange of 8 bytes
    /// a rank in steps in which some rank names its own.
    pub samples: Option<Samples>,
}

impl StepOptions {
    /// A step of `count` microbatches.
    #[must_use]
    pub fn microbatches(count: usize) -> Self {
        Self { microbatches: Some(count), ..Self::default() }
    }

    /// A step of as many microbatches as come, which may be more on some ranks than on others.
    #[must_use]
    pub fn as_many_as_come() -> Self {
        Self::default()
    }

    /// The same on a rank that has no data for it.
    #[must_use]
    pub fn without_data(self) -> Self {
        Self { input: Input::Exhausted, ..self }
    }
}
