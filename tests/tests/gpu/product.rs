//! Products of matrices by cuBLAS.

use half::bf16;
use hsdp_kernels::cuda::{Cublas, DeviceBuffer, DeviceMatrix, Product, Stored, Stream};
use hsdp_kernels::{HostBuffer, Values};
use hsdp_sharding::DType;

use super::numbers::ordinary;
use super::{device, download, stream, upload};

/// The elements before the first of a matrix, in its buffer.
const START: usize = 5;

/// The number of products of a call, at most.
const MOST: usize = 3;

/// As many matrices as there are products in a buffer, and their elements.
struct Stocked {
    buffer: DeviceBuffer,
    values: Vec<f32>,
    sizes: (usize, usize),
    stored: Stored,
}

impl Stocked {
    fn new(stream: &Stream, seed: u64, dtype: DType, sizes: [usize; 2], stored: Stored) -> Self {
        let all = ordinary(seed, START + MOST * sizes[0] * sizes[1]);
        let all = HostBuffer::F32(all);
        let buffer = upload(stream, cast(&all, dtype).values());
        let values = download(stream, &buffer).values().to_f32()[START..].to_vec();
        Self { buffer, values, sizes: sizes.into(), stored }
    }

    fn matrix(&self) -> DeviceMatrix<'_> {
        let Self { buffer, sizes, stored, .. } = self;
        DeviceMatrix { buffer, start: START, rows: sizes.0, columns: sizes.1, stored: *stored }
    }

    fn at(&self, product: usize, row: usize, column: usize) -> f64 {
        let (rows, columns) = self.sizes;
        let start = product * rows * columns;
        f64::from(match self.stored {
            Stored::ByRows => self.values[start + row * columns + column],
            Stored::ByColumns => self.values[start + column * rows + row],
        })
    }
}

fn cast(values: &HostBuffer, dtype: DType) -> HostBuffer {
    match dtype {
        DType::BF16 => {
            HostBuffer::BF16(values.values().to_f32().into_iter().map(bf16::from_f32).collect())
        }
        _ => values.clone(),
    }
}

const SIZES: [(usize, usize, usize); 4] = [(1, 1, 1), (3, 5, 7), (64, 33, 20), (1, 200, 9)];

const ORDERS: [Stored; 2] = [Stored::ByRows, Stored::ByColumns];

#[test]
#[ignore = "needs a CUDA device"]
fn products_are_those_of_the_definition() {
    let stream = stream();
    let mut cublas = Cublas::new(&device()).expect("cuBLAS");
    for (dtype, (rows, inner, columns)) in
        [DType::F32, DType::BF16].into_iter().flat_map(|dtype| SIZES.map(|sizes| (dtype, sizes)))
    {
        let before = Stocked::new(&stream, 3, dtype, [rows, columns], Stored::ByRows);
        for orders in ORDERS.into_iter().flat_map(|one| ORDERS.map(|other| (one, other))) {
            let left = Stocked::new(&stream, 1, dtype, [rows, inner], orders.0);
            let right = Stocked::new(&stream, 2, dtype, [inner, columns], orders.1);
            for (count, scales) in [(1, [1.0, 0.0]), (2, [1.0, 0.0]), (MOST, [-0.75, 1.5])] {
                compare(&stream, &mut cublas, count, [&left, &right], &before, scales);
            }
        }
    }
}

/// Compares products with the definition. A sum of k products in f32 is off by at most k units of
/// 2^-24 of the sum of their magnitudes, and by two more for the scales. A result in bf16 is
/// rounded by at most 2^-8 of it.
fn compare(
    stream: &Stream,
    cublas: &mut Cublas,
    count: usize,
    [left, right]: [&Stocked; 2],
    before: &Stocked,
    [take, keep]: [f32; 2],
) {
    let untouched = download(stream, &before.buffer);
    let mut target = upload(stream, untouched.values());
    let rounding = if target.dtype() == DType::BF16 { 2_f64.powi(-8) } else { 0.0 };
    let product = Product {
        count,
        target: &mut target,
        start: START,
        left: left.matrix(),
        right: right.matrix(),
        take,
        keep,
    };
    cublas.multiply(stream, product).expect("multiplied");
    let found = download(stream, &target).values().to_f32();
    let untouched = untouched.values().to_f32();
    assert_eq!(found[..START], untouched[..START], "before the first target");
    let (inner, columns) = right.sizes;
    let numel = left.sizes.0 * columns;
    let end = START + count * numel;
    assert_eq!(found[end..], untouched[end..], "behind the last target");
    for (at, found) in found[START..end].iter().copied().map(f64::from).enumerate() {
        let product = at / numel;
        let row = at % numel / columns;
        let column = at % columns;
        let term = |k| f64::from(take) * left.at(product, row, k) * right.at(product, k, column);
        let terms = (0..inner).map(term);
        let kept = f64::from(keep) * before.at(product, row, column);
        let expected = terms.clone().sum::<f64>() + kept;
        let magnitude = terms.map(f64::abs).sum::<f64>() + kept.abs();
        let bound = (inner as f64 + 2.0) * 2_f64.powi(-24) * magnitude;
        let bound = bound + rounding * (expected.abs() + bound);
        let error = (found - expected).abs();
        let sizes = (left.sizes, right.sizes);
        let orders = (left.stored, right.stored);
        assert!(
            error <= bound,
            "{count} of {sizes:?} {orders:?}, element {at}: {found}, not {expected}"
        );
    }
}

#[test]
#[ignore = "needs a CUDA device"]
fn a_target_that_is_not_kept_is_not_read() {
    let stream = stream();
    let mut cublas = Cublas::new(&device()).expect("cuBLAS");
    let one = upload(&stream, Values::F32(&[3.0]));
    let mut target = upload(&stream, Values::F32(&[f32::NAN]));
    let factor =
        DeviceMatrix { buffer: &one, start: 0, rows: 1, columns: 1, stored: Stored::ByRows };
    let left = factor;
    let right = factor.t();
    let product =
        Product { count: 1, target: &mut target, start: 0, left, right, take: 1.0, keep: 0.0 };
    cublas.multiply(&stream, product).expect("multiplied");
    assert_eq!(download(&stream, &target).values().to_f32(), [9.0]);
}

#[test]
#[ignore = "needs a CUDA device"]
fn matrices_that_do_not_fit_are_refused() {
    let stream = stream();
    let mut cublas = Cublas::new(&device()).expect("cuBLAS");
    let buffer = upload(&stream, Values::F32(&[1.0; 12]));
    let narrow = upload(&stream, Values::BF16(&[bf16::ONE; 12]));
    let half = upload(&stream, Values::F16(&[half::f16::ONE; 12]));
    let matrix = |buffer, start, (rows, columns)| {
        let stored = Stored::ByRows;
        DeviceMatrix { buffer, start, rows, columns, stored }
    };
    let mut refused_of = |count, left, right, target: &DeviceBuffer, start| {
        let target = &mut upload(&stream, download(&stream, target).values());
        let product = Product { count, target, start, left, right, take: 1.0, keep: 0.0 };
        cublas.multiply(&stream, product).expect_err("it does not fit").to_string()
    };
    let several = [
        refused_of(2, matrix(&buffer, 0, (2, 3)), matrix(&buffer, 0, (3, 4)), &buffer, 0),
        refused_of(2, matrix(&buffer, 1, (3, 2)), matrix(&buffer, 0, (2, 1)), &buffer, 0),
        refused_of(usize::MAX, matrix(&buffer, 0, (1, 1)), matrix(&buffer, 0, (1, 2)), &buffer, 0),
    ];
    let mut refused =
        |left, right, target: &DeviceBuffer, start| refused_of(1, left, right, target, start);
    let whole = matrix(&buffer, 0, (3, 4));
    for (told, expected) in [
        (refused(whole, whole, &buffer, 0), "the left matrix has 4 columns, the right 3 rows"),
        (refused(whole, whole.t(), &half, 0), "the target is f16, but must be f32 or bf16"),
        (
            refused(whole, whole.t(), &buffer, 4),
            "the target, 1 x 3 x 3 of f32 from element 4 on, does not lie in a buffer of 12 elements of f32",
        ),
        (
            refused(matrix(&buffer, 1, (3, 4)), whole.t(), &buffer, 0),
            "the left matrix, 1 x 3 x 4 of f32 from element 1 on, does not lie in a buffer of 12 elements of f32",
        ),
        (
            refused(whole, matrix(&narrow, 0, (4, 3)), &buffer, 0),
            "the right matrix, 1 x 4 x 3 of f32 from element 0 on, does not lie in a buffer of 12 elements of bf16",
        ),
        (
            refused(whole, matrix(&buffer, 0, (4, usize::MAX)), &buffer, 0),
            "the target, 1 x 3 x 18446744073709551615 of f32 from element 0 on, does not lie in a buffer of 12 elements of f32",
        ),
        (
            several[0].clone(),
            "the target, 2 x 2 x 4 of f32 from element 0 on, does not lie in a buffer of 12 elements of f32",
        ),
        (
            several[1].clone(),
            "the left matrix, 2 x 3 x 2 of f32 from element 1 on, does not lie in a buffer of 12 elements of f32",
        ),
        (
            several[2].clone(),
            "the target, 18446744073709551615 x 1 x 2 of f32 from element 0 on, does not lie in a buffer of 12 elements of \
             f32",
        ),
    ] {
        assert_eq!(told, format!("multiply matrices: {expected}"));
    }
}
