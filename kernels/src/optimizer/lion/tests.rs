//! Updates are compared with the same update in f64, and bit for bit with one element at a time.

use super::{LionStep, lion};
use crate::simd::tests::on_both;

const STEP: LionStep =
    LionStep { learning_rate: 3e-3, beta1: 0.9, beta2: 0.99, weight_decay: 0.1, clip: 0.5 };

fn wave(len: usize, frequency: f32) -> Vec<f32> {
    (0..len).map(|index| ((index as f32 + 0.5) * frequency).sin()).collect()
}

/// One update in f64, as Program 1 of the paper has it, and the direction whose sign it took.
fn in_f64(step: &LionStep, [p, m]: [f64; 2], gradient: f64) -> ([f64; 2], f64) {
    let g = gradient * f64::from(step.clip);
    let c = step.beta1 * m + (1.0 - step.beta1) * g;
    let sign = if c == 0.0 { 0.0 } else { c.signum() };
    let p = p * (1.0 - step.learning_rate * step.weight_decay) - step.learning_rate * sign;
    ([p, step.beta2 * m + (1.0 - step.beta2) * g], c)
}

#[test]
fn follows_the_definition_for_many_steps() {
    let mut parameter = wave(37, 0.3);
    let mut momentum = vec![0.0; 37];
    let mut reference: Vec<[f64; 2]> = parameter.iter().map(|p| [f64::from(*p), 0.0]).collect();
    for number in 1..=50 {
        let gradient = wave(37, number as f32 * 0.7);
        lion(&STEP, &mut parameter, &gradient, &mut momentum);
        for (element, gradient) in reference.iter_mut().zip(&gradient) {
            let (updated, direction) = in_f64(&STEP, *element, f64::from(*gradient));
            assert!(direction.abs() > 1e-6, "rounding does not decide the sign of {direction}");
            *element = updated;
        }
    }
    for (index, [p, m]) in reference.into_iter().enumerate() {
        assert!((f64::from(parameter[index]) - p).abs() < 1e-6);
        assert!((f64::from(momentum[index]) - m).abs() < 1e-6);
    }
}

#[test]
fn a_slice_is_its_elements_on_every_machine() {
    let gradient = wave(1003, 0.7);
    let whole = on_both(|| {
        let mut parameter = wave(1003, 0.2);
        let mut momentum = wave(1003, 0.1);
        lion(&STEP, &mut parameter, &gradient, &mut momentum);
        (parameter, momentum)
    });
    let mut parameter = wave(1003, 0.2);
    let mut momentum = wave(1003, 0.1);
    for index in 0..1003 {
        let element = index..=index;
        let momentum = &mut momentum[element.clone()];
        lion(&STEP, &mut parameter[element.clone()], &gradient[element], momentum);
    }
    assert_eq!(whole, (parameter, momentum));
}

#[test]
fn every_element_moves_by_the_learning_rate_unless_its_direction_is_zero() {
    let step = LionStep { learning_rate: 0.25, weight_decay: 0.0, ..STEP };
    let gradient = [1e-30, -1e30, 0.0, -0.0, 3.0];
    let mut parameter = [1.0; 5];
    let mut momentum = [0.0, 0.0, 0.0, 0.0, -1.0];
    lion(&step, &mut parameter, &gradient, &mut momentum);
    // The last: 0.9 * -1 + 0.1 * 0.5 * 3 is below zero although its gradient is above.
    assert_eq!(parameter, [0.75, 1.25, 1.0, 1.0, 1.25]);
}

#[test]
#[should_panic(expected = "lengths of momentum and parameter")]
fn lengths_must_agree() {
    lion(&STEP, &mut [1.0, 2.0], &[1.0, 2.0], &mut [0.0]);
}
