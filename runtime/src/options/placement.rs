//! The place of a rank's part of a model: the host or a device.

use std::fmt;
use std::str::FromStr;

use hsdp_kernels::cuda::{CudaError, Device, HAS_DEVICES};
use hsdp_sharding::Offload;

/// The place where a rank's part of a model (parameters, partials, optimizer state) lies and is
/// computed. All ranks have the same kind of place.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Placement {
    /// The memory and the CPU of the process.
    #[default]
    Host,
    /// A CUDA device. Several ranks may use one device.
    Cuda {
        /// The number of the device, as the driver counts.
        ordinal: usize,
        /// The part of the state that is kept in host memory.
        offload: Offload,
    },
}

/// Parses `cpu`, `cuda` for the first device, and `cuda:2` for another device.
///
/// ```
/// use hsdp::Placement;
///
/// assert_eq!("cpu".parse(), Ok(Placement::Host));
/// assert!("gpu".parse::<Placement>().is_err());
/// assert!(Placement::Host.offloading(hsdp::Offload::All).is_err());
/// ```
impl FromStr for Placement {
    type Err = String;

    /// # Errors
    /// A message if the text is not a device, or if this build has no devices.
    fn from_str(text: &str) -> Result<Self, String> {
        let ordinal = match text.split_once(':').unwrap_or((text, "0")) {
            ("cpu", "0") if text == "cpu" => return Ok(Self::Host),
            ("cuda", ordinal) => ordinal.parse().map_err(|_| {
                format!("`{text}` is not a device: a number must follow `cuda:`, such as cuda:1")
            })?,
            _ => return Err(format!("`{text}` is not a device such as cpu, cuda or cuda:1")),
        };
        Self::cuda(ordinal)
    }
}

impl Placement {
    /// Returns the same place, with `offload` in host memory.
    ///
    /// # Errors
    /// A message if the model lies on the host already.
    pub fn offloading(self, offload: Offload) -> Result<Self, String> {
        match self {
            _ if offload == Offload::None => Ok(self),
            Self::Host => {
                Err(format!("nothing to offload ({offload}): the model lies on the host"))
            }
            Self::Cuda { ordinal, .. } => Ok(Self::Cuda { ordinal, offload }),
        }
    }

    /// Returns the part of the state that a model on a device keeps in host memory.
    #[must_use]
    pub fn offload(self) -> Offload {
        match self {
            Self::Host => Offload::None,
            Self::Cuda { offload, .. } => offload,
        }
    }

    /// Returns the place for the process with the number `process_here` on its machine: processes
    /// get the devices of the machine in turn, beginning with this one.
    ///
    /// # Errors
    /// A message if the driver does not give the number of devices.
    pub fn dealt_to(self, process_here: usize) -> Result<Self, String> {
        match self {
            Self::Host => Ok(self),
            Self::Cuda { ordinal, offload } => {
                let count = Device::count();
                let count = count.map_err(|error| error.to_string())?.max(1);
                Ok(Self::Cuda { ordinal: (ordinal + process_here) % count, offload })
            }
        }
    }

    fn cuda(ordinal: usize) -> Result<Self, String> {
        if HAS_DEVICES {
            return Ok(Self::Cuda { ordinal, offload: Offload::None });
        }
        Err(format!("no device cuda:{ordinal}: {}", CudaError::NotBuilt))
    }
}

/// The kind of place, and the state that is offloaded. The number of the device is left out,
/// because it may differ between ranks.
impl fmt::Display for Placement {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Host => "cpu",
            Self::Cuda { offload: Offload::None, .. } => "cuda",
            Self::Cuda { offload: Offload::Optimizer, .. } => "cuda, offloading optimizer",
            Self::Cuda { offload: Offload::All, .. } => "cuda, offloading all",
        })
    }
}
