//! A unit's parameters, gathered.

use hsdp_kernels::{HostBuffer, Values};
use hsdp_sharding::UnitId;

use crate::engine::full_pool::Loan;

/// A unit's parameters in full, in the compute dtype, one buffer a parameter.
///
/// Dropping it is the reshard: its buffers go to the gathers to come, which never hold more together than the plan says
/// ([`MemoryPlan::full`](crate::MemoryPlan::full)).
#[derive(Debug)]
#[must_use = "a gathered unit takes up memory until it is dropped"]
pub struct Full {
    unit: UnitId,
    /// `None` where a buffer was taken out.
    buffers: Vec<Option<HostBuffer>>,
    /// Until the reshard.
    loan: Option<Loan>,
}

impl Full {
    pub(crate) fn new(unit: UnitId, buffers: Vec<HostBuffer>, loan: Loan) -> Self {
        Self { unit, buffers: buffers.into_iter().map(Some).collect(), loan: Some(loan) }
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
    /// If the unit has no such parameter, or its buffer was [taken out](Self::take).
    #[must_use]
    pub fn values(&self, parameter: usize) -> Values<'_> {
        self.buffers[parameter].as_ref().expect("the buffer is not taken out").values()
    }

    /// The elements of an f32 parameter, row-major; `None` where the compute dtype is another.
    ///
    /// # Panics
    /// As [`values`](Self::values).
    #[must_use]
    pub fn as_f32(&self, parameter: usize) -> Option<&[f32]> {
        match self.values(parameter) {
            Values::F32(values) => Some(values),
            _ => None,
        }
    }

    /// Takes a parameter's buffer out, as the storage of a tensor, say; `None` if it is out already.
    ///
    /// [Put it back](Self::put_back) when it is not wanted any more: then it serves another gather.
    ///
    /// # Panics
    /// If the unit has no such parameter.
    #[must_use]
    pub fn take(&mut self, parameter: usize) -> Option<HostBuffer> {
        self.buffers[parameter].take()
    }

    /// Puts a buffer back that was taken out.
    ///
    /// # Panics
    /// If the unit has no such parameter.
    pub fn put_back(&mut self, parameter: usize, buffer: HostBuffer) {
        self.buffers[parameter] = Some(buffer);
    }

    /// Gives the buffers away, by index of the parameter in its unit. They are the caller's from now on, and no plan
    /// counts them.
    ///
    /// # Panics
    /// If one was [taken out](Self::take).
    #[must_use]
    pub fn into_buffers(mut self) -> Vec<HostBuffer> {
        self.loan = None;
        let all = self.buffers.drain(..).map(|buffer| buffer.expect("no buffer is taken out"));
        all.collect()
    }
}

impl Drop for Full {
    fn drop(&mut self) {
        if let Some(loan) = self.loan.take() {
            loan.give_back(self.buffers.drain(..).flatten());
        }
    }
}
