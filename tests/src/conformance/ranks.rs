//! Ranks as threads, or as processes, for a case.

use std::fmt::Display;
#[cfg(feature = "mpi")]
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

#[cfg(feature = "mpi")]
use hsdp::Rank;
use hsdp::{Mesh, Placement, RankFailure, World, WorldOptions};
#[cfg(feature = "mpi")]
use hsdp_comm::mpi::{Job, MpiError};
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::support::worlds::launched;

/// No operation of a case takes longer, on the slowest machine.
const DEADLINE: Duration = Duration::from_secs(30);

/// The place at which a case runs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Site {
    /// The place of each rank's part of the model.
    pub placement: Placement,
    /// The backend of its collectives.
    pub carrier: Carrier,
}

/// The backend of collectives.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Carrier {
    /// This process itself.
    #[default]
    Local,
    /// MPI, between processes; NCCL for buffers on devices.
    #[cfg(feature = "mpi")]
    Mpi {
        /// The number of this process.
        process: usize,
        /// The ordinal of its device, if it has one.
        device: Option<usize>,
    },
    /// NCCL, on a device.
    #[cfg(feature = "nccl")]
    Nccl {
        /// The ordinal of the device.
        ordinal: usize,
    },
}

impl Carrier {
    /// How many ranks there can be, where that is not as many as are asked for.
    pub(super) fn most_ranks(self) -> Option<usize> {
        match self {
            #[cfg(feature = "mpi")]
            Self::Mpi { .. } => job().map(|job| job.size()),
            _ => None,
        }
    }

    fn connect(self, world: &World) -> Result<(), String> {
        match self {
            Self::Local => world.end().map_or(Ok(()), |ended| Err(ended.to_string())),
            #[cfg(feature = "mpi")]
            Self::Mpi { device: None, .. } => Ok(()),
            #[cfg(feature = "mpi")]
            Self::Mpi { device: Some(ordinal), .. } => connect(world, ordinal),
            #[cfg(feature = "nccl")]
            Self::Nccl { ordinal } => connect(world, ordinal),
        }
    }
}

#[cfg(feature = "nccl")]
fn connect(world: &World, ordinal: usize) -> Result<(), String> {
    let device = hsdp_kernels::cuda::Device::new(ordinal).map_err(|error| error.to_string())?;
    world.connect_nccl(&device).map_err(|error| error.to_string())
}

#[cfg(all(feature = "mpi", not(feature = "nccl")))]
fn connect(_: &World, _: usize) -> Result<(), String> {
    Err("this build has no NCCL: add --features nccl".to_owned())
}

/// Runs `act` on every rank of `mesh` and returns their results, in rank order.
///
/// # Errors
/// The first rank that failed or panicked, and how.
pub(super) fn on_ranks<T, E>(
    mesh: Mesh,
    carrier: Carrier,
    act: impl Fn(World) -> Result<T, E> + Sync,
) -> Result<Vec<T>, String>
where
    T: Send + Serialize + DeserializeOwned,
    E: Display + Send,
{
    let act = |world: World| {
        carrier.connect(&world)?;
        act(world).map_err(|error| error.to_string())
    };
    let options = WorldOptions { deadline: DEADLINE, ..WorldOptions::default() };
    #[cfg(feature = "mpi")]
    if matches!(carrier, Carrier::Mpi { .. }) {
        return on_processes(mesh, options, act);
    }
    let ended = launched(mesh.world_size(), options, act);
    let result = |(rank, ended): (usize, Result<Result<T, String>, RankFailure>)| match ended {
        Ok(Ok(made)) => Ok(made),
        Ok(Err(error)) => Err(format!("rank {rank}: {error}")),
        Err(failure) => Err(failure.to_string()),
    };
    ended.into_iter().enumerate().map(result).collect()
}

/// The processes of this job.
#[cfg(feature = "mpi")]
static JOB: Mutex<Option<Job>> = Mutex::new(None);

/// Has cases run on the processes of the job in which this one was started: which it is, and how
/// many there are.
///
/// # Errors
/// The error of MPI.
#[cfg(feature = "mpi")]
pub fn join() -> Result<(Rank, usize), MpiError> {
    let job = Job::join(DEADLINE)?;
    let place = (job.rank(), job.size());
    *JOB.lock().unwrap_or_else(PoisonError::into_inner) = Some(job);
    Ok(place)
}

/// No cases are run any more: the processes end together.
#[cfg(feature = "mpi")]
pub fn leave() {
    let job = JOB.lock().unwrap_or_else(PoisonError::into_inner).take();
    drop(job);
}

#[cfg(feature = "mpi")]
fn job() -> Option<Job> {
    JOB.lock().unwrap_or_else(PoisonError::into_inner).clone()
}

/// Makes a world of the processes that the mesh has ranks for, and gives each of them the results
/// of all. Further processes fail.
#[cfg(feature = "mpi")]
fn on_processes<T: Serialize + DeserializeOwned>(
    mesh: Mesh,
    options: WorldOptions,
    act: impl Fn(World) -> Result<T, String>,
) -> Result<Vec<T>, String> {
    let job = job().ok_or("this process has joined no job")?;
    let world = job.world(mesh.world_size(), options).map_err(|error| error.to_string())?;
    let world = world.ok_or("this process is not among the ranks")?;
    let made = act(world.clone());
    let made = exchanged(&world, &made).map_err(|error| match made {
        Err(own) => own,
        Ok(_) => error,
    })?;
    let of =
        |(rank, made): (usize, Result<T, String>)| made.map_err(|it| format!("rank {rank}: {it}"));
    made.into_iter().enumerate().map(of).collect()
}

/// The results of all ranks, on each of them.
#[cfg(feature = "mpi")]
fn exchanged<T: Serialize + DeserializeOwned>(world: &World, made: &T) -> Result<Vec<T>, String> {
    use hsdp_comm::{Channel, Tag};
    let text = |error: hsdp_comm::Error| error.to_string();
    let group = world.world_group(Channel::User);
    let mut bytes = postcard::to_allocvec(made).map_err(|error| error.to_string())?;
    let own = u32::try_from(bytes.len()).map_err(|error| error.to_string())?;
    let lengths = group.all_gather(Tag::default(), vec![own]).and_then(hsdp_comm::Pending::wait);
    let lengths = lengths.map_err(text)?;
    let longest = lengths.iter().max().map_or(0, |longest| *longest as usize).next_multiple_of(4);
    bytes.resize(longest, 0);
    let words =
        bytes.chunks_exact(4).map(|word| u32::from_ne_bytes([word[0], word[1], word[2], word[3]]));
    let all = group.all_gather(Tag::default(), words.collect()).and_then(hsdp_comm::Pending::wait);
    let all: Vec<u8> = all.map_err(text)?.into_iter().flat_map(u32::to_ne_bytes).collect();
    let parts = all.chunks_exact(longest.max(1)).zip(lengths);
    parts
        .map(|(part, len)| postcard::from_bytes(&part[..len as usize]).map_err(|it| it.to_string()))
        .collect()
}
