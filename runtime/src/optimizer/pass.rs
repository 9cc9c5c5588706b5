//! One pass over this rank's shards, in which each parameter is updated by its optimizer.

use std::ops::Range;

use hsdp_comm::World;
use hsdp_kernels::{FusedUpdate, UPDATE_BLOCK, ValuesMut, update_in_blocks};
use hsdp_sharding::{ParamId, Piece, Role, UnitId};
use parking_lot::Mutex;

use crate::error::Error;
use crate::model::ShardedModel;
use crate::model::updates::{Moved, Shared, Updates};
use crate::optimizer::assignment::Assignment;
use crate::optimizer::{Run, Selected, Update, Updating, device};
use crate::persist::pair::ONE_OF_EACH_KIND;
use crate::state::context::Context;
use crate::state::joint;
use crate::state::shard::Shard;
use crate::state::sums::Sums;
use crate::step::engine::State;
use crate::step::gradients::{Gradients, Verdict};

impl ShardedModel {
    /// Updates this rank's shards by several optimizers in one pass, each for the parameters that its function selects, and counts the
    /// step as committed; or skips the step if the ranks agreed on that. Collective over the shard group if one of the optimizers
    /// [is](crate::Optimizer::is_collective), and otherwise not.
    ///
    /// ```
    /// use hsdp::prelude::*;
    /// # fn step(model: &mut ShardedModel, gradients: hsdp::Gradients) -> Result<(), hsdp::Error> {
    /// let mut sgd = Sgd::new(model, SgdOptions::default());
    /// let mut adamw = AdamW::new(model, AdamWOptions::default());
    /// let is_matrix = |param: &Param| param.shape.len() == 2;
    /// model.update_by(gradients, [(&mut sgd, is_matrix), (&mut adamw, |param| param.shape.len() != 2)])?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// Before any parameter changes: [`Error::Options`] that names a trainable parameter which no optimizer selects, or more than one;
    /// [`Error::Misuse`] for an update on a device that is [measured](Gradients::measured), or clipped by
    /// [value](Gradients::clip_value) or by groups, and for two optimizers of one kind while
    /// [checkpoints](crate::checkpoint::Checkpoints::open) of the model are open; those of [`Gradients::check_model`], of
    /// [`Optimizer::check`](crate::Optimizer::check) and of [`Optimizer::prepare`](crate::Optimizer::prepare). [`Error::Device`](Error)
    /// if the model lies on a device that fails: some units are updated then, and others are not.
    pub fn update_by<const N: usize>(
        &mut self,
        gradients: Gradients,
        optimizers: [Selected<'_>; N],
    ) -> Result<Update, Error> {
        self.update_by_all(gradients, &mut { optimizers })
    }

    fn update_by_all(
        &mut self,
        mut gradients: Gradients,
        optimizers: &mut [Selected<'_>],
    ) -> Result<Update, Error> {
        gradients.grad_shards.taken();
        let context = &self.engine.context;
        let begin = || {
            gradients.check_model(self)?;
            let state = self.engine.enter("optimizer step", gradients.step)?;
            Ok((state, Assignment::new(context, optimizers)?))
        };
        let (mut state, assignment) =
            jointly((waiting(context, optimizers), gradients.step), begin)?;
        let averages = self.updates.lock().averages.living();
        let pass =
            Pass { context, gradients: &gradients, assignment: &assignment, averages: &averages };
        pass.run((&mut state, &self.updates), optimizers)?;
        state.commit(&gradients.verdict);
        Ok(match gradients.verdict {
            Verdict::Apply => Update::Applied,
            Verdict::Skip(found) => Update::Skipped(found),
        })
    }
}

/// The world, if other ranks wait for this one in an update by these optimizers.
fn waiting<'a>(context: &'a Context, optimizers: &[Selected<'_>]) -> Option<&'a World> {
    let is_collective = optimizers.iter().any(|(optimizer, _)| optimizer.is_collective());
    is_collective.then_some(&context.world)
}

/// A part of an update before anything changes. A rank that fails in it tells the ranks that wait.
fn jointly<T>(
    (waiting, step): (Option<&World>, u64),
    part: impl FnOnce() -> Result<T, Error>,
) -> Result<T, Error> {
    match waiting {
        Some(world) => joint::run(world, step, part),
        None => part(),
    }
}

/// An update of all shards of this rank.
#[derive(Clone, Copy)]
pub(super) struct Pass<'a> {
    pub(super) context: &'a Context,
    pub(super) gradients: &'a Gradients,
    pub(super) assignment: &'a Assignment,
    pub(super) averages: &'a [Shared],
}

impl<'a> Pass<'a> {
    fn run(
        self,
        (state, updates): (&mut State, &Mutex<Updates>),
        optimizers: &mut [Selected<'_>],
    ) -> Result<(), Error> {
        let room = state.updated.room();
        let lines = self.prepare((&state.shards, room), optimizers)?;
        updates.lock().moved = None;
        if self.gradients.verdict != Verdict::Apply {
            return Ok(());
        }
        state.begin_update(self.gradients, lines);
        for (index, (optimizer, _)) in optimizers.iter_mut().enumerate() {
            optimizer.begin(&self.updating(&state.shards, index));
        }
        let mut moved = self.gradients.is_measured.then(|| Moved::new(self.context));
        for unit in self.context.plan.reductions().iter().copied() {
            let shard = (unit, &mut state.shards[unit.index()]);
            self.update_unit(shard, (optimizers, moved.as_mut()))?;
        }
        updates.lock().moved = moved;
        Ok(())
    }

    /// All that may fail before anything changes. Returns the lines of the options. A rank that fails where others wait for it tells
    /// them.
    fn prepare(
        self,
        (shards, mut lines): (&[Shard], String),
        optimizers: &mut [Selected<'_>],
    ) -> Result<String, Error> {
        let waiting = waiting(self.context, optimizers);
        let prepare = || {
            self.check_measured()?;
            self.check_clipped()?;
            self.check_kinds(optimizers)?;
            self.assignment.write(optimizers.len(), &mut lines);
            for (index, (optimizer, _)) in optimizers.iter_mut().enumerate() {
                optimizer.check(&self.updating(shards, index), &mut lines)?;
            }
            for average in self.averages {
                average.lock().write(&mut lines);
            }
            if self.gradients.verdict == Verdict::Apply {
                for (index, (optimizer, _)) in optimizers.iter_mut().enumerate() {
                    optimizer.prepare(&self.updating(shards, index))?;
                }
            }
            Ok(lines)
        };
        jointly((waiting, self.gradients.step), prepare)
    }

    /// Refuses two optimizers of one kind while the model has checkpoints that may save: they could not.
    fn check_kinds(self, optimizers: &[Selected<'_>]) -> Result<(), Error> {
        let mut kinds = optimizers.iter().enumerate();
        let twice = kinds.find_map(|(index, (optimizer, _))| {
            let kind = optimizer.kind()?;
            let is_same = |(other, _): &Selected<'_>| other.kind() == Some(kind);
            optimizers[..index].iter().any(is_same).then_some(kind)
        });
        let Some(kind) = twice.filter(|_| self.context.is_saved()) else { return Ok(()) };
        let what = format!(
            "two optimizers of the update are {kind}, and checkpoints of the model are open: {ONE_OF_EACH_KIND}"
        );
        Err(self.context.misuse("optimizer step", self.gradients.step, what))
    }

    fn check_measured(self) -> Result<(), Error> {
        if !self.gradients.is_measured || !self.context.updates_on_device() {
            return Ok(());
        }
        let what = "an update on a device is not measured: do not call `Gradients::measured`";
        Err(self.context.misuse("optimizer step", self.gradients.step, what.to_owned()))
    }

    fn check_clipped(self) -> Result<(), Error> {
        if !self.gradients.is_clipped_apart() || !self.context.updates_on_device() {
            return Ok(());
        }
        let what = "an update on a device clips all gradients by one factor: do not clip by value, nor groups of parameters, or place the \
                    model on the host";
        Err(self.context.misuse("optimizer step", self.gradients.step, what.to_owned()))
    }

    fn updating<'b>(self, shards: &'b [Shard], index: usize) -> Updating<'b>
    where
        'a: 'b,
    {
        let Self { context, gradients, assignment, .. } = self;
        Updating { context, gradients, assignment, shards, index }
    }

    /// Updates a unit where its shard is updated: on the host, from which it may go on to a device, or on the device.
    fn update_unit(
        self,
        (unit, shard): (UnitId, &mut Shard),
        (optimizers, moved): (&mut [Selected<'_>], Option<&mut Moved>),
    ) -> Result<(), Error> {
        match (shard, &self.gradients.grad_shards[unit.index()]) {
            (Shard::Host(shard), Sums::Host(sums)) => {
                let (master, gather_input) = shard.exclusive();
                let on_host = OnHost { master, gather_input, sums };
                self.update_runs(unit, on_host, (optimizers, moved));
                Ok(())
            }
            (Shard::Device(shard), Sums::Device(_)) if self.context.updates_on_device() => {
                device::update_unit(self, (unit, shard), optimizers)
            }
            (Shard::Device(shard), Sums::Device(sums)) => {
                let sums = (sums, self.gradients.step);
                shard.update_on_host(self.context, sums, |master, sums| {
                    let on_host = OnHost { master, gather_input: None, sums };
                    self.update_runs(unit, on_host, (optimizers, moved));
                })
            }
            _ => unreachable!("a model has its shards and sums in the same place"),
        }
    }

    /// Updates a unit on the host, run by run.
    fn update_runs(
        self,
        unit: UnitId,
        OnHost { master, mut gather_input, sums }: OnHost<'_>,
        (optimizers, mut moved): (&mut [Selected<'_>], Option<&mut Moved>),
    ) {
        for piece in trained_pieces(self.context, unit) {
            let range = piece.shard_range();
            if !self.has_gradient(unit, &piece) {
                self.average((unit, piece), &master[range]);
                continue;
            }
            let (optimizer, _) = &mut optimizers[self.optimizer_of(unit, &piece)];
            let fused = FusedUpdate {
                parameters: &mut master[range.clone()],
                rounded: gather_input.as_mut().map(|all| all.reborrow().slice(range.clone())),
                gradient: &sums[range],
                divisor: self.gradients.divisor,
            };
            let clip = self.gradients.clip_factor();
            let parameter = ParamId { unit, index: piece.param };
            let number = self.context.number_of(parameter);
            let clipped_apart = self.gradients.clip_of(self.context, parameter);
            update_in_blocks(fused, |block, parameters, gradient| {
                let piece = part_of(piece, block);
                let mut on_stack;
                let gradient = match clipped_apart {
                    None => gradient,
                    Some(clip) => {
                        on_stack = [0.0; UPDATE_BLOCK];
                        let clipped = &mut on_stack[..gradient.len()];
                        clipped.copy_from_slice(gradient);
                        clip.apply(clipped);
                        clipped
                    }
                };
                let mut update = |parameters: &mut [f32]| {
                    optimizer.update(Run { unit, piece, parameters, gradient, clip });
                };
                match &mut moved {
                    Some(moved) => moved.measure(number, parameters, update),
                    None => update(parameters),
                }
                self.average((unit, piece), parameters);
            });
        }
    }

    /// Moves the averages of some elements on, to the parameters after the update.
    fn average(self, of: (UnitId, Piece), parameters: &[f32]) {
        for average in self.averages {
            average.lock().update(of, parameters);
        }
    }

    fn has_gradient(self, unit: UnitId, piece: &Piece) -> bool {
        self.gradients.grad_shards.present[unit.index()][piece.param]
    }

    /// The index of the optimizer of a piece.
    pub(super) fn optimizer_of(self, unit: UnitId, piece: &Piece) -> usize {
        self.assignment.of(self.context, ParamId { unit, index: piece.param })
    }

    /// The pieces of this rank's shard that are trained and got a gradient in this step.
    pub(super) fn pieces_with_gradient(self, unit: UnitId) -> impl Iterator<Item = Piece> {
        trained_pieces(self.context, unit).filter(move |piece| self.has_gradient(unit, piece))
    }
}

/// The pieces of this rank's shard that are trained.
pub(super) fn trained_pieces(context: &Context, unit: UnitId) -> impl Iterator<Item = Piece> {
    let layout = context.plan.layout(unit);
    let shard_index = context.plan.mesh().coordinate(context.rank()).shard_index;
    let is_trained = |piece: &Piece| layout.params()[piece.param].role == Role::Trainable;
    layout.pieces(shard_index).filter(is_trained)
}

/// The buffers of an update on the host: the f32 parameters, their copy in the compute dtype, and the sums of gradients.
struct OnHost<'a> {
    master: &'a mut [f32],
    gather_input: Option<ValuesMut<'a>>,
    sums: &'a [f32],
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
