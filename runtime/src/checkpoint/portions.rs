//! What of which tensor a rank has.

use std::ops::Range;

use hsdp_sharding::{Piece, Role, UnitId};

use crate::engine::fabric::Fabric;

/// Some consecutive elements of a parameter in this rank's shard.
#[derive(Clone, Debug)]
pub(super) struct Portion {
    pub(super) unit: UnitId,
    pub(super) name: String,
    pub(super) shape: Vec<u64>,
    pub(super) role: Role,
    /// The first element, in the parameter.
    pub(super) offset: u64,
    /// The elements, in the shard.
    pub(super) range: Range<usize>,
}

/// All that this rank has.
pub(super) fn of_rank(fabric: &Fabric) -> Vec<Portion> {
    of_pieces(fabric, fabric.plan.pieces_of(fabric.rank()))
}

/// What this rank writes.
pub(super) fn to_write(fabric: &Fabric) -> Vec<Portion> {
    of_pieces(fabric, fabric.plan.pieces_saved_by(fabric.rank()))
}

fn of_pieces(fabric: &Fabric, pieces: Vec<(UnitId, Piece)>) -> Vec<Portion> {
    let portion = |(unit, piece): (UnitId, Piece)| {
        let param = &fabric.plan.spec()[unit].params[piece.param];
        Portion {
            unit,
            name: param.name.clone(),
            shape: param.shape.iter().map(|size| *size as u64).collect(),
            role: param.role,
            offset: piece.param_start as u64,
            range: piece.shard_range(),
        }
    };
    pieces.into_iter().map(portion).collect()
}
