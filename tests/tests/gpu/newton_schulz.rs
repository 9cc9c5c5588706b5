//! The orthogonalization of matrices.

use hsdp_kernels::cuda::{Cublas, CudaError, MatrixProduct, NewtonSchulzBuffers, Product, Stream};
use hsdp_kernels::memory::{self, Category};
use hsdp_kernels::{MatrixDType, NewtonSchulz, Threads, Values};
use hsdp_sharding::{DType, Rank};

use super::numbers::ordinary;
use super::{device, download, stream, upload};

/// Wide, tall and square matrices, single rows and columns.
const SIZES: [(usize, usize); 8] =
    [(1, 1), (1, 300), (300, 1), (13, 40), (40, 13), (60, 60), (7, 130), (96, 64)];

/// A rank that no other test of this program has.
const OWN: Rank = Rank::new(71);

/// The elements of the buffer before the first matrix, and between matrices.
const GAP: usize = 3;

/// Products by cuBLAS, with their number: a program may bring products of its own.
#[derive(Debug)]
struct Counted {
    cublas: Cublas,
    products: usize,
}

impl MatrixProduct for Counted {
    fn multiply(&mut self, stream: &Stream, product: Product<'_>) -> Result<(), CudaError> {
        self.products += 1;
        self.cublas.multiply(stream, product)
    }
}

/// The greatest distance of a matrix from that of the host, in norms of the latter. All matrices lie in one buffer, with elements between them
/// that must not change, and have the same other buffers.
fn distance(by: &NewtonSchulz) -> f64 {
    let (stream, mut starts, mut len) = (stream(), Vec::new(), GAP);
    for (rows, columns) in SIZES {
        starts.push(len);
        len += rows * columns + GAP;
    }
    let mut expected = ordinary(7, len);
    let mut matrices = upload(&stream, Values::F32(&expected));
    let mut buffers = NewtonSchulzBuffers::new(&device(), by.dtype, SIZES).expect("memory");
    let cublas = Cublas::new(&device()).expect("cuBLAS");
    let mut product = Counted { cublas, products: 0 };
    for (sizes, start) in SIZES.into_iter().zip(&starts) {
        let matrix = (&mut matrices, *start, sizes);
        stream.orthogonalize(by, matrix, &mut buffers, &mut product).expect("orthogonalized");
        let own = &mut expected[*start..start + sizes.0 * sizes.1];
        let mut workspace = vec![0.0; NewtonSchulz::workspace(sizes.0, sizes.1)];
        by.orthogonalize(own, sizes, &mut workspace, Threads::One);
    }
    assert_eq!(product.products, 3 * by.steps * SIZES.len());
    let found = download(&stream, &matrices).values().to_f32();
    let mut greatest = 0.0_f64;
    for ((rows, columns), start) in SIZES.into_iter().zip(starts) {
        let own = start..start + rows * columns;
        assert_eq!(found[own.end..own.end + GAP], expected[own.end..own.end + GAP], "the gap");
        let norm =
            |values: &mut dyn Iterator<Item = f64>| values.map(|it| it * it).sum::<f64>().sqrt();
        let pairs = found[own.clone()].iter().zip(&expected[own.clone()]);
        let off = norm(&mut pairs.map(|(found, expected)| f64::from(found - expected)));
        let whole = norm(&mut expected[own].iter().copied().map(f64::from));
        greatest = greatest.max(off / whole);
    }
    greatest
}

/// A sum of 300 terms in another order may differ by some 16 units of 2^-24, which are 1e-6, and each step has such sums. (In TF32 a product would
/// be off by 5e-4.)
#[test]
#[ignore = "needs a CUDA device"]
fn matrices_are_orthogonalized_as_on_the_host() {
    for steps in [0, 1, 2, 5] {
        let by = NewtonSchulz { steps, ..NewtonSchulz::default() };
        let distance = distance(&by);
        assert!(distance <= 1e-6 * (1 + steps) as f64, "{steps} steps in f32: {distance:e}");
    }
}

/// Sums in another order may be rounded to another bf16, by 2^-8 of a value.
#[test]
#[ignore = "needs a CUDA device"]
fn in_bf16_results_are_rounded_where_the_host_rounds_them() {
    for steps in [0, 1, 2, 5] {
        let by = NewtonSchulz { steps, dtype: MatrixDType::BF16, ..NewtonSchulz::default() };
        let distance = distance(&by);
        assert!(distance <= 2.0 * 2_f64.powi(-8), "{steps} steps in bf16: {distance:e}");
    }
}

#[test]
#[ignore = "needs a CUDA device"]
fn buffers_have_the_elements_that_are_stated() {
    memory::set_rank(OWN);
    let _update = memory::scope(Category::Update);
    for dtype in [MatrixDType::F32, MatrixDType::BF16] {
        let buffers = NewtonSchulzBuffers::new(&device(), dtype, SIZES).expect("memory");
        let held = memory::usage_on_device(OWN, Category::Update).live.get();
        let elements = NewtonSchulzBuffers::elements(dtype, SIZES);
        assert_eq!(held, (elements * DType::from(dtype).size_bytes()) as u64, "{dtype}");
        drop(buffers);
    }
    let cublas = Cublas::new(&device()).expect("cuBLAS");
    assert_eq!(memory::usage_on_device(OWN, Category::Update).live.get(), 0, "{cublas:?}");
}

#[test]
#[ignore = "needs a CUDA device"]
fn matrices_that_do_not_fit_are_refused() {
    let (stream, by) = (stream(), NewtonSchulz::default());
    let mut cublas = Cublas::new(&device()).expect("cuBLAS");
    let mut matrix = upload(&stream, Values::F32(&[1.0; 50]));
    for (dtype, start, sizes, expected) in [
        (
            MatrixDType::F32,
            39,
            (3, 4),
            "a matrix of 3 x 4 from element 39 on does not lie in 50 elements",
        ),
        (
            MatrixDType::F32,
            0,
            (usize::MAX, 2),
            "a matrix of 18446744073709551615 x 2 from element 0 on does not lie in 50 elements",
        ),
        (
            MatrixDType::F32,
            0,
            (5, 5),
            "a matrix of 5 x 5, with buffers for 20 elements and squares of 16",
        ),
        (
            MatrixDType::F32,
            0,
            (3, 7),
            "a matrix of 3 x 7, with buffers for 20 elements and squares of 16",
        ),
        (MatrixDType::BF16, 0, (4, 4), "iterations in f32 with buffers of bf16"),
    ] {
        let mut buffers = NewtonSchulzBuffers::new(&device(), dtype, [(4, 5)]).expect("memory");
        let refused =
            stream.orthogonalize(&by, (&mut matrix, start, sizes), &mut buffers, &mut cublas);
        let told = refused.expect_err("it does not fit").to_string();
        assert_eq!(told, format!("orthogonalize: {expected}"));
    }
}
