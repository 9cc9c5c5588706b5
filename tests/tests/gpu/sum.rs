//! Sums of members, and casts.

use std::ops::Range;

use hsdp_kernels::cuda::{DeviceBuffer, Noted, Notes, Stream};
use hsdp_kernels::{Divisor, Fold, HostBuffer, Scaling, Values, Wire, sum_contributions};
use hsdp_sharding::DType;

use super::numbers::{DTYPES, LENGTHS, any_bits, of, ordinary};
use super::{PATIENCE, assert_same, device, download, stream, upload};

/// The round of all sums here.
const ROUND: usize = 5;

/// The index that a sum has noted.
fn found(stream: &Stream, noted: &Noted) -> Option<usize> {
    let found = stream.read_noted(&[noted], PATIENCE).expect("read")[0];
    assert_eq!(found.contribution, None, "nothing was packed");
    assert!(found.sum.is_none_or(|sum| sum.round == ROUND), "{found:?}");
    found.sum.map(|sum| sum.index)
}

/// Sums the elements of `members` from `start` on into `partial`, on the device and by the twin.
fn compare(members: &[HostBuffer], start: usize, partial: &[f32], post: f32, fold: Fold) {
    let stream = stream();
    let post = Divisor::new(post).expect("a divisor");
    let range = start..start + partial.len();
    let wires: Vec<_> = members.iter().map(|it| upload(&stream, it.values())).collect();
    let mut target = upload(&stream, Values::F32(partial));
    let mut noted = Noted::new(&stream).expect("memory");
    let all: Vec<_> = wires.iter().collect();
    let notes = Notes { noted: &mut noted, round: ROUND };
    let summed = stream.sum(&mut target, &all, range.clone(), post, fold, Some(notes));
    summed.expect("summed");

    let mut expected = partial.to_vec();
    let contributions: Vec<_> = members.iter().map(|it| it.values().slice(range.clone())).collect();
    let scaling = Scaling { post, ..Scaling::on(Wire::F32) };
    let expected_first = sum_contributions(&mut expected, &contributions, scaling, fold);
    let what = format!(
        "{} members of {} from {start}, {} elements, / {}, {fold:?}",
        members.len(),
        members[0].dtype(),
        partial.len(),
        post.value()
    );
    // Of two NaN that are added, either may remain: only that there is one counts.
    let quiet = |values: &[f32]| -> Vec<f32> {
        values.iter().map(|it| if it.is_nan() { f32::NAN } else { *it }).collect()
    };
    let sums = quiet(&download(&stream, &target).values().to_f32());
    assert_same(Values::F32(&sums), Values::F32(&quiet(&expected)), &what);
    assert_eq!(found(&stream, &noted), expected_first, "{what}: first that is not finite");
}

#[test]
#[ignore = "needs a CUDA device"]
fn members_are_summed_in_their_order_as_the_twin_sums_them() {
    for dtype in DTYPES {
        // The longest has more elements than a device has threads.
        let counted = [(1, 0), (1, 9), (2, 2055), (3, 1_300_003), (5, 64), (16, 2048), (480, 33)];
        for (count, len) in counted {
            // One of any bits: sums of many of those are NaN everywhere.
            let member = |member: u64| match member {
                0 => of(dtype, 7, len + 32),
                member => cast(dtype, &ordinary(member, len + 32)),
            };
            let members: Vec<_> = (0..count).map(member).collect();
            for (post, fold) in [(1.0, Fold::Replace), (8.0, Fold::Add), (3.0, Fold::Add)] {
                compare(&members, 32, &ordinary(99, len), post, fold);
            }
        }
    }
}

#[test]
#[ignore = "needs a CUDA device"]
fn one_contribution_that_is_not_finite_is_found_behind_a_million_that_are() {
    let mut members: Vec<_> = (0..3).map(|seed| ordinary(seed, 1_300_003)).collect();
    members[1][900_002] = f32::NEG_INFINITY;
    let members: Vec<_> = members.iter().map(|it| cast(DType::BF16, it)).collect();
    compare(&members, 0, &ordinary(9, 1_300_003), 3.0, Fold::Add);
}

fn cast(dtype: DType, values: &[f32]) -> HostBuffer {
    let mut cast = HostBuffer::zeros(dtype, values.len()).expect("memory");
    hsdp_kernels::cast(cast.values_mut(), values);
    cast
}

#[test]
#[ignore = "needs a CUDA device"]
fn finite_sums_note_nothing() {
    let members: Vec<_> = (0..3).map(|seed| cast(DType::BF16, &ordinary(seed, 5000))).collect();
    compare(&members, 0, &ordinary(9, 5000), 1.0, Fold::Add);
}

#[test]
#[ignore = "needs a CUDA device"]
fn casts_round_as_the_twin_rounds() {
    let stream = stream();
    for (dtype, len) in DTYPES.into_iter().flat_map(|dtype| LENGTHS.map(|len| (dtype, len))) {
        for pre in [1.0, 2.0, 7.0] {
            let pre = Divisor::new(pre).expect("a divisor");
            let values = any_bits(len as u64, len);
            let source = upload(&stream, Values::F32(&values));
            let mut target = DeviceBuffer::new(&device(), dtype, len, "a test").expect("memory");
            stream.narrow(&mut target, &source, pre).expect("cast");
            let mut expected = HostBuffer::zeros(dtype, len).expect("memory");
            hsdp_kernels::pack(expected.values_mut(), Values::F32(&values), pre);
            let found = download(&stream, &target);
            let what = format!("{len} elements to {dtype} / {}", pre.value());
            assert_same(found.values(), expected.values(), &what);
        }
    }
}

#[test]
#[ignore = "needs a CUDA device"]
fn parts_that_do_not_fit_are_not_cast() {
    let stream = stream();
    let source = upload(&stream, Values::F32(&[1.0; 24]));
    let mut target = DeviceBuffer::new(&device(), DType::BF16, 8, "a test").expect("memory");
    let reversed = Range { start: 16, end: 8 };
    let reversed_within = Range { start: 8, end: 0 };
    for (to, from) in [
        (reversed.clone(), 0..0),
        (reversed_within.clone(), reversed_within),
        (0..0, Range { start: 32, end: 24 }),
        (0..16, 0..16),
        (0..8, 20..28),
        (0..8, 4..12),
        (0..8, 0..16),
    ] {
        let refused = stream.narrow_part(&mut target, to.clone(), &source, from.clone());
        let said = format!("narrow: elements {from:?} cannot go to {to:?} in buffers of [24, 8]");
        assert_eq!(refused.map_err(|it| it.to_string()), Err(said));
    }
    assert_eq!(stream.narrow_part(&mut target, 0..8, &source, 16..24), Ok(()));
    assert_eq!(stream.narrow_part(&mut target, 8..8, &source, 24..24), Ok(()));
}

#[test]
#[ignore = "needs a CUDA device"]
fn members_that_do_not_fit_are_refused_by_number() {
    let stream = stream();
    let [long, short] = [40, 30].map(|len| upload(&stream, Values::F32(&vec![1.0; len])));
    let mut target = upload(&stream, Values::F32(&[0.0; 32]));
    let mut sum = |members: &[&DeviceBuffer], start: usize| {
        let range = start..start + 32;
        let summed = stream.sum(&mut target, members, range, Divisor::ONE, Fold::Add, None);
        summed.map_err(|it| it.to_string())
    };
    assert_eq!(sum(&[&long], 8), Ok(()));
    let said = "sum: member 1 has 30 elements of f32, but 40 of f32 are expected".to_owned();
    assert_eq!(sum(&[&long, &short], 8), Err(said));
    assert_eq!(sum(&[], 0), Err("sum: 0 members, but 1 to 480 are expected".to_owned()));
    let said = "sum: the range 6..38 does not start at a multiple of 4".to_owned();
    assert_eq!(sum(&[&long], 6), Err(said));
}
