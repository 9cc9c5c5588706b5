//! The granularities of rows and blocks: every cut respects them, and they need no more padding
//! than necessary.

use std::time::Instant;

use hsdp_sharding::{ALIGNMENT, ElemCount, Granularity, Param, Role, Unit, UnitLayout};
use proptest::prelude::*;

use crate::generators::{cases, unit_with_rows};

/// Elements between two places where a parameter may be cut.
fn chunk(param: &Param) -> usize {
    match param.granularity {
        Granularity::Element => 1,
        Granularity::Rows(rows) => rows * param.shape[1..].iter().product::<usize>(),
        Granularity::Blocks(elements) => elements,
    }
}

fn assert_rows_are_whole(unit: &Unit, layout: &UnitLayout) {
    for shard_index in 0..layout.shard_size() {
        for piece in layout.pieces(shard_index) {
            let param = &unit.params[piece.param];
            let end = piece.param_range().end;
            assert_eq!(piece.param_start % chunk(param), 0, "{param:?} begins at {piece:?}");
            assert!(
                end.is_multiple_of(chunk(param)) || end == param.numel(),
                "{param:?} ends at {piece:?}"
            );
        }
    }
}

/// Whether a parameter that begins at `start` is cut only where it may be.
fn may_begin(param: &Param, start: usize, shard_len: usize) -> bool {
    let boundaries = (0..param.numel()).filter(|offset| (start + offset).is_multiple_of(shard_len));
    boundaries.into_iter().all(|offset| offset.is_multiple_of(chunk(param)))
}

/// Whether any placement at this shard length exists, by trying every start of every parameter.
fn exists(params: &[&Param], cursor: usize, shard_len: usize, shards: usize) -> bool {
    let Some((param, rest)) = params.split_first() else {
        return true;
    };
    let end_of = |start: usize| start + param.numel();
    (cursor..)
        .step_by(ALIGNMENT)
        .take_while(|&start| end_of(start) <= shard_len * shards)
        .filter(|&start| may_begin(param, start, shard_len))
        .any(|start| exists(rest, end_of(start).next_multiple_of(ALIGNMENT), shard_len, shards))
}

fn shortest(unit: &Unit, role: Role, shards: usize) -> usize {
    let params: Vec<&Param> = unit.params.iter().filter(|param| param.role == role).collect();
    let lengths = (0..).step_by(ALIGNMENT);
    let mut possible = lengths.filter(|&shard_len| match shard_len {
        0 => params.is_empty(),
        _ => exists(&params, 0, shard_len, shards),
    });
    possible.next().expect("one shard can hold everything")
}

/// Few small parameters, so that every placement can be tried.
fn small_unit() -> impl Strategy<Value = Unit> {
    let rows = (1usize..=3).prop_map(Granularity::Rows);
    let blocks = (1usize..=100).prop_map(Granularity::Blocks);
    let granularity = prop_oneof![1 => Just(Granularity::Element), 4 => rows, 2 => blocks];
    let param = (1usize..=9, 1usize..=48, granularity);
    prop::collection::vec(param, 1..=3).prop_map(|params| {
        params.into_iter().enumerate().fold(
            Unit::new("u"),
            |unit, (index, (len, row, granularity))| {
                let mut param = Param::new(format!("p{index}"), [len, row]);
                param.granularity = granularity;
                unit.param(param)
            },
        )
    })
}

proptest! {
    #![proptest_config(cases(256))]

    #[test]
    fn pieces_are_whole_groups_of_rows_and_whole_blocks(unit in unit_with_rows(), shards in 1usize..=8) {
        assert_rows_are_whole(&unit, &UnitLayout::new(&unit, shards).unwrap());
    }

    #[test]
    fn the_shard_length_is_the_shortest_possible(unit in small_unit(), shards in 1usize..=5) {
        let layout = UnitLayout::new(&unit, shards).unwrap();
        prop_assert_eq!(layout.trainable().shard_len, shortest(&unit, Role::Trainable, shards));
    }
}

#[test]
fn a_matrix_over_many_shards_is_cut_into_equal_groups_of_rows() {
    let unit = Unit::new("u").param(Param::new("w", [100, 48]).rows(2));
    let layout = UnitLayout::new(&unit, 8).unwrap();
    // 600 elements per rank would be enough. 2 rows are 96 elements, and 7 groups of them 672.
    assert_eq!(layout.shard_len(), 672);
    assert_eq!(layout.padding(), ElemCount(8 * 672 - 4800));
    assert_rows_are_whole(&unit, &layout);
}

#[test]
fn blocks_are_counted_in_elements_from_the_start_of_the_parameter() {
    let bias = Param::new("b", [40]);
    let unit = Unit::new("u").param(bias).param(Param::new("w", [1000]).blocks(256));
    let layout = UnitLayout::new(&unit, 3).unwrap();
    // Shards of 384 to 480 elements would cut it at two places that are no multiple of 256 apart.
    // From 64 on, 256 is the first place from which a boundary at 512 lies between two
    // blocks.
    assert_eq!((layout.shard_len(), layout.params()[1].start), (512, 256));
    let pieces = (0..3).flat_map(|shard| layout.pieces(shard)).filter(|piece| piece.param == 1);
    let cuts: Vec<_> = pieces.map(|piece| piece.param_range()).collect();
    assert_eq!(cuts, [0..256, 256..768, 768..1000]);
    assert_rows_are_whole(&unit, &layout);
}

#[test]
fn a_parameter_over_two_shards_is_shifted_instead() {
    let unit = Unit::new("u")
        .param(Param::new("a", [64]))
        .param(Param::new("w", [3, 64]).rows(1))
        .param(Param::new("b", [32]));
    let layout = UnitLayout::new(&unit, 2).unwrap();
    // At 64, shard 0 would end in the middle of its second row; at 96 it ends after the first.
    assert_eq!((layout.shard_len(), layout.params()[1].start), (160, 96));
    assert_rows_are_whole(&unit, &layout);
}

#[test]
fn a_group_longer_than_the_parameter_keeps_it_whole() {
    let unit = Unit::new("u").param(Param::new("w", [5, 40]).rows(1000));
    let layout = UnitLayout::new(&unit, 4).unwrap();
    assert_eq!(layout.shard_len(), 224);
    assert_eq!(layout.pieces(0).map(|piece| piece.len).collect::<Vec<_>>(), [200]);
}

#[test]
fn element_granularity_of_the_others_costs_nothing() {
    let unit = Unit::new("u").param(Param::new("w", [64, 32]).rows(1)).param(Param::new("b", [61]));
    let layout = UnitLayout::new(&unit, 3).unwrap();
    assert_eq!(layout.shard_len(), (2048usize + 64).div_ceil(96) * 32);
}

#[test]
fn a_transformer_block_pays_little() {
    let width = 768;
    let shards = 64;
    let matrix = |name: &str, rows: usize, row: usize| Param::new(name, [rows, row]).rows(1);
    let unit = Unit::new("h.0")
        .param(Param::new("norm", [width]))
        .param(matrix("qkv", 3 * width, width))
        .param(matrix("projection", width, width))
        .param(matrix("up", 4 * width, width))
        .param(matrix("down", width, 4 * width));
    let layout = UnitLayout::new(&unit, shards).unwrap();
    assert_rows_are_whole(&unit, &layout);
    // 110,604 elements per rank would be enough. Rows of 3072 make it 37 of them: 113,664.
    assert_eq!(layout.shard_len(), 37 * 4 * width);
    assert!(layout.padding().get() * 100 < 3 * layout.full_len() as u64, "under 3%");
}

#[test]
fn groups_that_do_not_go_together_are_planned_promptly() {
    let started = Instant::now();
    for shards in [2, 8, 64, 1024] {
        let unit = Unit::new("u")
            .param(Param::new("a", [100_003, 4099]).rows(101))
            .param(Param::new("b", [50_021, 7919]).rows(103))
            .param(Param::new("c", [1_000_003, 997]).rows(107));
        let layout = UnitLayout::new(&unit, shards).unwrap();
        assert_rows_are_whole(&unit, &layout);
        println!("{shards} shards: {} of {}", layout.padding(), ElemCount::of(layout.full_len()));
    }
    assert!(started.elapsed().as_secs() < 5, "took {:?}", started.elapsed());
}
