//! The results equal those of a pass for each member, a pass for the sum and one for the check, bit
//! for bit.

use std::array;

use proptest::prelude::*;

use super::{FUSED, contribute_all, sum_contributions};
use crate::accumulate::{Fold, Scaling, contribute, settle};
use crate::buffer::HostBuffer;
use crate::divisor::Divisor;
use crate::inspect::first_non_finite;
use crate::simd::tests::on_all_widths;
use crate::tests::{FOLDS, REALS, WIRES, around_every_bf16, buffer};
use crate::values::Values;
use crate::wire::Wire;

/// Numbers of every size, with infinities and NaN among them where `specials` says so.
fn numbers(len: usize, member: usize, specials: Specials) -> Vec<f32> {
    let number = |index: u32| {
        let bits = index
            .wrapping_add(1)
            .wrapping_mul(2_654_435_761)
            .rotate_left(u32::try_from(member).unwrap());
        let value = f32::from_bits(bits);
        match specials {
            Specials::Kept => value,
            Specials::Replaced if value.is_finite() => value,
            Specials::Replaced => -0.0,
        }
    };
    (0_u32..).take(len).map(number).collect()
}

#[derive(Clone, Copy)]
enum Specials {
    Kept,
    Replaced,
}

fn one_by_one(
    target: &mut [f32],
    contributions: &[Values<'_>],
    scaling: Scaling,
    fold: Fold,
) -> Option<usize> {
    let mut sum = vec![0.0; target.len()];
    for (member, values) in contributions.iter().enumerate() {
        let fold = if member == 0 { Fold::Replace } else { Fold::Add };
        contribute(&mut sum, *values, scaling.pre, scaling.wire, fold);
    }
    settle(target, &sum, scaling.post, fold);
    first_non_finite(target)
}

fn check(members: &[HostBuffer], scaling: Scaling, fold: Fold) {
    let contributions: Vec<Values<'_>> = members.iter().map(HostBuffer::values).collect();
    let before = numbers(members.first().map_or(5, HostBuffer::len), 31, Specials::Replaced);
    let bits = |target: Vec<f32>| target.into_iter().map(bits).collect::<Vec<_>>();
    let found = on_all_widths(|| {
        let mut target = before.clone();
        let first = sum_contributions(&mut target, &contributions, scaling, fold);
        (bits(target), first)
    });
    let mut target = before;
    let first = one_by_one(&mut target, &contributions, scaling, fold);
    assert_eq!(found, (bits(target), first), "{} members, {scaling}, {fold:?}", members.len());
}

/// Compares members a few at a time with members one by one.
fn check_all(members: &[HostBuffer], scaling: Scaling, fold: Fold) {
    let contributions: Vec<Values<'_>> = members.iter().map(HostBuffer::values).collect();
    let pre = scaling.pre;
    let wire = scaling.wire;
    let before = numbers(members.first().map_or(5, HostBuffer::len), 31, Specials::Replaced);
    let found = on_all_widths(|| {
        let mut sum = before.clone();
        contribute_all(&mut sum, &contributions, pre, wire, fold);
        sum.into_iter().map(bits).collect::<Vec<_>>()
    });
    let mut sum = before;
    for (member, values) in contributions.iter().enumerate() {
        contribute(&mut sum, *values, pre, wire, if member == 0 { fold } else { Fold::Add });
    }
    let sum: Vec<u32> = sum.into_iter().map(bits).collect();
    assert_eq!(found, sum, "{} members, {scaling}, {fold:?}", members.len());
}

/// The payload of the sum of two NaN is not specified, so all NaN compare equal.
fn bits(value: f32) -> u32 {
    if value.is_nan() { f32::NAN.to_bits() } else { value.to_bits() }
}

fn divisor(value: f32) -> Divisor {
    Divisor::new(value).unwrap()
}

#[test]
fn every_dtype_wire_divisor_and_number_of_members() {
    let divisors = [(1.0, 1.0), (2.0, 1.0), (1.0, 3.0), (4.0, 2.0), (3.0, 1.0), (0.25, 0.1)];
    for (dtype, wire) in REALS.into_iter().flat_map(|dtype| WIRES.map(|wire| (dtype, wire))) {
        for members in 0..=2 * FUSED + 1 {
            for specials in [Specials::Kept, Specials::Replaced] {
                let of = |member| buffer(dtype, &numbers(2100, member, specials));
                let members: Vec<_> = (0..members).map(of).collect();
                for ((pre, post), fold) in
                    divisors.into_iter().flat_map(|both| FOLDS.map(|fold| (both, fold)))
                {
                    let scaling = Scaling { wire, pre: divisor(pre), post: divisor(post) };
                    check(&members, scaling, fold);
                    check_all(&members, scaling, fold);
                }
            }
        }
    }
}

#[test]
fn a_bf16_wire_has_the_same_bits_on_all_widths() {
    for first in around_every_bf16() {
        // Members whose sums have all signs and many sizes, each with NaN at places of its own.
        let of = |member: usize| {
            let mut values = first.clone();
            values.rotate_left(member * 21_001);
            HostBuffer::from(values)
        };
        let members: [_; FUSED] = array::from_fn(of);
        for (count, fold) in (1..=FUSED).flat_map(|count| FOLDS.map(|fold| (count, fold))) {
            for (pre, post) in [(1.0, 1.0), (2.0, 3.0)] {
                let scaling = Scaling { wire: Wire::BF16, pre: divisor(pre), post: divisor(post) };
                check(&members[..count], scaling, fold);
                check_all(&members[..count], scaling, fold);
            }
        }
    }
}

#[test]
fn members_of_different_dtypes() {
    for (first, second) in REALS.into_iter().flat_map(|first| REALS.map(|second| (first, second))) {
        let members = [
            buffer(first, &numbers(300, 0, Specials::Kept)),
            buffer(second, &numbers(300, 1, Specials::Kept)),
        ];
        check(&members, Scaling::on(Wire::BF16), Fold::Add);
        check_all(&members, Scaling::on(Wire::BF16), Fold::Add);
    }
}

#[test]
fn the_first_of_many_that_are_not_finite() {
    for members in [1, 2, 5] {
        let with = |member| {
            let mut numbers = vec![1.0; 5000];
            if member == 0 {
                numbers[4711] = f32::INFINITY;
                numbers[1234] = f32::NAN;
            }
            HostBuffer::from(numbers)
        };
        let members: Vec<_> = (0..members).map(with).collect();
        let contributions: Vec<_> = members.iter().map(HostBuffer::values).collect();
        let mut target = vec![0.0; 5000];
        let scaling = Scaling::on(Wire::F32);
        assert_eq!(
            sum_contributions(&mut target, &contributions, scaling, Fold::Replace),
            Some(1234)
        );
    }
}

#[test]
#[should_panic(expected = "lengths of target and contribution")]
fn a_contribution_of_another_length_is_refused() {
    let _ = sum_contributions(
        &mut [0.0; 3],
        &[Values::F32(&[1.0; 2])],
        Scaling::on(Wire::F32),
        Fold::Add,
    );
}

#[test]
#[should_panic(expected = "lengths of sum and contribution")]
fn a_contribution_of_another_length_than_the_sum_is_refused() {
    let contributions = [Values::F32(&[1.0; 3]), Values::F32(&[1.0; 2])];
    contribute_all(&mut [0.0; 3], &contributions, Divisor::ONE, Wire::F32, Fold::Add);
}

proptest! {
    #[test]
    fn any_length(len in 0_usize..200, members in 1_usize..=FUSED, wire in 0_usize..3, add in 0_usize..2) {
        let of = |member| HostBuffer::from(numbers(len, member, Specials::Kept));
        let members: Vec<_> = (0..members).map(of).collect();
        check(&members, Scaling::on(WIRES[wire]), FOLDS[add]);
        check_all(&members, Scaling::on(WIRES[wire]), FOLDS[add]);
    }
}
