//! An optimizer of a user's own for whole parameters: Shampoo (Gupta et al., arXiv 1802.09568) on
//! the shorter side alone, whose preconditioner is the inverse root of the sum of G G^T. Vectors
//! take steps down the gradient, and have no state.

use hsdp::{Param, Whole};
use hsdp_sharding::Matrices;

use crate::formulas::product;

const RATE: f64 = 0.01;

/// Added to the diagonal.
const EPS: f64 = 1.0;

/// A parameter as one matrix G: its rows and columns, and the place of an element of G, or of its
/// transpose if it has more rows than columns: there are no more rows than columns.
fn wide(matrices: Matrices) -> (usize, usize, impl Fn(usize, usize) -> usize + use<>) {
    let rows = matrices.count * matrices.rows;
    let columns = matrices.columns;
    let is_tall = rows > columns;
    let at =
        move |row, column| if is_tall { column * columns + row } else { row * columns + column };
    (rows.min(columns), rows.max(columns), at)
}

/// The elements of state: G G^T is square.
pub(crate) fn state(param: &Param) -> usize {
    param.as_matrices().map_or(0, |it| wide(it).0.pow(2))
}

/// Adds G G^T to a square.
fn add_square(matrices: Matrices, gradient: &[f64], mut add: impl FnMut(usize, f64)) {
    let (rows, columns, at) = wide(matrices);
    for row in 0..rows {
        for other in 0..rows {
            let products = (0..columns).map(|it| gradient[at(row, it)] * gradient[at(other, it)]);
            add(row * rows + other, products.sum());
        }
    }
}

/// The update of a parameter on its owner.
#[expect(clippy::cast_possible_truncation, reason = "state and parameters are f32")]
pub(crate) fn update(Whole { param, values, gradient, state }: Whole<'_>) {
    let gradient: Vec<f64> = gradient.iter().copied().map(f64::from).collect();
    let Some(matrices) = param.as_matrices() else {
        return values
            .iter_mut()
            .zip(gradient)
            .for_each(|(it, slope)| *it -= (RATE * slope) as f32);
    };
    add_square(matrices, &gradient, |at, sum| state[at] += sum as f32);
    let (rows, columns, at) = wide(matrices);
    let root = inverse_root(state, rows);
    for row in 0..rows {
        for column in 0..columns {
            let along = (0..rows).map(|it| root[row * rows + it] * gradient[at(it, column)]);
            values[at(row, column)] -= (RATE * along.sum::<f64>()) as f32;
        }
    }
}

/// The inverse root of `state + EPS` by the coupled Newton iteration of Denman and Beavers, scaled
/// into its region of convergence.
fn inverse_root(state: &[f32], size: usize) -> Vec<f64> {
    let mut matrix: Vec<f64> = state.iter().copied().map(f64::from).collect();
    (0..size).for_each(|at| matrix[at * size + at] += EPS);
    let scale = (0..size).map(|at| matrix[at * size + at]).sum::<f64>();
    let mut y: Vec<f64> = matrix.iter().map(|it| it / scale).collect();
    let identity = |at: usize| if at / size == at % size { 1.0 } else { 0.0 };
    let mut z: Vec<f64> = (0..size * size).map(identity).collect();
    for _ in 0..28 {
        let zy = product(&z, &y, [size; 3]);
        let t: Vec<f64> =
            zy.iter().enumerate().map(|(at, it)| 0.5 * (3.0 * identity(at) - it)).collect();
        (y, z) = (product(&y, &t, [size; 3]), product(&t, &z, [size; 3]));
    }
    z.into_iter().map(|it| it / scale.sqrt()).collect()
}

/// The formula, by the eigenvectors of the sum: cyclic Jacobi rotations in f64.
pub(crate) fn formula(param: &Param, values: &mut [f64], gradient: &[f64], sums: &mut Vec<f64>) {
    let Some(matrices) = param.as_matrices() else {
        return values.iter_mut().zip(gradient).for_each(|(it, slope)| *it -= RATE * slope);
    };
    let (rows, columns, place) = wide(matrices);
    sums.resize(rows * rows, 0.0);
    add_square(matrices, gradient, |at, sum| sums[at] += sum);
    let (eigenvalues, vectors) = eigen(sums.clone(), rows);
    for column in 0..columns {
        let own: Vec<f64> = (0..rows).map(|it| gradient[place(it, column)]).collect();
        for (at, value) in eigenvalues.iter().enumerate() {
            let vector = |row: usize| vectors[row * rows + at];
            let along: f64 = (0..rows).map(|row| vector(row) * own[row]).sum();
            let factor = RATE * along / (value + EPS).sqrt();
            (0..rows).for_each(|row| values[place(row, column)] -= factor * vector(row));
        }
    }
}

/// Eigenvalues, and eigenvectors as columns, of a symmetric matrix.
fn eigen(mut a: Vec<f64>, size: usize) -> (Vec<f64>, Vec<f64>) {
    let mut v: Vec<f64> =
        (0..size * size).map(|at| if at / size == at % size { 1.0 } else { 0.0 }).collect();
    for _ in 0..8 {
        for p in 0..size {
            for q in p + 1..size {
                let off = a[p * size + q];
                if off == 0.0 {
                    continue;
                }
                let theta = 0.5 * (a[q * size + q] - a[p * size + p]) / off;
                let t = theta.signum() / (theta.abs() + theta.hypot(1.0));
                let t = if theta == 0.0 { 1.0 } else { t };
                let cos = 1.0 / t.hypot(1.0);
                let sin = t / t.hypot(1.0);
                for k in 0..size {
                    let kp = a[k * size + p];
                    let kq = a[k * size + q];
                    (a[k * size + p], a[k * size + q]) = (cos * kp - sin * kq, sin * kp + cos * kq);
                }
                for k in 0..size {
                    let pk = a[p * size + k];
                    let qk = a[q * size + k];
                    (a[p * size + k], a[q * size + k]) = (cos * pk - sin * qk, sin * pk + cos * qk);
                    let kp = v[k * size + p];
                    let kq = v[k * size + q];
                    (v[k * size + p], v[k * size + q]) = (cos * kp - sin * kq, sin * kp + cos * kq);
                }
            }
        }
    }
    ((0..size).map(|at| a[at * size + at]).collect(), v)
}
