//! The memory of a rank in a step.

use hsdp_sharding::{ByteCount, MemoryPlan, Offload, Plan, UnitId};

use super::Workload;
use crate::host::Placement;

/// The memory of a rank in a step: that of the plan, and that of the model's computation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StepMemory {
    /// Of the plan, where the model lies.
    pub planned: MemoryPlan,
    /// Of the plan, in the host's memory, for what is offloaded.
    pub offloaded: MemoryPlan,
    /// The activations of a microbatch, at their peak.
    pub activations: ByteCount,
    /// The gradients of the unit with the most bytes of them, before they are reduced.
    pub gradients: ByteCount,
}

impl StepMemory {
    pub(super) fn of(workload: &Workload, placement: Placement) -> Self {
        let Workload { plan, computation, batch, offload, .. } = workload;
        let activations = computation.most_kept(batch);
        Self { activations, ..Self::of_plan(plan, *offload, placement) }
    }

    /// That of a plan, without activations.
    pub(crate) fn of_plan(plan: &Plan, offload: Offload, placement: Placement) -> Self {
        let (planned, offloaded) = match placement {
            Placement::Host => (plan.memory(), MemoryPlan::default()),
            Placement::Device => (plan.memory_on_device(offload), plan.memory_offloaded(offload)),
        };
        let of_unit =
            |unit: UnitId| plan.spec()[unit].trainable_numel().bytes(plan.compute_dtype(unit));
        let gradients = plan.spec().unit_ids().map(of_unit).max().unwrap_or_default();
        Self { planned, offloaded, activations: ByteCount::ZERO, gradients }
    }

    /// Returns all of it, with the part in the host's memory.
    #[must_use]
    pub fn everywhere(&self) -> ByteCount {
        ByteCount(self.total().get().saturating_add(self.offloaded.total().get()))
    }

    /// All of it where the model lies, at most `u64::MAX`. Its parts may peak at different times. An autograd may hold more: gradients of
    /// activations, and those of a unit while they are reduced.
    #[must_use]
    pub fn total(&self) -> ByteCount {
        let parts = [self.planned.total(), self.activations, self.gradients];
        ByteCount(parts.iter().fold(0, |sum: u64, part| sum.saturating_add(part.get())))
    }
}
