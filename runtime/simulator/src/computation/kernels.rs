//! The kernels of a piece of work, and their time.

use hsdp_sharding::DType;

use super::processor::{Processor, Products};
use crate::WorkCost;

/// Kernels that follow each other on a processor.
pub(super) struct Kernels<'a> {
    on: &'a Processor,
    dtype: DType,
    count: f64,
    seconds: f64,
}

impl<'a> Kernels<'a> {
    pub(super) const fn new(on: &'a Processor, dtype: DType) -> Self {
        Self { on, dtype, count: 0.0, seconds: 0.0 }
    }

    /// Kernels from here on compute in `dtype`.
    pub(super) const fn compute_in(&mut self, dtype: DType) {
        self.dtype = dtype;
    }

    /// Adds a kernel of products.
    pub(super) fn product(&mut self, products: &Products) {
        self.count += 1.0;
        self.seconds += self.on.product(products, self.dtype);
    }

    /// A kernel of so many flops, which reads and writes so many elements.
    pub(super) fn fused(&mut self, flops: f64, elements: f64) {
        self.count += 1.0;
        let bytes = elements * self.dtype.size_bytes() as f64;
        self.seconds += self.on.fused(flops, bytes, self.dtype);
    }

    /// So many kernels that read and write so many elements in all.
    pub(super) fn passes(&mut self, kernels: f64, elements: f64) {
        self.passes_over(kernels, elements * self.dtype.size_bytes() as f64);
    }

    /// So many kernels that read and write so many bytes in all.
    pub(super) fn passes_over(&mut self, kernels: f64, bytes: f64) {
        self.count += kernels;
        self.seconds += self.on.passes(kernels, bytes);
    }

    pub(super) fn cost(&self) -> WorkCost {
        self.on.cost(self.count, self.seconds)
    }
}
