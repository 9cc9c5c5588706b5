//! The prediction of a step: a plan and its computation, on a machine.

mod on_machine;
mod placed;

use std::sync::Arc;

use hsdp_sharding::{ByteCount, MemoryPlan, Offload, Plan, UnitId};

pub(crate) use self::on_machine::{MeshGroups, OnMachine, PlanSizes, check_update, update_cost};
pub use self::placed::{Placed, Placing};

use crate::host::{Microbatches, ModelPlacement, Order};
use crate::simulation::{Costs, Timing};
use crate::{Batch, Computation, Error, Level, Machine};

/// A step that all ranks make with data.
#[derive(Clone, Debug)]
pub struct Workload {
    /// The plan.
    pub plan: Arc<Plan>,
    /// The computation of its model.
    pub computation: Arc<Computation>,
    /// The data of a rank's microbatch.
    pub batch: Batch,
    /// The microbatches of the step.
    pub microbatches: Microbatches,
    /// The part of a model on a device that is in the host's memory.
    pub offload: Offload,
}

/// A predicted step.
#[derive(Clone, Debug, PartialEq)]
pub struct Prediction {
    /// Its time, and where it goes.
    pub timing: Timing,
    /// The tokens of all ranks.
    pub tokens: u64,
    /// The floating-point operations of the model on all ranks: forward and backward, without what
    /// is computed again.
    pub flops: f64,
    /// The peak of all processors together, in flop/s of the dtype in which the model computes.
    pub peak: f64,
    /// The memory of a rank.
    pub memory: StepMemory,
}

impl Prediction {
    /// Tokens a second.
    #[must_use]
    pub fn tokens_per_second(&self) -> f64 {
        self.tokens as f64 / self.timing.step.seconds()
    }

    /// Model flops utilisation: the part of the peak.
    #[must_use]
    pub fn flops_utilisation(&self) -> f64 {
        self.flops / self.timing.step.seconds() / self.peak
    }

    /// Returns the part of the step for which the links of a rank of this color carry bytes.
    ///
    /// # Panics
    /// If there is no such color.
    #[must_use]
    pub fn link_utilisation(&self, color: usize, level: Level) -> f64 {
        let busy = self.timing.ranks[color].shares.busy(level);
        busy.seconds() / self.timing.step.seconds()
    }
}

impl Workload {
    /// Predicts the step on a machine.
    ///
    /// # Errors
    /// [`Error::TooManyRanks`] if the machine has too few cards and no network;
    /// [`Error::Computation`] for a dtype in which no training computes, and for an update of whole
    /// matrices, as by Muon; [`Error::TooLong`] for a step of 213 days, the longest
    /// [`Time`](crate::Time), or longer.
    pub fn predict(&self, machine: &Machine) -> Result<Prediction, Error> {
        check_update(&self.plan)?;
        let groups = Arc::new(MeshGroups::new(self.plan.mesh(), machine)?);
        let timing = Placed::among(self, machine, groups)?.timing(machine)?;
        Ok(self.prediction(machine, timing))
    }

    /// Returns the costs of its actions on a machine.
    ///
    /// # Errors
    /// Errors of [`predict`](Self::predict).
    pub fn costs<'a>(&self, machine: &'a Machine) -> Result<impl Costs + use<'a>, Error> {
        let sizes = PlanSizes::of(&self.plan, self.offload)?;
        let groups = Arc::new(MeshGroups::new(sizes.mesh, machine)?);
        OnMachine::of(&self.computation, &self.batch, &sizes, machine, groups)
    }

    /// Returns its order on a machine.
    #[must_use]
    pub fn order(&self, machine: &Machine) -> Order {
        Order::of(&self.plan, self.microbatches, placement(machine))
    }

    /// Returns the prediction with a time that is known.
    pub(crate) fn prediction(&self, machine: &Machine, timing: Timing) -> Prediction {
        let ranks = self.plan.mesh().world_size() as u64;
        let count = self.microbatches.count();
        let tokens = (self.batch.sequences as u64)
            .saturating_mul(self.batch.context as u64)
            .saturating_mul(count)
            .saturating_mul(ranks);
        let of_batch = self.computation.flops(&self.batch);
        let peak = machine.compute.peak(self.batch.dtype).map_or(0.0, |peak| peak.value());
        let processors = match placement(machine) {
            ModelPlacement::Device => ranks as f64,
            ModelPlacement::Host => machine.ranks.value(),
        };
        Prediction {
            timing,
            tokens,
            flops: of_batch * count as f64 * ranks as f64,
            peak: peak * processors,
            memory: StepMemory::of(self, placement(machine)),
        }
    }
}

/// Returns the memory that holds the model.
pub(crate) fn placement(machine: &Machine) -> ModelPlacement {
    if machine.device().is_some() { ModelPlacement::Device } else { ModelPlacement::Host }
}

/// The memory of a rank in a step: that of the plan, and that of the model's computation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StepMemory {
    /// Memory of the plan, where the model lies.
    pub planned: MemoryPlan,
    /// Memory of the plan on the host, for what is offloaded.
    pub offloaded: MemoryPlan,
    /// The activations of a microbatch, at their peak.
    pub activations: ByteCount,
    /// The gradients of the unit with the most bytes of them, before they are reduced.
    pub gradients: ByteCount,
}

impl StepMemory {
    fn of(workload: &Workload, placement: ModelPlacement) -> Self {
        let Workload { plan, computation, batch, offload, .. } = workload;
        let activations = computation.most_kept(batch);
        Self { activations, ..Self::of_plan(plan, *offload, placement) }
    }

    /// Returns the memory of a plan, without activations.
    pub(crate) fn of_plan(plan: &Plan, offload: Offload, placement: ModelPlacement) -> Self {
        let (planned, offloaded) = match placement {
            ModelPlacement::Host => (plan.memory(), MemoryPlan::default()),
            ModelPlacement::Device => {
                (plan.memory_on_device(offload), plan.memory_offloaded(offload))
            }
        };
        let of_unit =
            |unit: UnitId| plan.spec()[unit].trainable_numel().bytes(plan.compute_dtype(unit));
        let gradients = plan.spec().unit_ids().map(of_unit).max().unwrap_or_default();
        Self { planned, offloaded, activations: ByteCount::ZERO, gradients }
    }

    /// Returns its parts where the model lies, by name.
    #[must_use]
    pub fn parts(&self) -> [(&'static str, ByteCount); 10] {
        let mut parts = [("", ByteCount::ZERO); 10];
        let of_runtime = self.planned.categories();
        parts[..of_runtime.len()].copy_from_slice(&of_runtime);
        parts[of_runtime.len()..]
            .copy_from_slice(&[("activations", self.activations), ("gradients", self.gradients)]);
        parts
    }

    /// Returns all of it, with the part in the host's memory.
    #[must_use]
    pub fn everywhere(&self) -> ByteCount {
        ByteCount(self.total().get().saturating_add(self.offloaded.total().get()))
    }

    /// Returns all of it where the model lies, at most `u64::MAX`. Its parts may peak at different
    /// times. An autograd may hold more: gradients of activations, and those of a unit while they
    /// are reduced.
    #[must_use]
    pub fn total(&self) -> ByteCount {
        let parts = [self.planned.total(), self.activations, self.gradients];
        ByteCount(parts.iter().fold(0, |sum: u64, part| sum.saturating_add(part.get())))
    }
}
