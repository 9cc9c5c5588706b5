//! The elements that an optimizer updates at once.

use hsdp_kernels::cuda::{DeviceUpdate, Stream};
use hsdp_sharding::{Piece, UnitId};

/// Consecutive elements of one parameter in this rank's shard, with their gradient: a piece of the
/// shard, or a part of a piece that stays in the cache while it is divided and updated.
#[derive(Debug)]
pub struct Run<'a> {
    /// The unit.
    pub unit: UnitId,
    /// The parameter of these elements, and their place in the unit's shard.
    pub piece: Piece,
    /// The f32 master parameters, `[piece.len]`, which the optimizer updates in place.
    pub parameters: &'a mut [f32],
    /// The gradient in f32, `[piece.len]`, divided. The optimizer must multiply it by `clip` first.
    pub gradient: &'a [f32],
    /// [`Gradients::clip_factor`](crate::Gradients::clip_factor).
    pub clip: f32,
}

/// A unit of a model on a device, with its gradient, for one optimizer.
#[derive(Debug)]
pub struct DeviceRun<'a> {
    /// The unit.
    pub unit: UnitId,
    /// The stream on which the update is to run.
    pub stream: &'a Stream,
    /// The f32 master parameters, the gradient, and its divisor.
    pub update: DeviceUpdate<'a>,
    /// The runs of elements that this optimizer updates, and that got a gradient in this step.
    pub pieces: Vec<Piece>,
    /// The factor of [`Gradients::clip`](crate::Gradients::clip), or 1. The update multiplies the
    /// gradient by it before anything else.
    pub clip: f32,
}

/// Borrows an update again, for one of several groups of its parameters.
pub(super) fn reborrow<'a>(update: &'a mut DeviceUpdate<'_>) -> DeviceUpdate<'a> {
    DeviceUpdate {
        parameters: &mut *update.parameters,
        rounded: update.rounded.as_deref_mut(),
        gradient: update.gradient,
        divisor: update.divisor,
    }
}
