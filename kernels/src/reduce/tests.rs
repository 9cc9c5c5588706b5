use half::{bf16, f16};
use hsdp_sharding::DType;
use proptest::prelude::*;

use super::{ReduceOp, average_elements, reduce_elements};
use crate::element::Element;
use crate::error::Error;
use crate::simd::tests::on_all_widths;

const OPS: [ReduceOp; 4] = [ReduceOp::Sum, ReduceOp::Product, ReduceOp::Min, ReduceOp::Max];

fn reduce<T: Element>(op: ReduceOp, sources: &[Vec<T>]) -> Vec<T> {
    let sources: Vec<&[T]> = sources.iter().map(Vec::as_slice).collect();
    on_all_widths(|| {
        let mut target = vec![T::zeroed(); sources[0].len()];
        reduce_elements(op, &mut target, &sources);
        target
    })
}

/// The sources of members: small whole numbers, so that every order and every dtype gives the same
/// result.
fn sources<T>(members: usize, len: usize, from: impl Fn(i8) -> T) -> Vec<Vec<T>> {
    let number = |member: usize, index: usize| [1, 2, 3, 4, 5, 6, 7][(member * 5 + index * 3) % 7];
    let source = |member| (0..len).map(|index| from(number(member, index))).collect();
    (0..members).map(source).collect()
}

/// Compares all operations on one type with the same operations in i64.
fn check<T: Element>(from: impl Fn(i8) -> T, whole: impl Fn(T) -> i64) {
    for (members, len) in [(1, 5), (2, 0), (3, 1), (4, 1030), (5, 33)] {
        let sources = sources(members, len, &from);
        for op in OPS {
            let results = reduce(op, &sources);
            for (index, result) in results.into_iter().enumerate() {
                let column = sources.iter().map(|source| whole(source[index]));
                let expected = match op {
                    ReduceOp::Sum => column.sum(),
                    ReduceOp::Product => column.product(),
                    ReduceOp::Min => column.min().unwrap(),
                    ReduceOp::Max => column.max().unwrap(),
                };
                // bf16 keeps eight bits of a product.
                let expected =
                    if op == ReduceOp::Product { whole_of::<T>(expected) } else { expected };
                assert_eq!(whole(result), expected, "{op:?} of {members} {}", T::DTYPE);
            }
        }
    }
}

#[expect(clippy::cast_possible_truncation, reason = "products here are below 7^5")]
fn whole_of<T: Element>(value: i64) -> i64 {
    match T::DTYPE {
        DType::BF16 => bf16::from_f32(value as f32).to_f32() as i64,
        DType::F16 => f16::from_f32(value as f32).to_f32() as i64,
        _ => value,
    }
}

#[test]
#[expect(clippy::cast_possible_truncation, reason = "small whole numbers")]
#[expect(clippy::cast_sign_loss, reason = "positive numbers")]
fn every_operation_on_every_dtype() {
    check(f32::from, |x| x as i64);
    check(|x| f16::from_f32(x.into()), |x| x.to_f32() as i64);
    check(|x| bf16::from_f32(x.into()), |x| x.to_f32() as i64);
    check(f64::from, |x| x as i64);
    check(i32::from, i64::from);
    check(i64::from, |x| x);
    check(|x| x as u32, i64::from);
    check(|x| x as u64, |x| x as i64);
}

#[test]
fn sums_are_in_the_order_of_the_sources() {
    // From the left: (1e8 + 1) - 1e8 is 0 in f32; any other order gives 1.
    let sources = [vec![1e8_f32; 9], vec![1.0; 9], vec![-1e8; 9]];
    assert_eq!(reduce(ReduceOp::Sum, &sources), [0.0; 9]);
}

/// The results equal a fold from the left, bit for bit, for any number of sources that are read
/// side by side.
#[test]
fn any_number_of_sources_is_joined_from_the_left() {
    let value = |source: usize, index: usize| 1.0 + (source * 131 + index * 17) as f32 / 7.0;
    for count in 1..=13 {
        let source = |source| (0..1100).map(|index| value(source, index)).collect();
        let sources: Vec<Vec<f32>> = (0..count).map(source).collect();
        let folded = |join: fn(f32, f32) -> f32| -> Vec<u32> {
            let column = |index: usize| sources.iter().map(move |source| source[index]);
            (0..1100).filter_map(|it| column(it).reduce(join)).map(f32::to_bits).collect()
        };
        let reduced =
            |op| -> Vec<u32> { reduce(op, &sources).into_iter().map(f32::to_bits).collect() };
        assert_eq!(reduced(ReduceOp::Sum), folded(|a, b| a + b), "{count} sources");
        assert_eq!(reduced(ReduceOp::Product), folded(|a, b| a * b), "{count} sources");
        assert_eq!(reduced(ReduceOp::Min), folded(f32::min), "{count} sources");
        assert_eq!(reduced(ReduceOp::Max), folded(f32::max), "{count} sources");
    }
}

#[test]
fn sixteen_bit_sums_are_rounded_once() {
    // In bf16, 256 + 1 is 256, so a sum in bf16 would stay at 256.
    let sources: Vec<_> = [256.0, 1.0, 1.0, 1.0, 1.0].map(|x| vec![bf16::from_f32(x); 3]).into();
    assert_eq!(reduce(ReduceOp::Sum, &sources), [bf16::from_f32(260.0); 3]);
    // In f16, the sum of the first two overflows.
    let sources: Vec<_> = [60_000.0, 60_000.0, -60_000.0].map(|x| vec![f16::from_f32(x); 3]).into();
    assert_eq!(reduce(ReduceOp::Sum, &sources), [f16::from_f32(60_000.0); 3]);
}

#[test]
fn integers_wrap() {
    assert_eq!(reduce(ReduceOp::Sum, &[vec![i32::MAX], vec![1]]), [i32::MIN]);
    assert_eq!(reduce(ReduceOp::Sum, &[vec![u64::MAX], vec![2]]), [1]);
    assert_eq!(reduce(ReduceOp::Product, &[vec![1_u32 << 31], vec![2]]), [0]);
}

#[test]
fn nan_wins() {
    for op in OPS {
        for nan in 0..3 {
            let mut sources = vec![vec![1.0_f32; 9]; 3];
            sources[nan] = vec![f32::NAN; 9];
            let sources: Vec<&[f32]> = sources.iter().map(Vec::as_slice).collect();
            let mut target = [0.0; 9];
            reduce_elements(op, &mut target, &sources);
            assert!(target.iter().all(|value| value.is_nan()), "{op:?}, NaN from member {nan}");
        }
    }
}

#[test]
fn an_average_is_divided_before_it_is_rounded() {
    let mut target = [f16::ZERO; 3];
    let member = [f16::from_f32(60_000.0); 3];
    average_elements(&mut target, &[&member, &member, &member]).unwrap();
    assert_eq!(target, member);

    let mut target = [0.0_f64];
    average_elements(&mut target, &[&[1.0], &[2.0], &[5.0]]).unwrap();
    assert_eq!(target, [8.0 / 3.0]);
}

#[test]
fn integers_have_no_average() {
    let refused = average_elements(&mut [0_i64], &[&[1], &[2]]);
    assert_eq!(refused, Err(Error::IntegerAverage { dtype: DType::I64, sources: 2 }));
    assert_eq!(
        refused.unwrap_err().to_string(),
        "average of 2 sources in i64: only floating-point elements have an average"
    );
}

#[test]
#[should_panic(expected = "there is no source")]
fn a_reduction_needs_a_source() {
    reduce_elements::<f32>(ReduceOp::Sum, &mut [0.0], &[]);
}

proptest! {
    #[test]
    fn cutting_a_range_changes_nothing(
        sources in prop::collection::vec(prop::collection::vec(-1e3_f32..1e3, 1500), 1..5),
        cut in 0_usize..=1500,
    ) {
        let sources: Vec<&[f32]> = sources.iter().map(Vec::as_slice).collect();
        let mut whole = vec![0.0; 1500];
        reduce_elements(ReduceOp::Sum, &mut whole, &sources);
        let mut parts = vec![0.0; 1500];
        for range in [0..cut, cut..1500] {
            let part: Vec<&[f32]> = sources.iter().map(|source| &source[range.clone()]).collect();
            reduce_elements(ReduceOp::Sum, &mut parts[range], &part);
        }
        prop_assert_eq!(whole, parts);
    }
}
