//! Where candle computes.

use candle_core::{Device, Result};

use super::options::Options;

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
