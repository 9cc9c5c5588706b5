//! The element-wise parts of the Muon update: before and after a matrix is orthogonalized.

use hsdp_sharding::DType;

use super::buffer::DeviceBuffer;
use super::error::CudaError;
use super::kernel::Kernel;
use super::launch::{Argument, Launch, Writes};
use super::stream::Stream;
use super::update::{DeviceUpdate, cast_of};
use crate::optimizer::MuonFactors;
use crate::{MomentumKind, MuonStep};

/// Consecutive elements of a matrix in the buffers of a Muon update. They may start anywhere.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PartOfMatrix {
    /// The number of elements.
    pub len: usize,
    /// The first element in the gradient, and in the parameters.
    pub shard: usize,
    /// The first element in the momentum.
    pub state: usize,
    /// The first element in the direction.
    pub direction: usize,
}

/// `MuonFactors` of `muon.cu`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
struct DeviceMuon {
    clip: f32,
    take: f32,
    keep: f32,
    rate: f32,
    nesterov: u32,
    unused: u32,
}

// SAFETY: CU-3, six fields of 4 bytes, in the kernel's order.
unsafe impl Argument for DeviceMuon {}

impl Stream {
    /// Computes the direction that is orthogonalized, for a part of a matrix: of the gradient, which is divided, and of the momentum, which does
    /// not change. All buffers are f32. Only the part's elements of `direction` are written.
    ///
    /// The call makes one launch. The bits are those of [`muon_direction`](crate::muon_direction).
    ///
    /// # Errors
    /// [`CudaError::Mismatch`] if a buffer is not f32 or is of another device, or if the part does not lie in a buffer; [`CudaError::Driver`]
    /// if a call of the driver fails.
    pub fn muon_direction(
        &self,
        direction: &mut DeviceBuffer,
        (gradient, divisor): (&DeviceBuffer, f64),
        (part, step): (&PartOfMatrix, &MuonStep),
        momentum: &DeviceBuffer,
    ) -> Result<(), CudaError> {
        let from = part.within("muon_direction", gradient, part.shard)?;
        let state = part.within("muon_direction", momentum, part.state)?;
        let to = part.within("muon_direction", direction, part.direction)?;
        let (len, factors) = (part.len as u64, device_muon(step));
        let launch = Launch::over(Kernel::MuonDirection, part.len)
            .argument(&to)
            .argument(&from)
            .argument(&state)
            .argument(&len)
            .argument(&divisor)
            .argument(&factors);
        // SAFETY: CU-5, the part lies in each buffer.
        unsafe { launch.issue(self, (&[gradient, momentum], &mut [direction])) }
    }

    /// Makes one Muon update of a part of a matrix, along the orthogonalized direction. Other elements are unchanged. `direction` and `momentum`
    /// are f32.
    ///
    /// The call makes one launch. The bits are those of [`update_in_blocks`](crate::update_in_blocks) with [`muon`](crate::muon).
    ///
    /// # Errors
    /// [`CudaError::Mismatch`] if a buffer has the wrong dtype or length or is of another device, or if the part does not lie in a buffer;
    /// [`CudaError::Driver`] if a call of the driver fails.
    pub fn muon(
        &self,
        update: DeviceUpdate<'_>,
        (part, step): (&PartOfMatrix, &MuonStep),
        direction: &DeviceBuffer,
        momentum: &mut DeviceBuffer,
    ) -> Result<(), CudaError> {
        update.check_buffers("muon")?;
        let DeviceUpdate { parameters, rounded, gradient, divisor } = update;
        let from = part.within("muon", gradient, part.shard)?;
        let along = part.within("muon", direction, part.direction)?;
        let state = part.within("muon", momentum, part.state)?;
        let to = parameters.address(part.shard);
        let (cast, address) = cast_of(rounded.as_deref(), part.shard);
        let (len, factors) = (part.len as u64, device_muon(step));
        let launch = Launch::over(Kernel::Muon(cast), part.len)
            .argument(&to)
            .argument(&from)
            .argument(&along)
            .argument(&state)
            .argument(&address)
            .argument(&len)
            .argument(&divisor)
            .argument(&factors);
        let mut writes: Writes<'_> = [parameters, momentum].into_iter().chain(rounded).collect();
        // SAFETY: CU-5, the part lies in each buffer; the parameters and their copy are not shorter than the gradient.
        unsafe { launch.issue(self, (&[gradient, direction], &mut writes)) }
    }
}

impl PartOfMatrix {
    /// The address of the part in an f32 buffer, from an element on.
    fn within(
        &self,
        operation: &'static str,
        buffer: &DeviceBuffer,
        start: usize,
    ) -> Result<u64, CudaError> {
        buffer.check(operation, DType::F32, buffer.len())?;
        let len = buffer.len();
        if start.checked_add(self.len).is_some_and(|end| end <= len) {
            return Ok(buffer.address(start));
        }
        let problem = format!("{self:?} does not lie in a buffer of {len} elements");
        Err(CudaError::Mismatch { operation, problem })
    }
}

fn device_muon(step: &MuonStep) -> DeviceMuon {
    let MuonFactors { clip, take, keep, rate } = MuonFactors::of(step);
    let nesterov = u32::from(step.kind == MomentumKind::Nesterov);
    DeviceMuon { clip, take, keep, rate, nesterov, unused: 0 }
}
