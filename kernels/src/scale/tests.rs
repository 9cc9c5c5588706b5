use super::{divide_in_place, scaled_copy};
use crate::simd::tests::on_both;

fn values() -> Vec<f32> {
    (0..=u32::MAX).step_by(1_999_993).map(f32::from_bits).filter(|x| !x.is_nan()).collect()
}

#[test]
#[expect(clippy::cast_possible_truncation, reason = "the reference rounds as the kernel does")]
fn divides_in_f64_and_rounds_once() {
    let source = values();
    for divisor in [1.0, 3.0, 7e12, 0.1, 2048.0, 2.0_f64.powi(-300), -4.0] {
        let copied = on_both(|| {
            let mut target = vec![0.0; source.len()];
            scaled_copy(&mut target, &source, divisor);
            target
        });
        let in_place = on_both(|| {
            let mut target = source.clone();
            divide_in_place(&mut target, divisor);
            target
        });
        for (index, value) in source.iter().enumerate() {
            let expected = ((f64::from(*value) / divisor) as f32).to_bits();
            assert_eq!(copied[index].to_bits(), expected, "{value} / {divisor}");
            assert_eq!(in_place[index].to_bits(), expected, "{value} / {divisor}");
        }
    }
}

#[test]
fn a_division_by_zero_is_ieee() {
    let mut values = [1.0, -1.0, 0.0];
    divide_in_place(&mut values, 0.0);
    assert_eq!(values[..2], [f32::INFINITY, f32::NEG_INFINITY]);
    assert!(values[2].is_nan());
}
