//! The divide plan of a reduction, in the types of comm.

use hsdp_comm::Scaling;
use hsdp_kernels::{Divisor, Wire};
use hsdp_sharding::Accumulation;

use crate::divide::{DividePlan, Divides, Parties};
use crate::engine::fabric::Fabric;
use crate::engine::place::Place;
use crate::error::Error;

/// How the reduce-scatter of a microbatch scales.
pub(crate) fn of_reduce_scatter(fabric: &Fabric, place: Place) -> Result<Scaling, Error> {
    scaling(fabric, divide_plan(fabric, place).reduce_scatter)
}

/// How the all-reduce over the replicas scales; without replicas, by 1.
pub(crate) fn of_all_reduce(fabric: &Fabric, place: Place) -> Result<Scaling, Error> {
    scaling(fabric, divide_plan(fabric, place).all_reduce.unwrap_or(Divides::NONE))
}

fn scaling(fabric: &Fabric, divides: Divides) -> Result<Scaling, Error> {
    let wire = Wire::try_from(fabric.options.wire())
        .map_err(|error| Error::Options { what: error.to_string() })?;
    Ok(Scaling { wire, pre: divisor(divides.pre)?, post: divisor(divides.post)? })
}

fn divide_plan(fabric: &Fabric, place: Place) -> DividePlan {
    let accumulation = fabric.plan.options().accumulation;
    let so_far = place.microbatches_so_far();
    DividePlan::of(Parties {
        wire: fabric.options.wire(),
        shard_members: fabric.plan.mesh().shard_size(),
        replicate_members: Some(fabric.plan.mesh().replicate_size()),
        microbatches_in_contribution: if accumulation == Accumulation::Local { so_far } else { 1 },
        microbatches_in_partial: if accumulation == Accumulation::Every { 1 } else { so_far },
        objective: fabric.options.objective,
    })
}

#[expect(
    clippy::cast_possible_truncation,
    reason = "a power of two, or members over one: exact in f32"
)]
fn divisor(divisor: f64) -> Result<Divisor, Error> {
    Ok(Divisor::new(divisor as f32)?)
}
