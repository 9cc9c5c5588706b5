//! The elements of each tensor that a rank has.

use std::ops::Range;

use hsdp_checkpoint::{Elements, Slice, state_tensor};
use hsdp_sharding::{Piece, Role, UnitId};

use super::Content;
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

/// All portions that this rank has.
pub(super) fn of_rank(fabric: &Fabric) -> Vec<Portion> {
    of_pieces(fabric, fabric.plan.pieces_of(fabric.rank()))
}

/// Some consecutive elements of a tensor that this rank writes: of a parameter, or of one kind of an optimizer's state for it.
#[derive(Clone, Debug)]
pub(super) struct Written {
    pub(super) portion: Portion,
    /// The index of the kind of state; `None` for a parameter.
    pub(super) kind: Option<usize>,
    /// The tensor's name.
    pub(super) name: String,
}

impl Written {
    pub(super) fn slice<'a>(&'a self, values: Elements<'a>) -> Slice<'a> {
        let Portion { shape, offset, .. } = &self.portion;
        Slice { tensor: &self.name, shape, offset: *offset, values }
    }
}

/// The elements that this rank writes of a model and of an optimizer with these kinds of state, in the order of its
/// file.
pub(super) fn to_write(fabric: &Fabric, kinds: &[&str], content: Content) -> Vec<Written> {
    let mut portions = of_pieces(fabric, fabric.plan.pieces_saved_by(fabric.rank()));
    portions.retain(|portion| content.has(portion.role));
    let of_kind = |kind: Option<usize>| {
        let has = move |it: &&Portion| kind.is_none() || it.role == Role::Trainable;
        let written = move |portion: &Portion| {
            let parameter = &portion.name;
            let name =
                kind.map_or_else(|| parameter.clone(), |kind| state_tensor(kinds[kind], parameter));
            Written { portion: portion.clone(), kind, name }
        };
        portions.iter().filter(has).map(written)
    };
    [None].into_iter().chain((0..kinds.len()).map(Some)).flat_map(of_kind).collect()
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
