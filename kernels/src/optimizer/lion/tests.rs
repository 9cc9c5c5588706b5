//! Updates are compared with the same update in f64, and bit for bit with one element at a time.

use super::{LionStep, lion};
use crate::tests::{assert_elementwise, assert_follows};

const STEP: LionStep =
    LionStep { learning_rate: 3e-3, beta1: 0.9, beta2: 0.99, weight_decay: 0.1, clip: 0.5 };

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
    let update = |_, [parameter, momentum]: [&mut [f32]; 2], gradient: &[f32]| {
        lion(&STEP, parameter, gradient, momentum);
    };
    assert_follows(1e-6, update, |_, element, gradient| {
        let (updated, direction) = in_f64(&STEP, element, gradient);
        assert!(direction.abs() > 1e-6, "rounding does not decide the sign of {direction}");
        updated
    });
}

#[test]
fn a_slice_is_its_elements_on_every_machine() {
    assert_elementwise(|[parameter, momentum], gradient| {
        lion(&STEP, parameter, gradient, momentum);
    });
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
