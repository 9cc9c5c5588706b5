//! One pass over this rank's shards, in which each parameter is updated by its optimizer: on the
//! host, run by run; on a device by one or two launches for each unit and optimizer, and no wait.

use std::ops::Range;

use hsdp_kernels::cuda::{CudaError, DeviceBuffer, DeviceUpdate};
use hsdp_kernels::{FusedUpdate, UPDATE_BLOCK, ValuesMut, update_in_blocks};
use hsdp_sharding::{ParamId, Piece, UnitId};

use crate::model::updates::{Moved, Shared};
use crate::optimizer::assignment::Assignment;
use crate::optimizer::interface::Selected;
use crate::optimizer::pieces::trained_pieces;
use crate::optimizer::run::{DeviceRun, Run};
use crate::optimizer::updating::Updating;
use crate::state::context::Context;
use crate::state::model_device::ModelDevice;
use crate::state::shard::{Shard, ShardUpdate};
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

    /// Moves the averages of some elements on, to the parameters after the update.
    fn average(self, unit: UnitId, piece: Piece, parameters: &[f32]) {
        for average in self.averages {
            average.lock().update(unit, piece, parameters);
        }
    }

    fn has_gradient(self, unit: UnitId, piece: &Piece) -> bool {
        self.gradients.grad_shards.present[unit.index()][piece.param]
    }

    /// Returns the index of the optimizer of a piece.
    fn optimizer_of(self, unit: UnitId, piece: &Piece) -> usize {
        self.assignment.of(self.context, ParamId { unit, index: piece.param })
    }
}

/// An update of one unit by its optimizers.
pub(super) struct UnitUpdate<'a, 'b, 'c> {
    pub(super) pass: Pass<'a>,
    pub(super) unit: UnitId,
    pub(super) optimizers: &'b mut [Selected<'c>],
    pub(super) moved: Option<&'b mut Moved>,
}

impl ShardUpdate for UnitUpdate<'_, '_, '_> {
    fn on_host(self, master: &mut [f32], mut rounded: Option<ValuesMut<'_>>, sums: &[f32]) {
        let Self { pass, unit, optimizers, mut moved } = self;
        for piece in trained_pieces(pass.context, unit) {
            let range = piece.shard_range();
            if !pass.has_gradient(unit, &piece) {
                pass.average(unit, piece, &master[range]);
                continue;
            }
            let (optimizer, _) = &mut optimizers[pass.optimizer_of(unit, &piece)];
            let fused = FusedUpdate {
                parameters: &mut master[range.clone()],
                rounded: rounded.as_mut().map(|all| all.reborrow().slice(range.clone())),
                gradient: &sums[range],
                divisor: pass.gradients.divisor,
            };
            let clip = pass.gradients.clip_factor();
            let parameter = ParamId { unit, index: piece.param };
            let number = pass.context.number_of(parameter);
            let clipped_apart = pass.gradients.clip_of(pass.context, parameter);
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
                pass.average(unit, piece, parameters);
            });
        }
    }

    fn on_device(
        self,
        device: &ModelDevice,
        master: &mut DeviceBuffer,
        mut rounded: Option<&mut DeviceBuffer>,
        sums: &DeviceBuffer,
    ) -> Result<(), CudaError> {
        let Self { pass, unit, optimizers, .. } = self;
        let Pass { context, gradients, averages, .. } = pass;
        let stream = &*device.stream;
        let mut pieces: Vec<Vec<Piece>> = vec![Vec::new(); optimizers.len()];
        for piece in trained_pieces(context, unit).filter(|piece| pass.has_gradient(unit, piece)) {
            pieces[pass.optimizer_of(unit, &piece)].push(piece);
        }
        for ((optimizer, _), pieces) in optimizers.iter_mut().zip(pieces) {
            if pieces.is_empty() {
                continue;
            }
            let update = DeviceUpdate {
                parameters: &mut *master,
                rounded: rounded.as_deref_mut(),
                gradient: sums,
                divisor: gradients.divisor,
            };
            let clip = gradients.clip_factor();
            optimizer.update_on_device(DeviceRun { unit, stream, update, pieces, clip })?;
        }
        if averages.is_empty() {
            return Ok(());
        }
        let pieces: Vec<Piece> = trained_pieces(context, unit).collect();
        averages
            .iter()
            .try_for_each(|average| average.lock().update_on_device(unit, stream, &pieces, master))
    }
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
