//! The pieces of a shard that optimizers update.

use hsdp_sharding::{Piece, Role, UnitId};

use crate::state::context::Context;

/// Returns the pieces of this rank's shard that are trained.
pub(super) fn trained_pieces(context: &Context, unit: UnitId) -> impl Iterator<Item = Piece> {
    let layout = context.plan.layout(unit);
    let shard_index = context.plan.mesh().coordinate(context.rank()).shard_index;
    let is_trained = |piece: &Piece| layout.params()[piece.param].role == Role::Trainable;
    layout.pieces(shard_index).filter(is_trained)
}
