//! The results equal those of one element at a time, bit for bit, for every dtype, wire, divisor
//! and fold.

use half::{bf16, f16};
use proptest::prelude::*;

use super::{Fold, contribute, pack, settle};
use crate::buffer::HostBuffer;
use crate::convert::BLOCK;
use crate::divisor::Divisor;
use crate::simd::tests::on_all_widths;
use crate::tests::{FOLDS, REALS, WIRES, around_every_bf16, bits, buffer};
use crate::values::{Values, ValuesMut};
use crate::wire::Wire;

/// The result that [`contribute`] promises for one element.
fn expected(sum: f32, value: f32, pre: Divisor, wire: Wire, fold: Fold) -> u32 {
    let contribution = wire.round(value / pre.value());
    match fold {
        Fold::Replace => contribution.to_bits(),
        Fold::Add => (sum + contribution).to_bits(),
    }
}

fn check(source: &[f32], pre: f32) {
    let pre = Divisor::new(pre).unwrap();
    let before: Vec<f32> = source.iter().rev().map(|value| value * 0.37).collect();
    for dtype in REALS {
        let values = buffer(dtype, source);
        for (wire, fold) in WIRES.into_iter().flat_map(|wire| FOLDS.map(|fold| (wire, fold))) {
            let bits: Vec<u32> = on_all_widths(|| {
                let mut sum = before.clone();
                contribute(&mut sum, values.values(), pre, wire, fold);
                sum.into_iter().map(f32::to_bits).collect()
            });
            let elements = before.iter().zip(values.values().to_f32());
            let expected: Vec<u32> =
                elements.map(|(sum, value)| expected(*sum, value, pre, wire, fold)).collect();
            assert_eq!(bits, expected, "{dtype} values, {wire} wire, {pre:?}, {fold:?}");
        }
    }
}

/// Finite numbers of every size.
fn numbers(len: usize) -> Vec<f32> {
    (0_u32..)
        .take(len)
        .map(|index| f32::from_bits(index.wrapping_mul(2_654_435_761)))
        .map(|value| if value.is_finite() { value } else { 65_520.0 })
        .collect()
}

#[test]
fn every_length_around_the_vectors_and_the_blocks() {
    for len in (0..40).chain([1023, 1024, 1025, 2048, 3001]) {
        check(&numbers(len), 1.0);
    }
}

#[test]
fn every_kind_of_divisor() {
    for pre in [0.25, 2.0, 3.0, 1024.0, 0.1, f32::MIN_POSITIVE, 2.0_f32.powi(127)] {
        check(&numbers(1100), pre);
    }
}

proptest! {
    #[test]
    fn any_numbers(source in prop::collection::vec(-1e5_f32..1e5, 0..70), pre in 1e-3_f32..1e3) {
        check(&source, pre);
    }

    #[test]
    fn cutting_a_range_changes_nothing(cut in 0_usize..=2500, dtype in 0_usize..3, wire in 0_usize..3) {
        let values = buffer(REALS[dtype], &numbers(2500));
        let pre = Divisor::new(3.0).unwrap();
let wire = WIRES[wire];
        let mut whole = vec![1.0; 2500];
        contribute(&mut whole, values.values(), pre, wire, Fold::Add);
        let mut parts = vec![1.0; 2500];
        for range in [0..cut, cut..2500] {
            let part = values.values().slice(range.clone());
            contribute(&mut parts[range], part, pre, wire, Fold::Add);
        }
        prop_assert_eq!(whole, parts);
    }
}

#[test]
fn packing_divides_in_f32_and_rounds_once() {
    let source: Vec<f32> = (0..2 * BLOCK + 3).map(|index| index as f32 / 3.0 - 100.0).collect();
    for (from, wire) in REALS.into_iter().flat_map(|from| WIRES.map(|wire| (from, wire))) {
        for pre in [1.0, 8.0, 3.0] {
            let pre = Divisor::new(pre).unwrap();
            let gradient = buffer(from, &source);
            let mut packed = HostBuffer::zeros(wire.dtype(), source.len()).unwrap();
            pack(packed.values_mut(), gradient.values(), pre);
            let values = gradient.values().to_f32().into_iter();
            let expected: Vec<f32> = values.map(|value| wire.round(value / pre.value())).collect();
            assert_eq!(packed.values().to_f32(), expected, "{from} to {wire}, {pre:?}");
        }
    }
}

#[test]
fn a_bf16_wire_has_the_same_bits_on_all_widths() {
    for source in around_every_bf16() {
        for pre in [1.0, 2.0, 3.0] {
            let pre = Divisor::new(pre).unwrap();
            let rounded = source.iter().map(|value| bf16::from_f32(value / pre.value()));
            let rounded: Vec<bf16> = rounded.collect();
            let packed = on_all_widths(|| {
                let mut packed = vec![bf16::ZERO; source.len()];
                pack(ValuesMut::BF16(&mut packed), Values::F32(&source), pre);
                packed.into_iter().map(bf16::to_bits).collect::<Vec<_>>()
            });
            let expected: Vec<_> = rounded.iter().map(|value| value.to_bits()).collect();
            assert_eq!(packed, expected, "{pre:?}");

            for fold in FOLDS {
                let sum = on_all_widths(|| {
                    let mut sum = vec![1.5; source.len()];
                    contribute(&mut sum, Values::F32(&source), pre, Wire::BF16, fold);
                    bits(&sum)
                });
                let folded = |value: &bf16| match fold {
                    Fold::Replace => value.to_f32(),
                    Fold::Add => 1.5 + value.to_f32(),
                };
                let expected: Vec<f32> = rounded.iter().map(folded).collect();
                assert_eq!(sum, bits(&expected), "{pre:?}, {fold:?}");
            }
        }
    }
}

#[test]
fn non_finite_values_arrive_as_such() {
    for dtype in REALS {
        let values = buffer(dtype, &[f32::INFINITY, f32::NEG_INFINITY, f32::NAN, 1.0]);
        for wire in WIRES {
            let mut sum = [1.0; 4];
            contribute(&mut sum, values.values(), Divisor::new(2.0).unwrap(), wire, Fold::Add);
            assert_eq!(sum[0], f32::INFINITY);
            assert_eq!(sum[1], f32::NEG_INFINITY);
            assert!(sum[2].is_nan());
            assert_eq!(sum[3], 1.5);
        }
    }
}

#[test]
fn an_f16_wire_overflows_where_f16_does_and_a_pre_divide_prevents_it() {
    let gradient = HostBuffer::from(vec![1_048_576.0_f32]);
    let mut sum = [0.0];
    contribute(&mut sum, gradient.values(), Divisor::ONE, Wire::F16, Fold::Replace);
    assert_eq!(sum, [f32::INFINITY]);
    contribute(&mut sum, gradient.values(), Divisor::new(64.0).unwrap(), Wire::F16, Fold::Replace);
    assert_eq!(sum, [16_384.0]);
}

#[test]
fn what_is_replaced_is_not_read() {
    let mut sum = [f32::NAN; 3];
    contribute(
        &mut sum,
        HostBuffer::F16(vec![f16::ONE; 3]).values(),
        Divisor::ONE,
        Wire::F16,
        Fold::Replace,
    );
    assert_eq!(sum, [1.0; 3]);
    let mut target = [f32::NAN; 3];
    settle(&mut target, &sum, Divisor::ONE, Fold::Replace);
    assert_eq!(target, [1.0; 3]);
}

#[test]
fn three_hundred_ones_in_bf16_are_three_hundred() {
    let ones = HostBuffer::BF16(vec![bf16::ONE; 5]);
    let mut partial = [0.0; 5];
    for _ in 0..300 {
        contribute(&mut partial, ones.values(), Divisor::ONE, Wire::BF16, Fold::Add);
    }
    assert_eq!(partial, [300.0; 5]);
}

#[test]
fn settling_divides_and_folds() {
    let sum = numbers(1029);
    for post in [1.0, 4.0, 7.0] {
        let post = Divisor::new(post).unwrap();
        let replaced = on_all_widths(|| {
            let mut target = vec![0.5; sum.len()];
            settle(&mut target, &sum, post, Fold::Replace);
            target
        });
        let added = on_all_widths(|| {
            let mut target = vec![0.5; sum.len()];
            settle(&mut target, &sum, post, Fold::Add);
            target
        });
        for (index, sum) in sum.iter().enumerate() {
            assert_eq!(replaced[index].to_bits(), (sum / post.value()).to_bits());
            assert_eq!(added[index].to_bits(), (0.5 + sum / post.value()).to_bits());
        }
    }
}

#[test]
#[should_panic(expected = "lengths of sum and values")]
fn lengths_must_agree() {
    let values = HostBuffer::from(vec![1.0_f32; 3]);
    contribute(&mut [0.0; 2], values.values(), Divisor::ONE, Wire::F32, Fold::Add);
}
