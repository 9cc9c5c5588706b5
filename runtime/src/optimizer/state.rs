//! One kind of an optimizer's state, where the model is updated: zeros at first.

use std::borrow::Cow;
use std::ops::Range;

use hsdp_kernels::Values;
use hsdp_kernels::cuda::DeviceBuffer;
use hsdp_kernels::memory::{self, Category};
use hsdp_sharding::{DType, UnitId};

use crate::error::Error;
use crate::persist::tensors::copy_part;
use crate::state::context::Context;
use crate::state::model_device::ModelDevice;

/// An operation and its step, for errors.
pub(super) type Of = (&'static str, u64);

/// A buffer for each unit, f32.
#[derive(Debug)]
pub(super) struct State(Vec<Buffer>);

#[derive(Debug)]
enum Buffer {
    Host(Vec<f32>),
    Device(DeviceBuffer),
}

impl State {
    /// Zeros, of this length for each unit. Errors name the operation and the step.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`]; [`Error::Device`](Error) if a device has no memory.
    pub(super) fn zeros(
        context: &Context,
        lens: impl Iterator<Item = usize>,
        of: Of,
    ) -> Result<Self, Error> {
        let units = lens.enumerate();
        let zeros = |(unit, len)| {
            let unit = UnitId::new(unit);
            Ok(match context.device.as_ref().filter(|device| device.updates_there()) {
                None => Buffer::Host(on_host(context, (unit, of), len)?),
                Some(device) => Buffer::Device(
                    on_device(device, len)
                        .map_err(|error| context.device_error(of.0, of.1, error))?,
                ),
            })
        };
        units.map(zeros).collect::<Result<_, Error>>().map(Self)
    }

    /// Elements of a unit's buffer on the host.
    ///
    /// # Panics
    /// If the state lies on a device.
    pub(super) fn host(&mut self, unit: UnitId, range: Range<usize>) -> &mut [f32] {
        match &mut self.0[unit.index()] {
            Buffer::Host(values) => &mut values[range],
            Buffer::Device(_) => unreachable!("the state of a model on a device lies there"),
        }
    }

    /// The same, to read.
    ///
    /// # Panics
    /// If the state lies on a device.
    pub(super) fn of_host(&self, unit: UnitId, range: Range<usize>) -> &[f32] {
        match &self.0[unit.index()] {
            Buffer::Host(values) => &values[range],
            Buffer::Device(_) => unreachable!("the state of a model on a device lies there"),
        }
    }

    /// A unit's buffer on a device.
    ///
    /// # Panics
    /// If the state lies on the host.
    pub(super) fn device(&mut self, unit: UnitId) -> &mut DeviceBuffer {
        match &mut self.0[unit.index()] {
            Buffer::Device(buffer) => buffer,
            Buffer::Host(_) => unreachable!("the state of a model on the host lies there"),
        }
    }

    /// Elements of a unit's buffer: borrowed, or a copy for which the call waits.
    pub(super) fn read(
        &self,
        context: &Context,
        (unit, range): (UnitId, Range<usize>),
    ) -> Result<Cow<'_, [f32]>, Error> {
        match &self.0[unit.index()] {
            Buffer::Host(values) => Ok(Cow::Borrowed(&values[range])),
            Buffer::Device(_) => {
                let mut copy = hsdp_kernels::zeros(range.len())?;
                self.copy_to(context, (unit, range.start), &mut copy)?;
                Ok(Cow::Owned(copy))
            }
        }
    }

    /// Copies elements of a unit's buffer, from the `from`-th on, to the host. Waits for the copy.
    pub(super) fn copy_to(
        &self,
        context: &Context,
        (unit, from): (UnitId, usize),
        into: &mut [f32],
    ) -> Result<(), Error> {
        match &self.0[unit.index()] {
            Buffer::Host(values) => copy_part(values, (from, into)),
            Buffer::Device(buffer) => {
                let device = context.device.as_ref().expect("the state lies on a device");
                let read = buffer.read_back_into((device.stream(), device.patience()), from, into);
                read.map_err(|error| context.device_error("saving", 0, error))?;
            }
        }
        Ok(())
    }

    /// Fills a unit's buffer with what `fill` writes. Waits for nothing.
    pub(super) fn fill<E: From<Error>>(
        &mut self,
        context: &Context,
        unit: UnitId,
        fill: impl FnOnce(&mut [f32]) -> Result<(), E>,
    ) -> Result<(), E> {
        let buffer = match &mut self.0[unit.index()] {
            Buffer::Host(values) => return fill(values),
            Buffer::Device(buffer) => buffer,
        };
        let device = context.device.as_ref().expect("the state lies on a device");
        let mut values = hsdp_kernels::zeros(buffer.len()).map_err(Error::from)?;
        fill(&mut values)?;
        let written = buffer.write(device.stream(), Values::F32(&values));
        Ok(written.map_err(|error| context.device_error("loading", 0, error))?)
    }
}

fn on_host(context: &Context, (unit, of): (UnitId, Of), len: usize) -> Result<Vec<f32>, Error> {
    // The text of an error is made outside of the scope, in which memory may be short.
    let zeros = {
        let _optimizer = memory::scope(Category::Optimizer);
        hsdp_kernels::zeros(len)
    };
    zeros.map_err(|error| context.no_memory(error, of.0, (of.1, unit)))
}

fn on_device(
    device: &ModelDevice,
    len: usize,
) -> Result<DeviceBuffer, hsdp_kernels::cuda::CudaError> {
    let _optimizer = memory::scope(Category::Optimizer);
    let stream = device.stream();
    let mut zeros = DeviceBuffer::new(stream.device(), DType::F32, len, "optimizer state")?;
    zeros.fill(stream, 0)?;
    Ok(zeros)
}
