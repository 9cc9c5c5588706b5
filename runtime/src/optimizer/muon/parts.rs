//! The parts of matrices that a rank has, and their options.

use hsdp_kernels::{MuonStep, NewtonSchulz};
use hsdp_sharding::{Part, Piece, WholeMatrix};

use super::options::MuonOptions;
use crate::optimizer::groups::Groups;
use crate::optimizer::whole::Exchange;

/// A part, as a piece of its unit's shard.
pub(super) fn piece_of(exchange: &Exchange, part: &Part) -> Piece {
    let matrix = exchange.matrix(part);
    Piece {
        param: matrix.param.index,
        param_start: matrix.start + part.start,
        len: part.shard.len(),
        shard_start: part.shard.start,
    }
}

/// The update of a part, after clipping by this factor.
pub(super) fn step_of(
    groups: &Groups<MuonOptions>,
    exchange: &Exchange,
    (part, clip): (&Part, f32),
) -> MuonStep {
    let matrix = exchange.matrix(part);
    groups.of(matrix.param.unit, matrix.param.index).of_step(matrix, clip)
}

/// The iterations of a matrix.
pub(super) fn iterations(groups: &Groups<MuonOptions>, matrix: &WholeMatrix) -> NewtonSchulz {
    groups.of(matrix.param.unit, matrix.param.index).newton_schulz
}
