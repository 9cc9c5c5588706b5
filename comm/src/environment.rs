//! The world that the environment describes, as a launcher has set it.

use std::env::{self, VarError};

use hsdp_sharding::{Mesh, Rank};

use crate::{Error, SetupError, World};

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

/// A launcher, and its variables: rank, size, number of processes on this machine, rank among them.
type Names = (Launcher, [&'static str; 4]);

/// The launchers that know most come first: `mpirun` in a job of Slurm inherits the variables of
/// its script.
#[rustfmt::skip]
const LAUNCHERS: [Names; 4] = [
    (Launcher::OpenMpi, ["OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"]),
    (Launcher::Pmi, ["PMI_RANK", "PMI_SIZE", "MPI_LOCALNRANKS", "MPI_LOCALRANKID"]),
    (Launcher::Slurm, ["SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS_PER_NODE", "SLURM_LOCALID"]),
    (Launcher::Torchrun, ["RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "LOCAL_RANK"]),
];

/// A variable that torchrun sets beside `RANK`, and no script does.
const OF_TORCHRUN: &str = "TORCHELASTIC_RUN_ID";

/// A variable of the environment, if it is set.
type Variable<'a> = &'a dyn Fn(&'static str) -> Result<Option<String>, Error>;

impl Launched {
    /// Reads the environment; `None` if no launcher has started this process. If torchrun runs
    /// under `srun`, its variables count.
    ///
    /// # Errors
    /// [`SetupError::Environment`] if a variable is not a number, a rank is not below the size, one
    /// of the two is missing, or two launchers contradict each other.
    pub fn from_env() -> Result<Option<Self>, Error> {
        Self::told(&variable)
    }

    fn told(variable: Variable<'_>) -> Result<Option<Self>, Error> {
        let mut places = Vec::new();
        for names in &LAUNCHERS {
            places.extend(Self::by(names, variable)?);
        }
        if variable(OF_TORCHRUN)?.is_some() {
            leave_out_agents(&mut places);
        }
        let mut places = places.into_iter();
        let Some(mut first) = places.next() else { return Ok(None) };
        places.try_for_each(|other| first.add(&other))?;
        Ok(Some(first))
    }

    fn rank_and_size(&self) -> (Rank, usize) {
        (self.rank, self.size)
    }

    /// Adds the knowledge of a later launcher, if it does not contradict.
    fn add(&mut self, other: &Self) -> Result<(), Error> {
        if self.rank_and_size() == other.rank_and_size() {
            // A server of PMI that Slurm has says nothing of the machine.
            self.size_here = self.size_here.or(other.size_here);
            self.rank_here = self.rank_here.or(other.rank_here);
            return Ok(());
        }
        // In a process that `mpirun` has started, the variables of Slurm are those of the script
        // that called it.
        if other.launcher == Launcher::Slurm {
            return Ok(());
        }
        let [[by, _], [rank_name, _]] = [self, other].map(|it| it.launcher.names());
        let said = format!("{rank_name} says rank {} of {}", other.rank, other.size);
        let problem = format!("rank {} of {}, and {said}", self.rank, self.size);
        Err(refused(by, self.rank, problem))
    }

    /// The place of this process according to one launcher, if it has set the variables.
    fn by(&(launcher, names): &Names, variable: Variable<'_>) -> Result<Option<Self>, Error> {
        let [rank_name, size_name, size_here, rank_here] = names;
        let read = |name| variable(name)?.map(|value| parsed(name, &value)).transpose();
        let is_not_set = |name| format!("{name} is not set");
        let (rank, size) = match (read(rank_name)?, read(size_name)?) {
            (None, None) => return Ok(None),
            (Some(0), None) | (None, Some(1)) => (0, 1),
            // A step of one task, or the script of a job, whose tasks are yet to be started.
            (Some(_), None) if launcher == Launcher::Slurm => return Ok(None),
            (Some(rank), None) => return Err(refused(rank_name, rank, is_not_set(size_name))),
            (None, Some(size)) => return Err(refused(size_name, size, is_not_set(rank_name))),
            (Some(rank), Some(size)) => (rank, size),
        };
        if size == 0 {
            return Err(refused(size_name, size, "a world has at least 1 rank".to_owned()));
        }
        if rank >= size {
            let problem = format!("ranks of a world of {size} are numbered from 0 to {}", size - 1);
            return Err(refused(rank_name, rank, problem));
        }
        let rank = Rank::new(rank);
        let size_here = read(size_here)?;
        let rank_here = read(rank_here)?;
        Ok(Some(Self { launcher, rank, size, size_here, rank_here }))
    }

    /// The mesh that suits these machines: the processes of one machine shard one replica. If the
    /// number of processes on this machine is unknown or does not divide the number of all
    /// processes, all processes shard one replica.
    ///
    /// # Errors
    /// [`SetupError::Environment`] if there is no such mesh.
    pub fn mesh(&self) -> Result<Mesh, Error> {
        let here = self.size_here.filter(|here| *here > 0 && self.size.is_multiple_of(*here));
        let shard = here.unwrap_or(self.size);
        let refused =
            |error: hsdp_sharding::Error| refused("WORLD_SIZE", self.size, error.to_string());
        Mesh::new(self.size / shard, shard).map_err(refused)
    }
}

impl Launcher {
    /// The variables of rank and size.
    fn names(self) -> [&'static str; 2] {
        let mut all = LAUNCHERS.iter();
        let names = all.find(|(launcher, _)| *launcher == self);
        let (_, [rank, size, ..]) = names.expect("each launcher has variables");
        [rank, size]
    }
}

/// Under `srun`, a task may be torchrun's agent, which has started this process: then the variables
/// of Slurm, and those of its server of PMI, say which task that is. (`hsdp launch` takes these
/// variables from its ranks.)
fn leave_out_agents(places: &mut Vec<Launched>) {
    let place_by = |launcher| places.iter().find(|place| place.launcher == launcher);
    let (Some(slurm), Some(_)) = (place_by(Launcher::Slurm), place_by(Launcher::Torchrun)) else {
        return;
    };
    let task = slurm.rank_and_size();
    places.retain(|place| {
        let is_of_srun = matches!(place.launcher, Launcher::Slurm | Launcher::Pmi);
        !is_of_srun || place.rank_and_size() != task
    });
}

impl World {
    /// Makes the world that the environment describes, as launchers set it: see
    /// [`Launched::from_env`].
    ///
    /// Without a launcher, or for one process, it is [`single`](Self::single). Processes that
    /// `mpirun` or `srun` has started make a world of all of them, in a build with the feature
    /// `mpi`; to make several worlds, or smaller ones, use `mpi::Job`. Processes that `hsdp launch
    /// --comm nccl` or torchrun has started do the same in a build with the feature `nccl` (see
    /// `control::Job`). Other builds refuse them, and the error says which feature or command is
    /// needed.
    ///
    /// **Collective**: all processes of the job call it.
    ///
    /// # Errors
    /// [`SetupError::Environment`] as `Launched::from_env`, if this build cannot make the world, or
    /// if the processes cannot join; the errors of `mpi::Job::world`.
    pub fn from_env() -> Result<Self, Error> {
        match Launched::from_env()? {
            Some(launched) if launched.size > 1 => of_processes(&launched),
            _ => Ok(Self::single()),
        }
    }
}

fn of_processes(launched: &Launched) -> Result<World, Error> {
    let [_, variable] = launched.launcher.names();
    let refused = |problem| refused(variable, launched.size, problem);
    let world = match launched.launcher {
        Launcher::Torchrun => by_control(launched, refused)?,
        _ => by_mpi(launched, refused)?,
    };
    world.ok_or_else(|| refused("this process is not among the ranks".to_owned()))
}

#[cfg(feature = "nccl")]
fn by_control(
    launched: &Launched,
    refused: impl Fn(String) -> Error,
) -> Result<Option<World>, Error> {
    let options = crate::WorldOptions::default();
    let job = crate::control::Job::from_env(options.deadline);
    job.map_err(|error| refused(error.to_string()))?.world(launched.size, options)
}

#[cfg(not(feature = "nccl"))]
fn by_control(
    Launched { size, .. }: &Launched,
    refused: impl Fn(String) -> Error,
) -> Result<Option<World>, Error> {
    Err(refused(format!(
        "processes on CPUs need MPI: build with the feature `mpi`, and start them with `mpirun -n {size}`; or start one process, and have `launch` run {size} threads. Processes on GPUs need the feature `nccl`"
    )))
}

#[cfg(feature = "mpi")]
fn by_mpi(launched: &Launched, refused: impl Fn(String) -> Error) -> Result<Option<World>, Error> {
    let options = crate::WorldOptions::default();
    let Launched { rank: told, size: of, .. } = launched;
    let job = crate::mpi::Job::join(options.deadline).map_err(|it| refused(it.to_string()))?;
    let rank = job.rank();
    let size = job.size();
    if (rank, size) != (*told, *of) {
        return Err(refused(format!(
            "rank {told} of {of}, and MPI says rank {rank} of {size}: is it the MPI of this launcher?"
        )));
    }
    job.world(size, options)
}

#[cfg(not(feature = "mpi"))]
fn by_mpi(_: &Launched, refused: impl Fn(String) -> Error) -> Result<Option<World>, Error> {
    Err(refused("processes need MPI: build with the feature `mpi`".to_owned()))
}

fn variable(name: &'static str) -> Result<Option<String>, Error> {
    match env::var(name) {
        Ok(value) => Ok(Some(value)),
        Err(VarError::NotPresent) => Ok(None),
        Err(VarError::NotUnicode(value)) => {
            Err(refused(name, value.to_string_lossy(), "not Unicode".to_owned()))
        }
    }
}

fn parsed(variable: &'static str, value: &str) -> Result<usize, Error> {
    let number = value.trim().parse().map(|number: u32| number as usize);
    number.map_err(|error| refused(variable, value, format!("not a number of ranks: {error}")))
}

fn refused(variable: &'static str, value: impl ToString, problem: String) -> Error {
    SetupError::Environment { variable, value: value.to_string(), problem }.into()
}

#[cfg(test)]
mod tests;
