//! The squared norm, and the first element that is not finite.

use std::ops::Range;

use hsdp_kernels::cuda::Seen;
use hsdp_kernels::{Values, first_non_finite, squared_norm};

use super::numbers::{any_bits, ordinary};
use super::{PATIENCE, stream, upload};

/// Start of the inspected part of a buffer.
const START: usize = 8;

fn inspect(values: &[f32]) -> Seen {
    let stream = stream();
    // Between elements that do not count, and beside another buffer, whose place is before its own.
    let all = [&[f32::NAN; START], values, &[f32::NAN]].concat();
    let source = upload(&stream, Values::F32(&all));
    let other = upload(&stream, Values::F32(&[f32::NAN]));
    let parts = [(&other, 0..1), (&source, START..START + values.len())];
    let seen = stream.inspect(&parts, PATIENCE).expect("inspected");
    assert_eq!(seen[0].first_non_finite, Some(0));
    let first_non_finite = seen[1].first_non_finite.map(|at| at - START as u64);
    Seen { first_non_finite, ..seen[1] }
}

/// The sum in the order in which the kernel adds: each of 512 x 256 threads takes vectors of four
/// elements, blocks add up in pairs, and so do the sums of blocks.
fn in_the_kernels_order(values: &[f32]) -> f64 {
    const BLOCKS: usize = 512;
    const THREADS: usize = 256;
    let mut sums = vec![0.0_f64; BLOCKS * THREADS];
    for (number, vector) in values.chunks(4).enumerate() {
        let sum = &mut sums[number % (BLOCKS * THREADS)];
        vector.iter().for_each(|value| *sum += f64::from(*value) * f64::from(*value));
    }
    let blocks: Vec<f64> = sums.chunks(THREADS).map(|block| in_pairs(block.to_vec())).collect();
    in_pairs(blocks)
}

fn in_pairs(mut sums: Vec<f64>) -> f64 {
    while sums.len() > 1 {
        let half = sums.len() / 2;
        for index in 0..half {
            sums[index] += sums[index + half];
        }
        sums.truncate(half);
    }
    sums[0]
}

#[test]
#[ignore = "needs a CUDA device"]
fn the_norm_is_added_up_in_one_order() {
    // The last is more than the device's threads read at once.
    for len in [0, 1, 9, 2055, 2_500_003] {
        let values = ordinary(len as u64, len);
        let seen = inspect(&values);
        assert_eq!(seen.first_non_finite, None);
        let expected = in_the_kernels_order(&values);
        assert_eq!(seen.squared_norm.to_bits(), expected.to_bits(), "{len} elements");
        let twin = squared_norm(&values);
        assert!((seen.squared_norm - twin).abs() <= 1e-12 * twin, "{len} elements: {twin}");
    }
}

#[test]
#[ignore = "needs a CUDA device"]
fn parts_that_a_buffer_does_not_have_are_refused() {
    let stream = stream();
    let source = upload(&stream, Values::F32(&ordinary(1, 100)));
    for (range, problem) in [
        (2..8, "elements 2..8 of 100"),
        (96..104, "elements 96..104 of 100"),
        (Range { start: 8, end: 4 }, "elements 8..4 of 100"),
    ] {
        let refused = stream.inspect(&[(&source, range)], PATIENCE).expect_err("refused");
        assert_eq!(refused.to_string(), format!("inspect: {problem}"));
    }
    let seen = stream.inspect(&[(&source, 96..96)], PATIENCE).expect("inspected");
    assert_eq!(seen, [Seen { squared_norm: 0.0, first_non_finite: None }]);
}

#[test]
#[ignore = "needs a CUDA device"]
fn the_first_element_that_is_not_finite_is_found() {
    for (len, at) in [(1, 0), (9, 8), (2055, 2049), (2_500_003, 2_200_001)] {
        let mut values = ordinary(3, len);
        values[len - 1] = f32::NAN;
        values[at] = f32::NEG_INFINITY;
        assert_eq!(inspect(&values).first_non_finite, Some(at as u64), "{len} elements");
    }
    let values = any_bits(5, 10_000);
    let expected = first_non_finite(&values).map(|at| at as u64);
    assert_eq!(inspect(&values).first_non_finite, expected);
}
