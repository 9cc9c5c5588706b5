//! The calls of a communicator on buffers of its device, and a member's part of an operation that
//! goes by NCCL.

use std::ffi::c_void;
use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

use hsdp_kernels::cuda::{CudaError, Device, DeviceBuffer, IssueGuard, Stream, Together};
use hsdp_sharding::DType;
use nccl_sys::{cudaStream_t, ncclDataType_t, ncclRedOp_t, ncclResult_t};

use super::NcclError;
use super::communicator::{Communicator, LOOK};
use super::connected::SharedCommunicator;
use super::queue::CallQueue;
use super::transfer::Transfer;
use crate::call::Issuing;
use crate::remote::CallShape;
use crate::threads::OwnRank;
use crate::{Error, Op};

/// A call of one communicator that is not issued yet.
pub(super) struct Prepared<'a> {
    comm: &'a Communicator,
    pub(super) shape: CallShape,
    part: Together<'a>,
    call: PutOnStream<'a>,
}

/// Has NCCL put a call on a stream.
type PutOnStream<'a> = Box<dyn FnOnce(cudaStream_t) -> ncclResult_t + 'a>;

impl Communicator {
    /// Issues a call on `stream`: a gather of the shards of all ranks, in rank order; a
    /// reduce-scatter, of which rank `r` gets the sum of the `r`-th parts; or an all-reduce, which
    /// sums in place. **Collective.** Sums are rounded in the dtype of the buffers. Returns when
    /// the operation is issued.
    ///
    /// # Errors
    /// [`NcclError::Mismatch`] if lengths, dtypes or devices do not fit; [`NcclError::Refused`];
    /// [`NcclError::Late`] if the call is not issued in time; [`NcclError::GivenUp`];
    /// [`NcclError::Device`].
    pub fn issue(&self, op: Op, stream: &Stream, transfer: Transfer<'_>) -> Result<(), NcclError> {
        issue_together(vec![self.prepare(op, stream, transfer)?]).map_err(|it| *it.error)
    }

    /// Prepares a call: checks the buffers that it reads and writes. Nothing is issued.
    pub(super) fn prepare<'a>(
        &'a self,
        op: Op,
        stream: &'a Stream,
        transfer: Transfer<'a>,
    ) -> Result<Prepared<'a>, NcclError> {
        let count = self.checked(op, stream, &transfer)?;
        let Transfer { from, to: (to, range) } = transfer;
        let output = to.address(range.start);
        let input = from.as_ref().map_or(output, |(source, own)| source.address(own.start));
        let shape = CallShape { op, dtype: to.dtype(), count };
        let call = self.call(shape, input as *const c_void, output as *mut c_void)?;
        let reads = from.map(|(buffer, _)| buffer).into_iter().collect();
        let part = Together { stream, reads, writes: vec![to] };
        Ok(Prepared { comm: self, shape, part, call })
    }

    /// Checks that the buffers of a call fit; the number of elements of one rank.
    fn checked(
        &self,
        op: Op,
        stream: &Stream,
        transfer: &Transfer<'_>,
    ) -> Result<usize, NcclError> {
        let Transfer { from, to: (to, range) } = transfer;
        let (source, own) = from.clone().unwrap_or((&**to, range.clone()));
        let ranks = self.size;
        let len = if op == Op::AllGather { own.len() } else { range.len() };
        let of = |scatters| if op == scatters { len * ranks } else { len };
        let problem = self
            .problem(stream, source, &own, of(Op::ReduceScatter))
            .or_else(|| self.problem(stream, to, range, of(Op::AllGather)))
            .or_else(|| other_dtype(source, to));
        let operation = op.name();
        let rank = self.rank;
        let size = self.size;
        let mismatch = |problem| NcclError::Mismatch { operation, rank, size, problem };
        problem.map_or(Ok(len), |problem| Err(mismatch(problem)))
    }

    /// The call of NCCL itself, with the addresses of buffers that were checked.
    fn call(
        &self,
        CallShape { op, dtype, count }: CallShape,
        input: *const c_void,
        output: *mut c_void,
    ) -> Result<PutOnStream<'_>, NcclError> {
        let raw = self.raw(op.name())?;
        let functions = self.nccl.functions();
        let dtype = data_type(dtype);
        let sum = ncclRedOp_t::ncclSum;
        Ok(Box::new(move |stream| match op {
            // SAFETY: NC-5, so many elements are read, and so many for each rank written.
            Op::AllGather => unsafe {
                (functions.ncclAllGather)(input, output, count, dtype, raw, stream)
            },
            // SAFETY: NC-5, so many elements for each rank are read, and so many written.
            Op::ReduceScatter => unsafe {
                (functions.ncclReduceScatter)(input, output, count, dtype, sum, raw, stream)
            },
            // SAFETY: NC-5, so many elements are read and written, maybe in place, which NCCL
            // allows.
            _ => unsafe {
                (functions.ncclAllReduce)(input, output, count, dtype, sum, raw, stream)
            },
        }))
    }

    /// The problem of a buffer and its range, of which so many elements are expected.
    fn problem(
        &self,
        stream: &Stream,
        buffer: &DeviceBuffer,
        range: &Range<usize>,
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
    let input = input.dtype();
    let output = output.dtype();
    (input != output).then(|| format!("the input has elements of {input}, the output of {output}"))
}

/// The reason that calls were not issued, and the place of the first that failed among them.
pub(super) struct NotIssued {
    pub(super) slot: usize,
    pub(super) error: Box<NcclError>,
}

impl From<CudaError> for NotIssued {
    fn from(error: CudaError) -> Self {
        Self { slot: 0, error: Box::new(error.into()) }
    }
}

/// Issues the calls of several communicators of this process, each on its own stream, as one: none
/// of them waits for the others before all are issued. Returns when they are on their streams.
/// After an error it is not known which are: the communicators are to be given up.
///
/// # Errors
/// NCCL's answer for the first that it refuses; [`NcclError::Late`] if one does not come to its
/// stream; [`NcclError::Device`].
pub(super) fn issue_together(calls: Vec<Prepared<'_>>) -> Result<(), NotIssued> {
    let _whole = whole(&calls)?;
    let mut parts = Vec::new();
    let mut rest = Vec::new();
    for Prepared { comm, shape, part, call } in calls {
        parts.push(part);
        rest.push((comm, shape.op.name(), call));
    }
    Stream::enqueue_together(&mut parts, |streams| {
        let functions = rest[0].0.nccl.functions();
        // SAFETY: NC-4, the group is ended on this thread, below.
        let start = unsafe { (functions.ncclGroupStart)() };
        if start != ncclResult_t::ncclSuccess {
            let error = Box::new(rest[0].0.refused("group", start));
            return Err(NotIssued { slot: 0, error });
        }
        let mut issued = Vec::with_capacity(rest.len());
        for ((comm, operation, call), stream) in rest.into_iter().zip(streams) {
            issued.push((comm, operation, call(stream.cast())));
        }
        // SAFETY: NC-4, it was started on this thread.
        let end = unsafe { (functions.ncclGroupEnd)() };
        // All have the time of one.
        let mut outcome = Ok(());
        let began = Instant::now();
        for (slot, (comm, operation, status)) in issued.into_iter().enumerate() {
            let settled = comm.settle(operation, worse(status, end), began);
            let failed = |error| NotIssued { slot, error: Box::new(error) };
            outcome = outcome.and(settled.map_err(failed));
        }
        outcome
    })
}

/// Calls of several ranks of this process wait for each other: the turn to issue them, for which
/// they wait as long as for a call.
fn whole(calls: &[Prepared<'_>]) -> Result<Option<IssueGuard>, NotIssued> {
    let [Prepared { comm, shape, .. }, _, ..] = calls else { return Ok(None) };
    let began = Instant::now();
    loop {
        let whole = IssueGuard::begin(LOOK);
        if whole.is_some() {
            return Ok(whole);
        }
        comm.check_patience(shape.op.name(), began)
            .map_err(|error| NotIssued { slot: 0, error: Box::new(error) })?;
    }
}

/// The worse of a call's answer and its group's: an error rather than in progress, and that rather
/// than success.
fn worse(call: ncclResult_t, group: ncclResult_t) -> ncclResult_t {
    match (call, group) {
        (ncclResult_t::ncclSuccess, other) | (other, ncclResult_t::ncclSuccess) => other,
        (ncclResult_t::ncclInProgress, other) => other,
        (other, _) => other,
    }
}

fn data_type(dtype: DType) -> ncclDataType_t {
    match dtype {
        DType::F16 => ncclDataType_t::ncclFloat16,
        DType::BF16 => ncclDataType_t::ncclBfloat16,
        _ => ncclDataType_t::ncclFloat32,
    }
}

/// A member's means to have NCCL move the elements of a call.
#[derive(Clone, Debug)]
pub(crate) struct NcclCarrier {
    pub(super) step: u64,
    pub(super) comm: SharedCommunicator,
    pub(super) stream: Arc<Stream>,
    pub(super) own: Arc<OwnRank>,
    /// `None` where all ranks are threads.
    pub(super) queue: Option<Arc<CallQueue>>,
    /// The operation that is issued by the calls that follow.
    pub(crate) issuing: Option<Issuing>,
}

impl NcclCarrier {
    /// Makes one call of NCCL of all members that are in this process: together, or this rank's own
    /// in its turn.
    ///
    /// # Errors
    /// An error of this call alone, which was not made. A failure of NCCL in the midst of the call
    /// ends the world.
    pub(crate) fn carry(
        carriers: &[Self],
        op: Op,
        transfers: Vec<Transfer<'_>>,
    ) -> Result<(), Error> {
        let first = &carriers[0];
        let queued = first.queue.as_ref().zip(first.issuing.as_ref());
        let turn = queued.map(|(queue, issuing)| queue.begin(&first.own, &issuing.compared));
        let turn = turn.transpose()?;
        let mut held: Vec<_> = carriers.iter().map(|carrier| carrier.comm.lock()).collect();
        let mut calls: Vec<Prepared<'_>> = Vec::with_capacity(carriers.len());
        for ((carrier, comm), transfer) in carriers.iter().zip(&held).zip(transfers) {
            let call = comm.prepare(op, &carrier.stream, transfer);
            calls.push(call.map_err(|error| carrier.not_made(op, error))?);
        }
        if let Some((queue, issuing)) = queued {
            queue.note(&first.own, issuing, calls[0].shape)?;
        }
        let issued = issue_together(calls)
            .and_then(|()| Ok(queued.map_or(Ok(()), |(queue, _)| queue.issued())?));
        issued.map_err(|NotIssued { slot, error }| {
            // No rank knows how many of the calls are done.
            held.iter_mut().for_each(|comm| comm.give_up());
            // The end is waited for: no other thread is to wait for a communicator meanwhile.
            drop((held, turn));
            carriers[slot].end(op, *error)
        })
    }

    /// Ends the world, since a call was not made.
    fn end(&self, op: Op, error: NcclError) -> Error {
        let left = self.queue.as_ref().zip(self.issuing.as_ref());
        let left = left.and_then(|(queue, issuing)| queue.left(&self.own, &issuing.compared));
        let error = self.refused(op, error);
        match left {
            Some(left) => self.own.core.end(left),
            None => {
                self.own.core.end_requested(self.own.rank, &error.to_string());
                self.own.early_ends().world_end().unwrap_or(error)
            }
        }
    }

    /// Returns the error of a call that was not made: the end of the world, if that has aborted the
    /// communicator in the meantime.
    fn not_made(&self, op: Op, error: NcclError) -> Error {
        let is_aborted = matches!(error, NcclError::GivenUp { .. });
        let end = is_aborted.then(|| self.own.early_ends().world_end()).flatten();
        end.unwrap_or_else(|| self.refused(op, error))
    }

    fn refused(&self, op: Op, error: NcclError) -> Error {
        let rank = self.own.rank;
        let step = self.step;
        match error {
            NcclError::Device(error) => Error::Device { op, rank, step, error },
            error => Error::Nccl { op, rank, step, error: Arc::new(error) },
        }
    }
}
