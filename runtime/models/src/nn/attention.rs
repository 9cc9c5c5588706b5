//! Attention that never holds all scores in memory.
//!
//! Blocks of queries are computed one after the other, as in FlashAttention (Dao et al. 2022,
//! arXiv:2205.14135), but each with all the keys that one of its queries may see. The backward
//! computes the scores again.

use std::ops::Range;

use candle_core::{CpuStorage, Result, Shape, Tensor, bail};
use half::bf16;
use hsdp_candle::Gradient;
use hsdp_kernels::{Fold, FreshVec, HostBuffer, Matrix, Threads, Values, cast, matmul, vectorized};

use super::composed;
use super::element::{LayerElement, LayerInput, check_dtypes, with_element};
use super::factors::Factors;
use super::layer::{CpuLayer, LayerGradients, apply, output};
use super::rows::in_parallel;
use super::scores::{Scores, Softmax, SoftmaxKernel, shown};

const NAME: &str = "attention";

/// Computes the attention of queries `q`, `[batch, queries, heads, dim]`, to keys `k` and values
/// `v`, `[batch, keys, key-value heads, dim]`: the softmax over the keys of the products `q k^T`,
/// which are scaled, capped and masked as `scores` has it, times `v`, in the shape of `q`. Each
/// key-value head serves an equal number of heads, which follow one another.
///
/// On the CPU, if the inputs are bf16, the other factors of products are rounded to bf16: the
/// shares of the softmax (in the forward before they are divided by their sum), the gradient of the
/// output, and the gradients of the products `q k^T`.
///
/// The mask has to fit scores of `[batch, heads, queries, keys]`. A query that may see no key has
/// the output 0. With a [`Mask::Window`](super::Mask::Window) time and memory grow with the window,
/// and not with the number of keys. Threads share the work by sequence and key-value head. On a GPU
/// this is [`composed::attention`].
///
/// # Errors
/// If the shapes or dtypes do not fit, a dtype is not f32, bf16 or f16, or cap or mask do not fit,
/// as for [`softmax_of_scores`](super::softmax_of_scores).
pub fn attention([q, k, v]: [&Tensor; 3], scores: &Scores<'_>) -> Result<Tensor> {
    let sizes = AttentionSizes::of([q, k, v])?;
    check_dtypes(NAME, &[q])?;
    scores.check(NAME, &sizes.scores())?;
    if !q.device().is_cpu() {
        return composed::attention([q, k, v], scores);
    }
    let op = AttentionOp::new(QkvPlaces::of_three(sizes), scores)?;
    apply(op, [q, k, v])
}

/// Computes [`attention`] of queries, keys and values in one tensor, `[batch, length, 3, heads,
/// dim]`, such as the output of one linear layer. The output is `[batch, length, heads, dim]`.
///
/// On a GPU this is [`composed::attention_packed`].
///
/// # Errors
/// The errors of [`attention`].
pub fn attention_packed(qkv: &Tensor, scores: &Scores<'_>) -> Result<Tensor> {
    let sizes = AttentionSizes::of_packed(qkv)?;
    check_dtypes(NAME, &[qkv])?;
    scores.check(NAME, &sizes.scores())?;
    if !qkv.device().is_cpu() {
        return composed::attention_packed(qkv, scores);
    }
    apply(AttentionOp::new(QkvPlaces::of_one(sizes), scores)?, [qkv])
}

struct AttentionOp {
    places: QkvPlaces,
    softmax: Softmax,
}

impl AttentionOp {
    fn new(places: QkvPlaces, scores: &Scores<'_>) -> Result<Self> {
        let softmax = Softmax::new(NAME, &places.sizes.scores(), scores)?;
        Ok(Self { places, softmax })
    }

    fn mixed<T: LayerElement>(&self, inputs: [Values<'_>; 3], factors: Factors) -> Result<Vec<T>> {
        let QkvPlaces { sizes, inputs: places, output: place } = &self.places;
        let parts = self.softmax.run(sizes.keys, |softmax| {
            sizes.each_group(|index| {
                let heads = [0, 1, 2]
                    .map(|input| factors.convert(places[input].read(inputs[input], index)));
                HeadGroup { sizes, softmax, factors, index }.forward(heads.each_ref())
            })
        })?;
        let heads = parts.iter().map(Vec::as_slice).collect();
        Ok(in_positions(sizes.batch, &[(*place, heads)]))
    }

    /// Returns the gradients of tracked inputs, by group.
    fn gradients(
        &self,
        inputs: [Values<'_>; 3],
        factors: Factors,
        tracked: [bool; 3],
        g: &[f32],
    ) -> Result<Vec<QkvGradients>> {
        let QkvPlaces { sizes, inputs: places, output } = &self.places;
        self.softmax.run(sizes.keys, |softmax| {
            sizes.each_group(|index| {
                let heads = [0, 1, 2]
                    .map(|input| factors.convert(places[input].read(inputs[input], index)));
                let g = factors.convert(output.read(Values::F32(g), index));
                let group = HeadGroup { sizes, softmax, factors, index };
                group.backward(heads.each_ref(), tracked, &g)
            })
        })
    }

    /// Returns the gradients of inputs that are in one tensor.
    fn joined(&self, inputs: &[usize], gradients: &[QkvGradients]) -> Vec<f32> {
        let of_input = |input: &usize| {
            let heads = gradients.iter().filter_map(|it| it[*input].as_deref()).collect();
            (self.places.inputs[*input], heads)
        };
        let inputs: Vec<_> = inputs.iter().map(of_input).collect();
        in_positions(self.places.sizes.batch, &inputs)
    }
}

impl AttentionSizes {
    /// Computes a result for each key-value head and the heads that it serves. Threads share the
    /// work.
    fn each_group<R: Send>(&self, result: impl Fn(usize) -> R + Send + Sync) -> Vec<R> {
        let groups = self.batch * self.kv_heads;
        match rayon::current_num_threads() {
            // In a pool of one thread, ranks that are threads would wait for each other.
            1 => (0..groups).map(result).collect(),
            _ => in_parallel(groups, result),
        }
    }
}

impl CpuLayer<1> for AttentionOp {
    fn name(&self) -> &'static str {
        NAME
    }

    fn forward(&self, [qkv]: [LayerInput<'_>; 1]) -> Result<(CpuStorage, Shape)> {
        let inputs = [qkv.values(NAME)?; 3];
        let dims = self.places.sizes.output();
        with_element!(qkv.dtype(), NAME, T => {
            output(self.mixed::<T>(inputs, Factors::of(&inputs))?, dims.as_slice())
        })
    }

    fn backward(&self, [qkv]: [LayerInput<'_>; 1], g: &Gradient) -> Result<LayerGradients<1>> {
        let inputs = [qkv.values(NAME)?; 3];
        let gradients = self.gradients(inputs, Factors::of(&inputs), [true; 3], g.elements())?;
        Ok([qkv.gradient(|| Ok(self.joined(&[0, 1, 2], &gradients)))?])
    }
}

impl CpuLayer<3> for AttentionOp {
    fn name(&self) -> &'static str {
        NAME
    }

    fn forward(&self, [q, k, v]: [LayerInput<'_>; 3]) -> Result<(CpuStorage, Shape)> {
        let inputs = [q.values(NAME)?, k.values(NAME)?, v.values(NAME)?];
        with_element!(q.dtype(), NAME, T => {
            output(self.mixed::<T>(inputs, Factors::of(&inputs))?, q.dims())
        })
    }

    fn backward(&self, [q, k, v]: [LayerInput<'_>; 3], g: &Gradient) -> Result<LayerGradients<3>> {
        let tracked = [q, k, v].map(LayerInput::is_tracked);
        let inputs = [q.values(NAME)?, k.values(NAME)?, v.values(NAME)?];
        let gradients = self.gradients(inputs, Factors::of(&inputs), tracked, g.elements())?;
        let whole =
            |of: LayerInput<'_>, input| of.gradient(|| Ok(self.joined(&[input], &gradients)));
        Ok([whole(q, 0)?, whole(k, 1)?, whole(v, 2)?])
    }
}

/// Sizes of an attention.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct AttentionSizes {
    batch: usize,
    queries: usize,
    keys: usize,
    heads: usize,
    kv_heads: usize,
    dim: usize,
}

impl AttentionSizes {
    fn of([q, k, v]: [&Tensor; 3]) -> Result<Self> {
        let dims = [q, k, v].map(Tensor::dims);
        let alike = k.dtype() == q.dtype() && v.dtype() == q.dtype() && k.dims() == v.dims();
        match dims {
            [&[batch, queries, heads, dim], &[of_k, keys, kv_heads, dim_of_k], _]
                if alike
                    && (of_k, dim_of_k) == (batch, dim)
                    && kv_heads > 0
                    && heads.is_multiple_of(kv_heads) =>
            {
                Ok(Self { batch, queries, keys, heads, kv_heads, dim })
            }
            [of_q, of_k, of_v] => {
                let [q, k, v] = [q, k, v].map(|tensor| tensor.dtype().as_str());
                bail!(
                    "{NAME}: q is {q} {of_q:?}, k is {k} {of_k:?} and v is {v} {of_v:?}: they need one dtype, [batch, queries, heads, dim], and twice [batch, keys, key-value heads, dim], where the number of key-value heads divides that of heads"
                )
            }
        }
    }

    fn of_packed(qkv: &Tensor) -> Result<Self> {
        match *qkv.dims() {
            [batch, length, 3, heads, dim] if heads > 0 => {
                Ok(Self { batch, queries: length, keys: length, heads, kv_heads: heads, dim })
            }
            ref dims => {
                bail!("{NAME}: qkv has the shape {dims:?}, not [batch, length, 3, heads, dim]")
            }
        }
    }

    /// Returns the dims of the scores.
    fn scores(&self) -> [usize; 4] {
        [self.batch, self.heads, self.queries, self.keys]
    }

    /// Returns the dims of the output.
    fn output(&self) -> [usize; 4] {
        [self.batch, self.queries, self.heads, self.dim]
    }
}

/// Places of the heads in inputs and output.
#[derive(Clone, Copy, Debug)]
struct QkvPlaces {
    sizes: AttentionSizes,
    /// Places in queries, keys and values.
    inputs: [HeadPlace; 3],
    output: HeadPlace,
}

impl QkvPlaces {
    /// Returns the places in three tensors.
    fn of_three(sizes: AttentionSizes) -> Self {
        let AttentionSizes { queries, keys, heads, kv_heads, dim, .. } = sizes;
        let q = HeadPlace::new([queries, kv_heads, heads / kv_heads, dim]);
        let k = HeadPlace::new([keys, kv_heads, 1, dim]);
        Self { sizes, inputs: [q, k, k], output: q }
    }

    /// Returns the places in one tensor, in which queries, keys and values of a position follow one
    /// another.
    fn of_one(sizes: AttentionSizes) -> Self {
        let AttentionSizes { queries, heads, dim, .. } = sizes;
        let row = heads * dim;
        let output = HeadPlace::new([queries, heads, 1, dim]);
        let input = |index| HeadPlace { start: index * row, stride: 3 * row, ..output };
        Self { sizes, inputs: [0, 1, 2].map(input), output }
    }
}

/// Places of the heads in a tensor. Each `shared` heads that follow one another belong to a group.
#[derive(Clone, Copy, Debug)]
struct HeadPlace {
    start: usize,
    /// Number of elements from a position to the next.
    stride: usize,
    positions: usize,
    groups: usize,
    shared: usize,
    dim: usize,
}

impl HeadPlace {
    /// Returns the places in a tensor `[batch, positions, groups * shared, dim]`.
    fn new([positions, groups, shared, dim]: [usize; 4]) -> Self {
        Self { start: 0, stride: groups * shared * dim, positions, groups, shared, dim }
    }

    /// Returns the start of each row of a group, head by head and by position in each head.
    fn rows(self, group: usize) -> impl Iterator<Item = usize> {
        let batch = group / self.groups;
        let group = group % self.groups;
        let heads = group * self.shared..(group + 1) * self.shared;
        heads.flat_map(move |head| {
            let start = self.start + batch * self.positions * self.stride + head * self.dim;
            (0..self.positions).map(move |position| start + position * self.stride)
        })
    }

    /// Copies the heads of a group, `[shared, positions, dim]`.
    fn read(self, from: Values<'_>, group: usize) -> HostBuffer {
        match from {
            Values::F32(from) => HostBuffer::F32(self.copy(from, group)),
            Values::F16(from) => HostBuffer::F16(self.copy(from, group)),
            Values::BF16(from) => HostBuffer::BF16(self.copy(from, group)),
        }
    }

    fn copy<T: LayerElement>(self, from: &[T], group: usize) -> Vec<T> {
        let mut heads = Vec::with_capacity(self.shared * self.positions * self.dim);
        for start in self.rows(group) {
            heads.extend_from_slice(&from[start..start + self.dim]);
        }
        heads
    }

    /// Returns the row of a head in the heads of its group.
    fn row(self, heads: &[f32], head: usize, position: usize) -> &[f32] {
        &heads[(head * self.positions + position) * self.dim..][..self.dim]
    }
}

/// Returns the tensor `[batch, positions, inputs, heads, dim]` of inputs that have the same number
/// of positions. Each has the heads of all groups, one group after the other.
fn in_positions<T: LayerElement>(batch: usize, inputs: &[(HeadPlace, Vec<&[f32]>)]) -> Vec<T> {
    let len = |(place, _): &(HeadPlace, _)| {
        batch * place.positions * place.groups * place.shared * place.dim
    };
    let len = inputs.iter().map(len).sum();
    let mut tensor = FreshVec::new(len);
    if let Some(mut rest) = tensor.parts(len.max(1)).next() {
        let positions = inputs[0].0.positions;
        for index in 0..batch * positions {
            let batch = index / positions;
            let position = index % positions;
            for (place, groups) in inputs {
                for heads in &groups[batch * place.groups..][..place.groups] {
                    for head in 0..place.shared {
                        let row = place.row(heads, head, position);
                        cast(T::values_mut(rest.take(place.dim)), row);
                    }
                }
            }
        }
    }
    tensor.into_vec()
}

/// Number of queries in a block. With a thousand keys, two blocks of scores in f32 and one in bf16
/// fit in the second-level cache.
pub(crate) const BLOCK: usize = 64;

/// Gradients of queries, keys and values in the layout that the group reads. `None` if candle does
/// not track the input.
type QkvGradients = [Option<Vec<f32>>; 3];

/// The heads that one key-value head serves, in one sequence.
struct HeadGroup<'a> {
    sizes: &'a AttentionSizes,
    softmax: &'a SoftmaxKernel<'a>,
    factors: Factors,
    index: usize,
}

/// A block of queries of one head.
struct QueryBlock {
    /// Index of the first query among the rows of scores.
    row: usize,
    /// Range of the queries in the group.
    queries: Range<usize>,
    /// Range of keys that one of the queries may see.
    keys: Range<usize>,
}

impl QueryBlock {
    /// Returns the number of scores.
    fn scores(&self) -> usize {
        self.queries.len() * self.keys.len()
    }
}

impl HeadGroup<'_> {
    /// Returns the blocks that see a key.
    fn blocks(&self) -> impl Iterator<Item = QueryBlock> {
        let AttentionSizes { queries, heads, kv_heads, .. } = *self.sizes;
        let shared = heads / kv_heads;
        (0..shared)
            .flat_map(move |head| {
                let before = head * queries;
                (0..queries).step_by(BLOCK).map(move |start| {
                    let end = queries.min(start + BLOCK);
                    let row = self.index * shared * queries + before + start;
                    let last = row + end - start - 1;
                    let keys = self.softmax.visible(row).start..self.softmax.visible(last).end;
                    QueryBlock { row, queries: before + start..before + end, keys }
                })
            })
            .filter(|block| !block.keys.is_empty())
    }

    /// Returns memory for the scores of any block, in f32 and in bf16. The latter is empty if the
    /// factors are f32.
    fn room(&self) -> (Vec<f32>, Vec<bf16>) {
        let most = self.blocks().map(|block| block.scores()).max().unwrap_or(0);
        let rounded = if self.factors == Factors::F32 { 0 } else { most };
        (vec![0.0; most], vec![bf16::ZERO; rounded])
    }

    /// Returns some rows of queries, keys or values as a matrix.
    fn matrix<'a>(&self, heads: &'a HostBuffer, rows: Range<usize>) -> Matrix<'a> {
        let dim = self.sizes.dim;
        Matrix::new(heads.values().slice(rows.start * dim..rows.end * dim), rows.len(), dim)
    }

    /// Replaces the scores of invisible keys with 0, and calls `visit` for each row of a block with
    /// the index of the row and the scores of its visible keys.
    fn each_row(
        &self,
        block: &QueryBlock,
        scores: &mut [f32],
        mut visit: impl FnMut(usize, &mut [f32]),
    ) {
        let first = block.keys.start;
        for (row, scores) in (block.row..).zip(scores.chunks_exact_mut(block.keys.len())) {
            let visible = self.softmax.visible(row);
            visit(row, shown(scores, visible.start - first..visible.end - first));
        }
    }

    /// Returns the output, from queries, keys and values.
    ///
    /// Multiplies the exponentials by the values, and divides the product by the sum of the
    /// exponentials. If all scores of a row are equal, its exponentials are 1, which is exact in
    /// bf16.
    fn forward(&self, [q, k, v]: [&HostBuffer; 3]) -> Vec<f32> {
        let mut output = vec![0.0; q.len()];
        let dim = self.sizes.dim;
        let (mut scores, mut narrow) = self.room();
        let mut scales = [0.0; BLOCK];
        for block in self.blocks() {
            let queries = block.queries.clone();
            let keys = block.keys.clone();
            let scores = &mut scores[..block.scores()];
            let output = &mut output[queries.start * dim..queries.end * dim];
            let q = self.matrix(q, queries.clone());
            let [k, v] = [k, v].map(|values| self.matrix(values, keys.clone()));
            matmul(scores, Fold::Replace, [q, k.t()], Threads::One);
            self.each_row(&block, scores, |row, scores| {
                let scale = vectorized(|| self.softmax.exponentials_or_zeros(row, scores));
                scales[row - block.row] = scale;
            });
            let exponentials = self.factor(scores, &mut narrow, &block);
            matmul(output, Fold::Replace, [exponentials, v], Threads::One);
            for (output, scale) in output.chunks_exact_mut(dim.max(1)).zip(scales) {
                output.iter_mut().for_each(|x| *x *= scale);
            }
        }
        output
    }

    /// Returns the gradients of tracked queries, keys and values, from these and the gradient of
    /// the output.
    fn backward(
        &self,
        [q, k, v]: [&HostBuffer; 3],
        tracked: [bool; 3],
        g: &HostBuffer,
    ) -> QkvGradients {
        let dim = self.sizes.dim;
        let zeros = |input: usize, like: &HostBuffer| tracked[input].then(|| vec![0.0; like.len()]);
        let [mut of_q, mut of_k, mut of_v] = [zeros(0, q), zeros(1, k), zeros(2, v)];
        let (mut shares, mut narrow) = self.room();
        let mut of_scores = shares.clone();
        for block in self.blocks() {
            let queries = block.queries.clone();
            let keys = block.keys.clone();
            let [shares, of_scores] =
                [&mut shares, &mut of_scores].map(|room| &mut room[..block.scores()]);
            let [q, g] = [q, g].map(|values| self.matrix(values, queries.clone()));
            let [k, v] = [k, v].map(|values| self.matrix(values, keys.clone()));
            matmul(shares, Fold::Replace, [q, k.t()], Threads::One);
            let products = if self.softmax.is_capped() { shares.to_vec() } else { Vec::new() };
            self.each_row(&block, shares, |row, shares| {
                vectorized(|| self.softmax.shares_or_zeros(row, shares));
            });
            matmul(of_scores, Fold::Replace, [g, v.t()], Threads::One);
            self.to_gradients(&block, shares, of_scores);
            vectorized(|| self.softmax.through_cap(&products, of_scores));
            if let Some(of_v) = &mut of_v {
                let of_v = &mut of_v[keys.start * dim..keys.end * dim];
                let shares = self.factor(shares, &mut narrow, &block);
                matmul(of_v, Fold::Add, [shares.t(), g], Threads::One);
            }
            let of_scores = self.factor(of_scores, &mut narrow, &block);
            if let Some(of_q) = &mut of_q {
                let of_q = &mut of_q[queries.start * dim..queries.end * dim];
                matmul(of_q, Fold::Replace, [of_scores, k], Threads::One);
            }
            if let Some(of_k) = &mut of_k {
                let of_k = &mut of_k[keys.start * dim..keys.end * dim];
                matmul(of_k, Fold::Add, [of_scores.t(), q], Threads::One);
            }
        }
        [of_q, of_k, of_v]
    }

    /// Rounds a block's scores to the form of the factors, in place or into `narrow`, and returns
    /// them as a matrix.
    fn factor<'a>(
        &self,
        scores: &'a mut [f32],
        narrow: &'a mut [bf16],
        block: &QueryBlock,
    ) -> Matrix<'a> {
        let len = scores.len().min(narrow.len());
        let scores = self.factors.round(scores, &mut narrow[..len]);
        Matrix::new(scores, block.queries.len(), block.keys.len())
    }

    /// Replaces the gradients of a block's shares with the gradients of its products, except for
    /// the cap.
    fn to_gradients(&self, block: &QueryBlock, shares: &[f32], gradients: &mut [f32]) {
        let keys = block.keys.len();
        let rows = shares.chunks_exact(keys).zip(gradients.chunks_exact_mut(keys));
        for (shares, gradients) in rows {
            vectorized(|| self.softmax.to_gradients(shares, gradients));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::nn::Mask;

    /// Compares the forms on whole numbers: their sums are exact, so that the order of sums changes
    /// no bit of the factors, and only the last products differ by it.
    #[test]
    fn factors_are_rounded_alike_on_all_processors() {
        let sizes =
            AttentionSizes { batch: 2, queries: 67, keys: 67, heads: 4, kv_heads: 2, dim: 24 };
        let scores = Scores { scale: 0.0625, cap: Some(1.5), mask: Mask::Causal };
        let op = AttentionOp::new(QkvPlaces::of_three(sizes), &scores).expect("an op");
        let whole = |heads: usize, seed: usize| -> Vec<bf16> {
            let number = |it: usize| ((it * 7919 + seed * 104_729) % 9) as f32 - 4.0;
            (0..2 * 67 * heads * 24).map(number).map(bf16::from_f32).collect()
        };
        let [q, k, v] = [whole(4, 1), whole(2, 2), whole(2, 3)];
        let inputs = [&q[..], &k, &v].map(Values::BF16);
        let of_form = |factors, g: &[f32]| {
            let output: Vec<f32> = op.mixed(inputs, factors).expect("an output");
            let gradients = op.gradients(inputs, factors, [true; 3], g).expect("gradients");
            let gradients = (0..3).map(|input| op.joined(&[input], &gradients));
            std::iter::once(output).chain(gradients).collect::<Vec<_>>()
        };
        let apart = |a: &[f32], b: &[f32]| {
            let most = a.iter().fold(0.0_f32, |most, it| it.abs().max(most));
            a.iter().zip(b).map(|(a, b)| (a - b).abs() / most).fold(0.0, f32::max)
        };
        // bf16 has room for whole numbers, and none for the smaller bits of the others.
        for fraction in [0.0, 1.0 / 512.0] {
            let g: Vec<f32> = whole(4, 5).iter().map(|g| g.to_f32() * (1.0 + fraction)).collect();
            let [wide, rounded, narrow] =
                [Factors::F32, Factors::Rounded, Factors::BF16].map(|factors| of_form(factors, &g));
            for ((wide, rounded), narrow) in wide.iter().zip(&rounded).zip(&narrow) {
                assert!(apart(rounded, narrow) <= 1e-6, "{}", apart(rounded, narrow));
                let by_rounding = apart(rounded, wide);
                assert!((1e-4..1e-2).contains(&by_rounding), "{by_rounding}");
            }
        }
    }
}
