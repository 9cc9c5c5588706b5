//! Ranks as threads, for a case.

use std::fmt::Display;
use std::time::Duration;

use hsdp::{Mesh, Placement, World, WorldOptions, launch};
use hsdp_comm::RankFailure;

/// No operation of a case takes longer, on the slowest machine.
const DEADLINE: Duration = Duration::from_secs(60);

/// Where a case runs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Site {
    /// Where each rank's part of the model lies.
    pub placement: Placement,
    /// Who carries its collectives.
    pub carrier: Carrier,
}

/// Who carries collectives on devices.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Carrier {
    /// This process itself.
    #[default]
    Local,
    /// NCCL, on a device.
    #[cfg(feature = "nccl")]
    Nccl {
        /// Which of the driver's devices.
        ordinal: usize,
    },
}

impl Carrier {
    fn connect(self, world: &World) -> Result<(), String> {
        match self {
            Self::Local => world.end().map_or(Ok(()), |ended| Err(ended.to_string())),
            #[cfg(feature = "nccl")]
            Self::Nccl { ordinal } => {
                let device = hsdp_kernels::cuda::Device::new(ordinal);
                let device = device.map_err(|error| error.to_string())?;
                world.connect_nccl(&device).map_err(|error| error.to_string())
            }
        }
    }
}

/// Runs `act` on every rank of `mesh` and gives what each of them made, in rank order.
///
/// # Errors
/// The first rank that failed or panicked, and how.
pub(super) fn on_ranks<T: Send, E: Display + Send>(
    (mesh, carrier): (Mesh, Carrier),
    act: impl Fn(World) -> Result<T, E> + Sync,
) -> Result<Vec<T>, String> {
    let act = |world: World| {
        carrier.connect(&world)?;
        act(world).map_err(|error| error.to_string())
    };
    let options = WorldOptions { deadline: DEADLINE, ..WorldOptions::default() };
    let ended = launch(mesh.world_size(), options, act);
    let result = |(rank, ended): (usize, Result<Result<T, String>, RankFailure>)| match ended {
        Ok(Ok(made)) => Ok(made),
        Ok(Err(error)) => Err(format!("rank {rank}: {error}")),
        Err(failure) => Err(failure.to_string()),
    };
    ended.into_iter().enumerate().map(result).collect()
}
