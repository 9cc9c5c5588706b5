//! Norms of gradients, parameters and updates, by parameter: `histograms` counts elements besides.
//!
//! Each rank sums the squares of its pieces in f64, and one small all-reduce over the shard group, on the control channel, adds them in
//! the order of its members. So the bits are the same on all ranks: replicas hold the same pieces.

pub(crate) mod histograms;
pub(crate) mod moved;

use std::ops::Range;

use hsdp_comm::{Part, PartKind, Reduction, Stage};
use hsdp_kernels::{Element, squared_norm};
use hsdp_sharding::{ParamId, Piece, Role, UnitId};

use crate::error::Error;
use crate::model::ShardedModel;
use crate::state::context::Context;
use crate::state::control;
use crate::step::gradients::Gradients;

/// A value of each parameter, in the order of the model.
#[derive(Clone, Debug, PartialEq)]
pub struct ByParameter<T> {
    values: Vec<(String, T)>,
}

/// A number of each parameter: a norm or a ratio of norms.
pub type Norms = ByParameter<f64>;

impl<T> ByParameter<T> {
    /// The names and the values, in the order of the model.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &T)> {
        self.values.iter().map(|(name, value)| (name.as_str(), value))
    }

    fn find(&self, name: &str) -> Option<&T> {
        self.iter().find(|(it, _)| *it == name).map(|(_, value)| value)
    }
}

impl Norms {
    /// The number of a parameter.
    #[must_use]
    pub fn get(&self, name: &str) -> Option<f64> {
        self.find(name).copied()
    }

    /// The root of the sum of all squares: of norms, the norm of all parameters together.
    #[must_use]
    pub fn total(&self) -> f64 {
        self.iter().map(|(_, norm)| norm * norm).sum::<f64>().sqrt()
    }
}

impl Gradients {
    /// The 2-norm of the gradient of each trainable parameter, over all shards, divided, before clipping; 0 for a parameter without a
    /// gradient. Squares are summed in f64, and the [total](Norms::total) is [`norm`](Self::norm) but for the rounding of f64.
    ///
    /// If the ranks agreed to skip the step, these are norms of the sums without the division. Gradients on a device are copied to the
    /// host.
    ///
    /// Collective over the shard group: one all-reduce of an f64 for each parameter. All ranks get the same bits.
    ///
    /// # Errors
    /// [`Error::Misuse`] if these are the gradients of another model; [`Error::Comm`] if the all-reduce fails; [`Error::Device`](Error) if
    /// the gradients lie on a device that fails.
    pub fn norms(&self, model: &ShardedModel) -> Result<Norms, Error> {
        let squares = self.summed(model, 1, add_square)?;
        Ok(trained(model, &squares, |square| square[0].sqrt() / self.divisor))
    }

    /// As many sums for each parameter of the model: `add` adds elements of the sums of gradients on this rank to those of their parameter.
    fn summed<T: Element>(
        &self,
        model: &ShardedModel,
        count: usize,
        add: impl Fn(&mut [T], &[f32]),
    ) -> Result<Vec<T>, Error> {
        let context = &model.engine.context;
        control::between_steps(&context.world, self.step, || {
            if self.model != *model.id() {
                let what = "these are the gradients of another model".to_owned();
                return Err(context.misuse("norms", self.step, what));
            }
            let mut sums = vec![T::zeroed(); count * context.parameters()];
            for unit in context.plan.reductions().iter().copied() {
                let elements = self.sums_on_host(context, unit)?;
                for (number, range) in pieces(context, unit, elements.len()) {
                    add(&mut sums[count * number..][..count], &elements[range]);
                }
            }
            over_shards(context, self.step, Some(PartKind::Gradients), Reduction::Sum, sums)
        })
    }
}

impl ShardedModel {
    /// The 2-norm of the values of each parameter, also of frozen ones, over all shards. Squares are summed in f64. Parameters on a
    /// device are copied to the host.
    ///
    /// Collective over the shard group, outside of steps: one all-reduce of an f64 for each parameter. All ranks get the same bits.
    ///
    /// # Errors
    /// [`Error::Comm`] if the all-reduce fails; [`Error::Kernel`] if there is not enough memory; [`Error::Device`](Error) if the
    /// parameters lie on a device that fails.
    pub fn norms(&self) -> Result<Norms, Error> {
        let squares = self.summed(1, add_square)?;
        Ok(by_parameter(self, &squares, |_| true, |square| square[0].sqrt()))
    }

    /// As many sums for each parameter: `add` adds elements of this rank to those of their parameter.
    fn summed<T: Element>(
        &self,
        count: usize,
        add: impl Fn(&mut [T], &[f32]),
    ) -> Result<Vec<T>, Error> {
        let (context, state) = (&self.engine.context, self.engine.state());
        let (shards, step) = (state.shards.clone(), state.next_step);
        drop(state);
        control::between_steps(&context.world, step, || {
            let mut sums = vec![T::zeroed(); count * context.parameters()];
            for (unit, shard) in context.plan.spec().unit_ids().zip(&shards) {
                let elements = shard.in_f32(context)?;
                for (number, range) in pieces(context, unit, elements.len()) {
                    add(&mut sums[count * number..][..count], &elements[range]);
                }
            }
            over_shards(context, step, None, Reduction::Sum, sums)
        })
    }
}

fn add_square(square: &mut [f64], elements: &[f32]) {
    square[0] += squared_norm(elements);
}

/// The pieces of parameters in the first `len` elements of this rank's shard: the number of each parameter in the model, and its
/// range. Trained parameters come first in a shard.
pub(crate) fn pieces(
    context: &Context,
    unit: UnitId,
    len: usize,
) -> impl Iterator<Item = (usize, Range<usize>)> {
    let place = move |piece: Piece| {
        (context.number_of(ParamId { unit, index: piece.param }), piece.shard_range())
    };
    context.pieces(unit).map(place).filter(move |(_, range)| range.end <= len)
}

/// Reduces values of each rank over the shard group, in the order of its members. They are of the
/// model's parameters, or of another part of it.
pub(crate) fn over_shards<T: Element>(
    context: &Context,
    step: u64,
    part: Option<PartKind>,
    by: Reduction,
    own: Vec<T>,
) -> Result<Vec<T>, Error> {
    let tag = context.tag(None, Stage::Export, step, 0);
    let tag = part.map_or(tag, |kind| tag.part(Part { kind, number: 0 }));
    Ok(context.export.all_reduce(tag, by, own)?.wait()?)
}

/// A value of each parameter whose role `has` accepts, of the sums of all parameters.
fn by_parameter<S, T>(
    model: &ShardedModel,
    sums: &[S],
    has: impl Fn(Role) -> bool,
    value: impl Fn(&[S]) -> T,
) -> ByParameter<T> {
    let params = || model.plan().spec().units().iter().flat_map(|unit| &unit.params);
    let count = (sums.len() / params().count().max(1)).max(1);
    let with_sums = params().zip(sums.chunks_exact(count)).filter(|(param, _)| has(param.role));
    ByParameter { values: with_sums.map(|(param, it)| (param.name.clone(), value(it))).collect() }
}

/// A value of each trainable parameter.
fn trained<S, T>(model: &ShardedModel, sums: &[S], value: impl Fn(&[S]) -> T) -> ByParameter<T> {
    by_parameter(model, sums, |role| role == Role::Trainable, value)
}
