//! Attention that never holds all scores in memory.
//!
//! Blocks of queries are computed one after the other, as in FlashAttention (Dao et al. 2022,
//! arXiv:2205.14135), but each with all the keys that one of its queries may see. The backward
//! computes the scores again.

mod group;
mod place;

use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, CustomOp1, CustomOp3, Layout, Result, Shape, Tensor, WithDType};

pub(crate) use self::group::BLOCK;
use self::group::{Gradients, Group};
use self::place::{Places, Sizes};
use super::composed;
use super::element::{Element, Lent, check_dtypes, elements, gradient, with_element, zeros};
use super::parts::in_parallel;
use super::scores::{Scores, Softmax};

const NAME: &str = "attention";

/// Computes the attention of queries `q`, `[batch, queries, heads, dim]`, to keys `k` and values
/// `v`, `[batch, keys, key-value heads, dim]`: the softmax over the keys of the products `q k^T`,
/// which are scaled, capped and masked as `scores` has it, times `v`, in the shape of `q`. Each
/// key-value head serves an equal number of heads, which follow one another.
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
    let sizes = Sizes::of([q, k, v])?;
    check_dtypes(NAME, &[q])?;
    scores.check(NAME, &sizes.scores())?;
    if !q.device().is_cpu() {
        return composed::attention([q, k, v], scores);
    }
    let op = Attention::new(Places::of_three(sizes), scores)?;
    q.contiguous()?.apply_op3(&k.contiguous()?, &v.contiguous()?, op)
}

/// Computes [`attention`] of queries, keys and values in one tensor, `[batch, length, 3, heads,
/// dim]`, such as the output of one linear layer. The output is `[batch, length, heads, dim]`.
///
/// On a GPU this is [`composed::attention_packed`].
///
/// # Errors
/// The errors of [`attention`].
pub fn attention_packed(qkv: &Tensor, scores: &Scores<'_>) -> Result<Tensor> {
    let sizes = Sizes::of_packed(qkv)?;
    check_dtypes(NAME, &[qkv])?;
    scores.check(NAME, &sizes.scores())?;
    if !qkv.device().is_cpu() {
        return composed::attention_packed(qkv, scores);
    }
    qkv.contiguous()?.apply_op1(Attention::new(Places::of_one(sizes), scores)?)
}

struct Attention {
    places: Places,
    softmax: Softmax,
}

impl Attention {
    fn new(places: Places, scores: &Scores<'_>) -> Result<Self> {
        let softmax = Softmax::new(NAME, &places.sizes.scores(), scores)?;
        Ok(Self { places, softmax })
    }

    fn forward<T: Element>(&self, inputs: [&[T]; 3]) -> Result<Vec<T>> {
        let Places { sizes, inputs: places, output: place } = &self.places;
        let parts = self.softmax.run(sizes.keys, |softmax| {
            sizes.each_group(|index| {
                let [q, k, v] = [0, 1, 2].map(|input| places[input].read(inputs[input], index));
                Group { sizes, softmax, index }.forward([&q, &k, &v])
            })
        })?;
        let mut output = zeros(sizes.output().iter().product());
        place.write(&mut output, parts.iter().map(Vec::as_slice));
        Ok(output)
    }

    /// Returns the gradients of tracked inputs, by group.
    fn backward<T: Element>(
        &self,
        inputs: [&[T]; 3],
        tracked: [bool; 3],
        g: &[T],
    ) -> Result<Vec<Gradients>> {
        let Places { sizes, inputs: places, output } = &self.places;
        self.softmax.run(sizes.keys, |softmax| {
            sizes.each_group(|index| {
                let [q, k, v] = [0, 1, 2].map(|input| places[input].read(inputs[input], index));
                let g = output.read(g, index);
                Group { sizes, softmax, index }.backward([&q, &k, &v], tracked, &g)
            })
        })
    }

    /// Writes the gradient of an input to its place.
    fn write<T: Element>(&self, to: &mut [T], input: usize, gradients: &[Gradients]) {
        let parts = gradients.iter().filter_map(|gradients| gradients[input].as_deref());
        self.places.inputs[input].write(to, parts);
    }
}

impl Sizes {
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

impl CustomOp1 for Attention {
    fn name(&self) -> &'static str {
        NAME
    }

    fn cpu_fwd(&self, qkv: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        with_element!(qkv.dtype(), NAME, T => {
            let output = self.forward([elements::<T>(qkv, layout)?; 3])?;
            Ok((T::to_cpu_storage_owned(output), self.places.sizes.output().as_slice().into()))
        })
    }

    fn bwd(&self, qkv: &Tensor, _output: &Tensor, g: &Tensor) -> Result<Option<Tensor>> {
        let g = g.detach().contiguous()?;
        let (lent, lent_g) = (Lent::of(qkv), Lent::of(&g));
        with_element!(qkv.dtype(), NAME, T => {
            let gradients = self.backward([lent.elements::<T>()?; 3], [true; 3], lent_g.elements()?)?;
            let mut of_qkv = zeros::<T>(qkv.elem_count());
            (0..3).for_each(|input| self.write(&mut of_qkv, input, &gradients));
            gradient(qkv, of_qkv)
        })
    }
}

impl CustomOp3 for Attention {
    fn name(&self) -> &'static str {
        NAME
    }

    fn cpu_fwd(
        &self,
        q: &CpuStorage,
        q_layout: &Layout,
        k: &CpuStorage,
        k_layout: &Layout,
        v: &CpuStorage,
        v_layout: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        with_element!(q.dtype(), NAME, T => {
            let inputs = [elements::<T>(q, q_layout)?, elements(k, k_layout)?, elements(v, v_layout)?];
            Ok((T::to_cpu_storage_owned(self.forward(inputs)?), q_layout.shape().clone()))
        })
    }

    fn bwd(
        &self,
        q: &Tensor,
        k: &Tensor,
        v: &Tensor,
        _output: &Tensor,
        g: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>, Option<Tensor>)> {
        let g = g.detach().contiguous()?;
        let (lent, lent_g) = ([q, k, v].map(Lent::of), Lent::of(&g));
        with_element!(q.dtype(), NAME, T => {
            let [of_q, of_k, of_v] = lent.each_ref().map(Lent::elements::<T>);
            let tracked = [q, k, v].map(Tensor::track_op);
            let gradients = self.backward([of_q?, of_k?, of_v?], tracked, lent_g.elements()?)?;
            let whole = |of: &Tensor, input| {
                if !of.track_op() {
                    return Ok(None);
                }
                let mut values = zeros::<T>(of.elem_count());
                self.write(&mut values, input, &gradients);
                gradient(of, values)
            };
            Ok((whole(q, 0)?, whole(k, 1)?, whole(v, 2)?))
        })
    }
}
