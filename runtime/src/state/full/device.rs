//! A unit's parameters, gathered on a device.

use std::sync::{Arc, OnceLock};
use std::time::Duration;

use hsdp_comm::{Pending, Tag};
use hsdp_kernels::cuda::{DeviceBuffer, DevicePart, Stream};
use hsdp_kernels::memory::Category;
use hsdp_kernels::{HostBuffer, Values};
use hsdp_sharding::{DType, UnitLayout};

use crate::error::Error;
use crate::state::context::Context;
use crate::state::shard::device::DeviceShard;

/// A gather that is under way.
#[derive(Debug)]
pub(crate) struct DeviceArriving {
    pending: Pending<DeviceBuffer>,
    layout: Arc<UnitLayout>,
}

impl DeviceArriving {
    pub(crate) fn issue(
        context: &Context,
        (tag, layout): (Tag, Arc<UnitLayout>),
        shard: &DeviceShard,
    ) -> Result<Self, Error> {
        let input = shard.gather_input();
        let full = context.model_device().buffer(Category::Full, input.dtype(), layout.full_len());
        let full = full.map_err(|error| context.site("gather", tag.step).device(error))?;
        let gather = &context.gather;
        let pending = gather.gather_unit_on_device(tag, Arc::clone(&layout), input, full)?;
        Ok(Self { pending, layout })
    }

    /// Waits until the gather is issued. Kernels that read the parameters wait for the rest, on the
    /// device.
    pub(crate) fn wait(self, context: &Context) -> Result<DeviceFull, Error> {
        let Self { pending, layout } = self;
        let (full, device) = (Arc::new(pending.wait()?), context.model_device());
        let reader = Reader { stream: Arc::clone(&device.stream), patience: device.patience };
        Ok(DeviceFull { full, layout, reader, copies: OnceLock::new() })
    }
}

/// The stream by which the host reads parameters, and how long it waits for them.
#[derive(Debug)]
struct Reader {
    stream: Arc<Stream>,
    patience: Duration,
}

/// A unit's parameters on a device: the unit's flat index space, as the layout says.
#[derive(Debug)]
pub(crate) struct DeviceFull {
    full: Arc<DeviceBuffer>,
    layout: Arc<UnitLayout>,
    reader: Reader,
    /// Copies on the host, by index of the parameter, once they were asked for.
    copies: OnceLock<Vec<HostBuffer>>,
}

impl DeviceFull {
    pub(crate) fn part(&self, parameter: usize) -> DevicePart {
        let range = self.layout.params()[parameter].range();
        DevicePart::new(Arc::clone(&self.full), range)
    }

    pub(crate) fn dtype(&self) -> DType {
        self.full.dtype()
    }

    /// Copies on the host, made when they are first asked for.
    ///
    /// # Panics
    /// If the device fails: the call has no error to return.
    pub(crate) fn on_host(&self) -> &[HostBuffer] {
        self.copies.get_or_init(|| {
            let Reader { stream, patience } = &self.reader;
            let all = self.full.read_back(stream, *patience);
            let all = all.unwrap_or_else(|error| panic!("a unit could not be read: {error}"));
            let slots = self.layout.params().iter();
            slots.map(|slot| owned(all.values().slice(slot.range()))).collect()
        })
    }
}

fn owned(values: Values<'_>) -> HostBuffer {
    match values {
        Values::F32(values) => values.to_vec().into(),
        Values::F16(values) => values.to_vec().into(),
        Values::BF16(values) => values.to_vec().into(),
    }
}
