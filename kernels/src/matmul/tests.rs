use hsdp_sharding::DType;
use proptest::prelude::*;

use super::*;
use crate::simd::tests::up_to_width;
use crate::tests::{REALS, buffer, scattered};

/// Elements of a matrix without any.
const NOTHING: [f32; 0] = [];

/// Returns the elements of a matrix, row by row, in f64.
fn elements(matrix: Matrix<'_>) -> Vec<f64> {
    let wide = matrix.values.wide();
    let (row, column) = matrix.strides;
    let place = |at_row: usize, at_column: usize| at_row * row + at_column * column;
    let rows = (0..matrix.rows).flat_map(|row| (0..matrix.columns).map(move |it| place(row, it)));
    rows.map(|place| f64::from(wide[place])).collect()
}

/// Returns the product by its definition, in f64, and the sum of the sizes of its terms.
fn by_definition([a, b]: [Matrix<'_>; 2]) -> Vec<(f64, f64)> {
    let [left, right] = [elements(a), elements(b)];
    let element = |row: usize, column: usize| {
        let terms = (0..a.columns)
            .map(|inner| left[row * a.columns + inner] * right[inner * b.columns + column]);
        terms.fold((0.0, 0.0), |(sum, size), term: f64| (sum + term, size + term.abs()))
    };
    (0..a.rows).flat_map(|row| (0..b.columns).map(move |column| element(row, column))).collect()
}

fn check(
    [rows, inner, columns]: [usize; 3],
    transposed: [bool; 2],
    fold: Fold,
    dtypes: [DType; 2],
) {
    let left = buffer(dtypes[0], &scattered(rows * inner));
    let right = buffer(dtypes[1], &scattered(inner * columns));
    let of = |values, rows, columns, transposed| match transposed {
        true => Matrix::new(values, columns, rows).t(),
        false => Matrix::new(values, rows, columns),
    };
    let pair = [
        of(left.values(), rows, inner, transposed[0]),
        of(right.values(), inner, columns, transposed[1]),
    ];
    // A product that replaces its target does not read it.
    let (old, before) = if fold == Fold::Add { (3.0, 3.0) } else { (f32::NAN, 0.0) };
    for widest in [16, 8] {
        let mut product = vec![old; rows * columns];
        up_to_width(widest, || matmul(&mut product, fold, pair, Threads::One));
        for (got, (expected, size)) in product.iter().zip(by_definition(pair)) {
            let bound = (size + before) * (inner + 2) as f64 * f64::from(f32::EPSILON);
            assert!((f64::from(*got) - expected - before).abs() <= bound, "{got} for {expected}");
        }
    }
}

proptest! {
    #[test]
    fn products_are_those_of_the_definition(
        sizes in [0_usize..40, 0_usize..40, 0_usize..40],
        transposed in any::<[bool; 2]>(),
        adds in any::<bool>(),
        dtypes in [0_usize..3, 0_usize..3],
    ) {
        let fold = if adds { Fold::Add } else { Fold::Replace };
        check(sizes, transposed, fold, dtypes.map(|index| REALS[index]));
    }
}

#[test]
fn products_may_be_large() {
    for sizes in [[300, 257, 190], [1, 2000, 50], [65, 1, 300], [130, 600, 1], [40, 9001, 33]] {
        for dtype in [DType::F32, DType::BF16] {
            check(sizes, [false, true], Fold::Replace, [dtype; 2]);
            check(sizes, [true, false], Fold::Add, [dtype; 2]);
        }
    }
}

#[test]
fn a_new_product_is_the_one_that_replaces() {
    for [rows, inner, columns] in [[3, 5, 4], [300, 257, 190], [7, 0, 9], [0, 4, 3]] {
        let left = scattered(rows * inner);
        let right = scattered(inner * columns);
        let pair = [Matrix::new(&left[..], rows, inner), Matrix::new(&right[..], inner, columns)];
        let mut replaced = vec![f32::NAN; rows * columns];
        matmul(&mut replaced, Fold::Replace, pair, Threads::One);
        assert_eq!(product(pair, Threads::One), replaced);
    }
}

#[test]
fn the_bits_do_not_depend_on_the_threads() {
    // Products of more rows, of more columns, and of too few multiplications for all threads.
    for [rows, inner, columns] in [[300, 200, 250], [130, 300, 700], [700, 301, 130], [70, 90, 80]]
    {
        for dtype in REALS {
            let left = buffer(dtype, &scattered(rows * inner));
            let right = buffer(dtype, &scattered(columns * inner));
            let pair = [
                Matrix::new(left.values(), rows, inner),
                Matrix::new(right.values(), columns, inner).t(),
            ];
            let product = |threads| {
                let mut product = vec![1.0; rows * columns];
                matmul(&mut product, Fold::Add, pair, threads);
                product
            };
            let alone = product(Threads::One);
            for threads in [2, 3, 4, 7] {
                let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build();
                let pool = pool.expect("a pool");
                assert!(pool.install(|| product(Threads::Pool)) == alone, "{threads} threads");
            }
        }
    }
}

#[test]
fn numbers_that_are_not_finite_reach_their_row_alone() {
    let specials = [f32::INFINITY, f32::NEG_INFINITY, f32::NAN];
    for (special, dtype) in specials.iter().flat_map(|it| REALS.map(|dtype| (*it, dtype))) {
        let mut left = scattered(30 * 9);
        left[4 * 9 + 8] = special;
        let [left, right] = [left, vec![1.0; 9 * 40]].map(|values| buffer(dtype, &values));
        let pair = [Matrix::new(left.values(), 30, 9), Matrix::new(right.values(), 9, 40)];
        let product = product(pair, Threads::One);
        for (row, elements) in product.chunks(40).enumerate() {
            let is_finite = elements.iter().all(|it| it.is_finite());
            let is_special = elements.iter().all(|it| it.to_bits() << 1 == special.to_bits() << 1);
            assert!(if row == 4 { is_special } else { is_finite }, "row {row} of {dtype}");
        }
    }
}

#[test]
fn a_product_of_bf16_takes_subnormal_numbers_for_zeros_where_pairs_are_multiplied() {
    let subnormal = f32::from_bits(1 << 20);
    let left = buffer(DType::BF16, &[subnormal, 0.0]);
    let right = buffer(DType::BF16, &[1.0, 1.0]);
    let pair = [Matrix::new(left.values(), 1, 2), Matrix::new(right.values(), 2, 1)];
    assert_eq!(up_to_width(8, || product(pair, Threads::One)), [subnormal]);
    let mut sum = [subnormal];
    matmul(&mut sum, Fold::Add, pair, Threads::One);
    assert_eq!(sum, if multiplies_bf16() { [0.0] } else { [2.0 * subnormal] });
}

#[test]
fn some_columns_of_a_matrix_are_those_and_no_others() {
    let values = scattered(6 * 7);
    let identity = |size: usize| -> Vec<f32> {
        (0..size * size).map(|at| if at % (size + 1) == 0 { 1.0 } else { 0.0 }).collect()
    };
    let matrix = Matrix::new(&values[..], 6, 7);
    for (range, part) in [0..6, 2..5, 5..6, 3..3].map(|it| (it.clone(), matrix.t().columns(it))) {
        let mut found = vec![f32::NAN; 7 * range.len()];
        let identity = identity(7);
        let pair = [Matrix::new(&identity[..], 7, 7), part];
        matmul(&mut found, Fold::Replace, pair, Threads::One);
        let expected = (0..7).flat_map(|column| range.clone().map(move |row| row * 7 + column));
        assert_eq!(found, expected.map(|at| values[at]).collect::<Vec<_>>());
    }
    for (range, part) in [0..7, 2..5, 6..7, 3..3].map(|it| (it.clone(), matrix.columns(it))) {
        let mut found = vec![f32::NAN; 6 * range.len()];
        let identity = identity(6);
        let pair = [Matrix::new(&identity[..], 6, 6), part];
        matmul(&mut found, Fold::Replace, pair, Threads::One);
        let expected = (0..6).flat_map(|row| range.clone().map(move |column| row * 7 + column));
        assert_eq!(found, expected.map(|at| values[at]).collect::<Vec<_>>());
    }
}

#[test]
#[should_panic(expected = "2..8 of 7 columns")]
fn columns_that_are_not_there_are_refused() {
    let _ = Matrix::new(&scattered(42)[..], 6, 7).columns(2..8);
}

#[test]
fn products_of_nothing_are_zeros() {
    let mut product = [3.0; 4];
    let nothing = Matrix::new(&NOTHING[..], 2, 0);
    matmul(&mut product, Fold::Replace, [nothing, nothing.t()], Threads::One);
    assert_eq!(product, [0.0; 4]);
}

#[test]
#[should_panic(expected = "the inner sizes of a product")]
fn matrices_that_do_not_fit_are_refused() {
    let values = scattered(6);
    let matrix = Matrix::new(&values[..], 2, 3);
    matmul(&mut [0.0; 4], Fold::Replace, [matrix, matrix], Threads::One);
}

#[test]
#[should_panic(expected = "the elements of a product")]
fn a_product_whose_size_wraps_around_is_refused() {
    let rows = 1 << (usize::BITS - 1);
    let pair = [Matrix::new(&NOTHING[..], rows, 0), Matrix::new(&NOTHING[..], 0, 2)];
    matmul(&mut [], Fold::Replace, pair, Threads::One);
}
