//! What of which tensor a rank has.

use std::ops::Range;

use hsdp_sharding::{Coordinate, Role, UnitId, balanced};

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
    of_shards(fabric, |len| 0..len)
}

/// What this rank writes: replicas have the same, and each writes its part of a shard.
pub(super) fn to_write(fabric: &Fabric) -> Vec<Portion> {
    let mesh = fabric.plan.mesh();
    let Coordinate { replicate_index, .. } = mesh.coordinate(fabric.rank());
    of_shards(fabric, |len| balanced(len, mesh.replicate_size(), replicate_index))
}

fn of_shards(fabric: &Fabric, part: impl Fn(usize) -> Range<usize>) -> Vec<Portion> {
    let plan = &fabric.plan;
    let shard_index = plan.mesh().coordinate(fabric.rank()).shard_index;
    let mut portions = Vec::new();
    for unit in plan.spec().unit_ids() {
        let layout = plan.layout(unit);
        let part = part(layout.shard_len());
        for piece in layout.pieces(shard_index) {
            let all = piece.shard_range();
            let range = all.start.max(part.start)..all.end.min(part.end);
            if range.is_empty() {
                continue;
            }
            let param = &plan.spec()[unit].params[piece.param];
            portions.push(Portion {
                unit,
                name: param.name.clone(),
                shape: param.shape.iter().map(|size| *size as u64).collect(),
                role: param.role,
                offset: (piece.param_start + range.start - all.start) as u64,
                range,
            });
        }
    }
    portions
}
