//! Whether there are replicas, and when their reductions take place.

use hsdp_sharding::Accumulation;

use crate::engine::fabric::Fabric;
use crate::precision::LossScaling;

pub(crate) fn exist(fabric: &Fabric) -> bool {
    fabric.plan.mesh().replicate_size() > 1
}

/// Whether ranks ask each other for overflows before they all-reduce.
pub(crate) fn expects_overflow(fabric: &Fabric) -> bool {
    let dynamic = matches!(fabric.options.loss_scaling, LossScaling::Dynamic(_));
    dynamic && exist(fabric) && fabric.plan.options().accumulation != Accumulation::Every
}

pub(crate) fn reduce_every_microbatch(fabric: &Fabric) -> bool {
    exist(fabric) && fabric.plan.options().accumulation == Accumulation::Every
}
