//! Muon on a device: directions, products and updates there, and the exchange with owners through
//! the host.

use hsdp_kernels::Values;
use hsdp_kernels::cuda::{CudaError, DeviceBuffer, PartOfMatrix};
use hsdp_sharding::{ParamId, WholeMatrix};

use super::options::{EXCHANGES, MuonOptions, bundles};
use crate::error::Error;
use crate::optimizer::exchange::MatrixExchange;
use crate::optimizer::interface::{DeviceRun, Updating, reborrow};
use crate::optimizer::owner_workspace::OwnerWorkspace;
use crate::optimizer::rule::RuleExchange;
use crate::optimizer::state::{KindOfState, OptimizerState};
use crate::state::model_device::ModelDevice;

/// Orthogonalizes the directions of a step, on the owners' devices.
pub(super) fn exchange(
    RuleExchange { options, state, updating }: RuleExchange<'_, MuonOptions>,
) -> Result<(), Error> {
    let failed = |error| updating.site().device(error);
    let device = updating.context.update_device().expect(THERE);
    let OptimizerState { kinds, exchange, on_device, .. } = state;
    let exchange = exchange.as_ref().expect(EXCHANGES);
    let OwnerWorkspace { directions, products } = match on_device {
        Some(made) => made,
        None => {
            let dtype = |matrix: &WholeMatrix| options(matrix.param).newton_schulz.dtype;
            let made = OwnerWorkspace::new(device, exchange, dtype).map_err(failed)?;
            on_device.insert(made)
        }
    };
    direct(device, exchange, options, updating, &mut kinds[0], directions).map_err(failed)?;
    let fill = |values: &mut [f32]| {
        directions.read_back_into(&device.stream, 0, values, device.patience).map_err(failed)
    };
    let bundles = bundles(exchange, options, updating);
    let values = exchange.run(updating.site(), &bundles, fill, |bundle, matrices| {
        let by = options(bundle.first.param).newton_schulz;
        products.orthogonalize(device, &by, matrices, bundle).map_err(failed)
    })?;
    directions.write(&device.stream, Values::F32(&values)).map_err(failed)
}

/// Computes the directions of all parts, and waits for nothing.
fn direct(
    device: &ModelDevice,
    exchange: &MatrixExchange,
    options: &dyn Fn(ParamId) -> MuonOptions,
    updating: &Updating<'_>,
    momentum: &mut KindOfState,
    directions: &mut DeviceBuffer,
) -> Result<(), CudaError> {
    for (part, direction) in exchange.sent() {
        let matrix = exchange.matrix(part);
        let state = momentum.start(part.unit, &exchange.piece_of(part));
        let step = options(matrix.param).of_step(matrix, updating.clip());
        let len = part.shard.len();
        let shard = part.shard.start;
        let of_part = PartOfMatrix { len, shard, state, direction };
        let (gradient, divisor) = updating.gradient_on_device(part.unit);
        let momentum = momentum.on_device(part.unit);
        let stream = &device.stream;
        stream.muon_direction(directions, gradient, divisor, &of_part, &step, momentum)?;
    }
    Ok(())
}

/// Launches the updates of pieces of a unit, along the orthogonalized directions.
pub(super) fn update(
    options: &MuonOptions,
    DeviceRun { unit, stream, mut update, pieces, clip }: DeviceRun<'_>,
    OptimizerState { kinds, exchange, on_device, .. }: &mut OptimizerState,
) -> Result<(), CudaError> {
    let exchange = exchange.as_ref().expect(EXCHANGES);
    let OwnerWorkspace { directions, .. } = on_device.as_ref().expect(THERE);
    for piece in pieces {
        let state = kinds[0].start(unit, &piece);
        for (part, range, place) in exchange.within(unit, &piece) {
            let step = options.of_step(exchange.matrix(part), clip);
            let len = range.len();
            let shard = piece.shard_start + range.start;
            let state = state + range.start;
            let direction = place.start;
            let of_part = PartOfMatrix { len, shard, state, direction };
            let momentum = kinds[0].on_device(unit);
            stream.muon(reborrow(&mut update), &of_part, &step, directions, momentum)?;
        }
    }
    Ok(())
}

/// The place of the model and of its state, in a panic that cannot be.
const THERE: &str = "the model is updated on a device";
