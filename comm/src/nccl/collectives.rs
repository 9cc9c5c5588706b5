//! What a communicator does with buffers of its device.

use std::ops::Range;
use std::time::Duration;

use hsdp_kernels::cuda::{DeviceBuffer, Stream};
use hsdp_sharding::DType;
use nccl_sys::{ncclDataType_t, ncclRedOp_t, ncclResult_t};

use super::communicator::Communicator;
use super::error::NcclError;

/// For how long a call may be in progress before it is on its stream: the ranks have met already, so it is the host's own work.
const TO_ISSUE: Duration = Duration::from_secs(60);

/// Some elements of a buffer.
type Part<'a> = (&'a DeviceBuffer, Range<usize>);

impl Communicator {
    /// Gathers: every rank's `shard`, in the order of ranks, becomes `range` of everybody's `full`, on `stream`. **Collective.**
    ///
    /// `shard`: `[n]`; `range`: `n` times the ranks; of one dtype. Returns when it is issued.
    ///
    /// # Errors
    /// [`NcclError::Mismatch`] if lengths, dtypes or devices differ; [`NcclError::Refused`]; [`NcclError::Device`].
    pub fn all_gather(
        &mut self,
        stream: &Stream,
        (shard, own): Part<'_>,
        (full, range): (&mut DeviceBuffer, Range<usize>),
    ) -> Result<(), NcclError> {
        let operation = "all_gather";
        self.check(operation, stream, (shard, &own), own.len())?;
        self.check(operation, stream, (full, &range), own.len() * self.size)?;
        let dtype = self.one_dtype(operation, shard, full)?;
        let (from, to, count) = (shard.address(own.start), full.address(range.start), own.len());
        let (raw, function) = (self.raw(operation)?, self.nccl.functions().ncclAllGather);
        self.issue(operation, stream, (&[shard], &mut [full]), |stream| {
            // SAFETY: NC-5, so many elements are read, and so many for each rank written.
            unsafe { function(from as *const _, to as *mut _, count, dtype, raw, stream) }
        })
    }

    /// Reduces and scatters: rank `r` gets the sum over ranks of their `r`-th part of `range`, on `stream`. **Collective.**
    ///
    /// `range`: `n` times the ranks; `part`: `[n]`; of one dtype, in which the sums are rounded. Returns when it is issued.
    ///
    /// # Errors
    /// Those of [`all_gather`](Self::all_gather).
    pub fn reduce_scatter(
        &mut self,
        stream: &Stream,
        (input, range): Part<'_>,
        part: &mut DeviceBuffer,
    ) -> Result<(), NcclError> {
        let (operation, count) = ("reduce_scatter", part.len());
        self.check(operation, stream, (input, &range), count * self.size)?;
        self.check(operation, stream, (part, &(0..count)), count)?;
        let dtype = self.one_dtype(operation, input, part)?;
        let (from, to) = (input.address(range.start), part.address(0));
        let (raw, function) = (self.raw(operation)?, self.nccl.functions().ncclReduceScatter);
        self.issue(operation, stream, (&[input], &mut [part]), |stream| {
            let sum = ncclRedOp_t::ncclSum;
            // SAFETY: NC-5, so many elements for each rank are read, and so many written.
            unsafe { function(from as *const _, to as *mut _, count, dtype, sum, raw, stream) }
        })
    }

    /// Reduces: everybody gets the sum over ranks, in place, on `stream`. **Collective.**
    ///
    /// `values`: `[n]`, in whose dtype the sums are rounded. Returns when it is issued.
    ///
    /// # Errors
    /// Those of [`all_gather`](Self::all_gather).
    pub fn all_reduce(
        &mut self,
        stream: &Stream,
        values: &mut DeviceBuffer,
    ) -> Result<(), NcclError> {
        let (operation, count) = ("all_reduce", values.len());
        self.check(operation, stream, (values, &(0..count)), count)?;
        let (dtype, address) = (data_type(values.dtype()), values.address(0));
        let (raw, function) = (self.raw(operation)?, self.nccl.functions().ncclAllReduce);
        self.issue(operation, stream, (&[], &mut [values]), |stream| {
            let sum = ncclRedOp_t::ncclSum;
            // SAFETY: NC-5, so many elements are read and written in place, which NCCL allows.
            unsafe {
                function(address as *const _, address as *mut _, count, dtype, sum, raw, stream)
            }
        })
    }

    /// Puts a call on a stream, and sees that it is there.
    fn issue(
        &self,
        operation: &'static str,
        stream: &Stream,
        buffers: (&[&DeviceBuffer], &mut [&mut DeviceBuffer]),
        call: impl FnOnce(nccl_sys::cudaStream_t) -> ncclResult_t,
    ) -> Result<(), NcclError> {
        stream.enqueue(buffers, |raw| self.settle(operation, call(raw.cast()), TO_ISSUE))
    }

    fn check(
        &self,
        operation: &'static str,
        stream: &Stream,
        (buffer, range): (&DeviceBuffer, &Range<usize>),
        expected: usize,
    ) -> Result<(), NcclError> {
        let problem = if range.end > buffer.len() || range.start > range.end {
            format!("elements {range:?} of a buffer of {}", buffer.len())
        } else if range.len() != expected {
            format!("{} elements, where {expected} are meant", range.len())
        } else if *buffer.device() != self.device || *stream.device() != self.device {
            let (own, of_buffer) = (self.device.ordinal(), buffer.device().ordinal());
            let of_stream = stream.device().ordinal();
            format!(
                "a buffer of device {of_buffer}, a stream of {of_stream}, a communicator of {own}"
            )
        } else {
            return Ok(());
        };
        Err(NcclError::Mismatch { operation, rank: self.rank, size: self.size, problem })
    }

    fn one_dtype(
        &self,
        operation: &'static str,
        one: &DeviceBuffer,
        other: &DeviceBuffer,
    ) -> Result<ncclDataType_t, NcclError> {
        if one.dtype() == other.dtype() {
            return Ok(data_type(one.dtype()));
        }
        let problem = format!("elements of {} into {}", one.dtype(), other.dtype());
        Err(NcclError::Mismatch { operation, rank: self.rank, size: self.size, problem })
    }
}

fn data_type(dtype: DType) -> ncclDataType_t {
    match dtype {
        DType::F16 => ncclDataType_t::ncclFloat16,
        DType::BF16 => ncclDataType_t::ncclBfloat16,
        _ => ncclDataType_t::ncclFloat32,
    }
}
