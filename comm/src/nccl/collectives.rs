//! The calls of a communicator on buffers of its device.

use std::ffi::c_void;
use std::ops::Range;
use std::time::Instant;

use hsdp_kernels::cuda::{CudaError, Device, DeviceBuffer, Stream, Together};
use hsdp_sharding::DType;
use nccl_sys::{ncclDataType_t, ncclRedOp_t, ncclResult_t};
use parking_lot::Mutex;

use super::NcclError;
use super::communicator::Communicator;
use super::patience::Patience;
use super::transfer::{Part, Transfer};
use crate::Op;
use crate::remote::Wire;

/// A call of one communicator that is not issued yet.
pub(crate) struct Prepared<'a> {
    comm: &'a Communicator,
    pub(super) wire: Wire,
    part: Together<'a>,
    call: Box<dyn FnOnce(nccl_sys::cudaStream_t) -> ncclResult_t + 'a>,
}

/// Of operations that are issued for several ranks, one at a time is: so all communicators of all ranks have one order.
static LAUNCHES: Mutex<()> = Mutex::new(());

impl Communicator {
    /// Gathers: the shards of all ranks, in rank order, are written into a range of every rank's `full`, on `stream`.
    /// **Collective.**
    ///
    /// `shard`: a buffer and a range of `n` elements; `full`: a buffer and a range of `n` times the ranks; of one dtype.
    /// Returns when the operation is issued.
    ///
    /// # Errors
    /// [`NcclError::Mismatch`] if lengths, dtypes or devices do not fit; [`NcclError::Refused`]; [`NcclError::Late`] if
    /// the call is not issued in time; [`NcclError::GivenUp`]; [`NcclError::Device`].
    pub fn all_gather(
        &mut self,
        stream: &Stream,
        shard: Part<'_>,
        full: (&mut DeviceBuffer, Range<usize>),
    ) -> Result<(), NcclError> {
        self.issue(Op::AllGather, stream, Transfer { from: Some(shard), to: full })
    }

    /// Reduces and scatters: rank `r` gets the sum over all ranks of the `r`-th part of `input`, on `stream`. **Collective.**
    ///
    /// `input`: a buffer and a range of `n` times the ranks; `part`: `[n]`; of one dtype, in which the sums are rounded.
    /// Returns when the operation is issued.
    ///
    /// # Errors
    /// Those of [`all_gather`](Self::all_gather).
    pub fn reduce_scatter(
        &mut self,
        stream: &Stream,
        input: Part<'_>,
        part: &mut DeviceBuffer,
    ) -> Result<(), NcclError> {
        let all = 0..part.len();
        self.issue(Op::ReduceScatter, stream, Transfer { from: Some(input), to: (part, all) })
    }

    /// Reduces: every rank gets the sum over all ranks, in place, on `stream`. **Collective.**
    ///
    /// `values`: `[n]`; the sums are rounded in its dtype. Returns when the operation is issued.
    ///
    /// # Errors
    /// Those of [`all_gather`](Self::all_gather).
    pub fn all_reduce(
        &mut self,
        stream: &Stream,
        values: &mut DeviceBuffer,
    ) -> Result<(), NcclError> {
        let all = 0..values.len();
        self.issue(Op::AllReduce, stream, Transfer { from: None, to: (values, all) })
    }

    fn issue(&self, op: Op, stream: &Stream, transfer: Transfer<'_>) -> Result<(), NcclError> {
        issue_together(vec![self.prepare(op, stream, transfer)?]).map_err(|it| *it.error)
    }

    /// Prepares a call: checks what it reads and writes. Nothing is issued.
    pub(crate) fn prepare<'a>(
        &'a self,
        op: Op,
        stream: &'a Stream,
        Transfer { from, to: (to, range) }: Transfer<'a>,
    ) -> Result<Prepared<'a>, NcclError> {
        let operation = name(op);
        let (source, own) = from.clone().unwrap_or((&*to, range.clone()));
        let (ranks, len) = (self.size, if op == Op::AllGather { own.len() } else { range.len() });
        let of = |scatters| if op == scatters { len * ranks } else { len };
        let problem = self
            .problem(stream, (source, &own), of(Op::ReduceScatter))
            .or_else(|| self.problem(stream, (to, &range), of(Op::AllGather)))
            .or_else(|| other_dtype(source, to));
        if let Some(problem) = problem {
            let (rank, size) = (self.rank, self.size);
            return Err(NcclError::Mismatch { operation, rank, size, problem });
        }
        let dtype = data_type(to.dtype());
        let wire = Wire { op, dtype: to.dtype(), count: len };
        let (input, output) = (source.address(own.start), to.address(range.start));
        let (raw, functions) = (self.raw(operation)?, self.nccl.functions());
        let reads = from.map(|(buffer, _)| buffer).into_iter().collect();
        let part = Together { stream, reads, writes: vec![to] };
        let call = move |stream| {
            let (input, output) = (input as *const c_void, output as *mut c_void);
            let sum = ncclRedOp_t::ncclSum;
            match op {
                // SAFETY: NC-5, so many elements are read, and so many for each rank written.
                Op::AllGather => unsafe {
                    (functions.ncclAllGather)(input, output, len, dtype, raw, stream)
                },
                // SAFETY: NC-5, so many elements for each rank are read, and so many written.
                Op::ReduceScatter => unsafe {
                    (functions.ncclReduceScatter)(input, output, len, dtype, sum, raw, stream)
                },
                // SAFETY: NC-5, so many elements are read and written, maybe in place, which NCCL allows.
                _ => unsafe {
                    (functions.ncclAllReduce)(input, output, len, dtype, sum, raw, stream)
                },
            }
        };
        Ok(Prepared { comm: self, wire, part, call: Box::new(call) })
    }

    /// The problem of a buffer and its range, of which so many elements are expected.
    fn problem(
        &self,
        stream: &Stream,
        (buffer, range): (&DeviceBuffer, &Range<usize>),
        expected: usize,
    ) -> Option<String> {
        if range.end > buffer.len() || range.start > range.end {
            return Some(format!("elements {range:?} are not within a buffer of {}", buffer.len()));
        }
        if range.len() != expected {
            return Some(format!("{} elements, expected {expected}", range.len()));
        }
        let devices = [buffer.device(), stream.device(), &self.device].map(Device::ordinal);
        let [of_buffer, of_stream, own] = devices;
        (devices != [own; 3]).then(|| {
            format!(
                "the buffer is on device {of_buffer}, the stream on {of_stream}, the communicator on {own}"
            )
        })
    }
}

fn other_dtype(input: &DeviceBuffer, output: &DeviceBuffer) -> Option<String> {
    let (input, output) = (input.dtype(), output.dtype());
    (input != output).then(|| format!("the input has elements of {input}, the output of {output}"))
}

/// The reason that calls were not issued, and the place of the first that failed among them.
pub(crate) struct NotIssued {
    pub(crate) slot: usize,
    pub(crate) error: Box<NcclError>,
}

impl From<CudaError> for NotIssued {
    fn from(error: CudaError) -> Self {
        Self { slot: 0, error: Box::new(error.into()) }
    }
}

/// Issues the calls of several communicators of this process, each on its own stream, as one: none of them waits for the others before
/// all are issued. Returns when they are on their streams. After an error it is not known which are: the communicators are to be given up.
///
/// # Errors
/// NCCL's answer for the first that it refuses; [`NcclError::Late`] if one does not come to its stream; [`NcclError::Device`].
pub(crate) fn issue_together(calls: Vec<Prepared<'_>>) -> Result<(), NotIssued> {
    // A thread that issues for one rank alone may have to wait for others that do.
    let _launch = (calls.len() > 1).then(|| LAUNCHES.lock());
    let (mut parts, mut rest) = (Vec::new(), Vec::new());
    for Prepared { comm, wire, part, call } in calls {
        parts.push(part);
        rest.push((comm, name(wire.op), call));
    }
    Stream::enqueue_together(&mut parts, |streams| {
        let group = Group::start(rest.first().map(|(comm, ..)| *comm));
        let group = group.map_err(|error| NotIssued { slot: 0, error: Box::new(error) })?;
        let mut issued = Vec::with_capacity(rest.len());
        for ((comm, operation, call), stream) in rest.into_iter().zip(streams) {
            issued.push((comm, operation, call(stream.cast())));
        }
        let end = group.end();
        // All have the time of one.
        let (mut outcome, began) = (Ok(()), Instant::now());
        for (slot, (comm, operation, status)) in issued.into_iter().enumerate() {
            let is_over = || began.elapsed() >= comm.patience || comm.is_over();
            let patience = Patience::until(comm.patience, &is_over);
            let settled = comm.settle(operation, worse(status, end), &patience);
            outcome = outcome.and(settled.map_err(|error| {
                let error = Box::new(error);
                NotIssued { slot, error }
            }));
        }
        outcome
    })
}

/// The worse of a call's answer and its group's: an error rather than in progress, and that rather than success.
fn worse(call: ncclResult_t, group: ncclResult_t) -> ncclResult_t {
    match (call, group) {
        (ncclResult_t::ncclSuccess, other) | (other, ncclResult_t::ncclSuccess) => other,
        (ncclResult_t::ncclInProgress, other) => other,
        (other, _) => other,
    }
}

/// Calls that NCCL takes as one.
struct Group<'a>(Option<&'a Communicator>);

impl<'a> Group<'a> {
    fn start(comm: Option<&'a Communicator>) -> Result<Self, NcclError> {
        let Some(first) = comm else { return Ok(Self(None)) };
        // SAFETY: NC-4, it is ended on this thread, by `end`.
        match unsafe { (first.nccl.functions().ncclGroupStart)() } {
            ncclResult_t::ncclSuccess => Ok(Self(comm)),
            status => Err(first.refused("group", status)),
        }
    }

    /// NCCL's answer for all together.
    fn end(self) -> ncclResult_t {
        let Some(first) = self.0 else { return ncclResult_t::ncclSuccess };
        // SAFETY: NC-4, it was started on this thread.
        unsafe { (first.nccl.functions().ncclGroupEnd)() }
    }
}

/// The name of a call in errors.
fn name(op: Op) -> &'static str {
    match op {
        Op::AllGather => "all_gather",
        Op::ReduceScatter => "reduce_scatter",
        _ => "all_reduce",
    }
}

fn data_type(dtype: DType) -> ncclDataType_t {
    match dtype {
        DType::F16 => ncclDataType_t::ncclFloat16,
        DType::BF16 => ncclDataType_t::ncclBfloat16,
        _ => ncclDataType_t::ncclFloat32,
    }
}
