//! Collectives on buffers of a device: the calls on whole units, where gradients, partials and
//! parameters lie there.
//!
//! Where ranks are threads, members meet as for any other operation, with the same descriptors, and
//! all ranks may use one device. The member that comes last issues for all of them, also by NCCL:
//! so an operation is issued for all members or for none, and in one order for all groups. Where
//! ranks are processes, each member issues its own part by NCCL, in its call (`NCCL.md`, "Between
//! processes"). Each member's part goes on that member's own streams. So an operation is complete,
//! for [`Pending`](crate::Pending), when it is issued; its outputs carry the moment from which they
//! can be read (`CUDA.md` of the kernels), and no thread of the host waits.
//!
//! In reading order: the calls, the contribution and the output of a member, the work.

use std::mem;
use std::ops::Range;
use std::sync::Arc;

use hsdp_flight::{EntryNumber, FlightState};
use hsdp_kernels::cuda::{CudaError, Device, DeviceBuffer, Noted, Notes, Stream};
use hsdp_kernels::{Fold, GradientValues};
use hsdp_sharding::{DType, Rank, UnitLayout, balanced};

use crate::call::{Described, GroupCall, Issuing};
use crate::engine::Record;
use crate::execute::{At, Contribute, LAYOUTS_DIFFER, Meter, Outputs, Work, one_cut};
use crate::lease::{Leased, lend};
use crate::nccl::{NcclCarrier, Transfer};
use crate::parts::{PendingParts, Ungathered};
use crate::pattern::{Pattern, nth};
use crate::rolling::signature;
use crate::sync::Mutex;
use crate::units::scaled_sum;
use crate::{Contribution, Error, Group, Op, Pending, Scaling, Tag};

/// The buffer for a member's part of a reduction, on a device.
#[derive(Debug)]
pub struct DeviceAccumulator {
    /// `[layout.trainable().shard_len]`, f32.
    pub partial: DeviceBuffer,
    /// Whether the sum replaces the partial or is added to it. Members may differ in it.
    pub fold: Fold,
    /// Notes of non-finite elements: of this member's contribution, as indices in the unit's
    /// trainable region, and of its partial. Its rounds are microbatches.
    pub noted: Noted,
}

/// A member's part of a reduction, on a device.
#[derive(Debug)]
pub struct DeviceReduced {
    /// The accumulator's partial, with the sum in it.
    pub partial: DeviceBuffer,
    /// The accumulator's notes.
    pub noted: Noted,
}

/// # Calls on whole units, on a device
///
/// As [the calls on the host](Self::gather_unit): **collective**, in the order of the group's
/// channel, with the same checks, the same bits and the same bytes in the ledger (NCCL sums in the
/// wire dtype and in its own order). There is no call for one copy that all ranks share. The output
/// of [`Pending::wait`] can be used at once by work on a stream, which waits for the operation. The
/// host does not wait.
///
/// Every call returns [`Error::Device`] of its own rank. An error of a device in the parts of the
/// operation comes out of [`Pending::wait`], the same on all members.
///
/// Where ranks are processes, each issues its part in the call, which returns errors of its rank
/// alone: the others wait for it, so the step is to be [aborted](crate::World::abort_step). A call
/// that NCCL refuses ends the world, and a group that is not connected by NCCL is refused
/// ([`CallError::Refused`](crate::CallError)). Descriptors are compared by
/// [`World::compare_operations`](crate::World::compare_operations).
impl Group {
    /// Gathers a unit: every member's shard is copied into every member's buffer.
    ///
    /// `shard`: `[layout.shard_len()]`, in the dtype of `full`. `full`: `[layout.full_len()]`, the
    /// unit's flat index space. The output is `full`, filled.
    ///
    /// # Errors
    /// [`CallError::Refused`](crate::CallError) if the layout does not have one shard for each
    /// member, or if the shard or `full` does not fit the layout, or if they differ in dtype;
    /// [`Error::Device`].
    pub fn gather_unit_on_device(
        &self,
        tag: Tag,
        layout: Arc<UnitLayout>,
        shard: Arc<DeviceBuffer>,
        full: DeviceBuffer,
    ) -> Result<Pending<DeviceBuffer>, Error> {
        let op = Op::AllGather;
        let dtype = shard.dtype();
        self.check_layout(op, &layout)?;
        self.check_len(op, "the shard", shard.len(), layout.shard_len())?;
        self.check_len(op, "the whole unit", full.len(), layout.full_len())?;
        if full.dtype() != dtype {
            return Err(self.bad_dtype(op, full.dtype(), "not the dtype of the shard"));
        }
        let caller = self.caller(op, tag, shard.device())?;
        let call = GroupCall::new(op, tag).of(dtype, layout.shard_len());
        let input = DeviceInput::Gather { layout, shard };
        self.issue_on_device(call, DeviceMember::new(caller, input, full.into()))
    }

    /// Reduces a unit's gradients: member `s` gets the sum over members, in their order, of
    /// `round_to_wire(gradient / pre)`, divided by `post`, for the elements of its trainable shard.
    ///
    /// Gradients on the host are copied to the device. The padding of the partial is set to
    /// zero when the sum replaces the partial, and stays as it is otherwise.
    ///
    /// # Errors
    /// [`CallError::Refused`](crate::CallError) if the layout does not have one shard for each
    /// member, or if a gradient or the partial does not fit the layout, or if the partial is not
    /// f32; [`Error::Device`].
    pub fn reduce_unit_on_device(
        &self,
        tag: Tag,
        layout: Arc<UnitLayout>,
        contribution: Contribution,
        accumulator: DeviceAccumulator,
    ) -> Result<Pending<DeviceReduced>, Error> {
        let op = Op::ReduceScatter;
        let Contribution { gradients: values, scaling } = contribution;
        let part_len = layout.trainable().shard_len;
        self.check_layout(op, &layout)?;
        self.check_len(op, "the partial", accumulator.partial.len(), part_len)?;
        self.check_is_f32(op, &accumulator.partial)?;
        self.check_gradients(&layout, &values)?;
        let scaling = self.effective(scaling);
        let microbatch = tag.microbatch;
        let caller = self.caller(op, tag, accumulator.partial.device())?;
        let call = scaled_sum(op, tag, layout.trainable().len, scaling);
        let DeviceAccumulator { partial: output, fold, noted } = accumulator;
        let input = DeviceInput::Reduce(DeviceGradients {
            layout,
            values,
            scaling,
            fold,
            noted,
            microbatch,
        });
        self.issue_on_device(call, DeviceMember::new(caller, input, output.into()))
    }

    /// Sums f32 elements over the members: every member gets the sum in member order of
    /// `round_to_wire(element / pre)`, divided by `post`; the same bits on all members.
    ///
    /// `values`: `[n]`, f32; output `[n]`, in the same buffer.
    ///
    /// # Errors
    /// [`CallError::Refused`](crate::CallError) if they are not f32; [`Error::Device`].
    pub fn all_reduce_scaled_on_device(
        &self,
        tag: Tag,
        values: DeviceBuffer,
        scaling: Scaling,
    ) -> Result<Pending<DeviceBuffer>, Error> {
        let op = Op::AllReduce;
        self.check_is_f32(op, &values)?;
        let scaling = self.effective(scaling);
        let caller = self.caller(op, tag, values.device())?;
        let call = scaled_sum(op, tag, values.len(), scaling);
        let input = DeviceInput::AllReduce(scaling);
        self.issue_on_device(call, DeviceMember::new(caller, input, values.into()))
    }

    /// Sums f32 elements over the members, each its own part, as
    /// [`reduce_scatter_scaled`](Self::reduce_scatter_scaled).
    ///
    /// `values`: `[n]`, f32; output `[n]`, in the same buffer. `cuts`: `[size + 1]`, ascending from
    /// 0 to `n`, the same on all members.
    ///
    /// # Errors
    /// [`CallError::Refused`](crate::CallError) if the values are not f32, or the cuts do not
    /// ascend from 0 to `n`, or are not one more than the members; [`Error::Device`].
    pub fn reduce_scatter_scaled_on_device(
        &self,
        tag: Tag,
        cuts: Arc<[usize]>,
        values: DeviceBuffer,
        scaling: Scaling,
    ) -> Result<Pending<DeviceBuffer>, Error> {
        let op = Op::ReduceScatter;
        self.check_is_f32(op, &values)?;
        let count = self.check_cuts(op, &cuts)?;
        self.check_len(op, "the input", values.len(), count)?;
        let scaling = self.effective(scaling);
        let caller = self.caller(op, tag, values.device())?;
        let call = scaled_sum(op, tag, count, scaling);
        let input = DeviceInput::ReduceParts { cuts, scaling };
        self.issue_on_device(call, DeviceMember::new(caller, input, values.into()))
    }

    /// Gathers parts in place, as [`gather_parts`](Self::gather_parts).
    ///
    /// Where ranks are processes, the operation is complete when it is issued. In a step that is
    /// aborted later, the parts of other members may be undefined, and the part of this member is
    /// as it was.
    ///
    /// # Errors
    /// Every error has the way to the buffer. [`CallError::Refused`](crate::CallError) if the cuts
    /// do not ascend from 0, or are not one more than the members, or the buffer ends before the
    /// last of them; [`Error::Device`].
    pub fn gather_parts_on_device(
        &self,
        tag: Tag,
        cuts: Arc<[usize]>,
        buffer: DeviceBuffer,
    ) -> Result<PendingParts<DeviceBuffer>, Ungathered<DeviceBuffer>> {
        let op = Op::AllGather;
        let (buffer, lease) = lend(buffer);
        let issued = self.check_parts_of(&cuts, buffer.len()).and_then(|count| {
            let caller = self.caller(op, tag, buffer.device())?;
            let call = GroupCall::new(op, tag).of(buffer.dtype(), count);
            let input = DeviceInput::GatherParts(cuts);
            self.issue_on_device(call, DeviceMember::new(caller, input, buffer))
        });
        self.lent(lease).pending(issued)
    }

    /// Issues an operation on devices. Where members share no memory, this rank's part is issued at
    /// once, by NCCL.
    fn issue_on_device<O>(&self, call: GroupCall, member: DeviceMember) -> Result<Pending<O>, Error>
    where
        O: TryFrom<DeviceOutput, Error = Error>,
    {
        let is_apart = self.size() > 1 && self.handle().endpoint().is_some();
        if is_apart && member.caller.carrier.is_none() {
            // A world that is over has closed its communicators.
            self.handle().check(call.op)?;
            return Err(self.apart(call.op));
        }
        self.issue_or(call, member, |at, described, own| {
            let entry = at.entry;
            let Record { ledger, flight, .. } = &*self.handle().own.record;
            let actual = described.actual();
            if let Some(endpoint) = self.handle().endpoint() {
                endpoint.note(&described.compared);
            }
            let site = at.site;
            let at = At { actual, ranks: &site.ranks, slot: site.slot, round: 0 };
            let received = own.pattern(at.pattern()).received();
            match O::try_from(self.issue_at_once(entry, &described, own, at)) {
                Ok(output) => {
                    ledger.received(actual.channel, actual.op, received);
                    Ok(Pending::ready(output))
                }
                Err(error) => {
                    flight.settle(entry, FlightState::Failed);
                    Err(error)
                }
            }
        })
    }

    /// Issues this rank's part of an operation by NCCL.
    fn issue_at_once(
        &self,
        entry: EntryNumber,
        described: &Described,
        mut own: DeviceMember,
        at: At<'_>,
    ) -> DeviceOutput {
        let layout = own.layout().map(|layout| &**layout);
        let signature = signature(own.op() as u8, layout, own.cuts());
        let issuing = Issuing { compared: Arc::clone(&described.compared), signature, entry };
        own.caller.carrier.iter_mut().for_each(|carrier| carrier.issuing = Some(issuing.clone()));
        let work = DeviceMember::assemble(vec![own], at).expect("one member agrees with itself");
        self.run_alone(work)
    }

    /// The caller: this member, with its stream and its carrier.
    fn caller(&self, op: Op, tag: Tag, device: &Device) -> Result<Caller, Error> {
        let handle = self.handle();
        let rank = self.rank();
        let step = tag.step;
        let stream = handle.streams.of(device, self.channel());
        let stream = stream.map_err(|error| self.device_error(op, tag, error))?;
        let carrier =
            if self.size() > 1 { handle.nccl.carrier(&handle.own, self.id(), step) } else { None };
        Ok(Caller { rank, slot: self.index(), step, stream, carrier })
    }

    fn device_error(&self, op: Op, tag: Tag, error: CudaError) -> Error {
        Error::Device { op, rank: self.rank(), step: tag.step, error }
    }

    fn check_is_f32(&self, op: Op, buffer: &DeviceBuffer) -> Result<(), Error> {
        if buffer.dtype() == DType::F32 {
            return Ok(());
        }
        Err(self.bad_dtype(op, buffer.dtype(), "partials are f32"))
    }
}

/// The contribution of a member.
pub(crate) struct DeviceMember {
    caller: Caller,
    input: DeviceInput,
    /// The whole unit of a gather, the partial of a reduction, or the elements of an operation in
    /// place.
    output: Leased<DeviceBuffer>,
    /// The elements for the wire, or the error of packing them.
    packed: Option<Result<DeviceBuffer, CudaError>>,
}

/// A member's rank, slot and step, and its ways to its device and to the others.
#[derive(Clone, Debug)]
pub(crate) struct Caller {
    rank: Rank,
    slot: usize,
    step: u64,
    stream: Arc<Stream>,
    /// `None` where the group does not go by NCCL.
    carrier: Option<NcclCarrier>,
}

/// The elements that a member brings, by operation.
enum DeviceInput {
    Gather {
        layout: Arc<UnitLayout>,
        shard: Arc<DeviceBuffer>,
    },
    Reduce(DeviceGradients),
    AllReduce(Scaling),
    /// Each member sums its own part in place.
    ReduceParts {
        cuts: Arc<[usize]>,
        scaling: Scaling,
    },
    /// Each member gives its own part to the others in place.
    GatherParts(Arc<[usize]>),
}

/// The gradients of a unit, in one microbatch.
struct DeviceGradients {
    layout: Arc<UnitLayout>,
    values: Vec<Option<Arc<dyn GradientValues>>>,
    scaling: Scaling,
    fold: Fold,
    noted: Noted,
    microbatch: usize,
}

/// The buffer and the notes that a member gets, or the reason that there are none.
pub(crate) struct DeviceOutput(Result<(Leased<DeviceBuffer>, Option<Noted>), Error>);

impl TryFrom<DeviceOutput> for DeviceBuffer {
    type Error = Error;

    fn try_from(issued: DeviceOutput) -> Result<Self, Error> {
        issued.0.map(|(buffer, _)| buffer.keep())
    }
}

/// The buffer returns to its lease.
impl TryFrom<DeviceOutput> for () {
    type Error = Error;

    fn try_from(issued: DeviceOutput) -> Result<Self, Error> {
        issued.0.map(drop)
    }
}

impl TryFrom<DeviceOutput> for DeviceReduced {
    type Error = Error;

    fn try_from(issued: DeviceOutput) -> Result<Self, Error> {
        let (partial, noted) = issued.0?;
        Ok(Self { partial: partial.keep(), noted: noted.expect("a reduction has notes") })
    }
}

impl Contribute for DeviceMember {
    type Gets = DeviceOutput;
    type Work = DeviceIssue;

    fn pattern<'a>(&'a self, plain: Pattern<'a>) -> Pattern<'a> {
        self.cuts().map_or(plain, |cuts| plain.cut(cuts))
    }

    fn gradients(&mut self) -> &mut [Option<Arc<dyn GradientValues>>] {
        match &mut self.input {
            DeviceInput::Reduce(gradients) => &mut gradients.values,
            _ => &mut [],
        }
    }

    fn introduce(all: &mut [Self]) -> Result<(), String> {
        let kind = |member: &Self| mem::discriminant(&member.input);
        if all.iter().any(|member| kind(member) != kind(&all[0])) {
            return Err("ranks call different functions".to_owned());
        }
        one_cut(all.len(), |slot| all[slot].cuts())
    }

    fn assemble(all: Vec<Self>, _at: At<'_>) -> Result<DeviceIssue, String> {
        let first = &all[0];
        if all.iter().any(|member| member.layout() != first.layout()) {
            return Err(LAYOUTS_DIFFER.to_owned());
        }
        let op = first.op();
        let calls_users = matches!(first.input, DeviceInput::Reduce(_));
        let len = first.len();
        if let Some(other) = all.iter().find(|member| member.len() != len) {
            return Err(format!("member 0 brings {len} elements, another {}", other.len()));
        }
        let carriers: Vec<_> = all.iter().filter_map(|it| it.caller.carrier.clone()).collect();
        if ![0, all.len()].contains(&carriers.len()) {
            return Err(format!("{} of {} ranks go by NCCL", carriers.len(), all.len()));
        }
        let members = all.into_iter().map(Mutex::new).collect();
        Ok(DeviceIssue { op, calls_users, members, carriers })
    }

    fn alone(self, _at: At<'_>) -> DeviceOutput {
        DeviceOutput(Ok(self.into_output()))
    }
}

impl DeviceMember {
    fn new(caller: Caller, input: DeviceInput, output: Leased<DeviceBuffer>) -> Self {
        Self { caller, input, output, packed: None }
    }

    fn op(&self) -> Op {
        match self.input {
            DeviceInput::Gather { .. } | DeviceInput::GatherParts(_) => Op::AllGather,
            DeviceInput::Reduce(_) | DeviceInput::ReduceParts { .. } => Op::ReduceScatter,
            DeviceInput::AllReduce(_) => Op::AllReduce,
        }
    }

    /// The layout of the unit that was passed.
    fn layout(&self) -> Option<&Arc<UnitLayout>> {
        match &self.input {
            DeviceInput::Gather { layout, .. } => Some(layout),
            DeviceInput::Reduce(gradients) => Some(&gradients.layout),
            _ => None,
        }
    }

    /// Returns the starts of the members' parts and the end of the last one, where members have
    /// parts of their own.
    fn cuts(&self) -> Option<&[usize]> {
        match &self.input {
            DeviceInput::ReduceParts { cuts, .. } | DeviceInput::GatherParts(cuts) => Some(cuts),
            _ => None,
        }
    }

    /// Returns the number of elements of the output that the operation touches.
    fn len(&self) -> usize {
        self.cuts().map_or(self.output.len(), |cuts| cuts[cuts.len() - 1])
    }

    fn into_output(self) -> (Leased<DeviceBuffer>, Option<Noted>) {
        match self.input {
            DeviceInput::Reduce(gradients) => (self.output, Some(gradients.noted)),
            _ => (self.output, None),
        }
    }

    /// Elements on this member's device.
    fn room(
        &self,
        dtype: DType,
        len: usize,
        what: &'static str,
    ) -> Result<DeviceBuffer, CudaError> {
        DeviceBuffer::new(self.caller.stream.device(), dtype, len, what)
    }

    /// Packs the elements for the wire, on the member's stream.
    fn pack(&mut self) {
        let stream = Arc::clone(&self.caller.stream);
        let packed = match &mut self.input {
            DeviceInput::Gather { .. } | DeviceInput::GatherParts(_) => return,
            DeviceInput::Reduce(gradients) => gradients.packed(&stream),
            DeviceInput::AllReduce(scaling) | DeviceInput::ReduceParts { scaling, .. } => {
                rounded(&stream, &self.output, *scaling)
            }
        };
        self.packed = Some(packed);
    }

    /// Sums a range of what members have packed into the output.
    fn sum(&mut self, wires: &[&DeviceBuffer], range: Range<usize>) -> Result<(), CudaError> {
        let stream = &self.caller.stream;
        let output = &mut self.output;
        match &mut self.input {
            DeviceInput::Reduce(DeviceGradients { scaling, fold, noted, microbatch, .. }) => {
                let notes = Some(Notes { noted, round: *microbatch });
                stream.sum(output, wires, range, scaling.post, *fold, notes)
            }
            DeviceInput::AllReduce(scaling) => {
                stream.sum(output, wires, range, scaling.post, Fold::Replace, None)
            }
            _ => Ok(()),
        }
    }

    /// Sums a range of what members have packed, apart from the output. Returns the sums, and their
    /// range in that buffer.
    fn sums(
        &self,
        wires: &[&DeviceBuffer],
        range: Range<usize>,
    ) -> Result<(DeviceBuffer, Range<usize>), CudaError> {
        let (DeviceInput::AllReduce(scaling) | DeviceInput::ReduceParts { scaling, .. }) =
            self.input
        else {
            unreachable!("other members have no such sums")
        };
        // The kernel begins where its vectors do, a little before the range: that is summed, and
        // not used.
        let begin = range.start / WIDTH * WIDTH;
        let summed = begin..range.end;
        let mut sums = self.room(DType::F32, summed.len(), "sums of partials")?;
        let stream = &self.caller.stream;
        stream.sum(&mut sums, wires, summed, scaling.post, Fold::Replace, None)?;
        Ok((sums, range.start - begin..range.end - begin))
    }

    /// Sums a range of what members have packed into a part of the output.
    fn sum_part(
        &mut self,
        wires: &[&DeviceBuffer],
        range: Range<usize>,
        part: Range<usize>,
    ) -> Result<(), CudaError> {
        if part.is_empty() {
            return Ok(());
        }
        let (sums, from) = self.sums(wires, range)?;
        self.output.copy(&self.caller.stream, part, &sums, from)
    }

    /// The error that says that this member's part failed.
    fn failed(&self, error: CudaError) -> Error {
        let Caller { rank, step, .. } = self.caller;
        Error::Device { op: self.op(), rank, step, error }
    }
}

impl DeviceGradients {
    fn packed(&mut self, stream: &Stream) -> Result<DeviceBuffer, CudaError> {
        let wire = self.scaling.wire.dtype();
        let len = self.layout.trainable().len;
        let mut flat = DeviceBuffer::new(stream.device(), wire, len, "packed gradients")?;
        let there = self.layout.params().iter().zip(&self.values);
        let gradients: Vec<_> =
            there.map(|(slot, gradient)| (slot.start, gradient.as_deref())).collect();
        let notes = Notes { noted: &mut self.noted, round: self.microbatch };
        stream.pack_gradients(&mut flat, &gradients, self.scaling.pre, Some(notes))?;
        Ok(flat)
    }
}

fn rounded(
    stream: &Stream,
    values: &DeviceBuffer,
    scaling: Scaling,
) -> Result<DeviceBuffer, CudaError> {
    let device = stream.device();
    let wire = scaling.wire.dtype();
    let mut rounded = DeviceBuffer::new(device, wire, values.len(), "partials on the wire")?;
    stream.narrow(&mut rounded, values, scaling.pre)?;
    Ok(rounded)
}

/// Elements that a kernel takes at once: where ranges of its operands begin.
const WIDTH: usize = 4;

/// An operation, to be issued on the streams of its members.
pub(crate) struct DeviceIssue {
    op: Op,
    /// Whether members lend gradients.
    calls_users: bool,
    /// Members by slot. Each is packed under its lock.
    members: Vec<Mutex<DeviceMember>>,
    /// Carriers of all members, if NCCL carries the operation.
    carriers: Vec<NcclCarrier>,
}

impl Work for DeviceIssue {
    type Gets = DeviceOutput;

    fn blocks(&self) -> usize {
        if self.op == Op::AllGather { 0 } else { self.members.len() }
    }

    /// The host moves nothing.
    fn bytes(&self) -> usize {
        0
    }

    /// Gradients on the host are lent by code of users.
    fn calls_users(&self) -> bool {
        self.calls_users
    }

    fn run(&self, block: usize, meter: &Meter<'_>) {
        let member = &mut *self.members[block].lock();
        meter.lent_by(block, || member.pack());
    }

    /// All members get their outputs, or all the first error: a part that failed is one that others
    /// were to read.
    fn finish(self) -> Outputs<DeviceOutput> {
        let mut members: Vec<_> = self.members.into_iter().map(Mutex::into_inner).collect();
        let issued = issue(&mut members, &self.carriers);
        let output =
            |member: DeviceMember| DeviceOutput(issued.clone().map(|()| member.into_output()));
        members.into_iter().map(output).collect()
    }
}

fn issue(members: &mut [DeviceMember], carriers: &[NcclCarrier]) -> Result<(), Error> {
    let packed = members.iter_mut().map(|member| {
        let packed = member.packed.take().transpose();
        packed.map_err(|error| member.failed(error))
    });
    let wires: Vec<_> = packed.collect::<Result<Vec<_>, _>>()?.into_iter().flatten().collect();
    let is_by_nccl = !carriers.is_empty();
    let op = members[0].op();
    match &members[0].input {
        DeviceInput::Gather { .. } if is_by_nccl => gather_by_nccl(members, carriers),
        DeviceInput::Gather { .. } => each(members, place_all(members)),
        DeviceInput::GatherParts(cuts) => {
            let cuts = Arc::clone(cuts);
            match is_by_nccl {
                true => gather_parts_by_nccl(members, carriers, &cuts),
                false => place_parts(members, &cuts),
            }
        }
        DeviceInput::ReduceParts { cuts, .. } => {
            let cuts = Arc::clone(cuts);
            match is_by_nccl {
                true => sum_parts_by_nccl(members, carriers, &cuts, &wires),
                false => sum_parts(members, &cuts, &wires),
            }
        }
        _ if is_by_nccl => sum_by_nccl(members, op, carriers, wires),
        DeviceInput::Reduce(_) => sum_shards(members, &wires),
        DeviceInput::AllReduce(_) => sum_owned(members, &wires),
    }
}

/// Has each member do its part.
fn each(
    members: &mut [DeviceMember],
    mut part: impl FnMut(usize, &mut DeviceMember) -> Result<(), CudaError>,
) -> Result<(), Error> {
    members
        .iter_mut()
        .enumerate()
        .try_for_each(|(slot, member)| part(slot, member).map_err(|error| member.failed(error)))
}

/// Copies both regions of all shards to where they lie in the whole.
fn place_all(
    members: &[DeviceMember],
) -> impl FnMut(usize, &mut DeviceMember) -> Result<(), CudaError> + use<> {
    let gathered = members.iter().filter_map(|member| match &member.input {
        DeviceInput::Gather { layout, shard } => Some((Arc::clone(layout), Arc::clone(shard))),
        _ => None,
    });
    let gathered: Vec<_> = gathered.collect();
    move |_, member| {
        for (index, (layout, shard)) in gathered.iter().enumerate() {
            let mut from = 0;
            for region in [layout.trainable(), layout.frozen()] {
                let to = region.start + index * region.shard_len;
                let len = region.shard_len;
                if len > 0 {
                    let stream = &member.caller.stream;
                    member.output.copy(stream, to..to + len, shard, from..from + len)?;
                }
                from += len;
            }
        }
        Ok(())
    }
}

/// Both regions, each from where it lies in the shards to where it lies in the whole.
fn gather_by_nccl(members: &mut [DeviceMember], carriers: &[NcclCarrier]) -> Result<(), Error> {
    let Some(layout) = members[0].layout().cloned() else { return Ok(()) };
    let mut from = 0;
    for region in [layout.trainable(), layout.frozen()] {
        let own = from..from + region.shard_len;
        from = own.end;
        if region.len == 0 {
            continue;
        }
        let part = |member| gathered(member, own.clone(), region.range());
        NcclCarrier::carry(carriers, Op::AllGather, members.iter_mut().filter_map(part).collect())?;
    }
    Ok(())
}

/// A member's part of a gather: from a range of its shard to one of the whole.
fn gathered(
    member: &mut DeviceMember,
    own: Range<usize>,
    to: Range<usize>,
) -> Option<Transfer<'_>> {
    let DeviceInput::Gather { shard, .. } = &member.input else { return None };
    Some(Transfer { from: Some((&**shard, own)), to: (&mut member.output, to) })
}

/// Each member sums its shard of what all have packed.
fn sum_shards(members: &mut [DeviceMember], wires: &[DeviceBuffer]) -> Result<(), Error> {
    let wires: Vec<&DeviceBuffer> = wires.iter().collect();
    each(members, |slot, member| {
        let len = member.output.len();
        member.sum(&wires, slot * len..(slot + 1) * len)
    })
}

/// Each member sums the slice that it owns of the packed elements, and copies it to all.
fn sum_owned(members: &mut [DeviceMember], wires: &[DeviceBuffer]) -> Result<(), Error> {
    let wires: Vec<&DeviceBuffer> = wires.iter().collect();
    for owner in 0..members.len() {
        let summed = sum_of_owner(members, owner, &wires);
        summed.map_err(|error| members[owner].failed(error))?;
    }
    Ok(())
}

fn sum_of_owner(
    members: &mut [DeviceMember],
    owner: usize,
    wires: &[&DeviceBuffer],
) -> Result<(), CudaError> {
    let owned = balanced(members[owner].output.len(), members.len(), owner);
    if owned.is_empty() {
        return Ok(());
    }
    let (sums, from) = members[owner].sums(wires, owned.clone())?;
    let stream = Arc::clone(&members[owner].caller.stream);
    members
        .iter_mut()
        .try_for_each(|member| member.output.copy(&stream, owned.clone(), &sums, from.clone()))
}

/// Has each member sum its own part of the packed elements.
fn sum_parts(
    members: &mut [DeviceMember],
    cuts: &[usize],
    wires: &[DeviceBuffer],
) -> Result<(), Error> {
    let wires: Vec<&DeviceBuffer> = wires.iter().collect();
    each(members, |slot, member| {
        let part = nth(cuts, slot);
        member.sum_part(&wires, part.clone(), part)
    })
}

/// Has each member copy its own part to all others.
fn place_parts(members: &mut [DeviceMember], cuts: &[usize]) -> Result<(), Error> {
    for owner in 0..members.len() {
        let part = nth(cuts, owner);
        if part.is_empty() {
            continue;
        }
        for taker in (0..members.len()).filter(|taker| *taker != owner) {
            let pair = members.get_disjoint_mut([owner, taker]);
            let [owner, taker] = pair.expect("two members of the operation");
            let stream = &owner.caller.stream;
            let copied = taker.output.copy(stream, part.clone(), &owner.output, part.clone());
            copied.map_err(|error| owner.failed(error))?;
        }
    }
    Ok(())
}

/// NCCL sums what members have packed, in the dtype of the wire; what each gets of it goes into its
/// output.
fn sum_by_nccl(
    members: &mut [DeviceMember],
    op: Op,
    carriers: &[NcclCarrier],
    mut wires: Vec<DeviceBuffer>,
) -> Result<(), Error> {
    let mut shards = Vec::new();
    if op == Op::ReduceScatter {
        for (member, wire) in members.iter().zip(&wires) {
            let shard = member.room(wire.dtype(), member.output.len(), "a sum on the wire");
            shards.push(shard.map_err(|error| member.failed(error))?);
        }
        let pairs = wires.iter().zip(&mut shards);
        let transfers = pairs.map(|(wire, shard)| Transfer::whole(Some(wire), shard));
        NcclCarrier::carry(carriers, op, transfers.collect())?;
    } else {
        let in_place = wires.iter_mut().map(|wire| Transfer::whole(None, wire));
        NcclCarrier::carry(carriers, op, in_place.collect())?;
    }
    let sums = if op == Op::ReduceScatter { &shards } else { &wires };
    each(members, |slot, member| member.sum(&[&sums[slot]], 0..sums[slot].len()))
}

/// Returns the number of elements of the longest part. All parts are padded to it on their way by
/// NCCL.
fn longest(cuts: &[usize]) -> usize {
    cuts.windows(2).map(|cut| cut[1] - cut[0]).max().unwrap_or(0)
}

/// Returns the parts with the places that they have side by side, padded to the longest.
fn padded(cuts: &[usize]) -> impl Iterator<Item = (Range<usize>, Range<usize>)> {
    let longest = longest(cuts);
    let parts = cuts.windows(2).enumerate();
    let place = move |(slot, cut): (usize, &[usize])| {
        let start = slot * longest;
        (cut[0]..cut[1], start..start + cut[1] - cut[0])
    };
    parts.map(place).filter(|(part, _)| !part.is_empty())
}

/// Has NCCL sum what members have packed, in parts that are padded to the longest. Each member
/// reads the sum of its own part into its output. The padding is undefined, and no member reads its
/// sums.
fn sum_parts_by_nccl(
    members: &mut [DeviceMember],
    carriers: &[NcclCarrier],
    cuts: &[usize],
    wires: &[DeviceBuffer],
) -> Result<(), Error> {
    let len = longest(cuts);
    let mut staged = Vec::with_capacity(members.len());
    for (member, wire) in members.iter().zip(wires) {
        let stage = || {
            let mut parts = member.room(wire.dtype(), len * (cuts.len() - 1), "padded partials")?;
            for (part, place) in padded(cuts) {
                parts.copy(&member.caller.stream, place, wire, part)?;
            }
            Ok((parts, member.room(wire.dtype(), len, "a sum on the wire")?))
        };
        staged.push(stage().map_err(|error| member.failed(error))?);
    }
    let transfers = staged.iter_mut().map(|(parts, sum)| Transfer::whole(Some(parts), sum));
    NcclCarrier::carry(carriers, Op::ReduceScatter, transfers.collect())?;
    each(members, |index, member| {
        let part = nth(cuts, member.caller.slot);
        member.sum_part(&[&staged[index].1], 0..part.len(), part)
    })
}

/// Has NCCL gather the parts of members, padded to the longest, beside the outputs. Each member
/// copies those of the others to where they belong, so its own part is not written, whatever
/// becomes of the call.
fn gather_parts_by_nccl(
    members: &mut [DeviceMember],
    carriers: &[NcclCarrier],
    cuts: &[usize],
) -> Result<(), Error> {
    let len = longest(cuts);
    let mut staged = Vec::with_capacity(members.len());
    for member in &*members {
        let stage = || {
            let dtype = member.output.dtype();
            let mut own = member.room(dtype, len, "a padded part")?;
            let part = nth(cuts, member.caller.slot);
            if !part.is_empty() {
                own.copy(&member.caller.stream, 0..part.len(), &member.output, part)?;
            }
            Ok((own, member.room(dtype, len * (cuts.len() - 1), "padded parts")?))
        };
        staged.push(stage().map_err(|error| member.failed(error))?);
    }
    let transfers = staged.iter_mut().map(|(own, parts)| Transfer::whole(Some(own), parts));
    NcclCarrier::carry(carriers, Op::AllGather, transfers.collect())?;
    each(members, |index, member| {
        let own = nth(cuts, member.caller.slot);
        for (part, place) in padded(cuts).filter(|(part, _)| *part != own) {
            member.output.copy(&member.caller.stream, part, &staged[index].1, place)?;
        }
        Ok(())
    })
}
