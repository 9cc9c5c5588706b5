use super::{divide_in_place, scaled_copy};
use crate::simd::tests::on_all_widths;

fn values() -> Vec<f32> {
    (0..=u32::MAX).step_by(1_999_993).map(f32::from_bits).filter(|x| !x.is_nan()).collect()
}

/// Divisors of all sizes and signs, with and without exact reciprocals, and some whose reciprocal
/// is subnormal or infinite.
const DIVISORS: [f64; 13] = [
    1.0,
    3.0,
    7e12,
    0.1,
    2048.0,
    1e-90,
    -4.0,
    -3.0,
    1.7e308,
    1e-310,
    f64::INFINITY,
    f64::NEG_INFINITY,
    5e-324,
];

#[test]
#[expect(clippy::cast_possible_truncation, reason = "the reference rounds as the kernel does")]
fn divides_in_f64_and_rounds_once() {
    let source = values();
    for divisor in DIVISORS {
        let copied = on_all_widths(|| {
            let mut target = vec![0.0; source.len()];
            scaled_copy(&mut target, &source, divisor);
            target
        });
        let in_place = on_all_widths(|| {
            let mut target = source.clone();
            divide_in_place(&mut target, divisor);
            target
        });
        for (index, value) in source.iter().enumerate() {
            let expected = ((f64::from(*value) / divisor) as f32).to_bits();
            // A single element, which no other element of its block sends to the division.
            let mut alone = [0.0];
            scaled_copy(&mut alone, &[*value], divisor);
            assert_eq!(alone[0].to_bits(), expected, "{value} / {divisor}");
            assert_eq!(copied[index].to_bits(), expected, "{value} / {divisor}");
            assert_eq!(in_place[index].to_bits(), expected, "{value} / {divisor}");
        }
    }
}

/// Quotients that lie on a midpoint of two f32, or as near to one as possible.
#[test]
#[expect(clippy::cast_possible_truncation, reason = "the reference rounds as the kernel does")]
fn a_quotient_between_two_floats_goes_where_a_division_sends_it() {
    for step in 1..2000_u32 {
        let lower = f32::from_bits(0x3f80_0000 + step * 4093);
        let turn = f64::midpoint(f64::from(lower), f64::from(lower.next_up()));
        for divisor in [3.0, 0.1, 1.0 + 2.0_f64.powi(-24), 49.0, 1e9 / 7.0] {
            let value = (turn * divisor) as f32;
            for value in [value.next_down(), value, value.next_up(), -value] {
                let mut quotient = [0.0; 2];
                scaled_copy(&mut quotient, &[1.0, value], divisor);
                let expected = (f64::from(value) / divisor) as f32;
                assert_eq!(quotient[1].to_bits(), expected.to_bits(), "{value} / {divisor}");
            }
            // A divisor that makes this quotient the midpoint, up to the rounding of the divisor.
            let divisor = f64::from(value) / turn;
            let mut quotient = [0.0];
            scaled_copy(&mut quotient, &[value], divisor);
            assert_eq!(quotient[0], (f64::from(value) / divisor) as f32, "{value} / {divisor}");
        }
    }
}

#[test]
fn what_is_not_finite_stays_so() {
    for (divisor, sign) in [(3.0, 1.0), (4.0, 1.0), (-3.0, -1.0)] {
        let mut quotients = [0.0; 5];
        let source = [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, 0.0, -0.0];
        scaled_copy(&mut quotients, &source, divisor);
        assert!(quotients[0].is_nan());
        let expected = source[1..].iter().map(|value| (value * sign).to_bits());
        assert!(quotients[1..].iter().map(|quotient| quotient.to_bits()).eq(expected));
    }
}

#[test]
fn a_division_by_zero_is_ieee() {
    let source = [1.0, -1.0, 0.0];
    let mut values = source;
    let mut copied = [0.0; 3];
    divide_in_place(&mut values, 0.0);
    scaled_copy(&mut copied, &source, 0.0);
    for values in [values, copied] {
        assert_eq!(values[..2], [f32::INFINITY, f32::NEG_INFINITY]);
        assert!(values[2].is_nan());
    }
}
