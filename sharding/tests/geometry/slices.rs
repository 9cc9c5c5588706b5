//! The slices of a shard that its replicas take, against a search over all places for a cut.

use std::ops::Range;

use hsdp_sharding::{
    Coordinate, Granularity, Mesh, ModelSpec, Param, Piece, Plan, PlanOptions, State, StateOver,
    Unit, UnitId,
};
use proptest::prelude::*;

use crate::generators::{cases, mesh, unit_with_rows};

/// Returns whether a piece may be cut before an element of the shard.
fn may_be_cut(param: &Param, piece: &Piece, at: usize) -> bool {
    let before = at - piece.shard_start;
    let rows = match param.granularity {
        Granularity::Element => 1,
        Granularity::Rows(rows) => rows * param.shape[1..].iter().product::<usize>(),
        Granularity::Blocks(elements) => elements,
    };
    let block = match param.state {
        State::EightBit { block } => block,
        _ => 1,
    };
    (piece.param_start + before).is_multiple_of(rows) && before.is_multiple_of(block)
}

/// Returns the starts of the slices of all replicas, and the end of the last one.
pub(crate) fn cuts(plan: &Plan, unit: UnitId, shard_index: usize) -> Vec<usize> {
    let layout = plan.layout(unit);
    let replicas = plan.mesh().replicate_size();
    let len = layout.trainable().shard_len;
    let may_be_cut = |at: &usize| {
        let mut pieces = layout.pieces(shard_index);
        let piece = pieces.find(|piece| piece.shard_range().contains(at));
        let is_inside = |piece: &Piece| piece.shard_start < *at && *at < len;
        let piece = piece.filter(is_inside);
        piece.is_none_or(|it| may_be_cut(&plan.spec()[unit].params[it.param], &it, *at))
    };
    let places: Vec<usize> = (0..=len).step_by(8).filter(may_be_cut).collect();
    let blocks = len / 8;
    let ideal =
        |replica: usize| (replica * (blocks / replicas) + replica.min(blocks % replicas)) * 8;
    let cut = |replica| {
        *places.iter().rev().min_by_key(|at| at.abs_diff(ideal(replica))).expect("0 is a place")
    };
    (0..=replicas).map(cut).collect()
}

/// Returns whether replicas have slices of their own to update.
pub(crate) fn divided(plan: &Plan) -> bool {
    plan.options().state == StateOver::World && plan.mesh().replicate_size() > 1
}

/// Returns the elements of its shard that each rank updates in a unit, by rank.
pub(crate) fn updated(plan: &Plan, unit: UnitId) -> Vec<Range<usize>> {
    let mesh = plan.mesh();
    let of_shard = (0..mesh.shard_size()).map(|shard_index| cuts(plan, unit, shard_index));
    let of_shard: Vec<Vec<usize>> = of_shard.collect();
    let of_rank = |rank| {
        let Coordinate { replicate_index, shard_index } = mesh.coordinate(rank);
        let cuts = &of_shard[shard_index];
        match divided(plan) {
            true => cuts[replicate_index]..cuts[replicate_index + 1],
            false => 0..cuts[mesh.replicate_size()],
        }
    };
    mesh.ranks().map(of_rank).collect()
}

proptest! {
    #![proptest_config(cases(192))]

    #[test]
    fn slices_are_cut_at_the_places_nearest_to_even_ones(
        unit in unit_with_rows(),
        mesh in mesh(),
        blocks in prop::collection::vec(prop::option::of(1usize..=300), 1..=6),
    ) {
        let state = |param: &Param| match blocks[param.numel() % blocks.len()] {
            Some(block) => State::EightBit { block },
            None => State::Elements(2),
        };
        let spec = ModelSpec::new().unit(unit).updated_by(state);
        let plan = Plan::new(spec, mesh, PlanOptions::default()).unwrap();
        let unit = UnitId::new(0);
        for shard_index in 0..mesh.shard_size() {
            let cuts = cuts(&plan, unit, shard_index);
            for replicate_index in 0..mesh.replicate_size() {
                let rank = mesh.rank_at(Coordinate { replicate_index, shard_index });
                let expected = cuts[replicate_index]..cuts[replicate_index + 1];
                prop_assert_eq!(plan.slice(unit, rank), expected, "rank {}", rank);
            }
            prop_assert_eq!(cuts[mesh.replicate_size()], plan.layout(unit).trainable().shard_len);
        }
    }
}

#[test]
fn elements_are_divided_evenly_and_whole_rows_as_well_as_they_can() {
    let of = |param: Param, state: State| {
        let mesh = Mesh::new(3, 1).expect("a mesh");
        let spec = ModelSpec::new().unit(Unit::new("u").param(param)).updated_by(|_| state);
        let plan = Plan::new(spec, mesh, PlanOptions::default()).expect("a plan");
        mesh.ranks().map(|rank| plan.slice(UnitId::new(0), rank)).collect::<Vec<_>>()
    };
    let slices = |param| of(param, State::Elements(2));
    assert_eq!(slices(Param::new("w", [100, 32])), [0..1072, 1072..2136, 2136..3200]);
    // 11 groups of three rows of 32 elements, and 22.
    assert_eq!(slices(Param::new("w", [100, 32]).rows(3)), [0..1056, 1056..2112, 2112..3200]);
    // Two rows of 36 elements are the least number that is a multiple of 8.
    assert_eq!(slices(Param::new("w", [10, 36]).rows(1)), [0..144, 144..288, 288..384]);
    assert_eq!(slices(Param::new("w", [100, 32]).rows(100)), [0..0, 0..3200, 3200..3200]);
    let in_blocks = of(Param::new("w", [100, 32]), State::EightBit { block: 256 });
    assert_eq!(in_blocks, [0..1024, 1024..2048, 2048..3200]);
}
