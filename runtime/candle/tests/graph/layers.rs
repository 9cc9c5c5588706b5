//! Layers beside ops of candle: gradients are those of candle's ops alone, wherever both meet.

use std::thread;

use candle_core::{CpuStorage, DType, Device, Result, Tensor, Var};
use hsdp::{Mesh, ModelSpec, Param, StepOptions, Unit, World};
use hsdp_candle::layer::{Layer, LayerArgument, record};
use hsdp_candle::{Gradient, Pass, UnitsExt};
use parking_lot::Mutex;

use crate::common::{input, results, sharded};

/// Layer that sums its inputs, each times its place, from 1 on.
struct WeightedSum;

impl Layer for WeightedSum {
    fn name(&self) -> &'static str {
        "weighted sum"
    }

    fn backward(&self, inputs: &[LayerArgument], g: &Gradient) -> Result<Vec<Option<Gradient>>> {
        let of_input = |(place, input): (usize, &LayerArgument)| {
            let factor = place as f32 + 1.0;
            let gradient = || g.elements().iter().map(|it| factor * it).collect::<Vec<f32>>();
            input.is_tracked.then(|| gradient().into())
        };
        Ok(inputs.iter().enumerate().map(of_input).collect())
    }
}

/// The layer, in the dtype and the shape of the first input.
fn weighted_sum(inputs: &[&Tensor]) -> Result<Tensor> {
    let mut sum = vec![0_f32; inputs[0].elem_count()];
    for (place, input) in inputs.iter().enumerate() {
        let values = input.detach().to_dtype(DType::F32)?.flatten_all()?.to_vec1::<f32>()?;
        sum.iter_mut().zip(values).for_each(|(sum, value)| *sum += (place as f32 + 1.0) * value);
    }
    let elements = match inputs[0].dtype() {
        DType::BF16 => CpuStorage::BF16(sum.into_iter().map(half::bf16::from_f32).collect()),
        _ => CpuStorage::F32(sum),
    };
    record(WeightedSum, inputs, elements, inputs[0].shape().clone())
}

/// The same by candle's ops.
fn composed(inputs: &[&Tensor]) -> Result<Tensor> {
    let mut sum = inputs[0].zeros_like()?;
    for (place, input) in inputs.iter().enumerate() {
        sum = (sum + (*input * (place as f64 + 1.0))?)?;
    }
    Ok(sum)
}

type Sum = fn(&[&Tensor]) -> Result<Tensor>;

fn variable(start: f32) -> Var {
    let values: Vec<f32> = (0..6).map(|index| start + index as f32).collect();
    let tensor = Tensor::from_vec(values, (2, 3), &Device::Cpu).expect("6 elements");
    Var::from_tensor(&tensor).expect("a variable")
}

/// The gradients of three variables through a graph.
fn gradients(graph: impl Fn([&Tensor; 3]) -> Result<Tensor>) -> Vec<Vec<f32>> {
    let variables = [1.0, -2.0, 0.5].map(variable);
    let [a, b, c] = variables.each_ref().map(Var::as_tensor);
    let loss = graph([a, b, c]).and_then(|it| it.sum_all()).expect("a forward");
    let read = |gradients: &candle_core::backprop::GradStore| {
        let of = |it: &Var| gradients.get(it).map(|it| it.flatten_all()?.to_vec1::<f32>());
        variables.iter().map(|it| of(it).transpose().expect("f32").unwrap_or_default()).collect()
    };
    let first: Vec<_> = read(&loss.backward().expect("a backward"));
    let again: Vec<_> = read(&loss.backward().expect("a second backward"));
    assert_eq!(first, again, "a second backward gives the same gradients");
    first
}

/// A graph over three variables, of layers or of candle's ops.
type Graph = fn(Sum, [&Tensor; 3]) -> Result<Tensor>;

const GRAPHS: [(&str, Graph); 10] = [
    ("one layer", |sum, [a, b, c]| sum(&[a, b, c])),
    ("five inputs", |sum, [a, b, c]| sum(&[a, b, c, a, b])),
    ("layers in a row", |sum, [a, b, c]| sum(&[&sum(&[a, b])?, c])),
    ("an output that two layers read", |sum, [a, b, c]| {
        let y = sum(&[a, b])?;
        sum(&[&sum(&[&y, c])?, &y])
    }),
    ("an output that candle reads, too", |sum, [a, b, c]| {
        let y = sum(&[a, b])?;
        sum(&[&y, c])? * y.sqr()?
    }),
    ("reshapes between", |sum, [a, b, c]| {
        let y = sum(&[a, b])?.reshape((3, 2))?;
        sum(&[&y, &c.reshape((3, 2))?])?.flatten_all()
    }),
    ("views between", |sum, [a, b, c]| {
        let y = sum(&[a, b])?;
        let rest = sum(&[&y.narrow(0, 1, 1)?, &c.narrow(0, 0, 1)?])?;
        sum(&[&y.t()?.contiguous()?, &c.t()?.contiguous()?])?.t()?.broadcast_mul(&rest)
    }),
    ("parts of a variable, the last one first", |sum, [a, b, c]| {
        let last = sum(&[&a.get(1)?, &b.get(1)?])?;
        let first = sum(&[&a.get(0)?, &b.get(0)?])?;
        sum(&[&(first * last.sqr()?)?, &c.get(0)?])
    }),
    ("parts of an op of candle's", |sum, [a, b, c]| {
        let y = (a * b)?;
        let parts = [y.get(1)?, y.get(0)?];
        let read = sum(&[&parts[0], &parts[1].sqr()?])?;
        (sum(&[&parts[1], &read])?.sqr()? * sum(&[&y, c])?.get(1)?)? + sum(&[&y, c])?.get(0)?
    }),
    ("constants and cuts", |sum, [a, b, c]| {
        let y = sum(&[&a.detach(), b])?;
        sum(&[&y.detach(), &y, c])
    }),
];

#[test]
fn layers_and_ops_of_candle_mix() {
    for (name, graph) in GRAPHS {
        let layers = gradients(|inputs| graph(weighted_sum, inputs));
        assert_eq!(layers, gradients(|inputs| graph(composed, inputs)), "{name}");
    }
}

#[test]
fn an_input_without_a_history_is_not_recorded() {
    let x = variable(1.0).detach();
    let y = weighted_sum(&[&x, &x]).expect("a forward");
    assert!(!y.track_op());
}

#[test]
fn inputs_that_layers_do_not_support_are_refused() {
    let wide = Var::new(&[1_f64], &Device::Cpu).expect("a variable");
    let error = record(WeightedSum, &[&wide], CpuStorage::F32(vec![1.0]), 1.into());
    let error = error.expect_err("f64").to_string();
    assert!(error.starts_with("weighted sum: an input is f64 on Cpu, not f32, bf16"), "{error}");
}

/// In bf16, 256 + 1 is 256: a sum of 258 gradients of 1 would stop there.
#[test]
fn gradients_of_layers_are_summed_in_f32() {
    let x = Tensor::new(&[1_f32, 2.0], &Device::Cpu).and_then(|it| it.to_dtype(DType::BF16));
    let x = x.and_then(|it| Var::from_tensor(&it)).expect("a variable");
    let outputs = (0..258).map(|_| weighted_sum(&[&x])).collect::<Result<Vec<_>>>();
    let all = outputs.and_then(|it| Tensor::cat(&it, 0)?.to_dtype(DType::F32)?.sum_all());
    let gradients = all.and_then(|it| it.backward()).expect("a backward");
    let gradient = gradients.get(&x).expect("a gradient");
    assert_eq!(gradient.dtype(), DType::BF16);
    let gradient = gradient.to_dtype(DType::F32).and_then(|it| it.to_vec1::<f32>());
    assert_eq!(gradient.expect("f32"), [258.0; 2]);
}

/// Layer whose backward fails at first, and whose gradients are then those that it is given.
struct Returning(Mutex<Option<Vec<Option<Gradient>>>>);

impl Layer for Returning {
    fn name(&self) -> &'static str {
        "returning"
    }

    fn backward(&self, _: &[LayerArgument], _: &Gradient) -> Result<Vec<Option<Gradient>>> {
        match self.0.lock().take() {
            Some(gradients) => Ok(gradients),
            None => candle_core::bail!("on purpose"),
        }
    }
}

fn returning(x: &Tensor, gradients: Option<Vec<Option<Gradient>>>) -> Tensor {
    let elements = CpuStorage::F32(vec![0.0; x.elem_count()]);
    let layer = Returning(Mutex::new(gradients));
    record(layer, &[x], elements, x.shape().clone()).expect("a forward")
}

#[test]
fn a_backward_after_a_failed_one_is_refused() {
    let x = variable(1.0);
    let middle = weighted_sum(&[&x]).expect("a forward");
    let failing = returning(&middle, None);
    let other = weighted_sum(&[&middle]).expect("a forward");
    // candle comes to the second operand of a sum first.
    let loss = failing.add(&other).and_then(|it| it.sum_all()).expect("a forward");
    let error = loss.backward().expect_err("the layer fails").to_string();
    assert!(error.starts_with("on purpose"), "{error}");
    let loss = other.sum_all().expect("a sum");
    let error = loss.backward().expect_err("a gradient is left").to_string();
    assert!(
        error.starts_with("a backward has added 1 gradients to a tensor that has 2"),
        "{error}"
    );
    let gradients = loss.backward().expect("none is left");
    let gradient = gradients.get(&x).expect("a gradient").flatten_all();
    assert_eq!(gradient.and_then(|it| it.to_vec1::<f32>()).expect("f32"), [1.0; 6]);
}

#[test]
fn gradients_that_a_layer_forgets_are_missed() {
    let gradient = |len: usize| Some(Gradient::from(vec![1.0; len]));
    for (gradients, expected) in [
        (vec![], "returning: the backward returned 0 gradients for 1 inputs"),
        (vec![None], "returning: the backward returned no gradient for input 0"),
        (vec![gradient(5)], "returning: the gradient of input 0 has 5 elements, and the input 6"),
    ] {
        let loss = returning(&variable(1.0), Some(gradients)).sum_all().expect("a loss");
        let error = loss.backward().expect_err("no gradient").to_string();
        assert!(error.starts_with(expected), "{error}");
    }
}

#[test]
fn threads_share_a_variable() {
    let x = variable(1.0);
    let run = |factor: f32| {
        for _ in 0..200 {
            let y = weighted_sum(&[&x]).and_then(|y| weighted_sum(&[&y, &y]));
            let loss = y.and_then(|y| (y * f64::from(factor))?.sum_all()).expect("a forward");
            let gradients = loss.backward().expect("a backward");
            let gradient = gradients.get(&x).expect("a gradient").flatten_all();
            let want = vec![3.0 * factor; 6];
            assert_eq!(gradient.and_then(|it| it.to_vec1::<f32>()).expect("f32"), want);
        }
    };
    let keeps = weighted_sum(&[&x]).expect("a graph that keeps the gate of the variable");
    thread::scope(|scope| {
        for factor in [1.0, 2.0, 4.0, 8.0] {
            scope.spawn(move || run(factor));
        }
    });
    drop(keeps);
}

/// A unit's output, its input and its parameters are read by layers in one model, and by candle's
/// ops in the other.
#[test]
fn units_pass_gradients_between_layers() {
    let spec = || {
        let unit = |name: &str| Unit::new(name).param(Param::new(format!("{name}.w"), [4, 3]));
        ModelSpec::new().unit(unit("a")).unit(unit("b")).unit(unit("c"))
    };
    let full = |sum: Sum, recomputes: bool| {
        let ranks = results(4, |world: World| {
            let rank = world.rank().index();
            let mut model = sharded(world, spec(), Mesh::new(2, 2).expect("a mesh"));
            let mut step = model.begin_step(StepOptions::microbatches(1)).expect("a step");
            let pass = Pass::new(step.microbatch().expect("a microbatch")).expect("a pass");
            let mut x = input(rank, 4, 3);
            for name in ["a", "b", "c"] {
                let weight = format!("{name}.w");
                let unit = move |p: &dyn hsdp_candle::Parameters, x: &Tensor| {
                    let w = p.get(&weight)?;
                    sum(&[&sum(&[x, &w])?, &(x * &w)?])
                };
                x = match recomputes {
                    true => pass.recomputed(name, &x, unit).expect("a unit"),
                    false => pass.unit(name, &x, unit).expect("a unit"),
                };
            }
            let loss = x.sqr().and_then(|it| it.mean_all()).expect("a loss");
            pass.backward(&loss, 1).expect("a backward");
            let gradients = step.finish().expect("a step");
            gradients.full(&model).expect("a gather")
        });
        ranks.into_iter().next().expect("rank 0")
    };
    let want = full(composed, false);
    assert!(want.values().flatten().all(|it| *it != 0.0));
    for recomputes in [false, true] {
        let got = full(weighted_sum, recomputes);
        for (name, want) in &want {
            for (got, want) in got[name].iter().zip(want) {
                let bound = 1e-5 * want.abs().max(1.0);
                assert!((got - want).abs() <= bound, "{name}: {got}, not {want}");
            }
        }
    }
}

/// The input of a recomputed unit is read by a layer, before and after the unit, and in other
/// shapes.
#[test]
fn inputs_of_recomputed_units_have_other_readers() {
    type Reader = fn(Sum, &Tensor, &Tensor) -> Result<Tensor>;
    let readers: [Reader; 3] = [
        |sum, input, output| sum(&[output, input]),
        |sum, input, output| sum(&[input, output]),
        |_, input, output| input + output.reshape((2, 6))?.reshape(input.shape())?,
    ];
    let gradients = |sum: Sum, reader: Reader, is_probed: bool| {
        let mut model = sharded(World::single(), one_unit(), Mesh::new(1, 1).expect("a mesh"));
        let mut step = model.begin_step(StepOptions::microbatches(1)).expect("a step");
        let pass = Pass::new(step.microbatch().expect("a microbatch")).expect("a pass");
        let x = Var::from_tensor(&input(0, 4, 3)).expect("a variable");
        let gradient = pass.gradient_of(&x);
        let made = (x.as_tensor() * 2.0).expect("an op of candle");
        if is_probed {
            drop(weighted_sum(&[&made]).expect("a layer that no loss depends on"));
        }
        let forward = |p: &dyn hsdp_candle::Parameters, x: &Tensor| x.sqr()? * p.get("a.w")?;
        let output = pass.recomputed("a", &made, forward).expect("a unit");
        let y = reader(sum, &made, &output).expect("a forward");
        pass.backward(&y.sqr().and_then(|it| it.mean_all()).expect("a loss"), 1).expect("its end");
        let of_w = step.finish().expect("a step").full(&model).expect("a gather")["a.w"].clone();
        let of_x = gradient.get().and_then(|it| it.flatten_all().ok()).expect("a gradient");
        [of_w, of_x.to_vec1::<f32>().expect("f32")]
    };
    for (index, reader) in readers.into_iter().enumerate() {
        let want = gradients(composed, reader, false);
        for is_probed in [false, true] {
            let got = gradients(weighted_sum, reader, is_probed);
            for (got, want) in got.iter().flatten().zip(want.iter().flatten()) {
                let bound = 1e-5 * want.abs().max(1.0);
                assert!((got - want).abs() <= bound, "reader {index}: {got}, not {want}");
            }
        }
    }
}

fn one_unit() -> ModelSpec {
    ModelSpec::new().unit(Unit::new("a").param(Param::new("a.w", [4, 3])))
}
