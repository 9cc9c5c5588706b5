//! One pass over this rank's shards, in which each parameter is updated by its optimizer: on the
//! host, run by run.

use std::ops::Range;

use hsdp_kernels::{FusedUpdate, UPDATE_BLOCK, ValuesMut, update_in_blocks};
use hsdp_sharding::{ParamId, Piece, UnitId};

use crate::model::updates::{Moved, Shared};
use crate::optimizer::assignment::Assignment;
use crate::optimizer::interface::Selected;
use crate::optimizer::pieces::trained_pieces;
use crate::optimizer::run::Run;
use crate::optimizer::updating::Updating;
use crate::state::context::Context;
use crate::state::shard::Shard;
use crate::step::gradients::Gradients;

/// An update of all shards of this rank.
#[derive(Clone, Copy)]
pub(super) struct Pass<'a> {
    pub(super) context: &'a Context,
    pub(super) gradients: &'a Gradients,
    pub(super) assignment: &'a Assignment,
    pub(super) averages: &'a [Shared],
}

impl<'a> Pass<'a> {
    /// Returns the update as an optimizer sees it.
    pub(super) fn updating<'b>(self, shards: &'b [Shard], index: usize) -> Updating<'b>
    where
        'a: 'b,
    {
        let Self { context, gradients, assignment, .. } = self;
        Updating { context, gradients, assignment, shards, index }
    }

    /// Updates a unit on the host, run by run.
    pub(super) fn update_runs(
        self,
        unit: UnitId,
        OnHost { master, mut gather_input, sums }: OnHost<'_>,
        (optimizers, mut moved): (&mut [Selected<'_>], Option<&mut Moved>),
    ) {
        for piece in trained_pieces(self.context, unit) {
            let range = piece.shard_range();
            if !self.has_gradient(unit, &piece) {
                self.average(unit, piece, &master[range]);
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
                self.average(unit, piece, parameters);
            });
        }
    }

    /// Moves the averages of some elements on, to the parameters after the update.
    fn average(self, unit: UnitId, piece: Piece, parameters: &[f32]) {
        for average in self.averages {
            average.lock().update(unit, piece, parameters);
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

/// The buffers of an update on the host: the f32 parameters, their copy in the compute dtype, and the sums of gradients.
pub(super) struct OnHost<'a> {
    pub(super) master: &'a mut [f32],
    pub(super) gather_input: Option<ValuesMut<'a>>,
    pub(super) sums: &'a [f32],
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
