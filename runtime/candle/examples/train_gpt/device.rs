//! Where a rank's part of the model lies, and where candle computes.

use candle_core::{Device, Result};
use hsdp::{Launched, Placement, World};

use super::failure::Failure;
use super::options::Options;

/// The place that was asked for, as far as it is this process's: those of one machine get its devices in turn.
pub(crate) fn of_process(asked: Placement) -> std::result::Result<Placement, Failure> {
    let launched = Launched::from_env().map_err(Failure::input)?;
    let process_here = launched.and_then(|launched| launched.rank_here).unwrap_or(0);
    asked.dealt_to(process_here).map_err(|problem| Failure::input(format!("--device: {problem}")))
}

/// Has NCCL carry what lies on devices, where ranks are processes.
pub(crate) fn connect(world: &World, options: &Options) -> std::result::Result<(), Failure> {
    match options.device {
        Placement::Host => Ok(()),
        _ if world.shares_memory() || world.size() == 1 => Ok(()),
        device => by_nccl(world, device),
    }
}

#[cfg(feature = "nccl")]
fn by_nccl(world: &World, device: Placement) -> std::result::Result<(), Failure> {
    let Placement::Cuda { ordinal, .. } = device else { return Ok(()) };
    let device = hsdp_kernels::cuda::Device::new(ordinal).map_err(Failure::training)?;
    Ok(world.connect_nccl(&device).map_err(hsdp::Error::from)?)
}

#[cfg(not(feature = "nccl"))]
fn by_nccl(_: &World, device: Placement) -> std::result::Result<(), Failure> {
    Err(Failure::input(format!("--device {device} in processes: build with --features nccl")))
}

/// Where a rank's tensors lie: on the GPU where its part of the model does, if this program has candle's kernels for that; on the
/// CPU otherwise. Made on the thread of the rank, which gets a stream of its own.
pub(crate) fn of(options: &Options) -> Result<Device> {
    #[cfg(feature = "candle-cuda")]
    if let hsdp::Placement::Cuda { ordinal, .. } = options.device {
        return Device::new_cuda_with_stream(ordinal);
    }
    let _ = options;
    Ok(Device::Cpu)
}
