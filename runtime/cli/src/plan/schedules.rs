//! The operations of all ranks in a step.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use hsdp_sharding::Plan;
use hsdp_simulator::{
    Data, Error, LossScale, Microbatches, Order, Orders, Placement, Schedules, Step, Streams,
};

use super::{Device, Options};

/// Returns the schedules of a plan in which all ranks have data, and the number of microbatches is
/// given.
pub(super) fn of(plan: &Plan, options: &Options) -> Result<Schedules, Error> {
    let (placement, streams) = match options.device {
        Device::Cpu => (Placement::Host, Streams::OfEachChannel),
        Device::Cuda => (Placement::Device, Streams::One),
    };
    let microbatches = Microbatches::Given(options.choices.microbatches);
    let (data, loss_scale) = (Data::Present, LossScale::Fixed);
    let plan = Arc::new(plan.clone());
    let order = Order::of(&plan, Step { microbatches, placement, data, loss_scale });
    let (of, absent) = (BTreeMap::from([(data, order)]), BTreeSet::new());
    Orders { mesh: plan.mesh(), placement, of, absent }.schedules(None, streams)
}
