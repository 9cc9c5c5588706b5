//! Cross-entropy of logits and labels.

use candle_core::{CpuStorage, DType, Result, Shape, Tensor, bail};
use hsdp_candle::Gradient;
use hsdp_kernels::Values;

use super::activations::exp;
use super::composed;
use super::element::{LayerInput, check_dtypes, last_dim, narrow};
use super::layer::{CpuLayer, LayerGradients, apply, output};
use super::rows::{Rows, max, sum};

const NAME: &str = "cross_entropy";

/// Label of items that do not count, as in PyTorch.
pub const IGNORED: i64 = -100;

/// Loss computed by [`cross_entropy`].
#[derive(Clone, Debug)]
pub struct CrossEntropy {
    /// Sum over the items that count, an f32 scalar.
    pub sum: Tensor,
    /// Number of items that count. It is the weight for
    /// [`Pass::backward_sum`](hsdp_candle::Pass::backward_sum).
    pub count: u64,
}

impl CrossEntropy {
    /// Returns the mean over the items that count, an f32 scalar. It is NaN if there are none.
    ///
    /// # Errors
    /// The errors of candle.
    pub fn mean(&self) -> Result<Tensor> {
        &self.sum / self.count as f64
    }
}

/// Computes the sum of `-log softmax(logits)[label]`. `logits` are `[..., vocabulary]` and `labels`
/// `[...]`, of i64 or u32. Items with the label `ignored` do not count: their gradient is 0, even
/// if their logits are not finite.
///
/// Copies the labels to the host. On a GPU the rest is [`composed::cross_entropy`].
///
/// # Errors
/// If the shapes do not fit, a label is neither `ignored` nor below the vocabulary's size, or a
/// dtype is not supported.
///
/// # Examples
/// ```
/// use candle_core::{Device, Tensor};
/// use hsdp_models::nn::{IGNORED, cross_entropy};
///
/// let logits = Tensor::zeros((3, 4), candle_core::DType::F32, &Device::Cpu)?;
/// let labels = Tensor::new(&[2, IGNORED, 0], &Device::Cpu)?;
/// let loss = cross_entropy(&logits, &labels, IGNORED)?;
/// assert_eq!(loss.count, 2);
/// assert!((loss.mean()?.to_scalar::<f32>()? - 4_f32.ln()).abs() < 1e-6);
/// # Ok::<(), candle_core::Error>(())
/// ```
pub fn cross_entropy(logits: &Tensor, labels: &Tensor, ignored: i64) -> Result<CrossEntropy> {
    check_dtypes(NAME, &[logits])?;
    if !logits.device().is_cpu() {
        return composed::cross_entropy(logits, labels, ignored);
    }
    let targets = targets(logits, labels, ignored)?;
    let count = targets.iter().flatten().count() as u64;
    let sum = apply(CrossEntropyOp { targets }, [logits])?;
    Ok(CrossEntropy { sum, count })
}

/// Returns the place of each item's label, if the item counts.
pub(super) fn targets(
    logits: &Tensor,
    labels: &Tensor,
    ignored: i64,
) -> Result<Vec<Option<usize>>> {
    let classes = last_dim(NAME, logits)?;
    let [of_logits, of_labels] = [logits.dims(), labels.dims()];
    if of_logits[..of_logits.len() - 1] != *of_labels {
        bail!(
            "{NAME}: logits {of_logits:?} need labels of their shape without its last dim, not {of_labels:?}"
        )
    }
    if !matches!(labels.dtype(), DType::I64 | DType::U32) {
        bail!("{NAME}: labels are i64 or u32, not {}", labels.dtype().as_str())
    }
    let place = |(item, label): (usize, i64)| match usize::try_from(label) {
        _ if label == ignored => Ok(None),
        Ok(place) if place < classes => Ok(Some(place)),
        _ => bail!(
            "{NAME}: label {label} of item {item} is neither below {classes} nor {ignored}, which is ignored"
        ),
    };
    let labels = labels.flatten_all()?.to_dtype(DType::I64)?.to_vec1()?;
    labels.into_iter().enumerate().map(place).collect()
}

struct CrossEntropyOp {
    targets: Vec<Option<usize>>,
}

impl CrossEntropyOp {
    fn sum(&self, logits: Values<'_>, width: usize) -> f32 {
        let rows = Rows { inputs: [logits], width };
        let (_, sums): ([Vec<f32>; 0], _) = rows.fold(
            || 0.0,
            |total, item, [logits], []| {
                if let Some(target) = self.targets[item] {
                    let most = max(logits);
                    let log_sum = sum(logits, |logit| exp(logit - most)).ln();
                    *total += f64::from(log_sum - (logits[target] - most));
                }
            },
        );
        narrow(sums.into_iter().sum())
    }

    /// Returns the gradient of the logits: `g` times the shares, less 1 at the label.
    fn gradients(&self, logits: Values<'_>, g: f32, width: usize) -> Vec<f32> {
        let [of_logits] = Rows { inputs: [logits], width }.map(|item, [logits], [of_logits]| {
            let Some(target) = self.targets[item] else { return of_logits.fill(0.0) };
            let most = max(logits);
            for (of_logit, logit) in of_logits.iter_mut().zip(logits) {
                *of_logit = exp(logit - most);
            }
            let scale = g / sum(of_logits, |share| share);
            of_logits.iter_mut().for_each(|share| *share *= scale);
            of_logits[target] -= g;
        });
        of_logits
    }
}

impl CpuLayer<1> for CrossEntropyOp {
    fn name(&self) -> &'static str {
        NAME
    }

    fn forward(&self, [logits]: [LayerInput<'_>; 1]) -> Result<(CpuStorage, Shape)> {
        let width = logits.dims().last().copied().unwrap_or_default();
        output(vec![self.sum(logits.values(NAME)?, width)], ())
    }

    fn backward(&self, [logits]: [LayerInput<'_>; 1], g: &Gradient) -> Result<LayerGradients<1>> {
        let width = logits.dims().last().copied().unwrap_or_default();
        let g = g.elements()[0];
        Ok([logits.gradient(|| Ok(self.gradients(logits.values(NAME)?, g, width)))?])
    }
}
