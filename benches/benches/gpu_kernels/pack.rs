//! Many gradients into one flat buffer.

use hsdp_kernels::cuda::{CudaError, DeviceBuffer, Noted, Notes, Packed, Stream};
use hsdp_kernels::{Divisor, HostBuffer};
use hsdp_sharding::DType;

use crate::case::{Case, Failure};
use crate::source::{Source, host};

/// By what gradients are divided before they are rounded.
const PRE: f32 = 4.0;

/// How many parameters there are, of which dtypes in turn, and the dtype of the flat buffer.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Shape {
    pub(crate) count: usize,
    pub(crate) dtypes: &'static [DType],
    pub(crate) flat: DType,
}

/// The parameters of a shape: where each begins, and its elements.
struct Params(Vec<(usize, DeviceBuffer)>);

impl Params {
    /// As long as each other, from multiples of 32 on, as a plan has them.
    fn new(source: &Source<'_>, shape: Shape, len: usize) -> Result<Self, CudaError> {
        let each = (len / shape.count / 32).max(1) * 32;
        let param = |index: usize| {
            let dtype = shape.dtypes[index % shape.dtypes.len()];
            Ok((index * each, source.device(dtype, index * each, each)?))
        };
        (0..shape.count).map(param).collect::<Result<_, _>>().map(Self)
    }

    fn elements(&self) -> usize {
        self.0.iter().map(|(_, param)| param.len()).sum()
    }

    fn bytes(&self) -> usize {
        self.0.iter().map(|(_, param)| param.len() * param.dtype().size_bytes()).sum()
    }
}

/// [`Stream::pack`], which looks for what is not finite, as it does in a step.
pub(crate) struct Pack {
    gradients: Params,
    flat: DeviceBuffer,
    noted: Noted,
}

impl Pack {
    pub(crate) fn new(source: &Source<'_>, shape: Shape, len: usize) -> Result<Self, CudaError> {
        let gradients = Params::new(source, shape, len)?;
        let flat = source.empty(shape.flat, gradients.elements())?;
        Ok(Self { gradients, flat, noted: Noted::new(source.stream)? })
    }
}

impl Case for Pack {
    fn bytes(&self) -> usize {
        self.gradients.bytes() + self.flat.len() * self.flat.dtype().size_bytes()
    }

    fn issue(&mut self, stream: &Stream, launches: u32) -> Result<(), CudaError> {
        let gradients = self.gradients.0.iter();
        let packed: Vec<_> = gradients
            .map(|(start, gradient)| Packed { gradient: gradient.into(), start: *start })
            .collect();
        (0..launches).try_for_each(|_| {
            let notes = Notes { noted: &mut self.noted, round: 0 };
            stream.pack(&mut self.flat, &packed, pre(), Some(notes))
        })
    }

    fn check(&self, source: &Source<'_>) -> Result<(), Failure> {
        let mut expected = zeros(&self.flat);
        for (start, gradient) in &self.gradients.0 {
            let values = host(gradient.dtype(), *start, gradient.len());
            let range = *start..start + gradient.len();
            hsdp_kernels::pack(expected.values_mut().slice(range), values.values(), pre());
        }
        source.compare(&self.flat, &expected, "what was packed")
    }
}

fn pre() -> Divisor {
    Divisor::new(PRE).expect("a divisor")
}

fn zeros(like: &DeviceBuffer) -> HostBuffer {
    HostBuffer::zeros(like.dtype(), like.len()).expect("memory for a check")
}
