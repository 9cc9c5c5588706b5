//! The kernels of forwards and backwards. The counts are those of a transformer in eager execution, where the framework launches a kernel for each
//! operation. They are properties of programs, not of machines: what a machine makes of them are its numbers.

use hsdp_sharding::{DType, Role, State};

use super::batch::{Batch, Recompute};
use super::kernels::Kernels;
use super::processor::Products;
use super::shapes::{Attention, Product, Scores, UnitShapes};

/// Kernels around a product beside it: bias, activation or norm, residual sum or gate.
const AROUND: f64 = 3.0;
/// Elements that they read and write in memory, by element of the product's input and result: a kernel finds half of its elements in the cache,
/// where the kernel before has left them.
const AROUND_PASSES: f64 = 0.5;
/// A backward has twice as many of both: for the gradients, and for what the forward kept.
const BACKWARD: f64 = 2.0;

/// Stored scores are scaled and masked, normalized, dropped out, and the results joined, in kernels of their own: two of them read and write all
/// scores.
const SCORES: (f64, f64) = (4.0, 4.0);
/// The backward of these reads and writes gradients, and reads what was normalized.
const SCORES_BACKWARD: (f64, f64) = (5.0, 5.0);
/// FlashAttention's backward has five products where its forward has two.
const FUSED_BACKWARD: f64 = 2.5;

/// A lookup reads rows, and writes them.
const LOOKUP: (f64, f64) = (1.0, 2.0);
/// The gradient of a parameter is converted, and added to those of earlier microbatches, which are read for it.
const GRADIENT: (f64, f64) = (2.0, 1.0);

/// The kernels of a loss over classes, and their bytes by class, in f32: convert (6), maximum (4), difference (8), exponential (8), sum (4), quotient
/// (8); the others are over tokens.
const LOSS: (f64, f64) = (8.0, 38.0);
/// Its gradient: copy (8), product with the seed (8), convert (6), difference at the target.
const LOSS_BACKWARD: (f64, f64) = (4.0, 22.0);

impl Kernels<'_> {
    /// The forward of a unit.
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

    /// The backward of a unit, with what it computes again, and the sums of gradients.
    pub(super) fn backward(&mut self, unit: &UnitShapes, batch: &Batch) {
        match (batch.recompute, &unit.attention) {
            (Recompute::Unit, _) => self.forward(unit, batch),
            (Recompute::Attention, Some(attention)) if attention.scores == Scores::Stored => {
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

    /// The product of activations with a matrix.
    pub(super) fn product_forward(&mut self, product: &Product, batch: &Batch) {
        let [a, b] = product.dims;
        self.product(&product.with([batch.rows(), a, b]));
    }

    /// The gradients of a tied product, with the sum of the matrix's.
    pub(super) fn product_backward(&mut self, product: &Product, batch: &Batch) {
        self.gradients(product, batch);
        if product.role == Role::Trainable {
            self.passes(GRADIENT.0, GRADIENT.1 * product.elements());
        }
    }

    /// The gradient of a product's inputs, and that of its matrix if it is trained.
    fn gradients(&mut self, product: &Product, batch: &Batch) {
        let [a, b] = product.dims;
        self.product(&product.with([batch.rows(), b, a]));
        if product.role == Role::Trainable {
            self.product(&product.with([a, b, batch.rows()]));
        }
    }

    fn attention_forward(&mut self, attention: &Attention, batch: &Batch) {
        match attention.scores {
            Scores::Stored => {
                self.attention_products(attention, batch);
                self.passes(SCORES.0, SCORES.1 * batch.scores(attention));
            }
            Scores::Fused | Scores::Window(_) => self.fused_attention(attention, batch, 1.0),
        }
    }

    fn attention_backward(&mut self, attention: &Attention, batch: &Batch) {
        match attention.scores {
            Scores::Stored => {
                self.attention_products(attention, batch);
                self.attention_products(attention, batch);
                self.passes(SCORES_BACKWARD.0, SCORES_BACKWARD.1 * batch.scores(attention));
            }
            Scores::Fused | Scores::Window(_) => {
                self.fused_attention(attention, batch, FUSED_BACKWARD);
            }
        }
    }

    /// Queries with keys, and scores with values; or the two of a gradient.
    fn attention_products(&mut self, attention: &Attention, batch: &Batch) {
        let (t, size) = (batch.context, attention.size);
        let count = batch.sequences as f64 * attention.heads as f64;
        // A row of the scores has a score for each token, and a row of any other matrix has a head.
        let strides = [t, size];
        self.product(&Products { count, sizes: [t, t, size], strides });
        self.product(&Products { count, sizes: [t, size, t], strides });
    }

    /// Adds the two products over the pairs of tokens that have a score, `times` times. Queries,
    /// keys, values and results pass memory.
    fn fused_attention(&mut self, attention: &Attention, batch: &Batch, times: f64) {
        let flops = 4.0 * batch.scores(attention) * attention.size as f64;
        let elements = 4.0 * batch.tokens() * attention.heads as f64 * attention.size as f64;
        self.fused(times * flops, times * elements);
    }

    /// A loss over `classes` a token, and its gradient.
    pub(super) fn loss(&mut self, classes: usize, batch: &Batch) {
        let results = batch.tokens() * classes as f64;
        self.passes_over(LOSS.0, LOSS.1 * results);
        self.passes_over(LOSS_BACKWARD.0, LOSS_BACKWARD.1 * results);
    }
}

impl Product {
    /// Returns the product of the forward, or of a gradient, with these numbers of rows, columns
    /// and summands.
    ///
    /// Activations have a row for each token, of as many elements as one dim of the matrix, and
    /// results have that of the other dim. The matrix itself has rows of one of both. So tokens are
    /// the number of rows of a matrix in memory, and never the length of one: also where they are
    /// summed over, in the gradient of the matrix.
    const fn with(&self, sizes: [usize; 3]) -> Products {
        Products { count: 1.0, sizes, strides: self.dims }
    }
}

impl Batch {
    /// Rows of the matrix of activations.
    const fn rows(&self) -> usize {
        self.sequences.saturating_mul(self.context)
    }

    /// Returns the number of scores: one for each head and pair of tokens, and if they are fused,
    /// for half of all pairs, or for those within the window.
    pub(super) fn scores(&self, attention: &Attention) -> f64 {
        let context = self.context as f64;
        let of_token = match attention.scores {
            Scores::Stored => context,
            Scores::Fused => context / 2.0,
            Scores::Window(window) => {
                let window = context.min(window as f64);
                // The first tokens have fewer tokens before them than the window is long.
                window * (1.0 - window / (2.0 * context))
            }
        };
        attention.heads as f64 * self.tokens() * of_token
    }
}

/// The bytes that the update of a parameter reads and writes, by element: the gradient, the f32 master, the `state` of its optimizer, and the copy
/// of the master in the dtype in which peers gather it.
///
/// Updates of whole matrices, as by Muon, are refused before.
#[must_use]
pub(crate) fn update_bytes(state: State, gradient: DType, copy: DType) -> f64 {
    let [gradient, copy, word] =
        [gradient, copy, DType::F32].map(|dtype| dtype.size_bytes() as f64);
    let kept = match state {
        State::Elements(count) => 2.0 * word * count as f64,
        // Two bytes an element, and two words a block.
        State::EightBit { block } => 2.0 * (2.0 + 2.0 * word / block as f64),
        // The gradient is read once more, for the sums of rows and columns.
        State::Factored => gradient,
        State::Muon => 2.0 * word,
        // Its owner computes with it, wherever that is.
        State::Owned(_) => 0.0,
    };
    let copied = if copy < word { copy } else { 0.0 };
    gradient + 2.0 * word + kept + copied
}
