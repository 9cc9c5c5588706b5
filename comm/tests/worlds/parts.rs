//! Buffers that members cut into parts of their own: sums and gathers of these parts, in place.

use std::ops::Range;
use std::sync::Arc;

use half::{bf16, f16};
use hsdp_comm::{
    CallError, Channel, Error, Group, Op, Scaling, Stage, StepFailure, Tag, Ungathered, World,
    WorldError, WorldOptions,
};
use hsdp_kernels::{Divisor, HostBuffer, Wire, cast};
use hsdp_sharding::{DType, Flow, Rank};

use crate::common::{outcomes, results};

fn tag() -> Tag {
    Tag::new(Stage::AllReduce).step(3)
}

/// Numbers that differ between ranks and places, inexact in every dtype.
fn noise(rank: usize, len: usize) -> Vec<f32> {
    let value = |place: usize| {
        let mixed = (rank * 7 + place + 1).wrapping_mul(2_654_435_761) % 100_003;
        (f32::from(u16::try_from(mixed % 50_021).expect("below 65536")) - 25_000.0) / 977.0
    };
    (0..len).map(value).collect()
}

/// Starts of the parts of so many members, and the end: uneven ones, of which some have no
/// elements; and one member that has all.
fn cuts(members: usize) -> Vec<Arc<[usize]>> {
    let of = |lens: &dyn Fn(usize) -> usize| -> Arc<[usize]> {
        let ends = (0..members).scan(0, |end, slot| {
            *end += lens(slot);
            Some(*end)
        });
        std::iter::once(0).chain(ends).collect()
    };
    vec![
        of(&|_| 0),
        of(&|slot| [5, 0, 3, 1, 0][slot]),
        of(&|slot| [0, 17_003, 40_960, 1, 8][slot]),
        of(&|slot| if slot + 1 == members { 1003 } else { 0 }),
    ]
}

fn part(cuts: &[usize], slot: usize) -> Range<usize> {
    cuts[slot]..cuts[slot + 1]
}

fn divisor(value: f32) -> Divisor {
    Divisor::new(value).expect("a divisor")
}

fn scalings() -> [Scaling; 4] {
    let scaling = |wire, pre, post| Scaling { wire, pre: divisor(pre), post: divisor(post) };
    [
        scaling(Wire::F32, 1.0, 1.0),
        scaling(Wire::BF16, 1.0, 3.0),
        scaling(Wire::F16, 4.0, 2.0),
        scaling(Wire::BF16, 3.0, 0.5),
    ]
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| value.to_bits()).collect()
}

#[test]
fn each_member_gets_the_bits_of_an_all_reduce_in_its_own_part() {
    for (size, scaling) in (1..=5).flat_map(|size| scalings().map(|scaling| (size, scaling))) {
        for cuts in cuts(size) {
            let sums = results(size, |world| {
                let group = world.world_group(Channel::AllReduce);
                let mine = || noise(group.index(), cuts[size]);
                let all = group.all_reduce_scaled(tag(), mine(), scaling).expect("issued");
                let own = group
                    .reduce_scatter_scaled(tag(), Arc::clone(&cuts), mine(), scaling)
                    .expect("issued");
                (own.wait().expect("reduced"), all.wait().expect("reduced"))
            });
            for (slot, (own, all)) in sums.into_iter().enumerate() {
                assert_eq!(own.len(), all.len());
                let part = part(&cuts, slot);
                assert_eq!(bits(&own[part.clone()]), bits(&all[part]), "{size} {cuts:?}");
            }
        }
    }
}

/// A member's buffer: its part of `whole`, and something else outside of it.
fn own_part(dtype: DType, whole: &[f32], part: Range<usize>, tail: usize) -> HostBuffer {
    let mut values = vec![-7.5; whole.len() + tail];
    values[part.clone()].copy_from_slice(&whole[part]);
    let mut buffer = HostBuffer::zeros(dtype, values.len()).expect("a real dtype");
    cast(buffer.values_mut(), &values);
    buffer
}

fn rounded(dtype: DType, values: &[f32]) -> Vec<f32> {
    values
        .iter()
        .map(|value| match dtype {
            DType::F16 => f16::from_f32(*value).to_f32(),
            DType::BF16 => bf16::from_f32(*value).to_f32(),
            _ => *value,
        })
        .collect()
}

const DTYPES: [DType; 3] = [DType::F32, DType::BF16, DType::F16];

#[test]
fn every_member_gets_the_parts_of_all_and_what_lies_behind_them_stays() {
    for (size, dtype) in (1..=5).flat_map(|size| DTYPES.map(|dtype| (size, dtype))) {
        for cuts in cuts(size) {
            let whole = noise(9, cuts[size]);
            let gathered = results(size, |world| {
                let group = world.world_group(Channel::Gather);
                let slot = group.index();
                // Buffers may differ in length.
                let buffer = own_part(dtype, &whole, part(&cuts, slot), 3 * slot);
                let pending = group.gather_parts(tag(), Arc::clone(&cuts), buffer);
                pending.expect("issued").wait().expect("gathered")
            });
            for (slot, buffer) in gathered.into_iter().enumerate() {
                assert_eq!(buffer.dtype(), dtype);
                let found = buffer.values().to_f32();
                let (parts, tail) = found.split_at(whole.len());
                assert_eq!(parts, rounded(dtype, &whole), "{size} {dtype} {cuts:?}");
                assert_eq!(tail, vec![-7.5; 3 * slot]);
            }
        }
    }
}
