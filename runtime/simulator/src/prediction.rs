//! The prediction of a step: a plan and its computation, on a machine.

mod memory;
mod of_row;
mod on_machine;
mod placed;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use hsdp_sharding::{Offload, Plan};

pub use self::memory::StepMemory;
pub(crate) use self::on_machine::{Groups, OnMachine, check_update, update_cost};
pub use self::placed::{Placed, Placing};
use crate::host::{Data, LossScale, Microbatches, Order, Placement, Step};
use crate::simulation::{Costs, Orders, Timing, simulate_among};
use crate::{Batch, Computation, Error, Level, Machine, Time};

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
    /// The floating-point operations of the model on all ranks: forward and backward, without what is computed again.
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

    /// The part of the step for which the links of a rank of this color carry bytes.
    ///
    /// # Panics
    /// If there is no such color.
    #[must_use]
    pub fn link_utilisation(&self, color: usize, level: Level) -> f64 {
        let busy = self.timing.ranks[color].shares.busy[level as usize];
        busy.seconds() / self.timing.step.seconds()
    }
}

impl Workload {
    /// Predicts the step on a machine.
    ///
    /// # Errors
    /// [`Error::TooManyRanks`] if the machine has too few cards and no network; [`Error::Computation`] for a dtype in which no training
    /// computes, and for an update of whole matrices, as by Muon; [`Error::TooLong`] for a step of 213 days, the longest [`Time`], or longer.
    pub fn predict(&self, machine: &Machine) -> Result<Prediction, Error> {
        Ok(self.prediction(machine, self.timing(machine)?))
    }

    /// Predicts its time alone, many times as fast.
    ///
    /// # Errors
    /// Errors of [`predict`](Self::predict).
    pub fn time(&self, machine: &Machine) -> Result<Time, Error> {
        Ok(self.timing(machine)?.step)
    }

    fn timing(&self, machine: &Machine) -> Result<Timing, Error> {
        check_update(&self.plan)?;
        let groups = Groups::new(self.plan.mesh(), machine)?;
        self.timing_among(machine, &Arc::new(groups))
    }

    /// Predicts the time on a mesh that is placed.
    ///
    /// # Errors
    /// [`Error::Computation`] and [`Error::TooLong`], as [`predict`](Self::predict).
    pub(crate) fn timing_among(
        &self,
        machine: &Machine,
        groups: &Arc<Groups>,
    ) -> Result<Timing, Error> {
        let costs = OnMachine::among(self, machine, Arc::clone(groups))?;
        checked(simulate_among(&self.orders(machine), &costs, groups.colors.clone())?)
    }

    /// The costs of its actions on a machine.
    ///
    /// # Errors
    /// Errors of [`predict`](Self::predict).
    pub fn costs<'a>(&self, machine: &'a Machine) -> Result<impl Costs + use<'a>, Error> {
        OnMachine::new(self, machine)
    }

    /// The orders of all ranks on a machine.
    #[must_use]
    pub fn orders(&self, machine: &Machine) -> Orders {
        let placement = placement(machine);
        let data = Data::Present;
        let of = BTreeMap::from([(data, Order::of(&self.plan, self.step(placement)))]);
        Orders { mesh: self.plan.mesh(), placement, of, absent: BTreeSet::new() }
    }

    /// The step of a rank.
    pub(crate) const fn step(&self, placement: Placement) -> Step {
        let (microbatches, data, loss_scale) = (self.microbatches, Data::Present, LossScale::Fixed);
        Step { microbatches, placement, data, loss_scale }
    }

    /// The prediction with a time that is known.
    pub(crate) fn prediction(&self, machine: &Machine, timing: Timing) -> Prediction {
        let ranks = self.plan.mesh().world_size() as u64;
        let (Microbatches::Given(count) | Microbatches::Asked(count)) = self.microbatches;
        let tokens = (self.batch.sequences as u64)
            .saturating_mul(self.batch.context as u64)
            .saturating_mul(count)
            .saturating_mul(ranks);
        let of_batch = self.computation.flops(&self.batch);
        let peak = machine.compute.peak(self.batch.dtype).map_or(0.0, |peak| peak.value());
        let processors = match placement(machine) {
            Placement::Device => ranks as f64,
            Placement::Host => machine.ranks.value(),
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

/// Refuses a timing that has reached the longest time.
fn checked(timing: Timing) -> Result<Timing, Error> {
    if timing.step == Time::MAX { Err(Error::TooLong) } else { Ok(timing) }
}

/// The memory that holds the model.
pub(crate) fn placement(machine: &Machine) -> Placement {
    if machine.device().is_some() { Placement::Device } else { Placement::Host }
}
