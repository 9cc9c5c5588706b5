//! Updates are compared with the same update in f64, and bit for bit with one element at a time.

use super::{AdamWStep, adamw};
use crate::simd::tests::on_both;

const STEP: AdamWStep = AdamWStep {
    learning_rate: 3e-3,
    beta1: 0.9,
    beta2: 0.95,
    epsilon: 1e-8,
    weight_decay: 0.1,
    step: 1,
    clip: 1.0,
};

#[derive(Debug, Clone, PartialEq)]
struct State {
    parameter: Vec<f32>,
    first: Vec<f32>,
    second: Vec<f32>,
}

impl State {
    fn new(len: usize) -> Self {
        let parameter = (0..len).map(|index| (index as f32).sin()).collect();
        Self { parameter, first: vec![0.0; len], second: vec![0.0; len] }
    }

    fn step(&mut self, step: &AdamWStep, gradient: &[f32]) {
        adamw(step, &mut self.parameter, gradient, &mut self.first, &mut self.second);
    }
}

fn gradient(len: usize, step: u64) -> Vec<f32> {
    (0..len).map(|index| ((index as f32 + 1.0) * step as f32 * 0.7).cos()).collect()
}

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
    let len = 37;
    let mut state = State::new(len);
    let mut reference: Vec<[f64; 3]> =
        state.parameter.iter().map(|p| [f64::from(*p), 0.0, 0.0]).collect();
    for number in 1..=50 {
        let step = AdamWStep { step: number, clip: 0.5, ..STEP };
        let gradient = gradient(len, number);
        state.step(&step, &gradient);
        for (element, gradient) in reference.iter_mut().zip(&gradient) {
            *element = in_f64(&step, *element, f64::from(*gradient));
        }
    }
    for (index, [p, m, v]) in reference.into_iter().enumerate() {
        assert!((f64::from(state.parameter[index]) - p).abs() < 1e-6);
        assert!((f64::from(state.first[index]) - m).abs() < 1e-6);
        assert!((f64::from(state.second[index]) - v).abs() < 1e-6);
    }
}

#[test]
fn a_slice_is_its_elements_on_every_machine() {
    let len = 1003;
    let step = AdamWStep { step: 3, clip: 0.3, ..STEP };
    let gradient = gradient(len, 3);
    let whole = on_both(|| {
        let mut state = State::new(len);
        state.step(&step, &gradient);
        state.step(&step, &gradient);
        state
    });
    let mut single = State::new(len);
    for index in 0..len {
        let element = index..index + 1;
        for _ in 0..2 {
            adamw(
                &step,
                &mut single.parameter[element.clone()],
                &gradient[element.clone()],
                &mut single.first[element.clone()],
                &mut single.second[element.clone()],
            );
        }
    }
    assert_eq!(whole, single);
}

#[test]
fn without_a_gradient_only_the_decay_acts() {
    let mut state = State::new(3);
    let before = state.parameter.clone();
    state.step(&STEP, &[0.0; 3]);
    for (after, before) in state.parameter.iter().zip(before) {
        assert_eq!(*after, before * 0.9997);
    }
}

#[test]
#[should_panic(expected = "steps are counted from 1")]
fn there_is_no_step_zero() {
    State::new(1).step(&AdamWStep { step: 0, ..STEP }, &[1.0]);
}

#[test]
#[should_panic(expected = "lengths of gradient and parameter")]
fn lengths_must_agree() {
    State::new(2).step(&STEP, &[1.0]);
}
