//! Updates are compared with the same update in f64, and bit for bit with one element at a time.

use super::{AdamWStep, adamw};
use crate::tests::{assert_elementwise, assert_follows};

const STEP: AdamWStep = AdamWStep {
    learning_rate: 3e-3,
    beta1: 0.9,
    beta2: 0.95,
    epsilon: 1e-8,
    weight_decay: 0.1,
    step: 1,
    clip: 1.0,
};

/// One update in f64, as the definition has it.
fn in_f64(step: &AdamWStep, [p, m, v]: [f64; 3], gradient: f64) -> [f64; 3] {
    let g = gradient * f64::from(step.clip);
    let p = p * (1.0 - step.learning_rate * step.weight_decay);
    let m = step.beta1 * m + (1.0 - step.beta1) * g;
    let v = step.beta2 * v + (1.0 - step.beta2) * g * g;
    let m_hat = m / (1.0 - step.beta1.powf(step.step as f64));
    let v_hat = v / (1.0 - step.beta2.powf(step.step as f64));
    [p - step.learning_rate * m_hat / (v_hat.sqrt() + step.epsilon), m, v]
}

#[test]
fn follows_the_definition_for_many_steps() {
    let step = |number| AdamWStep { step: number, clip: 0.5, ..STEP };
    let update = |number, [parameter, first, second]: [&mut [f32]; 3], gradient: &[f32]| {
        adamw(&step(number), parameter, gradient, first, second);
    };
    assert_follows(1e-6, update, |number, element, gradient| {
        in_f64(&step(number), element, gradient)
    });
}

#[test]
fn a_slice_is_its_elements_on_every_machine() {
    let step = AdamWStep { step: 3, clip: 0.3, ..STEP };
    assert_elementwise(|[parameter, first, second], gradient| {
        adamw(&step, parameter, gradient, first, second);
    });
}

#[test]
fn without_a_gradient_only_the_decay_acts() {
    let before = [0.0, 1.0_f32.sin(), 2.0_f32.sin()];
    let mut after = before;
    adamw(&STEP, &mut after, &[0.0; 3], &mut [0.0; 3], &mut [0.0; 3]);
    assert_eq!(after, before.map(|before| before * 0.9997));
}

#[test]
#[should_panic(expected = "steps are counted from 1")]
fn there_is_no_step_zero() {
    adamw(&AdamWStep { step: 0, ..STEP }, &mut [0.0], &[1.0], &mut [0.0], &mut [0.0]);
}

#[test]
#[should_panic(expected = "lengths of gradient and parameter")]
fn lengths_must_agree() {
    adamw(&STEP, &mut [0.0; 2], &[1.0], &mut [0.0; 2], &mut [0.0; 2]);
}
