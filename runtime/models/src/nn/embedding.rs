//! Embeddings.

use candle_core::{CpuStorage, DType, Error, Result, Shape, Tensor, bail};
use hsdp_candle::Gradient;

use super::composed;
use super::element::{LayerInput, check_dtypes, with_element};
use super::layer::{CpuLayer, LayerGradients, apply, output};

const NAME: &str = "embedding";

/// Returns the rows of `weight` `[rows, width]` at `ids` (u32, u8 or i64, of any shape). The result
/// has the shape of `ids` and then `width`.
///
/// The gradient of a row is the sum over its ids, in their order. On a GPU this is
/// [`composed::embedding`], which does not check the ids: the host would have to wait for the
/// device to read them.
///
/// # Errors
/// If an id names no row, if the weight does not have two dims or is not f32, bf16 or f16, or if
/// the ids have another dtype.
pub fn embedding(ids: &Tensor, weight: &Tensor) -> Result<Tensor> {
    check(ids, weight)?;
    match weight.device().is_cpu() {
        true => fused(ids, weight, None),
        false => composed::embedding(ids, weight),
    }
}

/// Computes [`embedding`], but the row `padding` gets no gradient, as with `padding_idx` in
/// PyTorch.
///
/// # Errors
/// The errors of [`embedding`]. Also if the weight has no row `padding`.
pub fn padded_embedding(ids: &Tensor, weight: &Tensor, padding: usize) -> Result<Tensor> {
    let count = check(ids, weight)?;
    if padding >= count {
        bail!("{NAME}: padding {padding}, and the weight has {count} rows")
    }
    match weight.device().is_cpu() {
        true => fused(ids, weight, Some(padding)),
        false => composed::padded_embedding(ids, weight, padding),
    }
}

fn fused(ids: &Tensor, weight: &Tensor, padding: Option<usize>) -> Result<Tensor> {
    let op = EmbeddingOp { rows: rows(ids, weight.dim(0)?)?, padding };
    apply(op, [weight])?.reshape(with_width(ids, weight)?)
}

/// Returns the shape of `ids`, followed by the width of a row.
pub(super) fn with_width(ids: &Tensor, weight: &Tensor) -> Result<Vec<usize>> {
    let mut dims = ids.dims().to_vec();
    dims.push(weight.dim(1)?);
    Ok(dims)
}

/// Checks that the weight fits, and returns its number of rows.
fn check(ids: &Tensor, weight: &Tensor) -> Result<usize> {
    check_dtypes(NAME, &[weight])?;
    let &[count, _] = weight.dims() else {
        bail!("{NAME}: the weight has the shape {:?}, and needs [rows, width]", weight.dims())
    };
    match ids.dtype() {
        DType::U8 | DType::U32 | DType::I64 => Ok(count),
        other => Err(Error::UnsupportedDTypeForOp(other, NAME)),
    }
}

/// Returns the row of each id.
fn rows(ids: &Tensor, count: usize) -> Result<Vec<usize>> {
    let row = |id: i64| match usize::try_from(id) {
        Ok(row) if row < count => Ok(row),
        _ => bail!("{NAME}: id {id}, and the weight has {count} rows"),
    };
    let ids = ids.flatten_all()?.to_dtype(DType::I64)?.to_vec1()?;
    ids.into_iter().map(row).collect()
}

/// Op that puts the row of each id one below the other.
struct EmbeddingOp {
    rows: Vec<usize>,
    /// Row that gets no gradient.
    padding: Option<usize>,
}

impl CpuLayer<1> for EmbeddingOp {
    fn name(&self) -> &'static str {
        NAME
    }

    fn forward(&self, [weight]: [LayerInput<'_>; 1]) -> Result<(CpuStorage, Shape)> {
        let width = weight.dims()[1];
        with_element!(weight.dtype(), NAME, T => {
            let weight = weight.elements::<T>()?;
            let mut y = Vec::with_capacity(self.rows.len() * width);
            for row in &self.rows {
                y.extend_from_slice(&weight[row * width..][..width]);
            }
            output(y, (self.rows.len(), width))
        })
    }

    /// Sums the gradients of each row, in f32.
    fn backward(&self, [weight]: [LayerInput<'_>; 1], g: &Gradient) -> Result<LayerGradients<1>> {
        let (count, width) = weight.dims2()?;
        let of_weight = weight.gradient(|| {
            let mut sums = vec![0.0; count * width];
            let rows = self.rows.iter().zip(g.elements().chunks(width.max(1)));
            for (row, g) in rows.filter(|(row, _)| Some(**row) != self.padding) {
                let sums = &mut sums[row * width..][..width];
                sums.iter_mut().zip(g).for_each(|(sum, g)| *sum += g);
            }
            Ok(sums)
        })?;
        Ok([of_weight])
    }
}
