//! Where in a step a reduction takes place, and its divide plan there, in the types of comm.

use hsdp_comm::Scaling;
use hsdp_kernels::{Divisor, Wire};
use hsdp_sharding::Accumulation;

use crate::error::Error;
use crate::options::divide::{DividePlan, Divides, Parties};
use crate::state::context::Context;

/// Where in a step a reduction takes place.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Place {
    pub(crate) step: u64,
    pub(crate) microbatch: usize,
    pub(crate) turn: Turn,
}

/// Whether another microbatch follows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Turn {
    /// Yes, or it is not known.
    MayFollow,
    /// No: all-reduces may start.
    Last,
}

impl Place {
    /// How the reduce-scatter of a microbatch scales.
    pub(crate) fn scaling_of_reduce_scatter(self, context: &Context) -> Result<Scaling, Error> {
        scaling(context, self.divide_plan(context).reduce_scatter)
    }

    /// How the all-reduce over the replicas scales; without replicas, by 1.
    pub(crate) fn scaling_of_all_reduce(self, context: &Context) -> Result<Scaling, Error> {
        scaling(context, self.divide_plan(context).all_reduce.unwrap_or(Divides::NONE))
    }

    fn divide_plan(self, context: &Context) -> DividePlan {
        let accumulation = context.plan.options().accumulation;
        let so_far = self.microbatch + 1;
        DividePlan::of(Parties {
            wire: context.options.wire(),
            shard_members: context.plan.mesh().shard_size(),
            replicate_members: Some(context.plan.mesh().replicate_size()),
            microbatches_in_contribution: if accumulation == Accumulation::Local {
                so_far
            } else {
                1
            },
            microbatches_in_partial: if accumulation == Accumulation::Every { 1 } else { so_far },
            objective: context.options.objective,
        })
    }
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
