//! The values of the buffers: the same numbers on the device and on the host.

use std::time::Duration;

use half::{bf16, f16};
use hsdp_kernels::HostBuffer;
use hsdp_kernels::cuda::{CudaError, DeviceBuffer, Stream};
use hsdp_sharding::DType;

use crate::case::Failure;

/// More than anything here takes.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);

/// Elements of a pattern: what is larger repeats it.
const PATTERN: usize = 1 << 18;

/// Patterns on a device. Its buffers are tiled with them: to send 256 MiB from the host for each
/// buffer would take longer than the rest.
#[derive(Debug)]
pub(crate) struct Source<'a> {
    pub(crate) stream: &'a Stream,
    patterns: [DeviceBuffer; 3],
}

impl<'a> Source<'a> {
    pub(crate) fn new(stream: &'a Stream) -> Result<Self, CudaError> {
        let pattern = |dtype| {
            let mut buffer = DeviceBuffer::new(stream.device(), dtype, PATTERN, "a pattern")?;
            buffer.write(stream, host(dtype, 0, PATTERN).values())?;
            Ok(buffer)
        };
        let patterns = [pattern(DType::F32)?, pattern(DType::F16)?, pattern(DType::BF16)?];
        Ok(Self { stream, patterns })
    }

    /// A buffer of the device with what [`host`] gives for the same arguments.
    pub(crate) fn device(
        &self,
        dtype: DType,
        first: usize,
        len: usize,
    ) -> Result<DeviceBuffer, CudaError> {
        let pattern = match dtype {
            DType::F16 => &self.patterns[1],
            DType::BF16 => &self.patterns[2],
            _ => &self.patterns[0],
        };
        let mut buffer = self.empty(dtype, len)?;
        let mut at = 0;
        let mut from = first % PATTERN;
        while at < len {
            let count = (PATTERN - from).min(len - at);
            buffer.copy(self.stream, at..at + count, pattern, from..from + count)?;
            (at, from) = (at + count, 0);
        }
        Ok(buffer)
    }

    /// A buffer of the device that means nothing yet.
    pub(crate) fn empty(&self, dtype: DType, len: usize) -> Result<DeviceBuffer, CudaError> {
        DeviceBuffer::new(self.stream.device(), dtype, len, "a bench")
    }

    /// A buffer of zeros on the device.
    pub(crate) fn zeros(&self, len: usize) -> Result<DeviceBuffer, CudaError> {
        let mut buffer = self.empty(DType::F32, len)?;
        buffer.fill(self.stream, 0)?;
        Ok(buffer)
    }

    /// Compares a buffer of the device with what is expected, bit for bit.
    pub(crate) fn compare(
        &self,
        found: &DeviceBuffer,
        expected: &HostBuffer,
        what: &str,
    ) -> Result<(), Failure> {
        let found = found.read_back(self.stream, PATIENCE)?.values().to_f32();
        let expected = expected.values().to_f32();
        let bits = found.iter().map(|it| it.to_bits()).zip(expected.iter().map(|it| it.to_bits()));
        match bits.clone().position(|(found, expected)| found != expected) {
            Some(at) => Err(Failure::Wrong(format!(
                "element {at} of {what} is {}, not {}",
                found[at], expected[at]
            ))),
            None if found.len() != expected.len() => Err(Failure::Wrong(format!(
                "{what} has {} elements, not {}",
                found.len(),
                expected.len()
            ))),
            None => Ok(()),
        }
    }
}

/// Numbers from -2 to 2 of 24 bits, so that narrower dtypes round them: `len` from number `first`
/// on.
pub(crate) fn host(dtype: DType, first: usize, len: usize) -> HostBuffer {
    let numbers = (first..first + len).map(|index| number(index % PATTERN));
    match dtype {
        DType::F16 => numbers.map(f16::from_f32).collect::<Vec<_>>().into(),
        DType::BF16 => numbers.map(bf16::from_f32).collect::<Vec<_>>().into(),
        _ => numbers.collect::<Vec<_>>().into(),
    }
}

/// The same as f32.
pub(crate) fn numbers(first: usize, len: usize) -> Vec<f32> {
    host(DType::F32, first, len).values().to_f32()
}

/// By a multiplicative hash: without a short period.
fn number(index: usize) -> f32 {
    let hashed = ((index as u64 * 0x9e37_79b1) & 0xffff_ffff) >> 8;
    hashed as f32 / (1 << 22) as f32 - 2.0
}
