//! Updates of shards that lie on a device: one or two launches for each unit and optimizer, and no wait.

use hsdp_kernels::cuda::{CudaError, DeviceUpdate};
use hsdp_sharding::{Piece, UnitId};

use crate::error::Error;
use crate::model::ShardedModel;
use crate::optimizer::interface::Selected;
use crate::optimizer::pass::Pass;
use crate::optimizer::pieces::trained_pieces;
use crate::optimizer::run::DeviceRun;
use crate::state::shard::device::DeviceShard;
use crate::state::sums::Sums;

impl ShardedModel {
    /// Whether this rank's part of the model lies on a device.
    #[must_use]
    pub fn is_on_device(&self) -> bool {
        self.engine.context.device.is_some()
    }

    /// Whether this rank's part of the model is updated on a device: it lies there, and none of it is offloaded.
    #[must_use]
    pub fn updates_on_device(&self) -> bool {
        self.engine.context.updates_on_device()
    }
}

/// Updates a unit on the device, by each optimizer that has a piece of it.
pub(super) fn update_unit(
    pass: Pass<'_>,
    (unit, shard): (UnitId, &mut DeviceShard),
    optimizers: &mut [Selected<'_>],
) -> Result<(), Error> {
    let Pass { context, gradients, .. } = pass;
    let Sums::Device(sums) = &gradients.grad_shards[unit.index()] else {
        unreachable!("a model has its shards and sums in the same place");
    };
    let device = context.device.as_ref().expect("a shard on a device belongs to a model there");
    let mut pieces: Vec<Vec<Piece>> = vec![Vec::new(); optimizers.len()];
    for piece in pass.pieces_with_gradient(unit) {
        pieces[pass.optimizer_of(unit, &piece)].push(piece);
    }
    for ((optimizer, _), pieces) in optimizers.iter_mut().zip(pieces) {
        if pieces.is_empty() {
            continue;
        }
        let updated = shard.exclusive(device).and_then(|(parameters, rounded)| {
            let (gradient, divisor) = (sums.values(), gradients.divisor);
            let update = DeviceUpdate { parameters, rounded, gradient, divisor };
            let (stream, clip) = (&device.stream, gradients.clip_factor());
            optimizer.update_on_device(DeviceRun { unit, stream, update, pieces, clip })
        });
        let failed = |error| context.site("optimizer step", gradients.step).device(error);
        updated.map_err(failed)?;
    }
    average_unit(pass, (unit, shard))
        .map_err(|error| context.site("optimizer step", gradients.step).device(error))
}

/// Moves the averages of a unit on, to the parameters after the update.
fn average_unit(
    Pass { context, averages, .. }: Pass<'_>,
    (unit, shard): (UnitId, &mut DeviceShard),
) -> Result<(), CudaError> {
    if averages.is_empty() {
        return Ok(());
    }
    let device = context.device.as_ref().expect("a shard on a device belongs to a model there");
    let (master, _) = shard.exclusive(device)?;
    let pieces: Vec<Piece> = trained_pieces(context, unit).collect();
    averages.iter().try_for_each(|average| {
        average.lock().update_on_device(unit, &device.stream, &pieces, master)
    })
}
