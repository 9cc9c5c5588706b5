use super::{Divisor, Scale, exact_reciprocal};
use crate::error::Error;

#[test]
fn refuses_what_is_not_a_divisor() {
    for value in [0.0, -0.0, -1.0, f32::INFINITY] {
        assert_eq!(Divisor::new(value), Err(Error::Divisor { value }));
    }
    assert!(Divisor::new(f32::NAN).is_err());
    let message = Divisor::new(-2.5).unwrap_err().to_string();
    assert_eq!(message, "divisor -2.5 is invalid: a divisor must be finite and greater than zero");
}

#[test]
fn one_divides_nothing() {
    assert!(Divisor::ONE.is_one());
    assert!(Divisor::new(1.0).unwrap().is_one());
    assert!(!Divisor::new(1.0 + f32::EPSILON).unwrap().is_one());
    assert_eq!(Divisor::ONE.scale(), Scale::None);
}

#[test]
fn powers_of_two_become_multiplications() {
    for exponent in -126..=127 {
        let divisor = Divisor::new(2.0_f32.powi(exponent)).unwrap();
        assert!(!matches!(divisor.scale(), Scale::Divide(_)), "2^{exponent}");
    }
    for value in [3.0, 6.0, 0.1, f32::MAX, f32::from_bits(1)] {
        assert!(matches!(Divisor::new(value).unwrap().scale(), Scale::Divide(_)), "{value}");
    }
}

#[test]
fn multiplying_by_the_reciprocal_has_the_bits_of_dividing() {
    let values = (0..=u32::MAX).step_by(3_999_971).map(f32::from_bits).filter(|x| !x.is_nan());
    for value in values {
        for exponent in -126..=127 {
            let divisor = Divisor::new(2.0_f32.powi(exponent)).unwrap();
            if let Scale::Multiply(scale) = divisor.scale() {
                let product = value * scale.0;
                assert_eq!(
                    product.to_bits(),
                    (value / divisor.value()).to_bits(),
                    "{value} / 2^{exponent}"
                );
            }
        }
    }
}

#[test]
fn only_normal_powers_of_two_have_an_exact_reciprocal() {
    assert_eq!(exact_reciprocal(8.0), Some(0.125));
    assert_eq!(exact_reciprocal(-0.5), Some(-2.0));
    for value in [0.0, 3.0, 1.0 + f64::EPSILON, f64::INFINITY, f64::NAN, f64::from_bits(1)] {
        assert_eq!(exact_reciprocal(value), None, "{value}");
    }
}
