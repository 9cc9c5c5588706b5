//! Optimizers on shards: each rank updates the shards that it owns, without communication.

mod adamw;
mod device;
mod groups;
mod sgd;

use std::fmt::Display;
use std::ops::Range;

use hsdp_kernels::memory::{self, Category};
use hsdp_kernels::{FusedUpdate, ValuesMut, update_in_blocks};
use hsdp_sharding::{Piece, Role, UnitId};

pub use adamw::{AdamW, AdamWOptions};
pub use device::DeviceRun;
pub use sgd::{Momentum, Sgd, SgdOptions};

use crate::engine::fabric::Fabric;
use crate::engine::shard::Shard;
use crate::engine::sums::Sums;
use crate::error::Error;
use crate::gradients::{Gradients, Verdict};
use crate::model::{ModelId, ShardedModel};
use crate::non_finite::NonFiniteGradient;

/// The result of an optimizer's step.
#[derive(Clone, Debug, PartialEq)]
pub enum Update {
    /// The parameters were updated.
    Applied,
    /// All ranks left the parameters as they were, for this reason.
    Skipped(NonFiniteGradient),
}

/// An optimizer, which updates a model's shards with its gradients through [`ShardedModel::update`].
pub trait Optimizer {
    /// Updates this rank's shards, or skips the step if the ranks agreed on that. Not collective.
    ///
    /// Parameters that got no gradient on any rank, and their state, do not change.
    ///
    /// # Errors
    /// [`Error::Misuse`] if the gradients are not those of the model's last step, or the optimizer was
    /// made for another model; [`Error::Options`] if an option has a value that would destroy the parameters, such as a learning rate
    /// that is NaN or below 0; [`Error::Device`](Error) if the model lies on a device that fails.
    fn step(&mut self, model: &mut ShardedModel, gradients: Gradients) -> Result<Update, Error>;

    /// Sets the learning rate for the next steps. Those of [groups](AdamW::group) keep their ratios to it.
    fn set_learning_rate(&mut self, rate: f64);
}

/// Consecutive elements of one parameter in this rank's shard, with their gradient: a piece of the shard, or a part of a piece that
/// stays in the cache while it is divided and updated.
#[derive(Debug)]
pub struct Run<'a> {
    /// The unit.
    pub unit: UnitId,
    /// The parameter of these elements, and their place in the unit's shard. Optimizer state has the same place.
    pub piece: Piece,
    /// The f32 master parameters, `[piece.len]`, which the optimizer updates in place.
    pub parameters: &'a mut [f32],
    /// The gradient in f32, `[piece.len]`, divided. The optimizer must multiply it by `clip` first.
    pub gradient: &'a [f32],
    /// The factor of [`Gradients::clip`], or 1.
    pub clip: f32,
}

impl ShardedModel {
    /// Updates this rank's shards: calls `update` for each run of elements that has a gradient, in the plan's order of
    /// units, and counts the step as committed. An [`Optimizer`] is built on it. Not collective.
    ///
    /// A long piece comes as several runs, one after the other, so that each run stays in the cache. An update must not depend on
    /// the places at which a piece is cut. If the ranks agreed to skip the step, `update` is not called.
    ///
    /// # Errors
    /// As [`Gradients::check_model`], before any parameter changes; [`Error::Misuse`] if the model is updated on a device; `Error::Device`
    /// if the model is offloaded from a device that fails: some units are updated then, and others are not.
    pub fn update(
        &mut self,
        gradients: Gradients,
        update: impl FnMut(Run<'_>),
    ) -> Result<Update, Error> {
        self.update_as("", gradients, update)
    }

    /// As [`update`](Self::update), by an optimizer with these options: a line for each option, with its value. The ranks compare the
    /// lines when the next step begins, before a checkpoint is saved, and at the [end of the run](Self::end_run): ranks with
    /// another learning rate, for example, get [`Error::Disagreement`]. Not collective.
    ///
    /// # Errors
    /// As [`update`](Self::update).
    pub fn update_as(
        &mut self,
        options: impl Display,
        mut gradients: Gradients,
        mut update: impl FnMut(Run<'_>),
    ) -> Result<Update, Error> {
        take(&mut gradients, self, self.id())?;
        let fabric = &self.engine.fabric;
        let mut state = self.engine.enter("optimizer step", gradients.step)?;
        if fabric.updates_on_device() {
            let what = "the shards of this model are updated on a device: call `update_on_device`"
                .to_owned();
            return Err(fabric.misuse("optimizer step", gradients.step, what));
        }
        state.begin_update(&gradients, &options);
        if gradients.verdict == Verdict::Apply {
            for unit in fabric.plan.reductions().iter().copied() {
                let shard = (unit, &mut state.shards[unit.index()]);
                update_unit(fabric, shard, &gradients, &mut update)?;
            }
        }
        state.commit();
        Ok(update_of(gradients.verdict))
    }
}

/// Updates a unit on the host, whether it lies on the host or on a device.
fn update_unit(
    fabric: &Fabric,
    (unit, shard): (UnitId, &mut Shard),
    gradients: &Gradients,
    update: &mut impl FnMut(Run<'_>),
) -> Result<(), Error> {
    match (shard, &gradients.grad_shards[unit.index()]) {
        (Shard::Host(shard), Sums::Host(sums)) => {
            let (master, gather_input) = shard.exclusive();
            let on_host = OnHost { master, gather_input, sums };
            update_runs((fabric, unit), on_host, gradients, update);
            Ok(())
        }
        (Shard::Device(shard), Sums::Device(sums)) => {
            let sums = (sums, gradients.step);
            shard.update_on_host(fabric, sums, |master, sums| {
                let on_host = OnHost { master, gather_input: None, sums };
                update_runs((fabric, unit), on_host, gradients, update);
            })
        }
        _ => unreachable!("a model has its shards and sums in the same place"),
    }
}

/// The buffers of an update on the host: the f32 parameters, their copy in the compute dtype, and the sums of gradients.
struct OnHost<'a> {
    master: &'a mut [f32],
    gather_input: Option<ValuesMut<'a>>,
    sums: &'a [f32],
}

/// Updates a unit run by run.
fn update_runs(
    (fabric, unit): (&Fabric, UnitId),
    OnHost { master, mut gather_input, sums }: OnHost<'_>,
    gradients: &Gradients,
    update: &mut impl FnMut(Run<'_>),
) {
    let present = &gradients.grad_shards.present[unit.index()];
    for piece in pieces_with_gradient(fabric, unit, present) {
        let range = piece.shard_range();
        let fused = FusedUpdate {
            parameters: &mut master[range.clone()],
            rounded: gather_input.as_mut().map(|all| all.reborrow().slice(range.clone())),
            gradient: &sums[range],
            divisor: gradients.divisor,
        };
        update_in_blocks(fused, |block, parameters, gradient| {
            let piece = part_of(piece, block);
            update(Run { unit, piece, parameters, gradient, clip: gradients.clip });
        });
    }
}

/// The result of a step with this verdict.
fn update_of(verdict: Verdict) -> Update {
    match verdict {
        Verdict::Apply => Update::Applied,
        Verdict::Skip(found) => Update::Skipped(found),
    }
}

/// The values that an option of an optimizer may have.
#[derive(Clone, Copy, Debug)]
enum Allowed {
    /// Finite, and 0 or more.
    NotNegative,
    /// From 0 to below 1.
    Fraction,
}

/// Refuses options of an optimizer or a group with which an update would destroy the parameters: each has a name and a value.
fn check_options<const N: usize>(
    of: &dyn Display,
    options: [(&str, f64, Allowed); N],
) -> Result<(), Error> {
    for (name, value, allowed) in options {
        let (is_allowed, must) = match allowed {
            Allowed::NotNegative => (value.is_finite() && value >= 0.0, "finite, and 0 or more"),
            Allowed::Fraction => ((0.0..1.0).contains(&value), "0 or more, and below 1"),
        };
        if !is_allowed {
            return Err(Error::Options {
                what: format!("{of} {name} {value:?}: it must be {must}"),
            });
        }
    }
    Ok(())
}

/// Takes gradients for an update of `model`, by the optimizer of the model `owner`. An update begins with this: gradients that it refuses
/// are not forgotten.
///
/// # Errors
/// [`Error::Misuse`] if the two are not one model, and those of [`Gradients::check_model`].
fn take(gradients: &mut Gradients, model: &ShardedModel, owner: &ModelId) -> Result<(), Error> {
    gradients.grad_shards.taken();
    if owner == model.id() {
        return gradients.check_model(model);
    }
    let what = "the optimizer was made for another model".to_owned();
    Err(model.engine.fabric.misuse("optimizer step", gradients.step, what))
}

/// The pieces of this rank's shard that are trained and got a gradient in this step.
fn pieces_with_gradient<'a>(
    fabric: &'a Fabric,
    unit: UnitId,
    present: &'a [bool],
) -> impl Iterator<Item = Piece> + 'a {
    let layout = fabric.plan.layout(unit);
    let shard_index = fabric.plan.mesh().coordinate(fabric.rank()).shard_index;
    let updated = |piece: &Piece| {
        layout.params()[piece.param].role == Role::Trainable && present[piece.param]
    };
    layout.pieces(shard_index).filter(updated)
}

/// A range of a piece, as a piece.
fn part_of(piece: Piece, range: Range<usize>) -> Piece {
    Piece {
        param_start: piece.param_start + range.start,
        shard_start: piece.shard_start + range.start,
        len: range.len(),
        ..piece
    }
}

/// Zeroed optimizer state on the host, for the trainable region of every unit; empty for a model that is updated on a device.
///
/// # Panics
/// If there is no memory for it.
fn state_like_shards(model: &ShardedModel) -> Vec<Vec<f32>> {
    let zeros = |unit| {
        let on_host = !model.engine.fabric.updates_on_device();
        let trainable = model.plan().layout(UnitId::new(unit)).trainable().shard_len;
        let elements = if on_host { trainable } else { 0 };
        let _optimizer = memory::scope(Category::Optimizer);
        let zeros = hsdp_kernels::zeros(elements);
        zeros.unwrap_or_else(|error| panic!("optimizer state of unit {unit}: {error}"))
    };
    (0..model.plan().spec().units().len()).map(zeros).collect()
}

/// One count for each parameter, by unit.
fn count_per_parameter(model: &ShardedModel) -> Vec<Vec<u64>> {
    model.plan().spec().units().iter().map(|unit| vec![0; unit.params.len()]).collect()
}
