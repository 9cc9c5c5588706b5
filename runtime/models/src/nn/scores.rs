//! Softmax over the last dim, of attention scores and of anything else.

use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, CustomOp1, DType, Layout, Result, Shape, Tensor, WithDType, bail};

use super::element::{
    Element, Lent, check_dtypes, elements, gradient, last_dim, narrow, with_element,
};
use super::exp::exp;
use super::rows::Rows;
use super::{composed, lanes};

const NAME: &str = "softmax";

/// The keys that each query may attend to. The last two dims of scores are queries and keys.
#[derive(Clone, Copy, Debug)]
pub enum Mask<'a> {
    /// All.
    None,
    /// Those that are not after the query, where the last query is at the place of the last key.
    Causal,
    /// Numbers that are added to the scaled scores, minus infinity where a key is hidden. The last dim is that of the scores, and the dims before
    /// it are broadcast. They get no gradient.
    Additive(&'a Tensor),
}

/// Softmax over the last dim of `x`.
///
/// On a GPU this is [`composed::softmax_of_scores`].
///
/// # Errors
/// If `x` is a scalar, or its dtype is not f32, bf16 or f16.
pub fn softmax(x: &Tensor) -> Result<Tensor> {
    softmax_of_scores(x, 1.0, Mask::None)
}

/// Softmax over the last dim of `scores * scale`, of the keys that `mask` leaves. The others have the share 0; if it leaves none,
/// the shares are NaN.
///
/// Scaling and masking take no memory of their own. On a GPU this is [`composed::softmax_of_scores`].
///
/// # Errors
/// If `scores` are a scalar, or a dtype is not f32, bf16 or f16; with [`Mask::Causal`] if they have one dim, or more queries
/// than keys; with [`Mask::Additive`] if the mask does not fit them, or candle tracks its gradient.
pub fn softmax_of_scores(scores: &Tensor, scale: f64, mask: Mask<'_>) -> Result<Tensor> {
    check_dtypes(NAME, &[scores])?;
    last_dim(NAME, scores)?;
    check_mask(NAME, scores.dims(), mask)?;
    if !scores.device().is_cpu() {
        return composed::softmax_of_scores(scores, scale, mask);
    }
    let hidden = Hidden::of(scores.dims(), mask)?;
    scores.contiguous()?.apply_op1(Softmax { scale: narrow(scale), hidden })
}

/// Refuses a mask that does not fit scores of these dims.
pub(super) fn check_mask(op: &'static str, scores: &[usize], mask: Mask<'_>) -> Result<()> {
    match mask {
        Mask::None => Ok(()),
        Mask::Causal => check_causal(op, scores),
        Mask::Additive(mask) => check_additive(op, scores, mask),
    }
}

fn check_causal(op: &str, scores: &[usize]) -> Result<()> {
    match scores {
        [.., queries, keys] if queries <= keys => Ok(()),
        _ => bail!(
            "{op}: scores {scores:?} have no causal mask: it needs at most as many queries as keys"
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

/// A mask as the op keeps it.
pub(super) enum Hidden {
    None,
    /// Of so many queries, which come after `before` keys.
    Future {
        queries: usize,
        before: usize,
    },
    /// In f32, with the shape of the scores.
    Added(Tensor),
}

impl Hidden {
    /// The mask for scores of these dims, which it fits.
    pub(super) fn of(scores: &[usize], mask: Mask<'_>) -> Result<Self> {
        Ok(match (mask, scores) {
            (Mask::Causal, [.., queries, keys]) => {
                Self::Future { queries: *queries, before: keys - queries }
            }
            (Mask::Additive(mask), _) => {
                let mask = mask.to_dtype(DType::F32)?.contiguous()?;
                Self::Added(mask.broadcast_as(scores)?)
            }
            _ => Self::None,
        })
    }
}

pub(super) struct Softmax {
    pub(super) scale: f32,
    pub(super) hidden: Hidden,
}

impl Softmax {
    /// Runs a kernel for rows of `width` scores while it may read the mask.
    pub(super) fn run<R>(&self, width: usize, kernel: impl FnOnce(&Kernel<'_>) -> R) -> Result<R> {
        let lent = match &self.hidden {
            Hidden::Added(mask) => Some(Lent::of(mask)),
            _ => None,
        };
        let added = lent.as_ref().map(Lent::all).transpose()?;
        Ok(kernel(&Kernel { op: self, width, added }))
    }
}

/// The arithmetic of rows of scores.
pub(super) struct Kernel<'a> {
    op: &'a Softmax,
    width: usize,
    /// The numbers of a mask, and their layout.
    added: Option<(&'a [f32], &'a Layout)>,
}

impl Kernel<'_> {
    fn forward<T: Element>(&self, scores: &[T]) -> Vec<T> {
        let rows = Rows { inputs: [scores], width: self.width };
        let [shares] = rows.map(|row, [scores], [shares]| {
            let (shares, hidden) = shares.split_at_mut(self.visible(row));
            shares.copy_from_slice(&scores[..shares.len()]);
            self.shares(row, shares);
            hidden.fill(0.0);
        });
        shares
    }

    /// The gradient of the scores, from the scores and the gradient of the shares. The shares are computed again, because those that the
    /// forward returned are rounded.
    fn backward<T: Element>(&self, inputs: [&[T]; 2]) -> Vec<T> {
        let rows = Rows { inputs, width: self.width };
        let [of_scores] = rows.map(|row, [scores, g], [of_scores]| {
            let (shares, hidden) = of_scores.split_at_mut(self.visible(row));
            shares.copy_from_slice(&scores[..shares.len()]);
            self.shares(row, shares);
            let g = &g[..shares.len()];
            let mean = lanes::sum_of_pairs(shares, g, |share, g| share * g);
            for (share, g) in shares.iter_mut().zip(g) {
                *share = *share * (g - mean) * self.op.scale;
            }
            hidden.fill(0.0);
        });
        of_scores
    }

    /// The number of keys that a row begins with and that may be visible.
    pub(super) fn visible(&self, row: usize) -> usize {
        match self.op.hidden {
            Hidden::Future { queries, before } => before + row % queries + 1,
            _ => self.width,
        }
    }

    /// Replaces the gradients of a row's shares by those of its scores.
    #[inline(always)]
    pub(super) fn to_gradients(&self, shares: &[f32], gradients: &mut [f32]) {
        let mean = lanes::sum_of_pairs(shares, gradients, |share, g| share * g);
        for (g, share) in gradients.iter_mut().zip(shares) {
            *g = share * (*g - mean) * self.op.scale;
        }
    }

    /// Replaces the scores of the keys at the beginning of a row by the shares.
    #[inline(always)]
    pub(super) fn shares(&self, row: usize, shares: &mut [f32]) {
        self.mask(row, shares);
        to_shares(shares);
    }

    /// As [`shares`](Self::shares), but the shares of a row without a visible key are 0.
    #[inline(always)]
    pub(super) fn shares_or_zeros(&self, row: usize, shares: &mut [f32]) {
        self.mask(row, shares);
        match self.added {
            Some(_) if shares.iter().all(|score| *score == f32::NEG_INFINITY) => shares.fill(0.0),
            _ => to_shares(shares),
        }
    }

    #[inline(always)]
    fn mask(&self, row: usize, scores: &mut [f32]) {
        scores.iter_mut().for_each(|score| *score *= self.op.scale);
        if let Some((mask, layout)) = self.added {
            let mask = &mask[start_of_row(layout, row)..];
            scores.iter_mut().zip(mask).for_each(|(score, mask)| *score += mask);
        }
    }
}

/// Replaces numbers by their exponentials, divided by the sum of these.
#[inline(always)]
fn to_shares(row: &mut [f32]) {
    let most = lanes::max(row);
    row.iter_mut().for_each(|x| *x = exp(*x - most));
    let scale = 1.0 / lanes::sum(row, |x| x);
    row.iter_mut().for_each(|x| *x *= scale);
}

/// The place of the first element of a row, in the storage of a tensor whose last dim is contiguous.
fn start_of_row(layout: &Layout, row: usize) -> usize {
    let leading = layout.dims().iter().zip(layout.stride()).rev().skip(1);
    let (start, _) = leading.fold((layout.start_offset(), row), |(start, rest), (dim, stride)| {
        (start + rest % dim * stride, rest / dim)
    });
    start
}

impl CustomOp1 for Softmax {
    fn name(&self) -> &'static str {
        NAME
    }

    fn cpu_fwd(&self, scores: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        let width = layout.dims().last().copied().unwrap_or_default();
        with_element!(scores.dtype(), NAME, T => {
            let scores = elements::<T>(scores, layout)?;
            let shares = self.run(width, |kernel| kernel.forward(scores))?;
            Ok((T::to_cpu_storage_owned(shares), layout.shape().clone()))
        })
    }

    fn bwd(&self, scores: &Tensor, _shares: &Tensor, g: &Tensor) -> Result<Option<Tensor>> {
        let g = g.detach().contiguous()?;
        let (lent, lent_g) = (Lent::of(scores), Lent::of(&g));
        let width = last_dim(NAME, scores)?;
        with_element!(scores.dtype(), NAME, T => {
            let inputs = [lent.elements::<T>()?, lent_g.elements::<T>()?];
            gradient(scores, self.run(width, |kernel| kernel.backward(inputs))?)
        })
    }
}
