//! Updates are compared with the same update in f64, and bit for bit with one element at a time.

use super::{MomentumKind, SgdStep, sgd};
use crate::simd::tests::on_both;

const STEP: SgdStep = SgdStep {
    learning_rate: 0.05,
    momentum: 0.9,
    kind: MomentumKind::Classic,
    weight_decay: 0.01,
    clip: 0.5,
};

const KINDS: [MomentumKind; 2] = [MomentumKind::Classic, MomentumKind::Nesterov];

fn wave(len: usize, frequency: f32) -> Vec<f32> {
    (0..len).map(|index| (index as f32 * frequency).sin()).collect()
}

/// One update in f64, as PyTorch defines it.
fn in_f64(step: &SgdStep, [p, velocity]: [f64; 2], gradient: f64) -> [f64; 2] {
    let g = gradient * f64::from(step.clip) + step.weight_decay * p;
    let velocity = step.momentum * velocity + g;
    let direction = match step.kind {
        MomentumKind::Classic => velocity,
        MomentumKind::Nesterov => g + step.momentum * velocity,
    };
    [p - step.learning_rate * direction, velocity]
}

#[test]
fn follows_the_definition_for_many_steps() {
    for kind in KINDS {
        let step = SgdStep { kind, ..STEP };
        let mut parameter = wave(21, 0.3);
        let mut velocity = vec![0.0; 21];
        let mut reference: Vec<[f64; 2]> = parameter.iter().map(|p| [f64::from(*p), 0.0]).collect();
        for number in 1..=30 {
            let gradient = wave(21, number as f32);
            sgd(&step, &mut parameter, &gradient, Some(&mut velocity));
            for (element, gradient) in reference.iter_mut().zip(&gradient) {
                *element = in_f64(&step, *element, f64::from(*gradient));
            }
        }
        for (index, [p, v]) in reference.into_iter().enumerate() {
            assert!((f64::from(parameter[index]) - p).abs() < 1e-5);
            assert!((f64::from(velocity[index]) - v).abs() < 1e-5);
        }
    }
}

#[test]
fn a_slice_is_its_elements_on_every_machine() {
    let gradient = wave(1003, 0.7);
    for kind in KINDS {
        let step = SgdStep { kind, ..STEP };
        let whole = on_both(|| {
            let mut parameter = wave(1003, 0.2);
            let mut velocity = wave(1003, 0.1);
            sgd(&step, &mut parameter, &gradient, Some(&mut velocity));
            (parameter, velocity)
        });
        let mut parameter = wave(1003, 0.2);
        let mut velocity = wave(1003, 0.1);
        for index in 0..1003 {
            let velocity = Some(&mut velocity[index..=index]);
            sgd(&step, &mut parameter[index..=index], &gradient[index..=index], velocity);
        }
        assert_eq!(whole, (parameter, velocity));
    }
}

#[test]
fn without_momentum_it_is_a_step_down_the_gradient() {
    let step = SgdStep { momentum: 0.0, weight_decay: 0.0, clip: 1.0, ..STEP };
    let updated = on_both(|| {
        let mut parameter = vec![1.0; 11];
        sgd(&step, &mut parameter, &[2.0; 11], None);
        parameter
    });
    assert_eq!(updated, [1.0 - 0.05 * 2.0; 11]);
}

#[test]
#[should_panic(expected = "momentum 0.9 without a velocity")]
fn momentum_needs_a_velocity() {
    sgd(&STEP, &mut [1.0], &[1.0], None);
}
