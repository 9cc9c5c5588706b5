//! The least time of a step, by sums that all batches of a plan share.

use hsdp_flight::Channel;
use hsdp_sharding::{Offload, Rank};

use super::space::Load;
use crate::host::{Action, Block, Order, Placement, Work};
use crate::prediction::{OnMachine, update_cost};
use crate::simulation::Costs;
use crate::{Machine, Processor, Workload};

/// Seconds that a part of a step takes at least: of rank 0's thread, of its device, and of its
/// stream of collectives.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Least {
    host: f64,
    device: f64,
    stream: f64,
}

impl Least {
    fn add(&mut self, other: Self, times: f64) {
        self.host += other.host * times;
        self.device += other.device * times;
        self.stream += other.stream * times;
    }
}

/// Costs that a plan adds to the computation of a step: its operations, and its work on gradients
/// and parameters except the update.
pub(super) struct PlanCost {
    /// Costs of every microbatch but the last.
    repeated: Least,
    /// Costs of the rest of the step.
    once: Least,
}

/// Times are rounded to picoseconds.
const ROUNDING: f64 = 1.0 - 1e-6;

impl PlanCost {
    /// The costs of a plan, which are those of any of its workloads with two microbatches.
    pub(super) fn new(workload: &Workload, costs: &OnMachine<'_>, on: Placement) -> Self {
        let step = workload.step(on);
        let Order { blocks } = Order::of(&workload.plan, step);
        let mut cost = Self { repeated: Least::default(), once: Least::default() };
        // The opening, the repeated microbatch, and the last.
        for (index, block) in blocks.iter().enumerate() {
            let least = of_block(block, costs, on);
            if index == 1 { cost.repeated = least } else { cost.once.add(least, 1.0) }
        }
        cost
    }

    /// The least seconds of a step. Each rank has a thread, a device and a stream that do one thing
    /// after the other.
    pub(super) fn seconds(&self, load: &Load, update: Least) -> f64 {
        let microbatch = Least {
            host: load.microbatch.host.seconds(),
            device: load.microbatch.device.seconds(),
            stream: 0.0,
        };
        let mut sum = self.once;
        sum.add(update, 1.0);
        sum.add(microbatch, load.microbatches as f64);
        sum.add(self.repeated, load.microbatches.saturating_sub(1) as f64);
        sum.host.max(sum.device).max(sum.stream) * ROUNDING
    }
}

/// The cost of the update with a part of the model in the host's memory.
pub(super) fn update(
    workload: &Workload,
    offload: Offload,
    machine: &Machine,
    processor: &Processor,
) -> Least {
    let cost = update_cost(&workload.plan, offload, machine, processor);
    Least { host: cost.host.seconds(), device: cost.device.seconds(), stream: 0.0 }
}

fn of_block(block: &Block, costs: &OnMachine<'_>, on: Placement) -> Least {
    let mut least = Least::default();
    for action in &block.actions {
        let Action::Compute(work) = action else { continue };
        if matches!(work, Work::Accumulate(_) | Work::Fold(_) | Work::Norm) {
            let cost = costs.work(*work);
            least.host += cost.host.seconds();
            least.device += cost.device.seconds();
        }
    }
    for operation in &block.operations {
        let cost = costs.operation(operation, costs.shape(operation.members, Rank::new(0)));
        least.host += cost.host.seconds();
        match (operation.channel, on) {
            // The thread waits for it.
            (Channel::Control, _) => least.host += cost.link.seconds(),
            (_, Placement::Device) => least.stream += cost.link.seconds(),
            (_, Placement::Host) => {}
        }
    }
    least
}
