//! Inputs and comparisons that the tests of several kernels share.

use std::array;

use hsdp_sharding::DType;

use crate::accumulate::Fold;
use crate::buffer::HostBuffer;
use crate::convert::cast;
use crate::simd::tests::on_all_widths;
use crate::wire::Wire;

pub(crate) const REALS: [DType; 3] = [DType::F32, DType::F16, DType::BF16];
pub(crate) const WIRES: [Wire; 3] = [Wire::F32, Wire::F16, Wire::BF16];
pub(crate) const FOLDS: [Fold; 2] = [Fold::Replace, Fold::Add];

/// Returns `source` in another dtype.
pub(crate) fn buffer(dtype: DType, source: &[f32]) -> HostBuffer {
    let mut buffer = HostBuffer::zeros(dtype, source.len()).unwrap();
    cast(buffer.values_mut(), source);
    buffer
}

/// Lower halves of f32 around the points where rounding to bf16 changes.
const LOWER_HALVES: [u32; 8] = [0, 1, 0x4000, 0x7fff, 0x8000, 0x8001, 0xc001, 0xffff];

/// Returns a vector for each of [`LOWER_HALVES`], of the f32 with this lower half and any upper
/// half: numbers, subnormals, infinities and NaN of both signs, below, on and above each midpoint
/// of two bf16.
pub(crate) fn around_every_bf16() -> impl Iterator<Item = Vec<f32>> {
    let with =
        |lower| (0..=u32::from(u16::MAX)).map(move |upper| f32::from_bits(upper << 16 | lower));
    LOWER_HALVES.into_iter().map(move |lower| with(lower).collect())
}

pub(crate) fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| value.to_bits()).collect()
}

/// Returns numbers from -1 to 1, in waves.
pub(crate) fn wave(len: usize, frequency: f32) -> Vec<f32> {
    (0..len).map(|index| ((index as f32 + 0.5) * frequency).sin()).collect()
}

/// Returns numbers from -1 to about 1, in no order.
pub(crate) fn scattered(len: usize) -> Vec<f32> {
    (0..len).map(|index| ((index * 7919) % 1013) as f32 / 500.0 - 1.0).collect()
}

/// Returns a parameter, and the state that its optimizer keeps, which begins as zeros.
fn parameter_and_state<const N: usize>(len: usize) -> [Vec<f32>; N] {
    array::from_fn(|place| if place == 0 { wave(len, 0.2) } else { vec![0.0; len] })
}

/// Compares fifty updates of a slice with the update of one element in f64. Both get the number of
/// the step, the parameter with its state, and the gradient.
pub(crate) fn assert_follows<const N: usize>(
    bound: f64,
    update: impl Fn(u64, [&mut [f32]; N], &[f32]),
    in_f64: impl Fn(u64, [f64; N], f64) -> [f64; N],
) {
    let mut found: [Vec<f32>; N] = parameter_and_state(37);
    let mut expected: Vec<[f64; N]> =
        (0..37).map(|index| found.each_ref().map(|all| f64::from(all[index]))).collect();
    for number in 1..=50 {
        let gradient = wave(37, number as f32 * 0.7);
        update(number, found.each_mut().map(Vec::as_mut_slice), &gradient);
        for (element, gradient) in expected.iter_mut().zip(&gradient) {
            *element = in_f64(number, *element, f64::from(*gradient));
        }
    }
    for (index, expected) in expected.into_iter().enumerate() {
        for (found, expected) in found.iter().zip(expected) {
            assert!((f64::from(found[index]) - expected).abs() < bound, "element {index}");
        }
    }
}

/// Checks that two updates of a slice, on every machine, have the bits of updates of one element at
/// a time.
pub(crate) fn assert_elementwise<const N: usize>(update: impl Fn([&mut [f32]; N], &[f32])) {
    let gradient = wave(1003, 0.7);
    let whole = on_all_widths(|| {
        let mut all: [Vec<f32>; N] = parameter_and_state(1003);
        (0..2).for_each(|_| update(all.each_mut().map(Vec::as_mut_slice), &gradient));
        all
    });
    let mut single: [Vec<f32>; N] = parameter_and_state(1003);
    for index in 0..1003 {
        for _ in 0..2 {
            let element = single.each_mut().map(|all| &mut all[index..=index]);
            update(element, &gradient[index..=index]);
        }
    }
    assert_eq!(whole, single);
}
