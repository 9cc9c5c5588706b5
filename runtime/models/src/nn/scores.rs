//! Softmax over the last dim, for attention scores and other tensors.

use std::ops::Range;

use candle_core::{CpuStorage, DType, Layout, Result, Shape, Tensor, bail};
use hsdp_candle::Gradient;
use hsdp_kernels::Values;

use super::activations::{Cap, exp};
use super::composed;
use super::element::{
    LayerElement, LayerInput, LentTensor, check_dtypes, last_dim, narrow, with_element,
};
use super::layer::{CpuLayer, LayerGradients, apply, output};
use super::rows::{Rows, max, sum, sum_of_pairs};

const NAME: &str = "softmax";

/// Keys that each query may attend to. The last two dims of scores are queries and keys. The last
/// query is at the position of the last key.
#[derive(Clone, Copy, Debug)]
pub enum Mask<'a> {
    /// All keys.
    None,
    /// Keys that are not after the query.
    Causal,
    /// Keys that are not after the query, and less than this number of positions before it. With a
    /// window of 1 a query sees only the key at its own position.
    Window(usize),
    /// Numbers that are added to the scaled and capped scores, minus infinity for hidden keys. The
    /// last dim equals the last dim of the scores, and the dims before it are broadcast. They get
    /// no gradient.
    Additive(&'a Tensor),
}

/// Steps from products of queries and keys to the scores of the softmax.
#[derive(Clone, Copy, Debug)]
pub struct Scores<'a> {
    /// Factor of the products.
    pub scale: f64,
    /// Bound of the scaled products, which become `cap * tanh(score / cap)` as in
    /// [`soft_cap`](super::soft_cap()).
    pub cap: Option<f64>,
    /// Keys that each query may attend to.
    pub mask: Mask<'a>,
}

impl Scores<'_> {
    /// Refuses an invalid cap, and a mask that does not fit scores of these dims.
    pub(super) fn check(&self, op: &'static str, dims: &[usize]) -> Result<()> {
        self.cap.map(|cap| Cap::of(op, cap)).transpose()?;
        match self.mask {
            Mask::None => Ok(()),
            Mask::Causal => check_causal(op, "causal mask", dims),
            Mask::Window(0) => bail!("{op}: a window of 0 keys leaves none: it needs at least one"),
            Mask::Window(_) => check_causal(op, "window", dims),
            Mask::Additive(mask) => check_additive(op, dims, mask),
        }
    }
}

/// Computes the softmax over the last dim of `x`.
///
/// On a GPU this is [`composed::softmax_of_scores`].
///
/// # Errors
/// If `x` is a scalar, or its dtype is not f32, bf16 or f16.
pub fn softmax(x: &Tensor) -> Result<Tensor> {
    softmax_of_scores(x, &Scores { scale: 1.0, cap: None, mask: Mask::None })
}

/// Scales, caps and masks `products`, and computes the softmax over the last dim. A hidden key has
/// the share 0. The shares of a row without a visible key are NaN.
///
/// Scaling, capping and masking take no memory of their own. On a GPU this is
/// [`composed::softmax_of_scores`].
///
/// # Errors
/// If `products` are a scalar, a dtype is not f32, bf16 or f16, or a cap is not positive and finite
/// in f32; with [`Mask::Causal`] and [`Mask::Window`] if the products have one dim, or more queries
/// than keys, or the window is 0; with [`Mask::Additive`] if the mask does not fit the products, or
/// candle tracks its gradient.
pub fn softmax_of_scores(products: &Tensor, scores: &Scores<'_>) -> Result<Tensor> {
    check_dtypes(NAME, &[products])?;
    last_dim(NAME, products)?;
    scores.check(NAME, products.dims())?;
    if !products.device().is_cpu() {
        return composed::softmax_of_scores(products, scores);
    }
    apply(Softmax::new(NAME, products.dims(), scores)?, [products])
}

fn check_causal(op: &str, mask: &str, scores: &[usize]) -> Result<()> {
    match scores {
        [.., queries, keys] if queries <= keys => Ok(()),
        _ => bail!(
            "{op}: scores {scores:?} have no {mask}: it needs at most as many queries as keys"
        ),
    }
}

fn check_additive(op: &'static str, scores: &[usize], mask: &Tensor) -> Result<()> {
    check_dtypes(op, &[mask])?;
    if mask.track_op() {
        bail!("{op}: candle tracks the gradient of the mask, which has none: detach it")
    }
    let fits = mask.dims().last() == scores.last() && mask.broadcast_as(scores).is_ok();
    if !fits {
        bail!("{op}: a mask {:?} does not fit scores {scores:?}", mask.dims())
    }
    Ok(())
}

/// A mask in the form that the op keeps.
enum Hidden {
    None,
    /// Keys after a query and keys outside its window are hidden. The first query comes after
    /// `before` keys.
    Causal {
        queries: usize,
        before: usize,
        window: usize,
    },
    /// Numbers in f32, with the shape of the scores.
    Added(Tensor),
}

impl Hidden {
    /// Returns the mask for scores of these dims. The mask must fit them.
    fn of(scores: &[usize], mask: Mask<'_>) -> Result<Self> {
        let causal = |window| match scores {
            [.., queries, keys] => {
                Self::Causal { queries: *queries, before: keys - queries, window }
            }
            _ => Self::None,
        };
        Ok(match mask {
            Mask::None => Self::None,
            Mask::Causal => causal(usize::MAX),
            Mask::Window(window) => causal(window),
            Mask::Additive(mask) => {
                let mask = mask.to_dtype(DType::F32)?.contiguous()?;
                Self::Added(mask.broadcast_as(scores)?)
            }
        })
    }
}

pub(super) struct Softmax {
    scale: f32,
    cap: Option<Cap>,
    hidden: Hidden,
}

impl Softmax {
    /// Returns the op `op` for scores of these dims. The mask must fit them.
    pub(super) fn new(op: &'static str, dims: &[usize], scores: &Scores<'_>) -> Result<Self> {
        Ok(Self {
            scale: narrow(scores.scale),
            cap: scores.cap.map(|cap| Cap::of(op, cap)).transpose()?,
            hidden: Hidden::of(dims, scores.mask)?,
        })
    }

    /// Runs a kernel for rows of `width` scores, with access to the mask.
    pub(super) fn run<R>(
        &self,
        width: usize,
        kernel: impl FnOnce(&SoftmaxKernel<'_>) -> R,
    ) -> Result<R> {
        let lent = match &self.hidden {
            Hidden::Added(mask) => Some(LentTensor::of(mask)),
            _ => None,
        };
        let added = lent.as_ref().map(|lent| lent.input()?.all()).transpose()?;
        Ok(kernel(&SoftmaxKernel { op: self, width, added }))
    }
}

/// Arithmetic on rows of scores.
pub(super) struct SoftmaxKernel<'a> {
    op: &'a Softmax,
    width: usize,
    /// Numbers of a mask, and their layout.
    added: Option<(&'a [f32], &'a Layout)>,
}

impl SoftmaxKernel<'_> {
    fn forward<T: LayerElement>(&self, products: Values<'_>) -> Vec<T> {
        let rows = Rows { inputs: [products], width: self.width };
        let [shares] = rows.map(|row, [products], [shares]| {
            let visible = self.visible(row);
            let shares = shown(shares, visible.clone());
            shares.copy_from_slice(&products[visible]);
            self.shares(row, shares);
        });
        shares
    }

    /// Returns the gradient of the products, from the products and the gradient of the shares. The
    /// shares are computed again, because those that the forward returned are rounded.
    fn backward(&self, inputs: [Values<'_>; 2]) -> Vec<f32> {
        let rows = Rows { inputs, width: self.width };
        let [of_products] = rows.map(|row, [products, g], [of_products]| {
            let visible = self.visible(row);
            let shares = shown(of_products, visible.clone());
            let products = &products[visible.clone()];
            let g = &g[visible];
            shares.copy_from_slice(products);
            self.shares(row, shares);
            let mean = sum_of_pairs(shares, g, |share, g| share * g);
            for (share, g) in shares.iter_mut().zip(g) {
                *share = *share * (g - mean) * self.op.scale;
            }
            self.through_cap(products, shares);
        });
        of_products
    }

    /// Returns the keys of a row that may be visible. An additive mask hides none of them here.
    pub(super) fn visible(&self, row: usize) -> Range<usize> {
        match self.op.hidden {
            Hidden::Causal { queries, before, window } => {
                let end = before + row % queries + 1;
                end.saturating_sub(window)..end
            }
            _ => 0..self.width,
        }
    }

    /// Returns whether scores have a cap, so that a backward needs the products.
    pub(super) fn is_capped(&self) -> bool {
        self.op.cap.is_some()
    }

    /// Replaces the gradients of a row's shares with the gradients of its products, except for the
    /// cap.
    #[inline(always)]
    pub(super) fn to_gradients(&self, shares: &[f32], gradients: &mut [f32]) {
        let mean = sum_of_pairs(shares, gradients, |share, g| share * g);
        for (g, share) in gradients.iter_mut().zip(shares) {
            *g = share * (*g - mean) * self.op.scale;
        }
    }

    /// Multiplies gradients by the derivatives of the cap, if there is one.
    #[inline(always)]
    pub(super) fn through_cap(&self, products: &[f32], gradients: &mut [f32]) {
        if let Some(cap) = self.op.cap {
            for (g, product) in gradients.iter_mut().zip(products) {
                *g *= cap.derivative(product * self.op.scale);
            }
        }
    }

    /// Replaces the products of the visible keys of a row with the shares.
    #[inline(always)]
    fn shares(&self, row: usize, shares: &mut [f32]) {
        self.to_scores(row, shares);
        to_shares(shares);
    }

    /// Computes [`shares`](Self::shares), but the shares of a row without a visible key are 0.
    #[inline(always)]
    pub(super) fn shares_or_zeros(&self, row: usize, shares: &mut [f32]) {
        let scale = self.exponentials_or_zeros(row, shares);
        shares.iter_mut().for_each(|share| *share *= scale);
    }

    /// Replaces the products of a row's visible keys with the exponentials of their scores, scaled
    /// so that the largest is 1. Returns one divided by their sum. If the mask hides all keys, it
    /// writes zeros and returns 1.
    #[inline(always)]
    pub(super) fn exponentials_or_zeros(&self, row: usize, products: &mut [f32]) -> f32 {
        self.to_scores(row, products);
        match self.added {
            Some(_) if products.iter().all(|score| *score == f32::NEG_INFINITY) => {
                products.fill(0.0);
                1.0
            }
            _ => to_exponentials(products),
        }
    }

    /// Scales, caps and masks the products of the visible keys of a row.
    #[inline(always)]
    fn to_scores(&self, row: usize, products: &mut [f32]) {
        products.iter_mut().for_each(|score| *score *= self.op.scale);
        if let Some(cap) = self.op.cap {
            products.iter_mut().for_each(|score| *score = cap.value(*score));
        }
        if let Some((mask, layout)) = self.added {
            let mask = &mask[start_of_row(layout, row)..];
            products.iter_mut().zip(mask).for_each(|(score, mask)| *score += mask);
        }
    }
}

/// Zeros a row outside the visible keys, and returns these.
pub(super) fn shown(row: &mut [f32], visible: Range<usize>) -> &mut [f32] {
    row[..visible.start].fill(0.0);
    row[visible.end..].fill(0.0);
    &mut row[visible]
}

/// Replaces numbers with their exponentials, divided by the sum of these.
#[inline(always)]
fn to_shares(row: &mut [f32]) {
    let scale = to_exponentials(row);
    row.iter_mut().for_each(|x| *x *= scale);
}

/// Replaces numbers with their exponentials, divided by the largest of these. Returns the inverse
/// of the sum.
#[inline(always)]
fn to_exponentials(row: &mut [f32]) -> f32 {
    let most = max(row);
    row.iter_mut().for_each(|x| *x = exp(*x - most));
    1.0 / sum(row, |x| x)
}

/// Returns the index of the first element of a row in the storage of a tensor whose last dim is
/// contiguous.
fn start_of_row(layout: &Layout, row: usize) -> usize {
    let leading = layout.dims().iter().zip(layout.stride()).rev().skip(1);
    let (start, _) = leading.fold((layout.start_offset(), row), |(start, rest), (dim, stride)| {
        (start + rest % dim * stride, rest / dim)
    });
    start
}

impl CpuLayer<1> for Softmax {
    fn name(&self) -> &'static str {
        NAME
    }

    fn forward(&self, [products]: [LayerInput<'_>; 1]) -> Result<(CpuStorage, Shape)> {
        let width = products.dims().last().copied().unwrap_or_default();
        with_element!(products.dtype(), NAME, T => {
            let values = products.values(NAME)?;
            output::<T>(self.run(width, |kernel| kernel.forward(values))?, products.dims())
        })
    }

    fn backward(&self, [products]: [LayerInput<'_>; 1], g: &Gradient) -> Result<LayerGradients<1>> {
        let width = products.dims().last().copied().unwrap_or_default();
        let inputs = [products.values(NAME)?, Values::F32(g.elements())];
        Ok([products.gradient(|| self.run(width, |kernel| kernel.backward(inputs)))?])
    }
}
