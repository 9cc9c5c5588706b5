//! The ranks: threads of this process, or processes under MPI.

use std::error::Error;
use std::time::Duration;

use hsdp::World;
use hsdp_comm::{WorldOptions, launch as launch_threads};

use crate::options::{Comm, Options};

/// The text of the error of a rank, or of its panic.
type Failure = Box<dyn Error + Send + Sync>;

/// The deadline of a step on a device. It is longer than a step takes, and shorter than the time
/// that a run on a card has for it.
pub(crate) const ON_A_DEVICE: Duration = Duration::from_secs(30);

/// Runs the ranks of this process; the results of all, or the first error.
pub(crate) fn launch<T: Send>(
    options: &Options,
    rank: impl Fn(&World) -> Result<T, String> + Sync,
) -> Result<Vec<T>, String> {
    let rank = |world: World| rank(&world).map_err(Failure::from);
    let of_world = WorldOptions::default();
    let ended = match options.comm {
        Comm::Local => launch_threads(options.ranks(), of_world, rank),
        Comm::Nccl => {
            let of_world = WorldOptions { deadline: ON_A_DEVICE, ..of_world };
            launch_threads(options.ranks(), of_world, rank)
        }
        Comm::Mpi => of_job(options, rank)?,
    };
    ended.into_iter().map(|ended| ended.map_err(|failure| failure.to_string())).collect()
}

#[cfg(feature = "mpi")]
fn of_job<T>(
    options: &Options,
    rank: impl Fn(World) -> Result<T, Failure>,
) -> Result<Vec<Result<T, Failure>>, String> {
    let world = WorldOptions::default();
    let job = hsdp_comm::mpi::Job::join(world.deadline).map_err(|error| error.to_string())?;
    let mesh = options.mesh;
    let processes = job.size();
    if mesh.world_size() != processes {
        return Err(format!(
            "mesh {mesh} has {} ranks, and there are {processes} processes",
            mesh.world_size()
        ));
    }
    let ended = job.launch(processes, world, rank).map_err(|error| error.to_string())?;
    Ok(ended.into_iter().collect())
}

#[cfg(not(feature = "mpi"))]
fn of_job<T>(
    _: &Options,
    _: impl Fn(World) -> Result<T, Failure>,
) -> Result<Vec<Result<T, Failure>>, String> {
    Err("--comm mpi: build with --features mpi".to_owned())
}

/// Connects the ranks by NCCL, if they go by it. Collective.
#[cfg(feature = "nccl")]
pub(crate) fn connect(options: &Options, world: &World) -> Result<(), String> {
    if options.comm != Comm::Nccl {
        return Ok(());
    }
    let device = hsdp_kernels::cuda::Device::new(0).map_err(|error| error.to_string())?;
    world.connect_nccl(&device).map_err(|error| error.to_string())
}

/// The options are refused where ranks are to go by NCCL.
#[cfg(not(feature = "nccl"))]
#[expect(clippy::unnecessary_wraps, reason = "with NCCL it fails")]
pub(crate) fn connect(_: &Options, _: &World) -> Result<(), String> {
    Ok(())
}
