//! A unit's parameters, gathered.

pub(crate) mod device;

use std::mem;
use std::sync::Arc;

use hsdp_kernels::{HostBuffer, Values};
use hsdp_sharding::{DType, UnitId, UnitLayout};

use self::device::DeviceFull;
use crate::state::full_pool::Pooled;

/// A unit's gathered parameters, in its compute dtype: one host buffer for each parameter, with all
/// of its elements, row-major.
///
/// On a device it is one device buffer, and each parameter is a part of it (`Full::on_device`). All
/// other methods that read values read a copy on the host. The first of these calls makes the copy:
/// it waits for the gather, and panics if the device fails.
///
/// Dropping it reshards the unit: its buffers go back to a pool for later gathers, which keeps no
/// more memory than the plan has ([`Plan::memory`](crate::Plan::memory)).
#[derive(Debug)]
#[must_use = "a gathered unit takes up memory until it is dropped"]
pub struct Full {
    unit: UnitId,
    layout: Arc<UnitLayout>,
    buffers: Buffers,
}

#[derive(Debug)]
enum Buffers {
    Own(Pooled),
    /// Other ranks read the same buffers.
    Shared(Arc<Pooled>),
    Device(DeviceFull),
}

impl Full {
    pub(crate) fn own((unit, layout): (UnitId, Arc<UnitLayout>), buffers: Pooled) -> Self {
        Self { unit, layout, buffers: Buffers::Own(buffers) }
    }

    pub(crate) fn shared((unit, layout): (UnitId, Arc<UnitLayout>), buffers: Arc<Pooled>) -> Self {
        Self { unit, layout, buffers: Buffers::Shared(buffers) }
    }

    pub(crate) fn on_a_device((unit, layout): (UnitId, Arc<UnitLayout>), full: DeviceFull) -> Self {
        Self { unit, layout, buffers: Buffers::Device(full) }
    }

    /// The unit of these parameters.
    #[must_use]
    pub fn unit(&self) -> UnitId {
        self.unit
    }

    /// The number of parameters of the unit.
    #[must_use]
    pub fn len(&self) -> usize {
        self.layout.params().len()
    }

    /// Whether the unit has no parameters. Every planned unit has some.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.layout.params().is_empty()
    }

    /// The elements of the parameter with this index in its unit, in the compute dtype, row-major; empty after the buffer was
    /// [taken](Self::take).
    ///
    /// # Panics
    /// If the unit has no such parameter.
    #[must_use]
    pub fn values(&self, parameter: usize) -> Values<'_> {
        self.all()[parameter].values()
    }

    /// Returns the elements of an f32 parameter, row-major; `None` if the unit's compute dtype is
    /// not f32.
    ///
    /// # Panics
    /// If the unit has no such parameter.
    #[must_use]
    pub fn as_f32(&self, parameter: usize) -> Option<&[f32]> {
        match self.values(parameter) {
            Values::F32(values) => Some(values),
            _ => None,
        }
    }

    /// The parameter on the device, row-major; `None` in a model on the host. An operation that reads it on a stream waits for the gather
    /// on that stream.
    ///
    /// # Panics
    /// If the unit has no such parameter.
    #[must_use]
    pub fn on_device(&self, parameter: usize) -> Option<hsdp_kernels::cuda::DevicePart> {
        match &self.buffers {
            Buffers::Device(full) => Some(full.part(parameter)),
            _ => None,
        }
    }

    /// Takes a parameter's buffer, as the storage of a tensor for example; `None` if it was taken before. Each call gives a copy if
    /// [ranks share the buffers](crate::FullCopies::PerProcess), or if they lie on a device.
    ///
    /// [Put the buffer back](Self::put_back) when it is not used any more, so that another gather can use it.
    ///
    /// # Panics
    /// If the unit has no such parameter.
    #[must_use]
    pub fn take(&mut self, parameter: usize) -> Option<HostBuffer> {
        let buffer = match &mut self.buffers {
            Buffers::Own(pooled) => {
                mem::replace(&mut pooled.buffers[parameter], HostBuffer::F32(Vec::new()))
            }
            Buffers::Shared(pooled) => pooled.buffers[parameter].clone(),
            Buffers::Device(full) => full.on_host()[parameter].clone(),
        };
        (!buffer.is_empty()).then_some(buffer)
    }

    /// Puts back a buffer that was taken. Its values do not matter, unless they are read through this value again.
    ///
    /// # Panics
    /// If the unit has no such parameter, or the buffer is not of the parameter's length and the compute dtype.
    pub fn put_back(&mut self, parameter: usize, buffer: HostBuffer) {
        let (found, len) = ((buffer.dtype(), buffer.len()), self.layout.params()[parameter].len);
        let expected = (self.dtype(), len);
        assert!(
            found == expected,
            "put back {found:?}, but parameter {parameter} has {expected:?}"
        );
        if let Buffers::Own(pooled) = &mut self.buffers {
            pooled.buffers[parameter] = buffer;
        }
    }

    /// Gives the buffers to the caller, by index of the parameter in its unit; a buffer that was [taken](Self::take) is empty. The
    /// memory plan does not count them any more. They are copies if [ranks share the buffers](crate::FullCopies::PerProcess), or
    /// if these lie on a device.
    #[must_use]
    pub fn into_buffers(self) -> Vec<HostBuffer> {
        match self.buffers {
            Buffers::Own(pooled) => pooled.into_buffers(),
            Buffers::Shared(pooled) => pooled.buffers.to_vec(),
            Buffers::Device(full) => full.on_host().to_vec(),
        }
    }

    /// The compute dtype.
    fn dtype(&self) -> DType {
        match &self.buffers {
            Buffers::Own(pooled) => pooled.dtype(),
            Buffers::Shared(pooled) => pooled.dtype(),
            Buffers::Device(full) => full.dtype(),
        }
    }

    fn all(&self) -> &[HostBuffer] {
        match &self.buffers {
            Buffers::Own(pooled) => &pooled.buffers,
            Buffers::Shared(pooled) => &pooled.buffers,
            Buffers::Device(full) => full.on_host(),
        }
    }
}
