//! A unit's parameters, gathered.

use std::mem;
use std::sync::Arc;

use hsdp_kernels::{HostBuffer, Values};
use hsdp_sharding::{UnitId, UnitLayout};

use crate::engine::full_pool::Pooled;

/// A unit's parameters in full, in the compute dtype, one buffer a parameter.
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
    Shared(Arc<Pooled>),
}

impl Full {
    pub(crate) fn own((unit, layout): (UnitId, Arc<UnitLayout>), buffers: Pooled) -> Self {
        Self { unit, layout, buffers: Buffers::Own(buffers) }
    }

    pub(crate) fn shared((unit, layout): (UnitId, Arc<UnitLayout>), buffers: Arc<Pooled>) -> Self {
        Self { unit, layout, buffers: Buffers::Shared(buffers) }
    }

    /// Whose parameters these are.
    #[must_use]
    pub fn unit(&self) -> UnitId {
        self.unit
    }

    /// How many parameters the unit has.
    #[must_use]
    pub fn len(&self) -> usize {
        self.all().len()
    }

    /// Whether the unit has no parameters; a planned unit always has some.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.all().is_empty()
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

    /// Takes a parameter's buffer out, as the storage of a tensor, say; `None` if it is out already. Of what
    /// [ranks share](crate::FullCopies::PerProcess) it is a copy each time.
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
        };
        (!buffer.is_empty()).then_some(buffer)
    }

    /// Puts a buffer back that was taken out. What is in it does not matter, but for who reads it here.
    ///
    /// # Panics
    /// If the unit has no such parameter, or the buffer is not of the parameter's length and the compute dtype.
    pub fn put_back(&mut self, parameter: usize, buffer: HostBuffer) {
        let (found, len) = ((buffer.dtype(), buffer.len()), self.layout.params()[parameter].len);
        if let Buffers::Own(pooled) = &mut self.buffers {
            let expected = (pooled.dtype(), len);
            assert!(
                found == expected,
                "put back {found:?}, where parameter {parameter} has {expected:?}"
            );
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
            Buffers::Shared(pooled) => pooled.buffers.clone(),
        }
    }

    fn all(&self) -> &[HostBuffer] {
        match &self.buffers {
            Buffers::Own(pooled) => &pooled.buffers,
            Buffers::Shared(pooled) => &pooled.buffers,
        }
    }
}
