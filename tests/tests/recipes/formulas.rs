//! Each optimizer against its formula, written in f64 for whole parameters.

use std::collections::BTreeMap;

use hsdp::{ModelSpec, MuonOptions, Param, RateScale};

use crate::model::{
    ADAMW, LION, MESHES, Recipe, SGD, Tensors, Trace, adafactor, initial, is_first_matrix,
    is_matrix, is_second_matrix, muon, run, run_muon, spec,
};
use crate::shampoo;

/// The state of a parameter, as far as its formula needs it.
#[derive(Clone, Debug, Default)]
struct State {
    first: Vec<f64>,
    second: Vec<f64>,
}

/// The update of a parameter, the `step`-th, from 1.
type Formula = fn(&Param, i32, &mut [f64], &[f64], &mut State);

fn sgd(_: &Param, _: i32, values: &mut [f64], gradient: &[f64], state: &mut State) {
    state.first.resize(values.len(), 0.0);
    for ((p, g), v) in values.iter_mut().zip(gradient).zip(&mut state.first) {
        let g = g + SGD.weight_decay * *p;
        *v = 0.9 * *v + g;
        *p -= SGD.learning_rate * (g + 0.9 * *v);
    }
}

fn adamw(_: &Param, step: i32, values: &mut [f64], gradient: &[f64], state: &mut State) {
    state.first.resize(values.len(), 0.0);
    state.second.resize(values.len(), 0.0);
    let (beta1, beta2) = ADAMW.betas;
    let moments = state.first.iter_mut().zip(&mut state.second);
    for ((p, g), (m, v)) in values.iter_mut().zip(gradient).zip(moments) {
        *p *= 1.0 - ADAMW.learning_rate * ADAMW.weight_decay;
        *m = beta1 * *m + (1.0 - beta1) * g;
        *v = beta2 * *v + (1.0 - beta2) * g * g;
        let m = *m / (1.0 - beta1.powi(step));
        let v = *v / (1.0 - beta2.powi(step));
        *p -= ADAMW.learning_rate * m / (v.sqrt() + ADAMW.eps);
    }
}

fn lion(_: &Param, _: i32, values: &mut [f64], gradient: &[f64], state: &mut State) {
    state.first.resize(values.len(), 0.0);
    let (beta1, beta2) = LION.betas;
    for ((p, g), m) in values.iter_mut().zip(gradient).zip(&mut state.first) {
        let direction = beta1 * *m + (1.0 - beta1) * g;
        let sign = if direction == 0.0 { 0.0 } else { direction.signum() };
        *p = *p * (1.0 - LION.learning_rate * LION.weight_decay) - LION.learning_rate * sign;
        *m = beta2 * *m + (1.0 - beta2) * g;
    }
}

fn mean_square(values: &[f64]) -> f64 {
    values.iter().map(|it| it * it).sum::<f64>() / values.len() as f64
}

/// As `torch.optim.Adafactor`: matrices are the last two dims.
fn adafactor_of(param: &Param, step: i32, values: &mut [f64], gradient: &[f64], state: &mut State) {
    let options = adafactor();
    let (eps1, eps2) = options.eps;
    let weight = f64::from(step).powf(options.beta2_decay);
    let relative = options.learning_rate.min(1.0 / f64::from(step).sqrt());
    let alpha = relative * mean_square(values).sqrt().max(eps2);
    values.iter_mut().for_each(|p| *p *= 1.0 - options.learning_rate * options.weight_decay);
    let variance = match &param.shape[..] {
        [.., rows, columns] => factored(*rows, *columns, weight, gradient, state, eps1),
        _ => {
            state.first.resize(values.len(), 0.0);
            let moments = state.first.iter_mut().zip(gradient);
            moments.for_each(|(v, g)| *v += weight * (g * g - *v));
            state.first.clone()
        }
    };
    let update: Vec<f64> =
        gradient.iter().zip(variance).map(|(g, v)| g / v.max(eps1 * eps1).sqrt()).collect();
    let scale = (mean_square(&update).sqrt() / options.threshold).max(1.0);
    values.iter_mut().zip(update).for_each(|(p, u)| *p -= alpha / scale * u);
}

/// The variances of all elements, after the moments of rows (first) and columns (second) have
/// moved.
fn factored(
    rows: usize,
    columns: usize,
    weight: f64,
    gradient: &[f64],
    state: &mut State,
    eps1: f64,
) -> Vec<f64> {
    let count = gradient.len() / (rows * columns);
    state.first.resize(count * rows, 0.0);
    state.second.resize(count * columns, 0.0);
    let mut variances = Vec::new();
    for matrix in 0..count {
        let square =
            |row: usize, column: usize| gradient[(matrix * rows + row) * columns + column].powi(2);
        for row in 0..rows {
            let mean = (0..columns).map(|it| square(row, it)).sum::<f64>() / columns as f64;
            let moment = &mut state.first[matrix * rows + row];
            *moment += weight * (mean - *moment);
        }
        for column in 0..columns {
            let mean = (0..rows).map(|it| square(it, column)).sum::<f64>() / rows as f64;
            let moment = &mut state.second[matrix * columns + column];
            *moment += weight * (mean - *moment);
        }
        let of_rows = &state.first[matrix * rows..(matrix + 1) * rows];
        let mean = (of_rows.iter().sum::<f64>() / rows as f64).max(eps1);
        for row in of_rows {
            let of_columns = &state.second[matrix * columns..(matrix + 1) * columns];
            variances.extend(of_columns.iter().map(|column| row / mean * column));
        }
    }
    variances
}

/// As `torch.optim.Muon`, for each matrix of the declared view.
fn muon_of(param: &Param, step: i32, values: &mut [f64], gradient: &[f64], state: &mut State) {
    let scale = |rows: f64, columns: f64| (rows / columns).max(1.0).sqrt();
    muon_scaled(param, step, values, gradient, state, scale);
}

/// As `torch.optim.Muon` with `adjust_lr_fn="match_rms_adamw"`.
fn muon_matching_adamw(
    param: &Param,
    step: i32,
    values: &mut [f64],
    gradient: &[f64],
    state: &mut State,
) {
    let scale = |rows: f64, columns: f64| 0.2 * rows.max(columns).sqrt();
    muon_scaled(param, step, values, gradient, state, scale);
}

/// Updates by Muon, with this factor of the learning rate for a matrix of rows x columns.
fn muon_scaled(
    param: &Param,
    step: i32,
    values: &mut [f64],
    gradient: &[f64],
    state: &mut State,
    scale: fn(f64, f64) -> f64,
) {
    let Some(view) = param.as_matrices() else {
        return adamw(param, step, values, gradient, state);
    };
    let options = muon();
    state.first.resize(values.len(), 0.0);
    let matrix = view.rows * view.columns;
    let pieces = values.chunks_mut(matrix).zip(gradient.chunks(matrix));
    for ((values, gradient), momentum) in pieces.zip(state.first.chunks_mut(matrix)) {
        let take = 1.0 - options.momentum;
        momentum.iter_mut().zip(gradient).for_each(|(m, g)| *m += take * (g - *m));
        let direction = gradient.iter().zip(&*momentum);
        let direction = direction.map(|(g, m)| g + options.momentum * (m - g)).collect();
        let update = orthogonalized(direction, view.rows, view.columns);
        let rate = options.learning_rate * scale(view.rows as f64, view.columns as f64);
        for (p, u) in values.iter_mut().zip(update) {
            *p = *p * (1.0 - options.learning_rate * options.weight_decay) - rate * u;
        }
    }
}

/// Multiplies matrices of rows x inner and inner x columns.
pub(crate) fn product(a: &[f64], b: &[f64], [rows, inner, columns]: [usize; 3]) -> Vec<f64> {
    let mut product = vec![0.0; rows * columns];
    for row in 0..rows {
        for at in 0..inner {
            for column in 0..columns {
                product[row * columns + column] += a[row * inner + at] * b[at * columns + column];
            }
        }
    }
    product
}

fn transposed(a: &[f64], rows: usize, columns: usize) -> Vec<f64> {
    let element = |at: usize| a[at % rows * columns + at / rows];
    (0..rows * columns).map(element).collect()
}

/// Five Newton-Schulz iterations.
fn orthogonalized(matrix: Vec<f64>, rows: usize, columns: usize) -> Vec<f64> {
    if rows > columns {
        let wide = orthogonalized(transposed(&matrix, rows, columns), columns, rows);
        return transposed(&wide, columns, rows);
    }
    let norm = matrix.iter().map(|it| it * it).sum::<f64>().sqrt().max(1e-7);
    let mut x: Vec<f64> = matrix.into_iter().map(|it| it / norm).collect();
    for _ in 0..5 {
        let gram = product(&x, &transposed(&x, rows, columns), [rows, columns, rows]);
        let square = product(&gram, &gram, [rows, rows, rows]);
        let b: Vec<f64> = gram.iter().zip(square).map(|(a, s)| -4.775 * a + 2.0315 * s).collect();
        let bx = product(&b, &x, [rows, rows, columns]);
        x.iter_mut().zip(bx).for_each(|(x, bx)| *x = 3.4445 * *x + bx);
    }
    x
}

fn shampoo(param: &Param, _: i32, values: &mut [f64], gradient: &[f64], state: &mut State) {
    shampoo::formula(param, values, gradient, &mut state.first);
}

fn mixed(param: &Param, step: i32, values: &mut [f64], gradient: &[f64], state: &mut State) {
    if is_first_matrix(param) {
        return muon_of(param, step, values, gradient, state);
    }
    if is_second_matrix(param) {
        return adafactor_of(param, step, values, gradient, state);
    }
    values.iter_mut().zip(gradient).for_each(|(p, g)| *p -= 0.01 * g);
}

/// The formula of a recipe, and the largest difference that rounding to f32 makes in a few steps.
fn formula(recipe: Recipe) -> (Formula, f64) {
    match recipe {
        Recipe::Sgd => (sgd, 2e-6),
        Recipe::AdamW => (adamw, 2e-6),
        Recipe::Lion => (lion, 2e-6),
        Recipe::Adafactor => (adafactor_of, 2e-6),
        // Newton-Schulz in f32 makes errors of singular values larger, by up to 3.4 in an
        // iteration.
        Recipe::Muon => (muon_of, 2e-5),
        Recipe::Mixed => (mixed, 2e-5),
        // A moment is kept to about a hundredth: the update of a step of 0.01 is off by a part of
        // that.
        Recipe::AdamW8Bit => (adamw, 2e-3),
        Recipe::Shampoo => (shampoo, 2e-6),
    }
}

/// The parameters after each step by the formula, from the gradients of a run.
fn expected(recipe: Recipe, formula: Formula, traces: &[Trace]) -> Vec<BTreeMap<String, Vec<f64>>> {
    let spec: ModelSpec = spec(recipe);
    let wide = |values: &[f32]| values.iter().copied().map(f64::from).collect::<Vec<_>>();
    let mut values: BTreeMap<String, Vec<f64>> =
        initial(recipe).iter().map(|(name, values)| (name.clone(), wide(values))).collect();
    let mut states = BTreeMap::<String, State>::new();
    let mut after = Vec::new();
    for (step, trace) in (1..).zip(traces) {
        for (name, gradient) in &trace.gradients {
            let param = &spec[spec.find(name).expect("a parameter")];
            let state = states.entry(name.clone()).or_default();
            let values = values.get_mut(name).expect("a parameter");
            formula(param, step, values, &wide(gradient), state);
        }
        after.push(values.clone());
    }
    after
}

fn compare(recipe: Recipe, mesh: [usize; 2]) {
    let (formula, bound) = formula(recipe);
    compare_by(formula, bound, recipe, mesh, &run(recipe, mesh));
}

fn compare_by(formula: Formula, bound: f64, recipe: Recipe, mesh: [usize; 2], traces: &[Trace]) {
    let expected = expected(recipe, formula, traces);
    for (step, (trace, expected)) in traces.iter().zip(expected).enumerate() {
        let found: &Tensors = &trace.parameters;
        assert!(found.keys().eq(expected.keys()));
        for (name, values) in found {
            for (index, (found, expected)) in values.iter().zip(&expected[name]).enumerate() {
                let off = (f64::from(*found) - expected).abs();
                assert!(
                    off <= bound * expected.abs().max(1.0),
                    "{recipe:?} on {mesh:?}, step {step}, {name}[{index}]: {found}, not {expected}"
                );
            }
        }
    }
}

#[test]
fn each_is_its_formula_with_and_without_shards() {
    let _turn = crate::beside_others();
    for recipe in Recipe::ALL {
        MESHES.into_iter().for_each(|mesh| compare(recipe, mesh));
    }
}

#[test]
fn muon_can_match_the_size_of_updates_by_adamw() {
    let _turn = crate::beside_others();
    let bound = formula(Recipe::Muon).1;
    let options = MuonOptions { rate_scale: RateScale::MatchRmsAdamW, ..muon() };
    for mesh in MESHES {
        let traces = run_muon(options, mesh);
        compare_by(muon_matching_adamw, bound, Recipe::Muon, mesh, &traces);
    }
}

#[test]
fn muon_has_matrices_alone() {
    let spec = spec(Recipe::Muon);
    let names = spec.params().filter(|(_, param)| is_matrix(param)).map(|(_, it)| &*it.name);
    let expected = ["first.weight", "first.conv", "second.experts", "second.weight"];
    assert_eq!(names.collect::<Vec<_>>(), expected);
}
