//! Updates are compared with the same update in f64, and bit for bit with one element at a time.

use super::{MomentumKind, SgdStep, sgd};
use crate::simd::tests::on_all_widths;
use crate::tests::{assert_elementwise, assert_follows};

const STEP: SgdStep = SgdStep {
    learning_rate: 0.05,
    momentum: 0.9,
    kind: MomentumKind::Classic,
    weight_decay: 0.01,
    clip: 0.5,
};

const KINDS: [MomentumKind; 2] = [MomentumKind::Classic, MomentumKind::Nesterov];

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
        let update = |_, [parameter, velocity]: [&mut [f32]; 2], gradient: &[f32]| {
            sgd(&step, parameter, gradient, Some(velocity));
        };
        assert_follows(1e-5, update, |_, element, gradient| in_f64(&step, element, gradient));
    }
}

#[test]
fn a_slice_is_its_elements_on_every_machine() {
    for kind in KINDS {
        let step = SgdStep { kind, ..STEP };
        assert_elementwise(|[parameter, velocity], gradient| {
            sgd(&step, parameter, gradient, Some(velocity));
        });
    }
}

#[test]
fn without_momentum_it_is_a_step_down_the_gradient() {
    let step = SgdStep { momentum: 0.0, weight_decay: 0.0, clip: 1.0, ..STEP };
    let updated = on_all_widths(|| {
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
