//! The iteration is compared with its definition in f64 with three loops a product, and with what
//! it does to singular values that are known.

use super::{MatrixDType, NewtonSchulz};
use crate::matmul::Threads;
use crate::round::{nearest_f32, round_bf16};
use crate::tests::scattered;

/// Sizes below and above those of X's parts, wide and tall.
const SIZES: [(usize, usize); 9] =
    [(1, 1), (1, 300), (300, 1), (7, 7), (13, 40), (40, 13), (5, 700), (700, 5), (60, 64)];

fn orthogonalized(by: &NewtonSchulz, values: &[f32], rows: usize, columns: usize) -> Vec<f32> {
    together(by, values, [1, rows, columns], Threads::One)
}

/// Orthogonalizes a number of matrices, each of some rows and columns.
fn together(
    by: &NewtonSchulz,
    values: &[f32],
    [count, rows, columns]: [usize; 3],
    threads: Threads,
) -> Vec<f32> {
    let mut matrices = values.to_vec();
    let mut workspace = vec![f32::NAN; count * NewtonSchulz::workspace(rows, columns)];
    by.orthogonalize(&mut matrices, count, rows, columns, &mut workspace, threads);
    matrices
}

/// A matrix by rows, in f64.
type Rows = Vec<Vec<f64>>;

fn transposed(matrix: &Rows) -> Rows {
    (0..matrix[0].len()).map(|column| matrix.iter().map(|row| row[column]).collect()).collect()
}

/// Returns `take * (left right)`, plus `keep * addend`, rounded.
fn product(
    take: f64,
    left: &Rows,
    right: &Rows,
    addend: Option<(f64, &Rows)>,
    round: fn(f64) -> f64,
) -> Rows {
    let element = |row: usize, column: usize| {
        let terms = left[row].iter().zip(right).map(|(left, right)| left * right[column]);
        let kept = addend.map_or(0.0, |(keep, addend)| keep * addend[row][column]);
        round(kept + take * terms.sum::<f64>())
    };
    let columns = right[0].len();
    (0..left.len()).map(|row| (0..columns).map(|column| element(row, column)).collect()).collect()
}

/// The definition, for a matrix that is not taller than wide.
fn by_definition(of: &NewtonSchulz, matrix: &Rows, round: fn(f64) -> f64) -> Rows {
    let mapped = |matrix: &Rows, by: &dyn Fn(f64) -> f64| -> Rows {
        matrix.iter().map(|row| row.iter().map(|value| round(by(*value))).collect()).collect()
    };
    let mut x = mapped(matrix, &|value| value);
    let squares = x.iter().flatten().map(|value| value * value).sum::<f64>();
    let norm = round(squares.sqrt().max(of.eps));
    x = mapped(&x, &|value| value / norm);
    let [a, b, c] = of.coefficients;
    for _ in 0..of.steps {
        let gram = product(1.0, &x, &transposed(&x), None, round);
        let polynomial = product(c, &gram, &gram, Some((b, &gram)), round);
        x = product(1.0, &polynomial, &x, Some((a, &x)), round);
    }
    x
}

/// The greatest difference from the definition.
fn error(of: &NewtonSchulz, rows: usize, columns: usize, round: fn(f64) -> f64) -> f64 {
    let values = scattered(rows * columns);
    let matrix: Rows =
        values.chunks(columns).map(|row| row.iter().copied().map(f64::from).collect()).collect();
    let expected = match rows > columns {
        true => transposed(&by_definition(of, &transposed(&matrix), round)),
        false => by_definition(of, &matrix, round),
    };
    let found = orthogonalized(of, &values, rows, columns);
    let pairs = found.iter().zip(expected.iter().flatten());
    pairs.map(|(found, expected)| (f64::from(*found) - expected).abs()).fold(0.0, f64::max)
}

/// A step multiplies the error of a singular value by at most |a + 3 b x^2 + 5 c x^4| < 4, for x up
/// to 1.2. It adds three products, whose errors are at most those of 64 roundings in a row if they
/// point in one direction, and of 8 if they are independent of each other. So five steps leave at
/// most 3 * 8 * (1 + 4 + 16 + 64 + 256) units of 2^-24.
#[test]
fn the_result_is_that_of_the_definition_except_for_rounding() {
    for (rows, columns) in SIZES {
        let error = error(&NewtonSchulz::default(), rows, columns, |value| value);
        assert!(error < 24.0 * 341.0 * 2_f64.powi(-24), "{rows} x {columns}: {error:e}");
    }
}

/// A sum of f32 products may be rounded to another bf16 than the sum in f64, by 2^-8 of it. A step
/// multiplies this by less than 4.
#[test]
fn in_bf16_each_result_is_rounded() {
    let bf16 = |value: f64| f64::from(round_bf16(nearest_f32(value)));
    for (rows, columns) in SIZES {
        let by = NewtonSchulz { steps: 1, dtype: MatrixDType::BF16, ..NewtonSchulz::default() };
        let error = error(&by, rows, columns, bf16);
        let greatest = 3.4445;
        assert!(error <= greatest * 2_f64.powi(-8), "{rows} x {columns}: {error:e}");
        let found = orthogonalized(&by, &scattered(rows * columns), rows, columns);
        assert!(found.iter().all(|value| round_bf16(*value) == *value));
        let other = NewtonSchulz { dtype: MatrixDType::F32, ..by };
        let exact = orthogonalized(&other, &scattered(rows * columns), rows, columns);
        let is_one = rows * columns == 1;
        assert!(is_one || found != exact, "{rows} x {columns}: it is not rounded");
    }
}

/// Figures of `torch.optim.Muon` (`_zeropower_via_newtonschulz` in PyTorch 2.15, on a CPU), for the
/// matrix [3, 5] whose element i is sin(0.3 (i + 1)), and for its transpose.
#[test]
fn in_bf16_the_result_is_that_of_pytorch() {
    let expected: [f64; 15] = [
        -0.2216796875,
        0.19921875,
        0.1240234375,
        0.65625,
        0.12255859375,
        0.75390625,
        0.48828125,
        0.2578125,
        -0.09033203125,
        -0.28125,
        0.00958251953125,
        0.1220703125,
        -0.25,
        0.015869140625,
        -0.72265625,
    ];
    let by = NewtonSchulz { dtype: MatrixDType::BF16, ..NewtonSchulz::default() };
    let value =
        |row: usize, column: usize| nearest_f32((0.3 * (row * 5 + column + 1) as f64).sin());
    let wide: Vec<f32> = (0..15).map(|at| value(at / 5, at % 5)).collect();
    let tall: Vec<f32> = (0..15).map(|at| value(at % 3, at / 3)).collect();
    let wide = orthogonalized(&by, &wide, 3, 5);
    let tall = orthogonalized(&by, &tall, 5, 3);
    for (at, expected) in expected.into_iter().enumerate() {
        for found in [wide[at], tall[at % 5 * 3 + at / 5]] {
            assert!(
                (f64::from(found) - expected).abs() <= 2_f64.powi(-8),
                "{at}: {found}, not {expected}"
            );
        }
    }
}

/// The singular values of a diagonal matrix are its elements, and each goes its own way.
#[test]
fn singular_values_follow_the_polynomial_and_come_near_one() {
    let values = [5.0_f64, -2.0, 1.0, 0.3, 0.15];
    let mut matrix = vec![0.0; 5 * 9];
    for (place, value) in values.iter().enumerate() {
        matrix[place * 9 + place] = nearest_f32(*value);
    }
    let found = orthogonalized(&NewtonSchulz::default(), &matrix, 5, 9);
    let norm = values.iter().map(|value| value * value).sum::<f64>().sqrt();
    for (index, found) in found.iter().enumerate() {
        let row = index / 9;
        let column = index % 9;
        let polynomial = |x: f64| 3.4445 * x - 4.775 * x.powi(3) + 2.0315 * x.powi(5);
        let own = (0..5).fold(values[row] / norm, |x, _| polynomial(x));
        let expected = if row == column { own } else { 0.0 };
        assert!((f64::from(*found) - expected).abs() < 1e-5, "{row}, {column}: {found}");
        assert!(row != column || (0.6..1.3).contains(&expected.abs()));
    }
}

#[test]
fn a_matrix_of_zeros_stays_one() {
    for (rows, columns) in [(3, 5), (5, 3), (0, 4), (4, 0)] {
        let zeros = vec![0.0; rows * columns];
        assert_eq!(orthogonalized(&NewtonSchulz::default(), &zeros, rows, columns), zeros);
    }
}

#[test]
fn the_bits_do_not_depend_on_the_threads() {
    let by = NewtonSchulz::default();
    let alone = orthogonalized(&by, &scattered(150 * 400), 150, 400);
    for threads in [2, 3] {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().expect("a pool");
        let values = scattered(150 * 400);
        let matrix = pool.install(|| together(&by, &values, [1, 150, 400], Threads::Pool));
        assert!(matrix == alone, "{threads} threads");
    }
}

/// Fewer matrices than threads, as many, and more, whose number is a multiple of theirs or not. The
/// largest are divided among threads, and the threads divide the products of the others. The
/// smallest are not divided.
#[test]
fn matrices_together_have_the_bits_of_each_alone() {
    let pools = [1, 4].map(|threads| {
        rayon::ThreadPoolBuilder::new().num_threads(threads).build().expect("a pool")
    });
    let shapes =
        [(13, 40), (40, 13), (5, 700), (60, 60), (90, 110), (110, 90), (1, 1), (0, 4), (4, 0)];
    for dtype in [MatrixDType::F32, MatrixDType::BF16] {
        let by = NewtonSchulz { dtype, ..NewtonSchulz::default() };
        for ((rows, columns), count) in
            shapes.into_iter().flat_map(|shape| [0, 1, 3, 4, 5, 8, 11].map(|count| (shape, count)))
        {
            let numel = rows * columns;
            let one = |index: usize| {
                let mut values = scattered(numel + index);
                values.drain(..index);
                values.iter_mut().for_each(|value| *value *= (index + 1) as f32);
                values
            };
            let all: Vec<Vec<f32>> = (0..count).map(one).collect();
            let alone = all.iter().flat_map(|it| orthogonalized(&by, it, rows, columns));
            let alone: Vec<f32> = alone.collect();
            let sizes = [count, rows, columns];
            let found = together(&by, &all.concat(), sizes, Threads::One);
            assert!(found == alone, "{sizes:?} {dtype} on one thread");
            for pool in &pools {
                let found = pool.install(|| together(&by, &all.concat(), sizes, Threads::Pool));
                assert!(
                    found == alone,
                    "{sizes:?} {dtype}, {} threads",
                    pool.current_num_threads()
                );
            }
        }
    }
}

#[test]
#[should_panic(expected = "elements and workspace of 2 x 3 x 4")]
fn a_workspace_of_one_matrix_is_too_small_for_two() {
    let mut workspace = vec![0.0; NewtonSchulz::workspace(3, 4)];
    let by = NewtonSchulz::default();
    by.orthogonalize(&mut [1.0; 24], 2, 3, 4, &mut workspace, Threads::One);
}

#[test]
fn the_workspace_is_at_most_two_squares_of_a_large_matrix() {
    assert_eq!(NewtonSchulz::workspace(1000, 4000), 2 * 1000 * 1000);
    assert_eq!(NewtonSchulz::workspace(4000, 1000), 2 * 1000 * 1000);
    assert_eq!(NewtonSchulz::workspace(10, 4000), 10 * 10 + 10 * 256);
}
