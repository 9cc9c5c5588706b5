//! Gradients of tensors: their sums, and how they are lent to the reduction without a copy.

use std::ops::Range;
use std::sync::Arc;
use std::thread::{self, ThreadId};

use candle_core::{CpuStorage, DType, Result, Storage, Tensor, bail};
use hsdp_kernels::{
    Divisor, Fold, GradientValues, HostBuffer, Real, Values, Wire, cast, contribute,
};
use parking_lot::Mutex;
use rayon::prelude::*;

/// Gradient of a tensor on the host, in f32 and row-major order. Clones share the elements.
#[derive(Clone, Debug)]
pub struct Gradient(Arc<Vec<f32>>);

impl Gradient {
    /// Returns a gradient of zeros.
    pub(crate) fn zeros(len: usize) -> Self {
        Self::from(vec![0.0; len])
    }

    /// Returns the elements.
    #[must_use]
    pub fn elements(&self) -> &[f32] {
        &self.0
    }
}

impl From<Vec<f32>> for Gradient {
    fn from(elements: Vec<f32>) -> Self {
        Self(Arc::new(elements))
    }
}

impl GradientValues for Gradient {
    fn len(&self) -> usize {
        self.0.len()
    }

    fn read(&self, range: Range<usize>, visit: &mut dyn FnMut(Values<'_>)) {
        visit(Values::F32(&self.0[range]));
    }
}

/// Sum of the gradients of a tensor that have arrived in a backward. A backward runs on one thread,
/// and each thread has its own sum: graphs of two threads may share a tensor.
#[derive(Debug, Default)]
pub(crate) struct GradientCell(Mutex<Vec<CellSum>>);

/// Sum of one thread.
#[derive(Debug)]
struct CellSum {
    thread: ThreadId,
    sum: GradientSum,
    /// Number of gradients in the sum.
    count: usize,
}

impl GradientCell {
    /// Adds a gradient. The op that calls this returns [`one`](Self::one) as the gradient of the
    /// scalar that represents the tensor.
    pub(crate) fn add(&self, gradient: GradientSum) -> Result<()> {
        let (sum, count) = match self.take_here() {
            Some(CellSum { sum, count, .. }) => (sum.plus(gradient)?, count + 1),
            None => (gradient, 1),
        };
        self.0.lock().push(CellSum { thread: thread::current().id(), sum, count });
        Ok(())
    }

    /// Returns the gradient of the scalar `parent` for an op that has added a gradient to the cell:
    /// candle counts the gradients.
    pub(crate) fn one(parent: &Tensor) -> Result<Option<Tensor>> {
        parent.track_op().then(|| Tensor::ones((), parent.dtype(), parent.device())).transpose()
    }

    /// Takes the sum. `None` if no gradient has arrived. `count` is the gradient of the scalar that
    /// represents the tensor, so the number of gradients that this backward has added.
    ///
    /// # Errors
    /// If the sum has gradients of another backward: of one that failed on this graph, or of one
    /// that this thread has begun in the midst of another.
    pub(crate) fn take(&self, count: &Tensor) -> Result<Option<GradientSum>> {
        let sum = self.take_here();
        let arrived = sum.as_ref().map_or(0, |it| it.count);
        let added = count.to_scalar::<f32>()?;
        if added != arrived as f32 {
            bail!(
                "a backward has added {added} gradients to a tensor that has {arrived}: the others \
                 are of a backward that failed, or that runs on this thread at the same time. Make \
                 the graph again"
            )
        }
        Ok(sum.map(|it| it.sum))
    }

    /// Takes the sum of a variable, which no op reads in candle's graph.
    pub(crate) fn take_all(&self) -> Option<GradientSum> {
        self.take_here().map(|it| it.sum)
    }

    fn take_here(&self) -> Option<CellSum> {
        let mut sums = self.0.lock();
        let this = thread::current().id();
        let place = sums.iter().position(|it| it.thread == this)?;
        Some(sums.swap_remove(place))
    }
}

/// Sum of the gradients of a tensor.
#[derive(Clone, Debug)]
pub(crate) enum GradientSum {
    /// Gradients of layers on the host.
    Host(Gradient),
    /// A gradient that candle has computed, without a history.
    Tensor(Tensor),
}

impl GradientSum {
    /// Adds a gradient. Gradients of layers are added in f32, in place if this sum has the only
    /// reference to its elements. Two of candle's are added as candle adds them, in their dtype.
    pub(crate) fn plus(self, other: Self) -> Result<Self> {
        let (host, other) = match (self, other) {
            (Self::Host(host), other) | (other, Self::Host(host)) => (host, other),
            (Self::Tensor(sum), Self::Tensor(other)) => {
                let other = other.reshape(sum.shape())?;
                return Ok(Self::Tensor((sum + other)?.detach()));
            }
        };
        let (mut sum, other): (_, Arc<dyn GradientValues>) = match other {
            Self::Tensor(other) => (host, Arc::new(TensorGradient::new(&other)?)),
            Self::Host(other) if Arc::strong_count(&host.0) > 1 => (other, Arc::new(host)),
            Self::Host(other) => (host, Arc::new(other)),
        };
        if sum.0.len() != other.len() {
            bail!("a gradient of {} elements was added to one of {}", other.len(), sum.0.len())
        }
        let elements: &mut Vec<f32> = Arc::make_mut(&mut sum.0);
        add(elements, &*other);
        Ok(Self::Host(sum))
    }

    /// Returns the sum in f32, on the host.
    pub(crate) fn into_gradient(self) -> Result<Gradient> {
        match self {
            Self::Host(gradient) => Ok(gradient),
            Self::Tensor(tensor) => {
                let lent = TensorGradient::new(&tensor)?;
                let mut wide = Vec::new();
                lent.read(0..lent.len(), &mut |values| wide = values.to_f32());
                Ok(wide.into())
            }
        }
    }

    /// Returns the sum as a tensor of the shape and the dtype of another.
    pub(crate) fn into_tensor_like(self, like: &Tensor) -> Result<Tensor> {
        match self {
            Self::Host(Gradient(elements)) => {
                let elements = Arc::unwrap_or_clone(elements);
                Tensor::from_vec(elements, like.shape(), like.device())?.to_dtype(like.dtype())
            }
            Self::Tensor(tensor) => tensor.reshape(like.shape())?.to_dtype(like.dtype()),
        }
    }

    /// Lends the gradient of a parameter of this dtype, multiplied by `factor` in f32. The sum is
    /// rounded to the dtype once, before. It is not copied if it has the dtype, the factor is 1 and
    /// the elements are contiguous.
    pub(crate) fn lent(&self, dtype: DType, factor: f32) -> Result<Arc<dyn GradientValues>> {
        let tensor = match self {
            Self::Host(gradient) => {
                return Ok(match dtype {
                    DType::BF16 => scaled(HostBuffer::BF16(rounded(gradient)), factor),
                    DType::F16 => scaled(HostBuffer::F16(rounded(gradient)), factor),
                    _ => scaled(gradient.clone(), factor),
                });
            }
            Self::Tensor(tensor) => tensor,
        };
        #[cfg(feature = "candle-cuda")]
        if tensor.device().is_cuda() {
            let tensor = match factor {
                1.0 => tensor.clone(),
                _ => (tensor.to_dtype(DType::F32)? * f64::from(factor))?,
            };
            return crate::cuda::lent(tensor.contiguous()?);
        }
        Ok(scaled(TensorGradient::new(tensor)?, factor))
    }
}

fn rounded<T: Real>(gradient: &Gradient) -> Vec<T> {
    let mut rounded = vec![T::zeroed(); gradient.0.len()];
    cast(T::values_mut(&mut rounded), &gradient.0);
    rounded
}

fn scaled(gradient: impl GradientValues + 'static, factor: f32) -> Arc<dyn GradientValues> {
    match factor {
        1.0 => Arc::new(gradient),
        _ => Arc::new(ScaledGradient { gradient, factor }),
    }
}

/// Number of elements that a thread adds at a time.
const CHUNK: usize = 1 << 15;

/// Adds a gradient to a sum. Threads of rayon's pool share the work.
fn add(sum: &mut [f32], gradient: &dyn GradientValues) {
    let add_chunk = |(index, sum): (usize, &mut [f32])| {
        let start = index * CHUNK;
        gradient.read(start..start + sum.len(), &mut |values| {
            contribute(sum, values, Divisor::ONE, Wire::F32, Fold::Add);
        });
    };
    match rayon::current_num_threads() {
        // In a pool of one thread, ranks that are threads would wait for each other.
        1 => sum.chunks_mut(CHUNK).enumerate().for_each(add_chunk),
        _ => sum.par_chunks_mut(CHUNK).enumerate().for_each(add_chunk),
    }
}

/// A gradient times a factor, in f32. Products are computed as they are read, a range at a time.
#[derive(Debug)]
struct ScaledGradient<G> {
    gradient: G,
    factor: f32,
}

impl<G: GradientValues> GradientValues for ScaledGradient<G> {
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
    use candle_core::Device;

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
            let sum = GradientSum::Tensor(gradient);
            let scaled = sum.lent(dtype, factor).expect("a float on the host");
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

    fn count(count: f32) -> Tensor {
        Tensor::new(count, &Device::Cpu).expect("a scalar")
    }

    #[test]
    fn threads_that_share_a_tensor_have_sums_of_their_own() {
        let cell = GradientCell::default();
        let gradient = |value: f32| GradientSum::Host(vec![value].into());
        let taken = |expected: f32| {
            let sum = cell.take(&count(expected)).expect("the gradients of this backward");
            sum.map(|it| it.into_gradient().expect("on the host").elements().to_vec())
        };
        cell.add(gradient(1.0)).expect("the first");
        thread::scope(|scope| {
            scope.spawn(|| {
                assert_eq!(taken(0.0), None);
                cell.add(gradient(10.0)).expect("the first here");
            });
        });
        cell.add(gradient(2.0)).expect("one of as many elements");
        assert_eq!(taken(2.0), Some(vec![3.0]));
        assert_eq!(taken(0.0), None);
        assert!(cell.add(gradient(1.0)).is_ok());
        let error = cell.add(GradientSum::Host(vec![1.0, 2.0].into())).expect_err("two elements");
        let error = error.to_string();
        assert!(error.starts_with("a gradient of 2 elements was added to one of 1"), "{error}");
    }

    #[test]
    fn a_sum_is_rounded_once_to_the_dtype_of_the_parameter() {
        let sum = GradientSum::Host(vec![1.0 + 1.0 / 256.0, -0.1].into());
        for (dtype, want) in [
            (DType::F32, [1.003_906_3, -0.1]),
            (DType::BF16, [1.0, -0.100_097_656]),
            (DType::F16, [1.003_906_3, -0.099_975_586]),
        ] {
            for factor in [1.0, 3.0] {
                let lent = sum.lent(dtype, factor).expect("on the host");
                let mut seen = Vec::new();
                lent.read(0..2, &mut |values| seen = values.to_f32());
                assert_eq!(seen, want.map(|it: f32| it * factor), "{dtype:?}");
            }
        }
    }

    #[test]
    fn gradients_of_another_backward_are_refused() {
        let cell = GradientCell::default();
        for _ in 0..2 {
            cell.add(GradientSum::Host(vec![1.0].into())).expect("one of as many elements");
        }
        let error = cell.take(&count(1.0)).expect_err("one of two").to_string();
        let expected = "a backward has added 1 gradients to a tensor that has 2: the others are of";
        assert!(error.starts_with(expected), "{error}");
        assert!(cell.take(&count(0.0)).expect("an empty cell").is_none());
    }

    #[test]
    fn gradients_of_two_shapes_are_added_by_their_elements() {
        let of = |shape: (usize, usize)| {
            let tensor = Tensor::arange(0_f32, 6.0, &Device::Cpu).and_then(|it| it.reshape(shape));
            GradientSum::Tensor(tensor.expect("6 elements"))
        };
        let host = || GradientSum::Host(vec![1.0; 6].into());
        let doubled = [0.0, 2.0, 4.0, 6.0, 8.0, 10.0];
        let more = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0];
        for (a, b, want) in [
            (of((2, 3)), of((3, 2)), doubled),
            (of((2, 3)), host(), more),
            (host(), of((6, 1)), more),
        ] {
            let sum = a.plus(b).and_then(GradientSum::into_gradient).expect("as many elements");
            assert_eq!(sum.elements(), want);
        }
    }
}
