//! One choice of mesh and options.

use std::fmt;

use hsdp_sharding::{Accumulation, DType, Mesh, ModelSpec, Offload};

use crate::host::Microbatches;
use crate::{Recompute, Workload};

/// Whether units stay gathered from their forward to their backward.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum AfterForwards {
    /// As the model says.
    AsDeclared,
    /// All of them.
    Keep,
}

impl AfterForwards {
    /// The model with this choice.
    pub(super) fn applied_to(self, spec: &ModelSpec) -> ModelSpec {
        match self {
            Self::AsDeclared => spec.clone(),
            Self::Keep => spec.clone().all_kept(),
        }
    }
}

/// The choices on which a plan depends.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct PlanChoice {
    /// The mesh.
    pub mesh: Mesh,
    /// The dtype of gathered parameters, in which the model computes, and that of gradients on the wire.
    pub dtypes: [DType; 2],
    /// When gradients are reduced.
    pub accumulation: Accumulation,
    /// Units that are gathered ahead.
    pub prefetch: usize,
    /// Whether units stay gathered.
    pub after_forward: AfterForwards,
}

impl PlanChoice {
    /// The dtype in which the model computes.
    pub(super) const fn param_dtype(&self) -> DType {
        self.dtypes[0]
    }
}

/// A choice of mesh and options. Displayed as the options of `hsdp simulate` that choose it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Candidate {
    /// That of the plan.
    pub plan: PlanChoice,
    /// The part of a forward that its backward computes again.
    pub recompute: Recompute,
    /// The part that is in the host's memory.
    pub offload: Offload,
    /// Sequences of a rank's microbatch.
    pub batch: usize,
    /// Microbatches of a step.
    pub microbatches: u64,
}

impl Candidate {
    pub(super) fn of(plan: PlanChoice, workload: &Workload) -> Self {
        let Workload { batch, microbatches, offload, .. } = workload;
        let (Microbatches::Given(microbatches) | Microbatches::Asked(microbatches)) = *microbatches;
        let (recompute, offload) = (batch.recompute, *offload);
        Self { plan, recompute, offload, batch: batch.sequences, microbatches }
    }
}

impl fmt::Display for Candidate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { plan, recompute, offload, batch, microbatches } = self;
        let PlanChoice { mesh, dtypes: [param, reduce], accumulation, prefetch, .. } = plan;
        write!(f, "--mesh {mesh} --batch {batch} --microbatches {microbatches}")?;
        write!(f, " --param-dtype {param} --reduce-dtype {reduce}")?;
        write!(f, " --accumulation {accumulation} --prefetch {prefetch} --recompute={recompute}")?;
        if plan.after_forward == AfterForwards::Keep {
            f.write_str(" --keep")?;
        }
        if *offload != Offload::None {
            write!(f, " --offload {offload}")?;
        }
        Ok(())
    }
}
