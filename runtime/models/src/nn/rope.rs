//! Rotary position embeddings.

use candle_core::{CpuStorage, Result, Shape, Tensor, bail};
use hsdp_candle::Gradient;
use hsdp_kernels::Values;

use super::composed;
use super::element::{LayerElement, LayerInput, check_dtypes, with_element};
use super::layer::{CpuLayer, LayerGradients, apply, output};
use super::rows::Rows;

/// Rotates pairs of elements of `x`, `[..., length, heads, dim]`, by an angle that depends on
/// position and pair. Pairs have the layout of Llama and GPT-NeoX. The first `2 * pairs`
/// elements of a row form two halves, and a pair is two elements at the same place in both. The
/// rest of a row, which partial rotary embeddings have, passes unchanged.
///
/// `cos` and `sin` are `[positions, pairs]`. The first `length` positions are used, and there may
/// be more. They get no gradient. To read a later part of a sequence, `narrow` both.
///
/// On a GPU this is [`composed::rope`].
///
/// # Errors
/// If the shapes do not fit, a dtype is not f32, bf16 or f16, or candle tracks the gradient of
/// `cos` or `sin`.
pub fn rope(x: &Tensor, cos: &Tensor, sin: &Tensor) -> Result<Tensor> {
    rotated(
        [x, cos, sin],
        RopeOp { name: "rope", pairs: RopePairs::Halves, composed: composed::rope },
    )
}

/// Rotates as [`rope`] does, in the layout of GPT-J: a pair is two neighbours.
///
/// On a GPU this is [`composed::rope_interleaved`].
///
/// # Errors
/// The errors of [`rope`].
pub fn rope_interleaved(x: &Tensor, cos: &Tensor, sin: &Tensor) -> Result<Tensor> {
    let composed = composed::rope_interleaved;
    rotated(
        [x, cos, sin],
        RopeOp { name: "rope_interleaved", pairs: RopePairs::Neighbours, composed },
    )
}

/// Layout of the elements that are rotated together.
#[derive(Clone, Copy)]
enum RopePairs {
    Halves,
    Neighbours,
}

type ComposedRope = fn(&Tensor, &Tensor, &Tensor) -> Result<Tensor>;

struct RopeOp {
    name: &'static str,
    pairs: RopePairs,
    composed: ComposedRope,
}

fn rotated([x, cos, sin]: [&Tensor; 3], op: RopeOp) -> Result<Tensor> {
    check_dtypes(op.name, &[x, cos, sin])?;
    check_shapes(op.name, [x, cos, sin])?;
    if cos.track_op() || sin.track_op() {
        bail!("{}: candle tracks the gradient of cos or sin, which have none: detach them", op.name)
    }
    if !x.device().is_cpu() {
        return (op.composed)(x, cos, sin);
    }
    apply(op, [x, cos, sin])
}

fn check_shapes(op: &str, [x, cos, sin]: [&Tensor; 3]) -> Result<()> {
    let fit = match (x.dims(), cos.dims()) {
        ([.., length, _, dim], [positions, pairs]) => length <= positions && *dim >= 2 * pairs,
        _ => false,
    };
    if !fit || cos.dims() != sin.dims() {
        let [x, cos, sin] = [x, cos, sin].map(Tensor::dims);
        bail!(
            "{op}: x {x:?}, cos {cos:?} and sin {sin:?} do not fit [..., length, heads, dim] \
             and twice [positions, pairs], where 2 pairs are at most dim"
        )
    }
    Ok(())
}

/// Cosines and sines of the angles. `sign` multiplies the sines.
struct Angles<'a> {
    cos: &'a [f32],
    sin: &'a [f32],
    sign: f32,
}

impl RopeOp {
    /// Rotates the rows of `x`. `dims` has the dims of `x` and of the tables.
    fn rotate<T: LayerElement>(
        &self,
        x: Values<'_>,
        dims: [&[usize]; 2],
        angles: &Angles<'_>,
    ) -> Vec<T> {
        let [&[.., length, heads, width], &[_, pairs]] = dims else { return Vec::new() };
        let [y] = Rows { inputs: [x], width }.map(|row, [x], [y]| {
            let start = row / heads % length * pairs;
            let angles = Angles {
                cos: &angles.cos[start..start + pairs],
                sin: &angles.sin[start..start + pairs],
                sign: angles.sign,
            };
            let (x, x_rest) = x.split_at(2 * pairs);
            let (y, y_rest) = y.split_at_mut(2 * pairs);
            y_rest.copy_from_slice(x_rest);
            match self.pairs {
                RopePairs::Halves => rotate_halves(x, y, &angles),
                RopePairs::Neighbours => rotate_neighbours(x, y, &angles),
            }
        });
        y
    }
}

#[inline(always)]
fn rotate_halves(x: &[f32], y: &mut [f32], Angles { cos, sin, sign }: &Angles<'_>) {
    let (x_first, x_second) = x.split_at(cos.len());
    let (y_first, y_second) = y.split_at_mut(cos.len());
    let y = y_first.iter_mut().zip(y_second);
    let x = x_first.iter().zip(x_second);
    for (((y_first, y_second), (first, second)), (cos, sin)) in y.zip(x).zip(cos.iter().zip(*sin)) {
        *y_first = first * cos - second * (sin * sign);
        *y_second = second * cos + first * (sin * sign);
    }
}

#[inline(always)]
fn rotate_neighbours(x: &[f32], y: &mut [f32], Angles { cos, sin, sign }: &Angles<'_>) {
    let (x, _) = x.as_chunks();
    let (y, _) = y.as_chunks_mut();
    for ((y, [first, second]), (cos, sin)) in y.iter_mut().zip(x).zip(cos.iter().zip(*sin)) {
        *y = [first * cos - second * (sin * sign), second * cos + first * (sin * sign)];
    }
}

impl CpuLayer<3> for RopeOp {
    fn name(&self) -> &'static str {
        self.name
    }

    fn forward(&self, [x, cos, sin]: [LayerInput<'_>; 3]) -> Result<(CpuStorage, Shape)> {
        let dims = [x, cos].map(LayerInput::dims);
        let [cos, sin] = [cos.wide(self.name)?, sin.wide(self.name)?];
        let angles = Angles { cos: &cos, sin: &sin, sign: 1.0 };
        with_element!(x.dtype(), self.name, T => {
            output::<T>(self.rotate(x.values(self.name)?, dims, &angles), x.dims())
        })
    }

    /// Rotates the gradient back.
    fn backward(
        &self,
        [x, cos, sin]: [LayerInput<'_>; 3],
        g: &Gradient,
    ) -> Result<LayerGradients<3>> {
        let dims = [x, cos].map(LayerInput::dims);
        let [cos, sin] = [cos.wide(self.name)?, sin.wide(self.name)?];
        let angles = Angles { cos: &cos, sin: &sin, sign: -1.0 };
        let of_x = || Ok(self.rotate(Values::F32(g.elements()), dims, &angles));
        Ok([x.gradient(of_x)?, None, None])
    }
}
