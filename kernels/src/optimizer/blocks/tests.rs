//! The bits equal those of separate passes.

use std::panic::{AssertUnwindSafe, catch_unwind};

use super::{FusedUpdate, UPDATE_BLOCK, update_in_blocks};
use crate::buffer::HostBuffer;
use crate::convert::cast;
use crate::optimizer::{AdamWStep, LionStep, MomentumKind, SgdStep, adamw, lion, sgd};
use crate::scale::divide_in_place;
use crate::simd::tests::on_all_widths;
use crate::tests::bits;
use hsdp_sharding::DType;

/// Lengths of 0 and 1, and around those of vectors and blocks.
const LENGTHS: [usize; 9] = [
    0,
    1,
    7,
    33,
    UPDATE_BLOCK - 1,
    UPDATE_BLOCK,
    UPDATE_BLOCK + 1,
    2 * UPDATE_BLOCK + 17,
    3 * UPDATE_BLOCK + 1001,
];

/// Divisors: 1, a power of two, two without an exact reciprocal, one that makes subnormals, and
/// zero.
const DIVISORS: [f64; 6] = [1.0, 1024.0, 3.0, 7e12, 3e39, 0.0];

/// Numbers of any size, with infinities, NaN and signed zeros among them.
fn numbers(len: usize, seed: u32) -> Vec<f32> {
    let number = |index: usize| match (index + seed as usize) % 41 {
        3 => f32::NAN,
        9 => f32::INFINITY,
        17 => f32::NEG_INFINITY,
        23 => -0.0,
        29 => f32::MIN_POSITIVE / 3.0,
        _ => ((index as f32 + 1.0) * (seed as f32 + 0.7)).sin() * [1e-4, 1.0, 1e3, 1e8][index % 4],
    };
    (0..len).map(number).collect()
}

/// The bits of the results of an update.
#[derive(Debug, PartialEq)]
struct Left {
    parameters: Vec<u32>,
    state: [Vec<u32>; 2],
    rounded: Option<Vec<u32>>,
}

/// An update of parameters by a gradient, with two buffers of state.
type Update = fn(&mut [f32], &[f32], [&mut [f32]; 2]);

const UPDATES: [Update; 3] = [
    |parameters, gradient, [first, second]| {
        let step = AdamWStep {
            learning_rate: 3e-3,
            beta1: 0.9,
            beta2: 0.95,
            epsilon: 1e-8,
            weight_decay: 0.1,
            step: 3,
            clip: 0.3,
        };
        adamw(&step, parameters, gradient, first, second);
    },
    |parameters, gradient, [velocity, _]| {
        let kind = MomentumKind::Nesterov;
        let step =
            SgdStep { learning_rate: 0.05, momentum: 0.9, kind, weight_decay: 0.01, clip: 0.3 };
        sgd(&step, parameters, gradient, Some(velocity));
    },
    |parameters, gradient, [momentum, _]| {
        let beta1 = 0.9;
        let beta2 = 0.99;
        let step = LionStep { learning_rate: 1e-3, beta1, beta2, weight_decay: 0.1, clip: 0.3 };
        lion(&step, parameters, gradient, momentum);
    },
];

/// One case: the number of elements, the divisor of the gradient, and the dtype to which parameters
/// are rounded.
#[derive(Debug, Clone, Copy)]
struct Case {
    len: usize,
    divisor: f64,
    dtype: Option<DType>,
}

impl Case {
    fn all() -> impl Iterator<Item = Self> {
        let dtypes = [None, Some(DType::F32), Some(DType::F16), Some(DType::BF16)];
        LENGTHS.into_iter().flat_map(move |len| {
            DIVISORS.into_iter().flat_map(move |divisor| {
                dtypes.into_iter().map(move |dtype| Self { len, divisor, dtype })
            })
        })
    }

    fn fused(self, update: Update) -> Left {
        let mut parameters = numbers(self.len, 0);
        let gradient = numbers(self.len, 1);
        let mut first = vec![0.5; self.len];
        let mut second = vec![0.25; self.len];
        let mut rounded = self.dtype.map(|dtype| HostBuffer::zeros(dtype, self.len).expect("real"));
        let fused = FusedUpdate {
            parameters: &mut parameters,
            rounded: rounded.as_mut().map(HostBuffer::values_mut),
            gradient: &gradient,
            divisor: self.divisor,
        };
        update_in_blocks(fused, |range, parameters, gradient| {
            update(parameters, gradient, [&mut first[range.clone()], &mut second[range]]);
        });
        assert_eq!(bits(&gradient), bits(&numbers(self.len, 1)), "the gradient is only read");
        let rounded = rounded.map(|rounded| bits(&rounded.values().to_f32()));
        Left { parameters: bits(&parameters), state: [bits(&first), bits(&second)], rounded }
    }

    fn one_after_another(self, update: Update) -> Left {
        let mut parameters = numbers(self.len, 0);
        let mut gradient = numbers(self.len, 1);
        let mut first = vec![0.5; self.len];
        let mut second = vec![0.25; self.len];
        divide_in_place(&mut gradient, self.divisor);
        update(&mut parameters, &gradient, [&mut first, &mut second]);
        let rounded = self.dtype.map(|dtype| {
            let mut rounded = HostBuffer::zeros(dtype, self.len).expect("real");
            cast(rounded.values_mut(), &parameters);
            bits(&rounded.values().to_f32())
        });
        Left { parameters: bits(&parameters), state: [bits(&first), bits(&second)], rounded }
    }
}

#[test]
fn one_pass_is_its_passes_one_after_another_on_every_machine() {
    for case in Case::all() {
        for update in UPDATES {
            assert_eq!(
                on_all_widths(|| case.fused(update)),
                case.one_after_another(update),
                "{case:?}"
            );
        }
    }
}

#[test]
fn a_clip_in_the_update_is_a_gradient_scaled_before() {
    let len = UPDATE_BLOCK + 33;
    let clip = 0.37;
    let step = AdamWStep {
        learning_rate: 1e-2,
        beta1: 0.9,
        beta2: 0.999,
        epsilon: 1e-8,
        weight_decay: 0.1,
        step: 2,
        clip,
    };
    let updated = |step: AdamWStep, gradient: &[f32]| {
        let mut parameters = numbers(len, 0);
        let mut first = vec![0.5; len];
        let mut second = vec![0.25; len];
        adamw(&step, &mut parameters, gradient, &mut first, &mut second);
        [bits(&parameters), bits(&first), bits(&second)]
    };
    let gradient = numbers(len, 1);
    let scaled: Vec<f32> = gradient.iter().map(|value| value * clip).collect();
    assert_eq!(updated(step, &gradient), updated(AdamWStep { clip: 1.0, ..step }, &scaled));
}

#[test]
fn parameters_are_rounded_though_their_update_panics() {
    let mut parameters = vec![1.0; 3 * UPDATE_BLOCK];
    let gradient = vec![1.0; 3 * UPDATE_BLOCK];
    let mut rounded = HostBuffer::zeros(DType::BF16, 3 * UPDATE_BLOCK).expect("real");
    cast(rounded.values_mut(), &parameters);
    let fused = FusedUpdate {
        parameters: &mut parameters,
        rounded: Some(rounded.values_mut()),
        gradient: &gradient,
        divisor: 1.0,
    };
    let unwound = catch_unwind(AssertUnwindSafe(|| {
        update_in_blocks(fused, |range, parameters, _| {
            parameters[..5].fill(7.0);
            assert!(range.start < UPDATE_BLOCK, "the second block is one too many");
        });
    }));
    assert!(unwound.is_err());
    assert_eq!(parameters.iter().filter(|value| **value == 7.0).count(), 10);
    assert_eq!(rounded.values().to_f32(), parameters);
}

#[test]
#[should_panic(expected = "lengths of gradient and parameters")]
fn a_gradient_has_the_length_of_its_parameters() {
    let fused =
        FusedUpdate { parameters: &mut [1.0, 2.0], rounded: None, gradient: &[1.0], divisor: 1.0 };
    update_in_blocks(fused, |_, _, _| ());
}

#[test]
#[should_panic(expected = "lengths of rounded and parameters")]
fn what_is_rounded_has_the_length_of_its_parameters() {
    let mut short = HostBuffer::zeros(DType::F16, 1).expect("real");
    let rounded = Some(short.values_mut());
    let fused =
        FusedUpdate { parameters: &mut [1.0, 2.0], rounded, gradient: &[1.0; 2], divisor: 1.0 };
    update_in_blocks(fused, |_, _, _| ());
}
