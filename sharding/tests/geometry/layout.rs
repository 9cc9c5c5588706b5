//! Layouts without row granularity: coverage, identity, alignment, padding.

use hsdp_sharding::{ALIGNMENT, ElemCount, Mesh, Param, Region, Role, Unit, UnitLayout};
use proptest::prelude::*;

use crate::generators::{cases, mesh, unit, unit_with_rows};

/// Each element of each parameter is in exactly one shard, and each element of a shard in at most
/// one piece.
fn assert_covers_once(layout: &UnitLayout) {
    let mut params: Vec<Vec<u8>> = layout.params().iter().map(|slot| vec![0; slot.len]).collect();
    for shard_index in 0..layout.shard_size() {
        let mut shard = vec![0u8; layout.shard_len()];
        let mut end = 0;
        for piece in layout.pieces(shard_index) {
            assert!(piece.len > 0 && piece.shard_start >= end, "in order of the shard");
            end = piece.shard_range().end;
            params[piece.param][piece.param_range()].iter_mut().for_each(|times| *times += 1);
            shard[piece.shard_range()].iter_mut().for_each(|times| *times += 1);
        }
        assert!(shard.iter().all(|&times| times <= 1));
    }
    assert!(params.iter().flatten().all(|&times| times == 1));
}

/// The unit's parameters, in which each element is a different number, and `full`: parameters at
/// their starts, zeros elsewhere.
fn numbered(layout: &UnitLayout) -> (Vec<Vec<f64>>, Vec<f64>) {
    let mut next = 0.0;
    let mut full = vec![0.0; layout.full_len()];
    let mut params = Vec::new();
    for slot in layout.params() {
        let values: Vec<f64> = (0..slot.len).map(|offset| next + 1.0 + offset as f64).collect();
        next += slot.len as f64;
        full[slot.range()].copy_from_slice(&values);
        params.push(values);
    }
    (params, full)
}

/// A rank's shard by the definition: its slice of each region of `full`.
fn shard_of(full: &[f64], layout: &UnitLayout, shard_index: usize) -> Vec<f64> {
    let slice = |region: Region| {
        let start = region.start + shard_index * region.shard_len;
        &full[start..start + region.shard_len]
    };
    [slice(layout.trainable()), slice(layout.frozen())].concat()
}

fn assert_gather_undoes_shard(layout: &UnitLayout) {
    let (params, full) = numbered(layout);
    let mut gathered: Vec<Vec<f64>> =
        layout.params().iter().map(|slot| vec![0.0; slot.len]).collect();
    for shard_index in 0..layout.shard_size() {
        let mut shard = vec![0.0; layout.shard_len()];
        for piece in layout.pieces(shard_index) {
            shard[piece.shard_range()].copy_from_slice(&params[piece.param][piece.param_range()]);
        }
        assert_eq!(shard, shard_of(&full, layout, shard_index));
        for piece in layout.pieces(shard_index) {
            gathered[piece.param][piece.param_range()].copy_from_slice(&shard[piece.shard_range()]);
        }
    }
    assert_eq!(gathered, params);
}

fn assert_aligned(layout: &UnitLayout, unit: &Unit) {
    let trainable = layout.trainable();
    let frozen = layout.frozen();
    assert_eq!((trainable.start, frozen.start), (0, trainable.len));
    assert_eq!(layout.full_len(), trainable.len + frozen.len);
    assert_eq!(layout.shard_len(), trainable.shard_len + frozen.shard_len);
    for region in [trainable, frozen] {
        assert_eq!(region.len, region.shard_len * layout.shard_size());
        assert_eq!(region.shard_len % ALIGNMENT, 0);
    }
    for (slot, param) in layout.params().iter().zip(&unit.params) {
        let region = if param.role == Role::Trainable { trainable } else { frozen };
        assert_eq!((&slot.name, slot.len, slot.role), (&param.name, param.numel(), param.role));
        assert_eq!(slot.start % ALIGNMENT, 0);
        assert!(region.start <= slot.start && slot.range().end <= region.range().end);
    }
    let used: usize = unit.params.iter().map(Param::numel).sum();
    assert_eq!(layout.padding(), ElemCount::of(layout.full_len() - used));
}

proptest! {
    #![proptest_config(cases(256))]

    #[test]
    fn pieces_cover_every_element_exactly_once(unit in unit(), mesh in mesh()) {
        assert_covers_once(&UnitLayout::new(&unit, mesh.shard_size()).unwrap());
    }

    #[test]
    fn shard_then_gather_is_the_identity(unit in unit(), mesh in mesh()) {
        assert_gather_undoes_shard(&UnitLayout::new(&unit, mesh.shard_size()).unwrap());
    }

    #[test]
    fn the_same_holds_with_pieces_of_rows(unit in unit_with_rows(), mesh in mesh()) {
        let layout = UnitLayout::new(&unit, mesh.shard_size()).unwrap();
        assert_covers_once(&layout);
        assert_gather_undoes_shard(&layout);
        assert_aligned(&layout, &unit);
    }

    #[test]
    fn starts_and_shards_are_aligned(unit in unit(), mesh in mesh()) {
        assert_aligned(&UnitLayout::new(&unit, mesh.shard_size()).unwrap(), &unit);
    }

    #[test]
    fn shards_are_as_short_as_alignment_allows(unit in unit(), shards in 1usize..=64) {
        let layout = UnitLayout::new(&unit, shards).unwrap();
        let regions = [(Role::Trainable, layout.trainable()), (Role::Frozen, layout.frozen())];
        for (role, region) in regions {
            let params = unit.params.iter().filter(|param| param.role == role);
            let blocks: usize = params.map(|param| param.numel().div_ceil(ALIGNMENT)).sum();
            prop_assert_eq!(region.shard_len, blocks.div_ceil(shards) * ALIGNMENT);
        }
    }
}

#[test]
fn one_element_leaves_all_ranks_but_one_without_pieces() {
    let layout = UnitLayout::new(&Unit::new("u").param(Param::new("scalar", [])), 8).unwrap();
    assert_eq!((layout.shard_len(), layout.full_len()), (32, 256));
    assert_eq!(layout.padding(), ElemCount(255));
    let held: Vec<usize> = (0..8).map(|shard| layout.pieces(shard).count()).collect();
    assert_eq!(held, [1, 0, 0, 0, 0, 0, 0, 0]);
}

#[test]
fn a_region_without_parameters_takes_nothing() {
    let trainable = Unit::new("u").param(Param::new("w", [33]));
    let layout = UnitLayout::new(&trainable, 2).unwrap();
    assert_eq!(layout.frozen(), Region { start: 64, len: 0, shard_len: 0 });
    let frozen = Unit::new("u").param(Param::new("w", [33]).frozen());
    let layout = UnitLayout::new(&frozen, 2).unwrap();
    assert_eq!(layout.trainable(), Region::default());
    assert_eq!(layout.frozen(), Region { start: 0, len: 64, shard_len: 32 });
}

#[test]
fn frozen_parameters_lie_behind_the_trainable_ones_wherever_declared() {
    let unit = Unit::new("u")
        .param(Param::new("table", [40]).frozen())
        .param(Param::new("weight", [100]))
        .param(Param::new("mask", [8]).frozen())
        .param(Param::new("bias", [4]));
    let layout = UnitLayout::new(&unit, 2).unwrap();
    let starts: Vec<usize> = layout.params().iter().map(|slot| slot.start).collect();
    assert_eq!(layout.trainable(), Region { start: 0, len: 192, shard_len: 96 });
    assert_eq!(layout.frozen(), Region { start: 192, len: 128, shard_len: 64 });
    assert_eq!(starts, [192, 0, 192 + 64, 128]);
    let order: Vec<Vec<usize>> =
        (0..2).map(|shard| layout.pieces(shard).map(|piece| piece.param).collect()).collect();
    assert_eq!(order, [vec![1, 0], vec![1, 3, 2]]);
}

#[test]
fn every_mesh_up_to_8x8_splits_a_prime() {
    for shards in 1..=8 {
        let unit = Unit::new("u").param(Param::new("w", [1009])).param(Param::new("b", [7]));
        let layout = UnitLayout::new(&unit, Mesh::new(8, shards).unwrap().shard_size()).unwrap();
        assert_covers_once(&layout);
        assert_gather_undoes_shard(&layout);
    }
}

#[test]
#[should_panic(expected = "shard 2 of a unit that is cut into 2 shards")]
fn a_shard_beyond_the_last_panics() {
    let layout = UnitLayout::new(&Unit::new("u").param(Param::new("w", [33])), 2).unwrap();
    let _ = layout.pieces(2);
}
