//! Where in a step an operation takes place, and how reductions divide there, in the types of comm.

use hsdp_comm::Scaling;
use hsdp_kernels::{Divisor, Wire};

use crate::error::Error;
use crate::options::divide::{DividePlan, Divides, Parties};
use crate::state::context::Context;

/// The place of an operation in the run: a step, and a microbatch of it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Place {
    pub(crate) step: u64,
    pub(crate) microbatch: usize,
}

impl Place {
    /// Returns the number of microbatches so far, with this one.
    pub(crate) fn microbatches(self) -> usize {
        self.microbatch + 1
    }
}

/// Returns how a reduce-scatter scales whose contributions are sums of this many microbatches.
pub(crate) fn scaling_of_reduce_scatter(
    context: &Context,
    microbatches: usize,
) -> Result<Scaling, Error> {
    scaling(context, divide_plan(context, microbatches).reduce_scatter)
}

/// Returns how an all-reduce of sums of this many microbatches scales; without replicas, by 1.
pub(crate) fn scaling_of_all_reduce(
    context: &Context,
    microbatches: usize,
) -> Result<Scaling, Error> {
    let divides = divide_plan(context, microbatches).all_reduce;
    scaling(context, divides.unwrap_or(Divides::NONE))
}

fn divide_plan(context: &Context, microbatches: usize) -> DividePlan {
    DividePlan::of(Parties {
        wire: context.options.wire(),
        shard_members: context.plan.mesh().shard_size(),
        replicate_members: Some(context.plan.mesh().replicate_size()),
        microbatches_in_contribution: microbatches,
        microbatches_in_partial: microbatches,
        objective: context.options.objective,
    })
}

fn scaling(context: &Context, divides: Divides) -> Result<Scaling, Error> {
    let wire = Wire::try_from(context.options.wire())
        .map_err(|error| Error::Options { what: error.to_string() })?;
    Ok(Scaling { wire, pre: divisor(divides.pre)?, post: divisor(divides.post)? })
}

#[expect(
    clippy::cast_possible_truncation,
    reason = "a power of two, or members over one: exact in f32"
)]
fn divisor(divisor: f64) -> Result<Divisor, Error> {
    Ok(Divisor::new(divisor as f32)?)
}
