//! The kernels of a piece of work, and their time.

use hsdp_sharding::{DType, Role, State};

use super::shapes::{AttentionScores, AttentionShape, LayerProduct, UnitShapes};
use super::{Batch, Recompute};
use crate::host::ModelPlacement;
use crate::machine::{Machine, MachineKind};
use crate::{Error, Time, WorkCost};

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
    fn product(&mut self, products: &ProductKernel) {
        self.count += 1.0;
        self.seconds += self.on.product(products, self.dtype);
    }

    /// Adds a kernel of `flops` operations that reads and writes `elements` elements.
    fn fused(&mut self, flops: f64, elements: f64) {
        self.count += 1.0;
        let bytes = elements * self.dtype.size_bytes() as f64;
        self.seconds += self.on.fused(flops, bytes, self.dtype);
    }

    /// Adds `kernels` kernels that read and write `elements` elements in all.
    fn passes(&mut self, kernels: f64, elements: f64) {
        self.passes_over(kernels, elements * self.dtype.size_bytes() as f64);
    }

    /// Adds `kernels` kernels that read and write `bytes` bytes in all.
    fn passes_over(&mut self, kernels: f64, bytes: f64) {
        self.count += kernels;
        self.seconds += self.on.passes(kernels, bytes);
    }

    pub(super) fn cost(&self) -> WorkCost {
        self.on.cost(self.count, self.seconds)
    }

    /// Adds the forward of a unit.
    pub(super) fn forward(&mut self, unit: &UnitShapes, batch: &Batch) {
        for width in &unit.lookups {
            self.passes(LOOKUP.0, LOOKUP.1 * batch.tokens() * *width as f64);
        }
        unit.products.iter().for_each(|product| self.product_forward(product, batch));
        let around = AROUND_PASSES * batch.tokens() * unit.widths();
        self.passes(AROUND * unit.products.len() as f64, around);
        if let Some(attention) = &unit.attention {
            self.attention_forward(attention, batch);
        }
    }

    /// Adds the backward of a unit, with the forward that it computes again, and the sums of
    /// gradients.
    pub(super) fn backward(&mut self, unit: &UnitShapes, batch: &Batch) {
        match (batch.recompute, &unit.attention) {
            (Recompute::Unit, _) => self.forward(unit, batch),
            (Recompute::Attention, Some(attention))
                if attention.scores == AttentionScores::Stored =>
            {
                self.attention_forward(attention, batch);
            }
            (Recompute::Attention | Recompute::Nothing, _) => {}
        }
        if let Some(attention) = &unit.attention {
            self.attention_backward(attention, batch);
        }
        let around = BACKWARD * AROUND_PASSES * batch.tokens() * unit.widths();
        self.passes(BACKWARD * AROUND * unit.products.len() as f64, around);
        unit.products.iter().for_each(|product| self.gradients(product, batch));
        for width in &unit.lookups {
            self.passes(LOOKUP.0, LOOKUP.1 * batch.tokens() * *width as f64);
        }
        let (params, elements) = unit.trained;
        self.passes(GRADIENT.0 * params as f64, GRADIENT.1 * elements);
    }

    /// Adds the product of activations with a matrix.
    pub(super) fn product_forward(&mut self, product: &LayerProduct, batch: &Batch) {
        let [a, b] = product.dims;
        self.product(&product.with([batch.rows(), a, b]));
    }

    /// Adds the gradients of a tied product, with the sum of the matrix's.
    pub(super) fn product_backward(&mut self, product: &LayerProduct, batch: &Batch) {
        self.gradients(product, batch);
        if product.role == Role::Trainable {
            self.passes(GRADIENT.0, GRADIENT.1 * product.elements());
        }
    }

    /// Adds the gradient of a product's inputs, and the matrix's gradient if it is trained.
    fn gradients(&mut self, product: &LayerProduct, batch: &Batch) {
        let [a, b] = product.dims;
        self.product(&product.with([batch.rows(), b, a]));
        if product.role == Role::Trainable {
            self.product(&product.with([a, b, batch.rows()]));
        }
    }

    fn attention_forward(&mut self, attention: &AttentionShape, batch: &Batch) {
        match attention.scores {
            AttentionScores::Stored => {
                self.attention_products(attention, batch);
                self.passes(SCORES.0, SCORES.1 * batch.scores(attention));
            }
            AttentionScores::Fused | AttentionScores::Window(_) => {
                self.fused_attention(attention, batch, 1.0)
            }
        }
    }

    fn attention_backward(&mut self, attention: &AttentionShape, batch: &Batch) {
        match attention.scores {
            AttentionScores::Stored => {
                self.attention_products(attention, batch);
                self.attention_products(attention, batch);
                self.passes(SCORES_BACKWARD.0, SCORES_BACKWARD.1 * batch.scores(attention));
            }
            AttentionScores::Fused | AttentionScores::Window(_) => {
                self.fused_attention(attention, batch, FUSED_BACKWARD);
            }
        }
    }

    /// Queries with keys, and scores with values; or the two of a gradient.
    fn attention_products(&mut self, attention: &AttentionShape, batch: &Batch) {
        let t = batch.context;
        let size = attention.size;
        let count = batch.sequences as f64 * attention.heads as f64;
        // A row of the scores has a score for each token, and a row of any other matrix has a head.
        let strides = [t, size];
        self.product(&ProductKernel { count, sizes: [t, t, size], strides });
        self.product(&ProductKernel { count, sizes: [t, size, t], strides });
    }

    /// Adds the two products over the pairs of tokens that have a score, `times` times. Queries,
    /// keys, values and results pass memory.
    fn fused_attention(&mut self, attention: &AttentionShape, batch: &Batch, times: f64) {
        let flops = 4.0 * batch.scores(attention) * attention.size as f64;
        let elements = 4.0 * batch.tokens() * attention.heads as f64 * attention.size as f64;
        self.fused(times * flops, times * elements);
    }

    /// Adds a loss over `classes` a token, and its gradient.
    pub(super) fn loss(&mut self, classes: usize, batch: &Batch) {
        let results = batch.tokens() * classes as f64;
        self.passes_over(LOSS.0, LOSS.1 * results);
        self.passes_over(LOSS_BACKWARD.0, LOSS_BACKWARD.1 * results);
    }
}

// The counts are those of a transformer in eager execution, in which the framework launches a
// kernel for each operation. They are properties of programs, not of machines: a machine's numbers
// turn them into times.

/// Kernels around a product beside it: bias, activation or norm, residual sum or gate.
const AROUND: f64 = 3.0;
/// Elements that they read and write in memory, by element of the product's input and result: a
/// kernel finds half of its elements in the cache, where the kernel before has left them.
const AROUND_PASSES: f64 = 0.5;
/// A backward has twice as many of both: for the gradients, and for what the forward kept.
const BACKWARD: f64 = 2.0;

/// Stored scores are scaled and masked, normalized, dropped out, and the results joined, in kernels
/// of their own: two of them read and write all scores.
const SCORES: (f64, f64) = (4.0, 4.0);
/// The backward of these reads and writes gradients, and reads what was normalized.
const SCORES_BACKWARD: (f64, f64) = (5.0, 5.0);
/// FlashAttention's backward has five products where its forward has two.
const FUSED_BACKWARD: f64 = 2.5;

/// A lookup reads rows, and writes them.
const LOOKUP: (f64, f64) = (1.0, 2.0);
/// The gradient of a parameter is converted, and added to those of earlier microbatches, which are
/// read for it.
const GRADIENT: (f64, f64) = (2.0, 1.0);

/// The kernels of a loss over classes, and their bytes by class, in f32: convert (6), maximum (4),
/// difference (8), exponential (8), sum (4), quotient (8); the others are over tokens.
const LOSS: (f64, f64) = (8.0, 38.0);
/// Its gradient: copy (8), product with the seed (8), convert (6), difference at the target.
const LOSS_BACKWARD: (f64, f64) = (4.0, 22.0);

impl LayerProduct {
    /// Returns the product of the forward, or of a gradient, with these numbers of rows, columns
    /// and summands.
    ///
    /// Activations have a row for each token, of as many elements as one dim of the matrix, and
    /// results have that of the other dim. The matrix itself has rows of one of both. So tokens are
    /// the number of rows of a matrix in memory, and never the length of one: also where they are
    /// summed over, in the gradient of the matrix.
    const fn with(&self, sizes: [usize; 3]) -> ProductKernel {
        ProductKernel { count: 1.0, sizes, strides: self.dims }
    }
}

impl Batch {
    /// Rows of the matrix of activations.
    const fn rows(&self) -> usize {
        self.sequences.saturating_mul(self.context)
    }

    /// Returns the number of scores: one for each head and pair of tokens, and if they are fused,
    /// for half of all pairs, or for those within the window.
    pub(super) fn scores(&self, attention: &AttentionShape) -> f64 {
        let context = self.context as f64;
        let of_token = match attention.scores {
            AttentionScores::Stored => context,
            AttentionScores::Fused => context / 2.0,
            AttentionScores::Window(window) => {
                let window = context.min(window as f64);
                // The first tokens have fewer tokens before them than the window is long.
                window * (1.0 - window / (2.0 * context))
            }
        };
        attention.heads as f64 * self.tokens() * of_token
    }
}

/// Returns the bytes that the update of a parameter reads and writes, by element: the f32 gradient,
/// the f32 master, the `state` of its optimizer, and the copy of the master in the dtype in which
/// peers gather it.
///
/// # Panics
/// If the whole parameter is updated at once, as by Muon: `check_update` refuses such plans.
#[must_use]
pub(crate) fn update_bytes(state: State, copy: DType) -> f64 {
    let [copy, word] = [copy, DType::F32].map(|dtype| dtype.size_bytes() as f64);
    let kept = match state {
        State::Elements(count) => 2.0 * word * count as f64,
        // Two bytes an element, and two words a block.
        State::EightBit { block } => 2.0 * (2.0 + 2.0 * word / block as f64),
        // The gradient is read once more, for the sums of rows and columns.
        State::Factored => word,
        State::Muon | State::Owned(_) => unreachable!("updates of whole parameters are refused"),
    };
    let copied = if copy < word { copy } else { 0.0 };
    3.0 * word + kept + copied
}

/// The speed of a rank's card, or of its part of a host's cores and memory.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Processor {
    placement: ModelPlacement,
    /// Speeds in flop/s for each dtype of training: of products with aligned strides, and of
    /// others.
    speeds: [(DType, [f64; 2]); 3],
    /// The flops of a product that reaches half of its speed.
    half: f64,
    /// B/s.
    bandwidth: f64,
    /// Seconds of a kernel beyond its flops or bytes.
    kernel: f64,
    /// Seconds of the host for a launch.
    launch: f64,
}

/// Products of matrices of equal sizes, in one kernel.
#[derive(Clone, Copy, Debug)]
struct ProductKernel {
    /// Products in the kernel.
    pub(super) count: f64,
    /// `m`, `n` and `k`: each product is of an `m` x `k` with a `k` x `n` matrix.
    sizes: [usize; 3],
    /// Elements from the beginning of a row to that of the next, for each matrix in memory: both
    /// inputs and the result. SIMULATOR.md, "Computation", lists them. Two of the three are always
    /// equal.
    strides: [usize; 2],
}

/// Divisor of the bytes of each stride in a product that has its full speed.
const ALIGNMENT: usize = 16;

impl Processor {
    /// Returns the processor of one of `ranks` ranks that compute on a machine at the same time, in
    /// `dtype` unless a unit of the model declares another. Each has its own card; those on a host
    /// share its cores and the bandwidth of its memory.
    ///
    /// # Errors
    /// [`Error::Computation`] if no training computes in `dtype`.
    pub fn new(machine: &Machine, dtype: DType, ranks: usize) -> Result<Self, Error> {
        let Machine { memory, compute, .. } = machine;
        if !dtype.is_of_training() {
            let problem = format!("no training computes in {dtype}: expected f32, bf16 or f16");
            return Err(Error::Computation { problem });
        }
        let (placement, cores, sharing) = match machine.kind {
            MachineKind::Device(_) => (ModelPlacement::Device, 1.0, 1.0),
            MachineKind::Host(_) => (
                ModelPlacement::Host,
                (machine.ranks.value() / ranks as f64).min(1.0),
                ranks as f64,
            ),
        };
        let efficiency = compute.efficiency.value();
        // A fit to aligned steps may leave the number behind that of aligned products.
        let efficiencies = [efficiency, compute.unaligned.value().min(efficiency)];
        let speeds = [DType::F32, DType::BF16, DType::F16].map(|dtype| {
            let peak = compute.peak(dtype).map_or(0.0, |peak| peak.value());
            (dtype, efficiencies.map(|part| peak * part * cores))
        });
        Ok(Self {
            placement,
            speeds,
            half: compute.half.value(),
            bandwidth: memory.bandwidth.value() * memory.efficiency.value() / sharing,
            kernel: compute.kernel.value(),
            launch: compute.launch.value() / cores,
        })
    }

    /// Returns the seconds of a kernel of products.
    fn product(&self, products: &ProductKernel, dtype: DType) -> f64 {
        let ProductKernel { count, sizes, strides } = *products;
        let size = dtype.size_bytes();
        let is_aligned =
            strides.into_iter().all(|it| it.saturating_mul(size).is_multiple_of(ALIGNMENT));
        let speed = self.speeds(dtype)[usize::from(!is_aligned)];
        let [m, n, k] = sizes.map(|dim| dim as f64);
        let elements = count * (m * n + m * k + n * k);
        let computing = 2.0f64.mul_add(count * m * n * k, self.half) / speed;
        computing.max(elements * size as f64 / self.bandwidth) + self.kernel
    }

    /// Returns the flop/s of products in `dtype` with aligned strides, and of others.
    ///
    /// # Panics
    /// If no training computes in `dtype`.
    fn speeds(&self, dtype: DType) -> [f64; 2] {
        let (_, speeds) = self.speeds.iter().find(|(of, _)| *of == dtype).unwrap_or_else(|| {
            panic!("no training computes in {dtype}: expected f32, bf16 or f16")
        });
        *speeds
    }

    /// Returns the seconds of a kernel that computes `flops` operations over `bytes` bytes,
    /// whatever its shape.
    fn fused(&self, flops: f64, bytes: f64, dtype: DType) -> f64 {
        ((flops + self.half) / self.speeds(dtype)[0]).max(bytes / self.bandwidth) + self.kernel
    }

    /// Seconds of `kernels` kernels that read and write so many bytes of memory in all.
    fn passes(&self, kernels: f64, bytes: f64) -> f64 {
        kernels.mul_add(self.kernel, bytes / self.bandwidth)
    }

    /// Returns the cost of one kernel that reads and writes so many bytes, such as the addition of
    /// gradients.
    #[must_use]
    pub fn pass(&self, bytes: u64) -> WorkCost {
        self.cost(1.0, self.passes(1.0, bytes as f64))
    }

    /// Returns the cost of so many kernels, which take so many seconds.
    pub(super) fn cost(&self, kernels: f64, seconds: f64) -> WorkCost {
        let launches = kernels * self.launch;
        match self.placement {
            ModelPlacement::Device => {
                WorkCost { host: Time::saturating(launches), device: Time::saturating(seconds) }
            }
            ModelPlacement::Host => {
                WorkCost { host: Time::saturating(launches + seconds), device: Time::ZERO }
            }
        }
    }
}
