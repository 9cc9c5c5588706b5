//! The device of a rank's part of the model, and the device on which candle computes.

use candle_core::{Device, Result};
use hsdp::{Launched, Placement, World};

use super::failure::Failure;
use super::options::RunOptions;

/// The placement of this process, from the one on the command line: the processes of one machine get its devices in turn.
pub(crate) fn of_process(asked: Placement) -> std::result::Result<Placement, Failure> {
    let launched = Launched::from_env().map_err(Failure::input)?;
    let process_here = launched.and_then(|launched| launched.rank_here).unwrap_or(0);
    asked.dealt_to(process_here).map_err(|problem| Failure::input(format!("--device: {problem}")))
}

/// Connects the ranks by NCCL if they are processes and the model lies on devices. Collective.
pub(crate) fn connect(world: &World, options: &RunOptions) -> std::result::Result<(), Failure> {
    match options.device {
        Placement::Host => Ok(()),
        _ if world.shares_memory() || world.size() == 1 => Ok(()),
        device => by_nccl(world, device),
    }
}

#[cfg(feature = "nccl")]
fn by_nccl(world: &World, device: Placement) -> std::result::Result<(), Failure> {
    let Placement::Cuda { ordinal, .. } = device else { return Ok(()) };
    let device = hsdp::kernels::cuda::Device::new(ordinal).map_err(Failure::training)?;
    Ok(world.connect_nccl(&device).map_err(hsdp::Error::from)?)
}

#[cfg(not(feature = "nccl"))]
fn by_nccl(_: &World, device: Placement) -> std::result::Result<(), Failure> {
    Err(Failure::input(format!("--device {device} in processes: build with --features nccl")))
}

/// The candle device of a rank: the GPU of its part of the model if this program is built with `candle-cuda`, else the CPU. The
/// rank's own thread must make it, so that it has a stream of its own.
pub(crate) fn of(options: &RunOptions) -> Result<Device> {
    #[cfg(feature = "candle-cuda")]
    if let hsdp::Placement::Cuda { ordinal, .. } = options.device {
        return Device::new_cuda_with_stream(ordinal);
    }
    let _ = options;
    Ok(Device::Cpu)
}
