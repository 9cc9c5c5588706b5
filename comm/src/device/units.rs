//! The calls on whole units of which everything lies on a device, as methods of [`Group`].

use std::sync::Arc;

use hsdp_flight::{EntryNumber, FlightState};
use hsdp_kernels::Fold;
use hsdp_kernels::cuda::{CudaError, Device, DeviceBuffer, Noted};
use hsdp_sharding::{DType, UnitLayout};

use super::member::{Caller, DeviceOutput, Gradients, Input, Member};
use super::work::Issue;
use crate::call::{Call, Described, Issuing};
use crate::engine::Record;
use crate::pattern::Pattern;
use crate::rolling::signature;
use crate::units::scaled_sum;
use crate::{Contribution, Error, Group, Op, Pending, Scaling, Tag};

/// The buffer for a member's part of a reduction, on a device.
#[derive(Debug)]
pub struct DeviceAccumulator {
    /// `[layout.trainable().shard_len]`, f32.
    pub partial: DeviceBuffer,
    /// Whether the sum replaces the partial or is added to it. Members may differ in it.
    pub fold: Fold,
    /// Notes of non-finite elements: of this member's contribution, as indices in the unit's trainable region, and of its
    /// partial. Its rounds are microbatches.
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
/// As [the calls on the host](Self::gather_unit): **collective**, in the order of the group's channel, with the same
/// checks, the same bits and the same bytes in the ledger (NCCL sums in the wire dtype and in its own order). There is
/// no call for one copy that all ranks share. The output of [`Pending::wait`] can be used at once by work on a stream,
/// which waits for the operation. The host does not wait.
///
/// Every call returns [`Error::Device`] of its own rank. An error of a device in the parts of the operation comes out of
/// [`Pending::wait`], the same on all members.
///
/// Where ranks are processes, each issues its part in the call, which returns errors of its rank alone: the others wait for it, so the
/// step is to be [aborted](crate::World::abort_step). A call that NCCL refuses ends the world, and a group that is not connected by NCCL
/// is refused ([`Error::Refused`]). Descriptors are compared by [`World::compare_operations`](crate::World::compare_operations).
impl Group {
    /// Gathers a unit: every member's shard is copied into every member's buffer.
    ///
    /// `shard`: `[layout.shard_len()]`, in the dtype of `full`. `full`: `[layout.full_len()]`, the unit's flat index
    /// space. The output is `full`, filled.
    ///
    /// # Errors
    /// [`Error::Refused`] if the layout does not have one shard for each member, or if the shard or `full`
    /// does not fit the layout, or if they differ in dtype; [`Error::Device`].
    pub fn gather_unit_on_device(
        &self,
        tag: Tag,
        layout: Arc<UnitLayout>,
        shard: Arc<DeviceBuffer>,
        full: DeviceBuffer,
    ) -> Result<Pending<DeviceBuffer>, Error> {
        let (op, dtype) = (Op::AllGather, shard.dtype());
        self.check_layout(op, &layout)?;
        self.check_len(op, "the shard", shard.len(), layout.shard_len())?;
        self.check_len(op, "the whole unit", full.len(), layout.full_len())?;
        if full.dtype() != dtype {
            return Err(self.bad_dtype(op, full.dtype(), "not the dtype of the shard"));
        }
        let caller = self.caller(op, tag, shard.device())?;
        let call = Call::new(op, tag).of(dtype, layout.shard_len());
        let input = Input::Gather { layout, shard };
        self.issue_on_device(call, Member { caller, input, output: full, packed: None })
    }

    /// Reduces a unit's gradients: member `s` gets the sum over members, in their order, of
    /// `round_to_wire(gradient / pre)`, divided by `post`, for the elements of its trainable shard.
    ///
    /// Gradients on the host are copied to the device. The padding of the partial is set to zero when the sum replaces the
    /// partial, and stays as it is otherwise.
    ///
    /// # Errors
    /// [`Error::Refused`] if the layout does not have one shard for each member, or if a gradient or the
    /// partial does not fit the layout, or if the partial is not f32; [`Error::Device`].
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
        let (scaling, microbatch) = (self.effective(scaling), tag.microbatch);
        let caller = self.caller(op, tag, accumulator.partial.device())?;
        let call = scaled_sum(op, tag, layout.trainable().len, scaling);
        let DeviceAccumulator { partial: output, fold, noted } = accumulator;
        let input = Input::Reduce(Gradients { layout, values, scaling, fold, noted, microbatch });
        self.issue_on_device(call, Member { caller, input, output, packed: None })
    }

    /// Sums f32 elements over the members: every member gets the sum in member order of
    /// `round_to_wire(element / pre)`, divided by `post`; the same bits on all members.
    ///
    /// `values`: `[n]`, f32; output `[n]`, in the same buffer.
    ///
    /// # Errors
    /// [`Error::Refused`] if they are not f32; [`Error::Device`].
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
        let input = Input::AllReduce(scaling);
        self.issue_on_device(call, Member { caller, input, output: values, packed: None })
    }

    /// Issues an operation on devices. Where members share no memory, this rank's part is issued at once, by NCCL.
    fn issue_on_device<O>(&self, call: Call, member: Member) -> Result<Pending<O>, Error>
    where
        O: TryFrom<DeviceOutput, Error = Error>,
    {
        let is_apart = self.size() > 1 && self.handle().endpoint().is_some();
        if is_apart && member.caller.carrier.is_none() {
            // A world that is over has no communicators any more.
            self.handle().check(call.op)?;
            return Err(self.apart(call.op));
        }
        self.issue_or(call, member, |at, described, own| {
            let entry = at.entry;
            let Record { ledger, flight, .. } = &*self.handle().own.record;
            let actual = described.actual();
            let received = Pattern::of(actual, &at.site.ranks, at.site.slot).received();
            if let Some(endpoint) = self.handle().endpoint() {
                endpoint.note(&described.compared);
            }
            match O::try_from(self.issue_at_once(entry, &described, own)) {
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
        mut own: Member,
    ) -> DeviceOutput {
        let signature = signature(own.op() as u8, own.layout().map(|layout| &**layout));
        let issuing = Issuing { compared: Arc::clone(&described.compared), signature, entry };
        own.caller.carrier.iter_mut().for_each(|carrier| carrier.issuing = Some(issuing.clone()));
        let work = Issue::new(vec![own]).expect("one member agrees with itself");
        self.run_alone(work)
    }

    /// The caller: this member, with its stream and its carrier.
    fn caller(&self, op: Op, tag: Tag, device: &Device) -> Result<Caller, Error> {
        let (handle, rank, step) = (self.handle(), self.rank(), tag.step);
        let stream = handle.streams.of(device, self.channel());
        let stream = stream.map_err(|error| self.device_error(op, tag, error))?;
        let carrier =
            if self.size() > 1 { handle.nccl.carrier(&handle.own, self.id(), step) } else { None };
        Ok(Caller { rank, step, stream, carrier })
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
