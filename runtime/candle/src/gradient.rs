//! A gradient in a candle tensor, lent to the reduction without a copy.

use std::ops::Range;
use std::sync::Arc;

use candle_core::{CpuStorage, Result, Storage, Tensor, bail};
use hsdp_kernels::{GradientValues, Values};

/// Lends a gradient, multiplied by `factor` in f32. A contiguous gradient with the factor 1 is not
/// copied.
pub(crate) fn lent(gradient: &Tensor, factor: f32) -> Result<Arc<dyn GradientValues>> {
    #[cfg(feature = "candle-cuda")]
    if gradient.device().is_cuda() {
        let gradient = gradient.detach();
        let gradient = match factor {
            1.0 => gradient,
            _ => (gradient.to_dtype(candle_core::DType::F32)? * f64::from(factor))?,
        };
        return crate::cuda::lent(gradient.contiguous()?);
    }
    let gradient = TensorGradient::new(gradient)?;
    Ok(match factor {
        1.0 => Arc::new(gradient),
        _ => Arc::new(ScaledGradient { gradient, factor }),
    })
}

/// A gradient times a factor, in f32. Products are computed as they are read, a range at a time.
#[derive(Debug)]
struct ScaledGradient {
    gradient: TensorGradient,
    factor: f32,
}

impl GradientValues for ScaledGradient {
    fn len(&self) -> usize {
        self.gradient.len()
    }

    fn read(&self, range: Range<usize>, visit: &mut dyn FnMut(Values<'_>)) {
        let mut products = Vec::with_capacity(range.len());
        self.gradient.read(range, &mut |values| match values {
            Values::F32(values) => products.extend(values.iter().map(|it| it * self.factor)),
            Values::F16(values) => {
                products.extend(values.iter().map(|it| it.to_f32() * self.factor));
            }
            Values::BF16(values) => {
                products.extend(values.iter().map(|it| it.to_f32() * self.factor));
            }
        });
        visit(Values::F32(&products));
    }
}

/// A contiguous tensor on the host, of dtype f32, f16 or bf16.
#[derive(Debug)]
pub(crate) struct TensorGradient(Tensor);

impl TensorGradient {
    /// Takes a gradient without a copy if it is contiguous, and copies it otherwise.
    pub(crate) fn new(gradient: &Tensor) -> Result<Self> {
        let tensor = gradient.detach().contiguous()?;
        if values(&tensor.storage_and_layout().0).is_none() {
            bail!(
                "a gradient must be f32, f16 or bf16 on the CPU, this one is {:?} on {:?}",
                tensor.dtype(),
                tensor.device()
            );
        }
        Ok(Self(tensor))
    }
}

impl GradientValues for TensorGradient {
    fn len(&self) -> usize {
        self.0.elem_count()
    }

    fn read(&self, range: Range<usize>, visit: &mut dyn FnMut(Values<'_>)) {
        assert!(
            range.end <= self.len(),
            "the range {range:?} is beyond the gradient's {} elements",
            self.len()
        );
        let (storage, layout) = self.0.storage_and_layout();
        let values = values(&storage)
            .expect("`new` has checked the storage, and no code replaces that of a gradient");
        let start = layout.start_offset();
        visit(values.slice(start + range.start..start + range.end));
    }
}

fn values(storage: &Storage) -> Option<Values<'_>> {
    match storage {
        Storage::Cpu(CpuStorage::F32(values)) => Some(Values::F32(values)),
        Storage::Cpu(CpuStorage::F16(values)) => Some(Values::F16(values)),
        Storage::Cpu(CpuStorage::BF16(values)) => Some(Values::BF16(values)),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use candle_core::{DType, Device};

    use super::*;

    fn read(gradient: &TensorGradient, range: Range<usize>) -> Vec<f32> {
        let mut seen = Vec::new();
        gradient.read(range, &mut |values| match values {
            Values::F32(values) => seen.extend_from_slice(values),
            other => panic!("{other:?}"),
        });
        seen
    }

    #[test]
    fn a_part_of_a_tensor_is_read_where_it_lies() {
        let all = Tensor::arange(0.0_f32, 12.0, &Device::Cpu).expect("12 elements");
        let rows = all.reshape((4, 3)).and_then(|all| all.narrow(0, 1, 2)).expect("rows 1 and 2");
        let gradient = TensorGradient::new(&rows).expect("f32 on the host");
        assert_eq!(gradient.len(), 6);
        assert_eq!(read(&gradient, 1..4), [4.0, 5.0, 6.0]);
        assert_eq!(read(&gradient, 6..6), [0.0; 0]);
    }

    #[test]
    fn a_transposed_gradient_is_put_in_order() {
        let all = Tensor::new(&[[1.0_f32, 2.0], [3.0, 4.0]], &Device::Cpu).expect("2 x 2");
        let gradient = TensorGradient::new(&all.t().expect("two dims")).expect("f32 on the host");
        assert_eq!(read(&gradient, 0..4), [1.0, 3.0, 2.0, 4.0]);
    }

    #[test]
    fn a_factor_enters_in_f32() {
        let factor = 1003.0 / 512.0;
        for dtype in [DType::F32, DType::F16, DType::BF16] {
            let values = Tensor::new(&[1_f32, -2.0, 0.5, 3.0], &Device::Cpu).expect("4 elements");
            let gradient = values.to_dtype(dtype).expect("a float");
            let scaled = lent(&gradient, factor).expect("a float on the host");
            assert_eq!(scaled.len(), 4);
            let mut seen = Vec::new();
            scaled.read(1..4, &mut |values| match values {
                Values::F32(values) => seen.extend_from_slice(values),
                other => panic!("{other:?}"),
            });
            assert_eq!(seen, [-2.0 * factor, 0.5 * factor, 3.0 * factor], "{dtype:?}");
        }
    }

    #[test]
    fn integers_are_no_gradient() {
        let integers = Tensor::new(&[1_u32], &Device::Cpu).expect("one element");
        assert!(TensorGradient::new(&integers).is_err());
    }
}
