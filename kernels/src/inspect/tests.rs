use proptest::prelude::*;

use super::{LANES, STRIDE, first_non_finite, non_finite_bits, squared_distance, squared_norm};
use crate::simd::tests::on_all_widths;
use crate::tests::around_every_bf16;

/// The squared norm in the order of additions that [`squared_norm`] promises, as a plain loop.
fn in_lanes(values: &[f32]) -> f64 {
    let mut sums = [0.0; LANES];
    for (index, value) in values.iter().enumerate() {
        sums[index % LANES] += f64::from(*value).powi(2);
    }
    let eight: Vec<f64> = (0..8).map(|lane| sums[lane] + sums[lane + 8]).collect();
    let four: Vec<f64> = (0..4).map(|lane| eight[lane] + eight[lane + 4]).collect();
    (four[0] + four[2]) + (four[1] + four[3])
}

#[test]
fn the_norm_of_nothing_is_zero() {
    assert_eq!(squared_norm(&[]).to_bits(), 0.0_f64.to_bits());
}

#[test]
fn a_norm_neither_overflows_nor_loses_small_numbers() {
    assert_eq!(squared_norm(&[f32::MAX; 2]), 2.0 * f64::from(f32::MAX).powi(2));
    let small = vec![1e-30_f32; 1000];
    assert!((squared_norm(&small) / 1e-57 - 1.0).abs() < 1e-6);
}

#[test]
fn a_distance_is_not_rounded_to_f32() {
    let large = f32::MAX;
    let small = 1e-30_f32;
    let exact = f64::from(large) + f64::from(small);
    assert_eq!(squared_distance(&[large], &[-small]), exact * exact);
    let exact = 1.0 - f64::from(1e-9_f32);
    assert_eq!(squared_distance(&[1.0], &[1e-9]), exact * exact);
}

#[test]
fn a_norm_of_something_not_finite_is_not_finite() {
    assert_eq!(squared_norm(&[1.0, f32::NEG_INFINITY]), f64::INFINITY);
    assert!(squared_norm(&[1.0, f32::NAN, 2.0]).is_nan());
}

#[test]
fn infinities_and_nan_alone_are_found() {
    for value in around_every_bf16().flatten() {
        let found = first_non_finite(&[1.0, value]);
        assert_eq!(found, (!value.is_finite()).then_some(1), "{:#x}", value.to_bits());
        let is_found = non_finite_bits(value) != 0;
        assert_eq!(is_found, !value.is_finite(), "{:#x}", value.to_bits());
    }
}

#[test]
fn finds_every_place_of_every_kind() {
    for len in [1, 15, STRIDE, STRIDE + 1, 3 * STRIDE + 5] {
        assert_eq!(first_non_finite(&vec![f32::MAX; len]), None);
        for place in (0..len).step_by(7).chain([len - 1]) {
            for value in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
                let mut values = vec![f32::MIN; len];
                values[place] = value;
                values[len - 1] = value;
                assert_eq!(first_non_finite(&values), Some(place));
            }
        }
    }
    assert_eq!(first_non_finite(&[]), None);
}

proptest! {
    #[test]
    fn a_norm_adds_in_the_promised_order(values in prop::collection::vec(-1e3_f32..1e3, 0..200)) {
        let norm = on_all_widths(|| squared_norm(&values).to_bits());
        prop_assert_eq!(norm, in_lanes(&values).to_bits());
    }

    /// Differences of quarters are exact in f32, so their norm is known.
    #[test]
    fn a_distance_is_the_norm_of_the_differences(quarters in prop::collection::vec((-4000_i16..4000, -4000_i16..4000), 0..200)) {
        let of = |get: fn(&(i16, i16)) -> i16| -> Vec<f32> {
            quarters.iter().map(|pair| f32::from(get(pair)) / 4.0).collect()
        };
        let values = of(|pair| pair.0);
let others = of(|pair| pair.1);
        let differences: Vec<f32> = values.iter().zip(&others).map(|(value, other)| value - other).collect();
        let distance = on_all_widths(|| squared_distance(&values, &others).to_bits());
        prop_assert_eq!(distance, in_lanes(&differences).to_bits());
    }

    #[test]
    fn the_first_is_found(places in prop::collection::btree_set(0_usize..5000, 0..4)) {
        let mut values = vec![1.0; 5000];
        for place in &places {
            values[*place] = f32::NAN;
        }
        prop_assert_eq!(on_all_widths(|| first_non_finite(&values)), places.first().copied());
    }
}
