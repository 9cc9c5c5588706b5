//! A unit's parameters, gathered.

use hsdp_kernels::{HostBuffer, Values};
use hsdp_sharding::UnitId;

/// A unit's parameters in full, in the compute dtype, one buffer a parameter.
///
/// It owns its buffers: dropping it is the reshard, and frees them.
#[derive(Debug)]
#[must_use = "a gathered unit takes up memory until it is dropped"]
pub struct Full {
    unit: UnitId,
    buffers: Vec<HostBuffer>,
}

impl Full {
    pub(crate) fn new(unit: UnitId, buffers: Vec<HostBuffer>) -> Self {
        Self { unit, buffers }
    }

    /// Whose parameters these are.
    #[must_use]
    pub fn unit(&self) -> UnitId {
        self.unit
    }

    /// How many parameters the unit has.
    #[must_use]
    pub fn len(&self) -> usize {
        self.buffers.len()
    }

    /// Whether the unit has no parameters; a planned unit always has some.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.buffers.is_empty()
    }

    /// The elements of the parameter with this index in its unit, row-major.
    ///
    /// # Panics
    /// If the unit has no such parameter.
    #[must_use]
    pub fn values(&self, parameter: usize) -> Values<'_> {
        self.buffers[parameter].values()
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

    /// Gives the buffers away, by index of the parameter in its unit.
    #[must_use]
    pub fn into_buffers(self) -> Vec<HostBuffer> {
        self.buffers
    }
}
