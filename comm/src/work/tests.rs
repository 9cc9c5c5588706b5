//! CO-2: the blocks of a work are a partition of what it writes.

use hsdp_sharding::{Param, Unit, UnitLayout};

use super::*;

/// How often each of `len` elements is covered.
fn coverage(len: usize, ranges: impl Iterator<Item = Range<usize>>) -> Vec<u32> {
    let mut covered = vec![0; len];
    ranges.flatten().for_each(|place| covered[place] += 1);
    covered
}

#[test]
fn blocks_are_a_partition() {
    for (len, block) in [(0, 4), (1, 4), (4, 4), (5, 4), (1000, 7)] {
        let blocks: Vec<_> = blocks_of(3..3 + len, block).collect();
        assert!(blocks.iter().all(|it| !it.is_empty() && it.len() <= block));
        let covered = coverage(len + 3, blocks.into_iter());
        assert_eq!(covered[3..], vec![1; len]);
        assert_eq!(covered[..3], [0; 3]);
    }
}

#[test]
fn pieces_in_blocks_cover_every_parameter_once() {
    let unit = Unit::new("unit")
        .param(Param::new("a", [37, 19]))
        .param(Param::new("b", [1]))
        .param(Param::new("c", [211]).frozen())
        .param(Param::new("d", [40, 50]).rows(8));
    for (shards, block) in [(1, 64), (3, 32), (3, 1000), (8, 17)] {
        let layout = UnitLayout::new(&unit, shards).expect("a layout");
        let mut parts: Vec<Vec<Range<usize>>> = vec![Vec::new(); layout.params().len()];
        for shard in 0..shards {
            let pieces: Vec<Piece> = layout.pieces(shard).collect();
            for range in blocks_of(0..layout.shard_len(), block) {
                for (param, place, part) in pieces_in(&pieces, range.clone()) {
                    assert!(range.start <= place.start && place.end <= range.end);
                    assert_eq!(place.len(), part.len());
                    parts[param].push(part);
                }
            }
        }
        for (slot, parts) in layout.params().iter().zip(parts) {
            assert_eq!(coverage(slot.len, parts.into_iter()), vec![1; slot.len], "{}", slot.name);
        }
    }
}

/// The places that the blocks of a work write: all work writes ones over zeros, or adds up ones.
fn run_all<W: Work>(work: W) -> Vec<W::Output> {
    let ranks: Vec<Rank> = vec![Rank::new(0); 8];
    let meter = Meter::new(&[], &ranks, Channel::User, Op::Barrier);
    // Backwards: the order of blocks is nobody's business.
    (0..work.blocks()).rev().for_each(|block| work.run(block, &meter));
    work.finish()
}

#[test]
fn every_place_of_an_output_is_written_by_one_block() {
    const LEN: usize = 50_001;
    let exchange = |_| Exchange { source: vec![1_u32; LEN], target: Some(vec![0; LEN * 3]) };
    let gathered: Vec<Vec<u32>> = run_all(Copies::to_everybody((0..3).map(exchange).collect()));
    assert!(gathered.iter().all(|it| it.iter().all(|it| *it == 1)));
    // In place: an element that two blocks had added up would not be 3.
    let values = || vec![vec![1_u32; LEN]; 3];
    for receivers in [Receivers::All, Receivers::Root(0)] {
        let reduced = run_all(ReduceInPlace::new(values(), crate::Reduction::Sum, receivers));
        assert!(reduced[0].iter().all(|it| *it == 3));
    }
}
