//! The pieces of a shard that optimizers update.

use hsdp_sharding::{Piece, Role, UnitId};

use crate::state::context::Context;

/// Returns the pieces of this rank's shard that are trained.
pub(super) fn trained_pieces(context: &Context, unit: UnitId) -> impl Iterator<Item = Piece> {
    let layout = context.plan.layout(unit);
    let is_trained = |piece: &Piece| layout.params()[piece.param].role == Role::Trainable;
    context.pieces(unit).filter(is_trained)
}
