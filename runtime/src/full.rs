//! A unit's parameters, gathered.

use std::mem;
use std::sync::Arc;

use hsdp_kernels::{HostBuffer, Values};
use hsdp_sharding::{DType, UnitId, UnitLayout};

use crate::engine::device::DeviceFull;
use crate::engine::full_pool::{Pooled, SharedPooled};

/// A unit's parameters in full, in the compute dtype, one buffer a parameter.
///
/// On a device it is one buffer there, of which parameters are parts (`Full::on_device`, with the feature `cuda`). What is read on the host (all other methods) is
/// a copy, made when it is first asked for: that waits for the gather, and panics if the device fails.
///
/// Dropping it is the reshard: its buffers go to the gathers to come, which never hold more together than the plan says
/// ([`Plan::memory`](crate::Plan::memory)).
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
    /// Other ranks read it, too.
    Shared(SharedPooled),
    Device(DeviceFull),
}

impl Full {
    pub(crate) fn own((unit, layout): (UnitId, Arc<UnitLayout>), buffers: Pooled) -> Self {
        Self { unit, layout, buffers: Buffers::Own(buffers) }
    }

    pub(crate) fn shared((unit, layout): (UnitId, Arc<UnitLayout>), buffers: SharedPooled) -> Self {
        Self { unit, layout, buffers: Buffers::Shared(buffers) }
    }

    pub(crate) fn on_a_device((unit, layout): (UnitId, Arc<UnitLayout>), full: DeviceFull) -> Self {
        Self { unit, layout, buffers: Buffers::Device(full) }
    }

    /// Whose parameters these are.
    #[must_use]
    pub fn unit(&self) -> UnitId {
        self.unit
    }

    /// How many parameters the unit has.
    #[must_use]
    pub fn len(&self) -> usize {
        self.layout.params().len()
    }

    /// Whether the unit has no parameters; a planned unit always has some.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.layout.params().is_empty()
    }

    /// The elements of the parameter with this index in its unit, row-major; none where they were
    /// [taken out](Self::take).
    ///
    /// # Panics
    /// If the unit has no such parameter.
    #[must_use]
    pub fn values(&self, parameter: usize) -> Values<'_> {
        self.all()[parameter].values()
    }

    /// The elements of an f32 parameter, row-major; `None` where the compute dtype is another.
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

    /// The parameter where it lies on a device, row-major; `None` in a model on the host. What is issued on a stream and reads it waits
    /// for the gather there.
    ///
    /// # Panics
    /// If the unit has no such parameter.
    #[cfg(feature = "cuda")]
    #[must_use]
    pub fn on_device(&self, parameter: usize) -> Option<hsdp_kernels::cuda::DevicePart> {
        match &self.buffers {
            Buffers::Device(full) => Some(full.part(parameter)),
            _ => None,
        }
    }

    /// Takes a parameter's buffer out, as the storage of a tensor, say; `None` if it is out already. Of what
    /// [ranks share](crate::FullCopies::PerProcess), or what lies on a device, it is a copy each time.
    ///
    /// [Put it back](Self::put_back) when it is not wanted any more: then it serves another gather.
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

    /// Puts a buffer back that was taken out. What is in it does not matter, but for who reads it here.
    ///
    /// # Panics
    /// If the unit has no such parameter, or the buffer is not of the parameter's length and the compute dtype.
    pub fn put_back(&mut self, parameter: usize, buffer: HostBuffer) {
        let (found, len) = ((buffer.dtype(), buffer.len()), self.layout.params()[parameter].len);
        let expected = (self.dtype(), len);
        assert!(
            found == expected,
            "put back {found:?}, where parameter {parameter} has {expected:?}"
        );
        if let Buffers::Own(pooled) = &mut self.buffers {
            pooled.buffers[parameter] = buffer;
        }
    }

    /// Gives the buffers away, by index of the parameter in its unit; empty where one was [taken out](Self::take). They are
    /// the caller's from now on, and no plan counts them. Of what [ranks share](crate::FullCopies::PerProcess) they are
    /// copies.
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
