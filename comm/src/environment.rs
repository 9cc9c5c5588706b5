//! The world that the environment describes, as a launcher has set it.

use std::env::{self, VarError};

use hsdp_sharding::{Mesh, Rank};

use crate::{Error, World};

/// This process's place in its job, as its launcher has set it in the environment.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Launched {
    /// The launcher that has started the process.
    pub launcher: Launcher,
    /// The rank of this process.
    pub rank: Rank,
    /// The number of processes.
    pub size: usize,
    /// The number of processes on this machine, if the launcher sets it.
    pub size_here: Option<usize>,
    /// The rank of this process among those on this machine, if the launcher sets it.
    pub rank_here: Option<usize>,
}

/// A launcher of processes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Launcher {
    /// `mpirun` of Open MPI: `OMPI_COMM_WORLD_*`.
    OpenMpi,
    /// `mpirun` of MPICH, or a server of PMI: `PMI_*`.
    Pmi,
    /// `srun`, for a step of a job of Slurm: `SLURM_*`.
    Slurm,
    /// torchrun, or a launcher that sets the same variables: `RANK`, `WORLD_SIZE`.
    Torchrun,
}

/// The names of what a launcher says.
struct Names {
    launcher: Launcher,
    rank: &'static str,
    size: &'static str,
    size_here: &'static str,
    rank_here: &'static str,
}

/// Those that know most come first: `mpirun` in a job of Slurm inherits what Slurm has told its script.
const LAUNCHERS: [Names; 4] = [
    Names {
        launcher: Launcher::OpenMpi,
        rank: "OMPI_COMM_WORLD_RANK",
        size: "OMPI_COMM_WORLD_SIZE",
        size_here: "OMPI_COMM_WORLD_LOCAL_SIZE",
        rank_here: "OMPI_COMM_WORLD_LOCAL_RANK",
    },
    Names {
        launcher: Launcher::Pmi,
        rank: "PMI_RANK",
        size: "PMI_SIZE",
        size_here: "MPI_LOCALNRANKS",
        rank_here: "MPI_LOCALRANKID",
    },
    Names {
        launcher: Launcher::Slurm,
        rank: "SLURM_PROCID",
        size: "SLURM_STEP_NUM_TASKS",
        size_here: "SLURM_NTASKS_PER_NODE",
        rank_here: "SLURM_LOCALID",
    },
    Names {
        launcher: Launcher::Torchrun,
        rank: "RANK",
        size: "WORLD_SIZE",
        size_here: "LOCAL_WORLD_SIZE",
        rank_here: "LOCAL_RANK",
    },
];

/// A variable of the environment, if it is set.
type Variable<'a> = &'a dyn Fn(&'static str) -> Result<Option<String>, Error>;

impl Launched {
    /// Reads the environment; `None` if no launcher has started this process.
    ///
    /// # Errors
    /// [`Error::Environment`] if a variable is not a number, a rank is not below the size, one of the two is missing, or two
    /// launchers contradict each other.
    pub fn from_env() -> Result<Option<Self>, Error> {
        Self::told(&variable)
    }

    fn told(variable: Variable<'_>) -> Result<Option<Self>, Error> {
        let mut first: Option<(Self, &Names)> = None;
        for names in &LAUNCHERS {
            let Some(other) = names.told(variable)? else { continue };
            match &mut first {
                None => first = Some((other, names)),
                // A server of PMI that Slurm has says nothing of the machine.
                Some((one, _)) if (one.rank, one.size) == (other.rank, other.size) => {
                    one.size_here = one.size_here.or(other.size_here);
                    one.rank_here = one.rank_here.or(other.rank_here);
                }
                // What Slurm says where `mpirun` has started a process is of the script that called it.
                Some(_) if names.launcher == Launcher::Slurm => {}
                Some((one, by)) => {
                    let problem = format!(
                        "rank {} of {}, and {} says rank {} of {}",
                        one.rank, one.size, names.rank, other.rank, other.size
                    );
                    return Err(refused(by.rank, one.rank.to_string(), problem));
                }
            }
        }
        Ok(first.map(|(told, _)| told))
    }

    /// The mesh that suits these machines: the processes of one machine shard one replica. If the number of processes on this
    /// machine is unknown or does not divide the number of all processes, all processes shard one replica.
    ///
    /// # Errors
    /// [`Error::Environment`] if there is no such mesh.
    pub fn mesh(&self) -> Result<Mesh, Error> {
        let here = self.size_here.filter(|here| *here > 0 && self.size.is_multiple_of(*here));
        let shard = here.unwrap_or(self.size);
        let size = || ("WORLD_SIZE", self.size.to_string());
        Mesh::new(self.size / shard, shard).map_err(|error| {
            let (variable, value) = size();
            refused(variable, value, error.to_string())
        })
    }
}

impl Names {
    fn told(&self, variable: Variable<'_>) -> Result<Option<Launched>, Error> {
        let read = |name| variable(name)?.map(|value| number(name, &value)).transpose();
        let Self { launcher, rank: rank_name, size: size_name, .. } = *self;
        let (rank, size) = match (read(rank_name)?, read(size_name)?) {
            (None, None) => return Ok(None),
            (Some(0), None) | (None, Some(1)) => (0, 1),
            // A step of one task, or the script of a job, whose tasks are yet to be started.
            (Some(_), None) if launcher == Launcher::Slurm => return Ok(None),
            (Some(rank), None) => {
                return Err(refused(
                    rank_name,
                    rank.to_string(),
                    format!("{size_name} is not set"),
                ));
            }
            (None, Some(size)) => {
                return Err(refused(
                    size_name,
                    size.to_string(),
                    format!("{rank_name} is not set"),
                ));
            }
            (Some(rank), Some(size)) => (rank, size),
        };
        if size == 0 {
            return Err(refused(
                size_name,
                "0".to_owned(),
                "a world has at least 1 rank".to_owned(),
            ));
        }
        if rank >= size {
            let problem = format!("ranks of a world of {size} are numbered from 0 to {}", size - 1);
            return Err(refused(rank_name, rank.to_string(), problem));
        }
        let [size_here, rank_here] = [read(self.size_here)?, read(self.rank_here)?];
        let [size_here, rank_here] = [size_here, rank_here].map(|it| it.map(|it| it as usize));
        let (rank, size) = (Rank::new(rank as usize), size as usize);
        Ok(Some(Launched { launcher, rank, size, size_here, rank_here }))
    }
}

impl World {
    /// Makes the world that the environment describes, as launchers set it: see [`Launched::from_env`].
    ///
    /// Without a launcher, or for one process, it is [`single`](Self::single). Processes that `mpirun` or `srun` has
    /// started make a world of all of them, in a build with the feature `mpi`; to make several worlds, or smaller ones,
    /// use `mpi::Job`. Processes that `hsdp launch --comm nccl` or torchrun has started do the same in a build with the
    /// feature `nccl` (see `control::Job`). Other builds refuse them, and the error says which feature or command is needed.
    ///
    /// **Collective**: all processes of the job call it.
    ///
    /// # Errors
    /// [`Error::Environment`] as `Launched::from_env`, if this build cannot make the world, or if the processes cannot join;
    /// the errors of `mpi::Job::world`.
    pub fn from_env() -> Result<Self, Error> {
        match Launched::from_env()? {
            Some(launched) if launched.size > 1 => of_processes(&launched),
            _ => Ok(Self::single()),
        }
    }
}

fn of_processes(launched: &Launched) -> Result<World, Error> {
    let launcher = launched.launcher;
    let names = LAUNCHERS.iter().find(|names| names.launcher == launcher);
    let variable = names.map_or("WORLD_SIZE", |names| names.size);
    match launcher {
        Launcher::Torchrun => by_control(launched, variable),
        _ => by_mpi(launched, variable),
    }
}

#[cfg(feature = "nccl")]
fn by_control(launched: &Launched, variable: &'static str) -> Result<World, Error> {
    use crate::WorldOptions;
    use crate::control::Job;

    let options = WorldOptions::default();
    let size = launched.size;
    let failed = |problem: String| refused(variable, size.to_string(), problem);
    let job = Job::from_env(options.deadline).map_err(|error| failed(error.to_string()))?;
    job.world(size, options)?
        .ok_or_else(|| failed("this process is not among the ranks".to_owned()))
}

#[cfg(not(feature = "nccl"))]
fn by_control(launched: &Launched, variable: &'static str) -> Result<World, Error> {
    let size = launched.size;
    let problem = format!(
        "processes on CPUs need MPI: build with the feature `mpi`, and start them with `mpirun -n {size}`; or start one process, and have `launch` run {size} threads. Processes on GPUs need the feature `nccl`"
    );
    Err(refused(variable, size.to_string(), problem))
}

#[cfg(feature = "mpi")]
fn by_mpi(launched: &Launched, variable: &'static str) -> Result<World, Error> {
    use crate::WorldOptions;
    use crate::mpi::Job;

    let options = WorldOptions::default();
    let size = launched.size;
    let failed = |problem: String| refused(variable, size.to_string(), problem);
    let job = Job::join(options.deadline).map_err(|error| failed(error.to_string()))?;
    if (job.rank(), job.size()) != (launched.rank, size) {
        let (rank, size) = (job.rank(), job.size());
        let (told, of) = (launched.rank, launched.size);
        return Err(failed(format!(
            "rank {told} of {of}, and MPI says rank {rank} of {size}: is it the MPI of this launcher?"
        )));
    }
    job.world(size, options)?
        .ok_or_else(|| failed("this process is not among the ranks".to_owned()))
}

#[cfg(not(feature = "mpi"))]
fn by_mpi(launched: &Launched, variable: &'static str) -> Result<World, Error> {
    let problem = "processes need MPI: build with the feature `mpi`".to_owned();
    Err(refused(variable, launched.size.to_string(), problem))
}

fn variable(name: &'static str) -> Result<Option<String>, Error> {
    match env::var(name) {
        Ok(value) => Ok(Some(value)),
        Err(VarError::NotPresent) => Ok(None),
        Err(VarError::NotUnicode(value)) => {
            Err(refused(name, value.to_string_lossy().into_owned(), "not Unicode".to_owned()))
        }
    }
}

fn number(variable: &'static str, value: &str) -> Result<u32, Error> {
    value.trim().parse().map_err(|error| {
        refused(variable, value.to_owned(), format!("not a number of ranks: {error}"))
    })
}

fn refused(variable: &'static str, value: String, problem: String) -> Error {
    Error::Environment { variable, value, problem }
}

#[cfg(test)]
mod tests;
