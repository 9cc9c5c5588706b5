//! Where a rank's part of a model lies.

use std::fmt;
use std::str::FromStr;

use hsdp_sharding::Offload;

/// Where a rank's part of a model lies and is computed on: parameters, partials, the optimizer's state. Ranks have the same kind.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Placement {
    /// In the memory of the process, on its processors.
    #[default]
    Host,
    /// On a CUDA device. Several ranks may use one.
    #[cfg(feature = "cuda")]
    Cuda {
        /// Which of the driver's devices.
        ordinal: usize,
        /// What of it is kept in host memory.
        offload: Offload,
    },
}

/// `cpu`, `cuda` for the first device, `cuda:2` for another.
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
    /// What is wrong with the text, or that this build has no devices.
    fn from_str(text: &str) -> Result<Self, String> {
        let ordinal = match text.split_once(':').unwrap_or((text, "0")) {
            ("cpu", "0") if text == "cpu" => return Ok(Self::Host),
            ("cuda", ordinal) => ordinal.parse().map_err(|_| {
                format!("`{text}` is no device: a number comes after `cuda:`, such as cuda:1")
            })?,
            _ => return Err(format!("`{text}` is no device such as cpu, cuda or cuda:1")),
        };
        Self::cuda(ordinal)
    }
}

impl Placement {
    /// The same place, with this in host memory instead.
    ///
    /// # Errors
    /// In words, if all of it is there already.
    pub fn offloading(self, offload: Offload) -> Result<Self, String> {
        match self {
            _ if offload == Offload::None => Ok(self),
            Self::Host => {
                Err(format!("nothing to offload ({offload}): the model lies on the host"))
            }
            #[cfg(feature = "cuda")]
            Self::Cuda { ordinal, .. } => Ok(Self::Cuda { ordinal, offload }),
        }
    }

    /// What of it is kept in host memory although it lies elsewhere.
    #[must_use]
    pub fn offload(self) -> Offload {
        match self {
            Self::Host => Offload::None,
            #[cfg(feature = "cuda")]
            Self::Cuda { offload, .. } => offload,
        }
    }

    /// The same, for the process that is number `process_here` on its machine: from this one on, the devices of the machine are
    /// dealt out in turn.
    ///
    /// # Errors
    /// In words, if the driver does not say how many devices there are.
    pub fn dealt_to(self, process_here: usize) -> Result<Self, String> {
        match self {
            Self::Host => {
                let _ = process_here;
                Ok(Self::Host)
            }
            #[cfg(feature = "cuda")]
            Self::Cuda { ordinal, offload } => {
                let count = hsdp_kernels::cuda::Device::count();
                let count = count.map_err(|error| error.to_string())?.max(1);
                Ok(Self::Cuda { ordinal: (ordinal + process_here) % count, offload })
            }
        }
    }

    #[cfg(feature = "cuda")]
    #[expect(clippy::unnecessary_wraps, reason = "as where there are no devices")]
    const fn cuda(ordinal: usize) -> Result<Self, String> {
        Ok(Self::Cuda { ordinal, offload: Offload::None })
    }

    #[cfg(not(feature = "cuda"))]
    fn cuda(ordinal: usize) -> Result<Self, String> {
        Err(format!("no device cuda:{ordinal} in this build, which has not the feature `cuda`"))
    }
}

/// Its kind, and what is offloaded: which device a rank has is its own affair.
impl fmt::Display for Placement {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Host => "cpu",
            #[cfg(feature = "cuda")]
            Self::Cuda { offload: Offload::None, .. } => "cuda",
            #[cfg(feature = "cuda")]
            Self::Cuda { offload: Offload::Optimizer, .. } => "cuda, offloading optimizer",
            #[cfg(feature = "cuda")]
            Self::Cuda { offload: Offload::All, .. } => "cuda, offloading all",
        })
    }
}
