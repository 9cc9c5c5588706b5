//! Every kernel of `hsdp-kernels` against a memory copy, on one thread.
//!
//! A throughput counts the bytes that a kernel really reads and writes (elements of f32 unless its
//! name has another dtype), so it can be compared with that of `copy` in the same group. The groups
//! are named by the size of their f32 buffers: 1 MiB stays in a second-level cache, 64 MiB does
//! not. Each kernel's result is checked before it is timed.

use std::hint::black_box;
use std::time::Duration;

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use half::{bf16, f16};
use hsdp_kernels::{
    AdamWStep, Divisor, EIGHT_BIT_BLOCK, EightBit, Element, Fold, FusedUpdate, LionStep,
    MomentumKind, Real, ReduceOp, Scaling, SgdStep, Values, Wire, adamw, adamw_8bit, cast,
    contribute, divide_in_place, first_non_finite, lion, pack, reduce_elements, scaled_copy,
    settle, sgd, squared_norm, sum_contributions, unpack, update_in_blocks,
};

/// A divisor without an exact reciprocal by which what is divided in place stays in range for
/// thousands of runs.
const ABOUT_ONE: f64 = 1.0 + 1e-12;

/// A kernel with its buffers, checked and ready to be timed.
struct Case {
    /// Bytes read and written by one run.
    bytes: usize,
    run: Box<dyn FnMut()>,
}

/// Makes a case on so many elements.
type Make = fn(usize) -> Case;

const CASES: [(&str, Make); 38] = [
    ("copy", copy),
    ("contribute f32, wire f32", |len| contributed::<f32>(len, Wire::F32, 1.0)),
    ("contribute f32, wire f32, pre 3", |len| contributed::<f32>(len, Wire::F32, 3.0)),
    ("contribute f32, wire f16", |len| contributed::<f32>(len, Wire::F16, 4.0)),
    ("contribute f32, wire bf16", |len| contributed::<f32>(len, Wire::BF16, 1.0)),
    ("contribute f16, wire f16", |len| contributed::<f16>(len, Wire::F16, 4.0)),
    ("contribute bf16, wire bf16", |len| contributed::<bf16>(len, Wire::BF16, 1.0)),
    ("sum 2 x f32, wire f32", |len| summed::<2>(len, Wire::F32)),
    ("sum 2 x f32, wire bf16", |len| summed::<2>(len, Wire::BF16)),
    ("sum 4 x f32, wire f32", |len| summed::<4>(len, Wire::F32)),
    ("sum 4 x f32, wire bf16", |len| summed::<4>(len, Wire::BF16)),
    ("settle", settled),
    ("cast to f16", casted::<f16>),
    ("cast to bf16", casted::<bf16>),
    ("unpack f16", unpacked::<f16>),
    ("unpack bf16", unpacked::<bf16>),
    ("pack f32 to f16", packed::<f16>),
    ("pack f32 to bf16", packed::<bf16>),
    ("scaled_copy", scaled),
    ("divide_in_place", divided),
    ("squared_norm", norm),
    ("first_non_finite", finite),
    ("adamw", adam),
    ("adamw, 8-bit state", adam_8bit),
    ("lion", lion_of),
    ("sgd", momentum),
    ("passes: divide, adamw", |len| finished(len, ABOUT_ONE, in_passes::<f32>)),
    ("fused: divide, adamw", |len| finished(len, ABOUT_ONE, in_blocks::<f32>)),
    ("passes: divide by 1, adamw", |len| finished(len, 1.0, in_passes::<f32>)),
    ("fused: divide by 1, adamw", |len| finished(len, 1.0, in_blocks::<f32>)),
    ("passes: divide, adamw, to f16", |len| finished(len, ABOUT_ONE, in_passes::<f16>)),
    ("fused: divide, adamw, to f16", |len| finished(len, ABOUT_ONE, in_blocks::<f16>)),
    ("passes: divide, adamw, to bf16", |len| finished(len, ABOUT_ONE, in_passes::<bf16>)),
    ("fused: divide, adamw, to bf16", |len| finished(len, ABOUT_ONE, in_blocks::<bf16>)),
    ("reduce 4 x f32", reduced::<f32>),
    ("reduce 4 x f16", reduced::<f16>),
    ("reduce 4 x bf16", reduced::<bf16>),
    ("reduce 4 x f64", reduced::<f64>),
];

fn kernels(criterion: &mut Criterion) {
    for mebibytes in [1, 64] {
        let mut group = criterion.benchmark_group(format!("{mebibytes} MiB"));
        let len = (mebibytes << 20) / size_of::<f32>();
        for (name, make) in CASES {
            // Of a few elements: buffers are made for what a filter leaves.
            let bytes = make(64).bytes * (len / 64);
            group.throughput(Throughput::Bytes(bytes as u64));
            let mut case = None;
            group.bench_function(name, |bencher| {
                bencher.iter(&mut case.get_or_insert_with(|| make(len)).run);
            });
        }
    }
}

/// All of it within two minutes and a half; `-- --test "1 MiB"` runs each kernel once, checked, in
/// a second.
fn briefly() -> Criterion {
    Criterion::default()
        .sample_size(30)
        .warm_up_time(Duration::from_millis(200))
        .measurement_time(Duration::from_secs(1))
}

criterion_group! {
    name = benches;
    config = briefly();
    targets = kernels
}
criterion_main!(benches);

/// Numbers that every dtype here represents exactly: quarters from -8 to 8, in a fixed order
/// without a short period.
fn numbers<T>(len: usize, from: impl Fn(f32) -> T) -> Vec<T> {
    (0..len).map(|index| from(((index * 7919 + index / 64) % 65) as f32 / 4.0 - 8.0)).collect()
}

/// The same, in a dtype of gradients.
fn gradient<T: Real>(len: usize) -> Vec<T> {
    let source = numbers(len, |number| number);
    let mut target = vec![T::zeroed(); len];
    cast(T::values_mut(&mut target), &source);
    target
}

fn bytes<T>(len: usize) -> usize {
    len * size_of::<T>()
}

fn copy(len: usize) -> Case {
    let source = numbers(len, |number| number);
    let mut target = vec![0.0_f32; len];
    let run = move || black_box(&mut target).copy_from_slice(black_box(&source));
    Case { bytes: 2 * bytes::<f32>(len), run: Box::new(run) }
}

fn contributed<T: Real>(len: usize, wire: Wire, pre: f32) -> Case {
    let values = gradient::<T>(len);
    let pre = Divisor::new(pre).expect("a divisor of this bench");
    let mut sum = vec![0.0; len];
    contribute(&mut sum, T::values(&values), pre, wire, Fold::Add);
    for (sum, value) in sum.iter().zip(T::values(&values).to_f32()) {
        assert_eq!(*sum, wire.round(value / pre.value()));
    }
    let run = move || {
        contribute(black_box(&mut sum), T::values(black_box(&values)), pre, wire, Fold::Add);
    };
    Case { bytes: bytes::<T>(len) + 2 * bytes::<f32>(len), run: Box::new(run) }
}

/// Sums the gradients of N members in blocks, as the runtime does, and adds them to a partial.
fn summed<const N: usize>(len: usize, wire: Wire) -> Case {
    const BLOCK: usize = 8 << 10;
    let members: [Vec<f32>; N] = std::array::from_fn(|_| numbers(len, |number| number));
    let post = Divisor::new(N as f32).expect("a divisor of this bench");
    let scaling = Scaling { post, ..Scaling::on(wire) };
    let add = move |partial: &mut [f32], members: &[Vec<f32>; N]| {
        for (partial, start) in partial.chunks_mut(BLOCK).zip((0..).step_by(BLOCK)) {
            let range = start..start + partial.len();
            let lent = members.each_ref().map(|member| Values::F32(&member[range.clone()]));
            black_box(sum_contributions(partial, &lent, scaling, Fold::Add));
        }
    };
    let mut partial = vec![0.0; len];
    add(&mut partial, &members);
    assert_eq!(partial, members[0]);
    let run = move || add(black_box(&mut partial), black_box(&members));
    Case { bytes: (N + 2) * bytes::<f32>(len), run: Box::new(run) }
}

fn settled(len: usize) -> Case {
    let sum = numbers(len, |number| number);
    let mut target = vec![0.0; len];
    let post = Divisor::new(8.0).expect("a divisor of this bench");
    settle(&mut target, &sum, post, Fold::Add);
    assert!(target.iter().zip(&sum).all(|(target, sum)| *target == sum / 8.0));
    let run = move || settle(black_box(&mut target), black_box(&sum), post, Fold::Add);
    Case { bytes: 3 * bytes::<f32>(len), run: Box::new(run) }
}

fn casted<T: Real>(len: usize) -> Case {
    let source = numbers(len, |number| number);
    let mut target = vec![T::zeroed(); len];
    cast(T::values_mut(&mut target), &source);
    assert_eq!(T::values(&target).to_f32(), source);
    let run = move || cast(T::values_mut(black_box(&mut target)), black_box(&source));
    Case { bytes: bytes::<T>(len) + bytes::<f32>(len), run: Box::new(run) }
}

fn unpacked<T: Real>(len: usize) -> Case {
    let source = gradient::<T>(len);
    let mut target = vec![0.0; len];
    unpack(&mut target, T::values(&source));
    assert_eq!(target, numbers(len, |number| number));
    let run = move || unpack(black_box(&mut target), T::values(black_box(&source)));
    Case { bytes: bytes::<T>(len) + bytes::<f32>(len), run: Box::new(run) }
}

fn packed<T: Real>(len: usize) -> Case {
    let source = numbers(len, |number| number);
    let mut target = vec![T::zeroed(); len];
    let pre = Divisor::new(4.0).expect("a divisor of this bench");
    pack(T::values_mut(&mut target), f32::values(&source), pre);
    for (packed, value) in T::values(&target).to_f32().iter().zip(&source) {
        assert_eq!(*packed, value / 4.0);
    }
    let run = move || {
        pack(T::values_mut(black_box(&mut target)), f32::values(black_box(&source)), pre);
    };
    Case { bytes: bytes::<T>(len) + bytes::<f32>(len), run: Box::new(run) }
}

fn scaled(len: usize) -> Case {
    let source = numbers(len, |number| number);
    let mut target = vec![0.0; len];
    scaled_copy(&mut target, &source, 4.0);
    assert!(target.iter().zip(&source).all(|(target, source)| *target == source / 4.0));
    let run = move || scaled_copy(black_box(&mut target), black_box(&source), black_box(3.0));
    Case { bytes: 2 * bytes::<f32>(len), run: Box::new(run) }
}

fn divided(len: usize) -> Case {
    let mut target = numbers(len, |number| number);
    divide_in_place(&mut target, 4.0);
    divide_in_place(&mut target, 0.25);
    assert_eq!(target, numbers(len, |number| number));
    let run = move || divide_in_place(black_box(&mut target), black_box(ABOUT_ONE));
    Case { bytes: 2 * bytes::<f32>(len), run: Box::new(run) }
}

fn norm(len: usize) -> Case {
    let values = numbers(len, |number| number);
    let expected: f64 = values.iter().map(|value| f64::from(value * value)).sum();
    assert_eq!(squared_norm(&values), expected, "sums of quarters are exact");
    let run = move || {
        black_box(squared_norm(black_box(&values)));
    };
    Case { bytes: bytes::<f32>(len), run: Box::new(run) }
}

fn finite(len: usize) -> Case {
    let mut values = numbers(len, |number| number);
    values[len - 1] = f32::NAN;
    assert_eq!(first_non_finite(&values), Some(len - 1));
    values[len - 1] = 0.0;
    let run = move || {
        black_box(first_non_finite(black_box(&values)));
    };
    Case { bytes: bytes::<f32>(len), run: Box::new(run) }
}

const STEP: AdamWStep = AdamWStep {
    learning_rate: 1e-3,
    beta1: 0.9,
    beta2: 0.999,
    epsilon: 1e-8,
    weight_decay: 0.0,
    step: 1,
    clip: 1.0,
};

fn adam(len: usize) -> Case {
    let gradient = numbers(len, |number| number + 0.125);
    let mut parameter = vec![0.0; len];
    let mut first = vec![0.0; len];
    let mut second = vec![0.0; len];
    adamw(&STEP, &mut parameter, &gradient, &mut first, &mut second);
    for (parameter, gradient) in parameter.iter().zip(&gradient) {
        assert!((parameter + 1e-3 * gradient.signum()).abs() < 1e-8, "a first step is the rate");
    }
    let run = move || {
        let moments = (black_box(&mut first), black_box(&mut second));
        adamw(&STEP, black_box(&mut parameter), black_box(&gradient), moments.0, moments.1);
    };
    Case { bytes: 7 * bytes::<f32>(len), run: Box::new(run) }
}

fn adam_8bit(len: usize) -> Case {
    let gradient = numbers(len, |number| number + 0.125);
    let mut parameter = vec![0.0; len];
    let scales = len.div_ceil(EIGHT_BIT_BLOCK);
    let mut state = [0; 2].map(|_| (vec![0; len], vec![0.0; scales]));
    let mut update = move |parameter: &mut [f32]| {
        let state = state.each_mut().map(|(codes, scales)| EightBit { codes, scales });
        adamw_8bit(&STEP, parameter, black_box(&gradient), black_box(state));
    };
    update(&mut parameter);
    let moved = |parameter: &f32| (parameter.abs() - 1e-3).abs() < 1e-8;
    assert!(parameter.iter().all(moved), "a first step is the rate");
    let bytes = 3 * bytes::<f32>(len) + 4 * (bytes::<u8>(len) + bytes::<f32>(scales));
    Case { bytes, run: Box::new(move || update(black_box(&mut parameter))) }
}

fn lion_of(len: usize) -> Case {
    let beta1 = 0.9;
    let beta2 = 0.99;
    let step = LionStep { learning_rate: 0.5, beta1, beta2, weight_decay: 0.0, clip: 1.0 };
    let gradient = numbers(len, |number| number);
    let mut parameter = vec![0.0; len];
    let mut momentum = vec![0.0; len];
    lion(&step, &mut parameter, &gradient, &mut momentum);
    let sign = |g: &f32| if *g == 0.0 { 0.0 } else { g.signum() };
    assert!(parameter.iter().zip(&gradient).all(|(parameter, g)| *parameter == -0.5 * sign(g)));
    let run = move || {
        lion(&step, black_box(&mut parameter), black_box(&gradient), black_box(&mut momentum));
    };
    Case { bytes: 5 * bytes::<f32>(len), run: Box::new(run) }
}

/// Buffers of the end of a step: a gradient that is not divided yet, and parameters, with a copy of
/// another dtype where there is one.
#[derive(Clone)]
struct End<T> {
    gradient: Vec<f32>,
    divisor: f64,
    parameter: Vec<f32>,
    moments: [Vec<f32>; 2],
    rounded: Vec<T>,
}

/// The end of a step by `run`, which gives the bytes that it moves.
fn finished<T: Real>(len: usize, divisor: f64, run: fn(&mut End<T>) -> usize) -> Case {
    let mut end = End {
        gradient: numbers(len, |number| number + 0.125),
        divisor,
        parameter: vec![0.0; len],
        moments: [vec![0.0; len], vec![0.0; len]],
        rounded: vec![T::zeroed(); if T::DTYPE == f32::DTYPE { 0 } else { len }],
    };
    let mut expected = end.clone();
    in_passes(&mut expected);
    let bytes = run(&mut end);
    assert!(end.parameter == expected.parameter && end.rounded == expected.rounded);
    let run = move || {
        black_box(run(black_box(&mut end)));
    };
    Case { bytes, run: Box::new(run) }
}

fn in_passes<T: Real>(end: &mut End<T>) -> usize {
    let len = end.parameter.len();
    divide_in_place(&mut end.gradient, end.divisor);
    let [first, second] = &mut end.moments;
    adamw(&STEP, &mut end.parameter, &end.gradient, first, second);
    if end.rounded.is_empty() {
        return 9 * bytes::<f32>(len);
    }
    cast(T::values_mut(&mut end.rounded), &end.parameter);
    10 * bytes::<f32>(len) + bytes::<T>(len)
}

fn in_blocks<T: Real>(end: &mut End<T>) -> usize {
    let len = end.parameter.len();
    let [first, second] = &mut end.moments;
    let is_rounded = !end.rounded.is_empty();
    let fused = FusedUpdate {
        parameters: &mut end.parameter,
        rounded: is_rounded.then(|| T::values_mut(&mut end.rounded)),
        gradient: &end.gradient,
        divisor: end.divisor,
    };
    update_in_blocks(fused, |range, parameter, gradient| {
        adamw(&STEP, parameter, gradient, &mut first[range.clone()], &mut second[range]);
    });
    7 * bytes::<f32>(len) + if is_rounded { bytes::<T>(len) } else { 0 }
}

fn momentum(len: usize) -> Case {
    let step = SgdStep {
        learning_rate: 0.5,
        momentum: 0.5,
        kind: MomentumKind::Classic,
        weight_decay: 0.0,
        clip: 1.0,
    };
    let gradient = numbers(len, |number| number);
    let mut parameter = vec![0.0; len];
    let mut velocity = vec![0.0; len];
    sgd(&step, &mut parameter, &gradient, Some(&mut velocity));
    assert!(parameter.iter().zip(&gradient).all(|(parameter, g)| *parameter == -0.5 * g));
    let run = move || {
        let velocity = Some(black_box(velocity.as_mut_slice()));
        sgd(&step, black_box(&mut parameter), black_box(&gradient), velocity);
    };
    Case { bytes: 5 * bytes::<f32>(len), run: Box::new(run) }
}

fn reduced<T: Element + From<i8>>(len: usize) -> Case {
    let sources: Vec<Vec<T>> = (1..=4).map(|member| vec![T::from(member); len]).collect();
    let mut target = vec![T::zeroed(); len];
    let mut run = move || {
        let sources: Vec<&[T]> = sources.iter().map(Vec::as_slice).collect();
        reduce_elements(ReduceOp::Sum, black_box(&mut target), black_box(&sources));
        assert!(target[0] == T::from(10));
    };
    run();
    Case { bytes: 5 * bytes::<T>(len), run: Box::new(run) }
}
