//! The device on which candle computes.

use candle_core::{Device, Result};
use hsdp::Placement;

/// Returns the candle device of a rank. It is the GPU of the rank's part of the model if this crate
/// is built with `candle-cuda`, else the CPU. The rank's own thread calls this, so that it has a
/// stream of its own.
///
/// # Errors
/// Errors of candle, if it cannot use the GPU.
pub fn device(placement: Placement) -> Result<Device> {
    #[cfg(feature = "candle-cuda")]
    if let Placement::Cuda { ordinal, .. } = placement {
        return Device::new_cuda_with_stream(ordinal);
    }
    let _ = placement;
    Ok(Device::Cpu)
}
