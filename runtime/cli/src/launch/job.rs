//! The processes that the launcher starts: mpirun, or the attendants themselves.

use std::error::Error;
use std::ffi::OsString;
use std::net::{Ipv4Addr, TcpListener};
use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::{env, io};

use clap::Args;
use nix::sys::prctl::set_pdeathsig;
use nix::sys::signal::Signal;
use nix::unistd::Uid;

use super::{LaunchArgs, LaunchComm};
use crate::CommandOutcome;
use crate::mpirun::{ADVICE, MpiFamily, Mpirun};

/// A job that has passed all checks that are possible before its start.
#[derive(Debug)]
pub(super) struct LaunchJob {
    ranks: u32,
    command: Vec<OsString>,
    /// The mpirun that starts the attendants. `None` if this program starts them.
    mpirun: Option<Mpirun>,
}

/// Variable, and its value, for the seconds that Open MPI's mpirun sleeps, up to three times,
/// between its signals to the remaining processes of a failed job. No process remains, because the
/// launcher has ended all of them by then.
const SLEEP: (&str, &str) = ("OMPI_MCA_odls_base_sigkill_timeout", "0");

/// Names of the variables that permit Open MPI to start processes as root.
const ALLOWED: [&str; 2] = ["OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"];

impl LaunchJob {
    /// Checks the command, and finds mpirun if the job needs it.
    ///
    /// # Errors
    /// A text with advice.
    pub(super) fn of(options: &LaunchArgs) -> Result<Self, String> {
        let program = &options.command[0]; // clap requires one
        which::which(program)
            .map_err(|_| format!("{}: no such program, here or in PATH", program.display()))?;
        let mpirun = match options.comm {
            LaunchComm::Mpi => Some(mpirun(options)?),
            LaunchComm::Nccl => None,
        };
        Ok(Self { ranks: options.ranks, command: options.command.clone(), mpirun })
    }

    pub(super) fn ranks(&self) -> u32 {
        self.ranks
    }

    /// Returns the name of the program that starts the attendants. `None` if it is this program.
    pub(super) fn starter(&self) -> Option<&'static str> {
        self.mpirun.is_some().then_some("mpirun")
    }

    /// Starts mpirun, or an attendant for each rank, in order.
    ///
    /// # Errors
    /// The error of the system. Processes that were already started end by themselves.
    pub(super) fn start(&self, attempt: u32, socket: &Path) -> io::Result<Vec<Child>> {
        let mut commands = match &self.mpirun {
            Some(mpirun) => vec![self.under(mpirun)?],
            None => self.attendants()?,
        };
        let start = |command: &mut Command| {
            command
                .env(SOCKET, socket)
                .env(RESTART, attempt.to_string())
                .stdin(Stdio::null())
                .process_group(0)
                .spawn()
        };
        commands.iter_mut().map(start).collect()
    }

    /// Returns the command that starts the attendants with mpirun. Messages of mpirun are shown as
    /// its own lines.
    fn under(&self, mpirun: &Mpirun) -> io::Result<Command> {
        let mut arguments: Vec<OsString> = vec!["-n".into(), self.ranks.to_string().into()];
        if mpirun.family == MpiFamily::OpenMpi {
            // It changes nothing where there is a core for each rank.
            arguments.push("--oversubscribe".into());
        }
        arguments.push(env::current_exe()?.into());
        arguments.extend(["launch-rank", "--"].map(OsString::from));
        arguments.extend(self.command.iter().cloned());
        let mut command = mortal(&mpirun.path, &arguments)?;
        // If this program runs inside another job, an attendant would take its rank in that job for
        // its own.
        RANKS.iter().for_each(|name| {
            command.env_remove(name);
        });
        let (name, seconds) = SLEEP;
        if mpirun.family == MpiFamily::OpenMpi && env::var_os(name).is_none() {
            command.env(name, seconds);
        }
        command.stdout(Stdio::piped()).stderr(Stdio::piped());
        Ok(command)
    }

    fn attendants(&self) -> io::Result<Vec<Command>> {
        let meeting = meeting(self.ranks)?;
        let program = env::current_exe()?;
        let attendant = |rank| {
            let mut command = Command::new(&program);
            command.args(["launch-rank", "--"]).args(&self.command).stdout(Stdio::null());
            contrary().for_each(|name| {
                command.env_remove(name);
            });
            command.envs(meeting.iter().cloned()).envs(variables_of(rank));
            command
        };
        Ok((0..self.ranks).map(attendant).collect())
    }
}

fn mpirun(options: &LaunchArgs) -> Result<Mpirun, String> {
    if is_torchrun() {
        let names = TORCHRUN.join(", ");
        return Err(format!(
            "{names} are set, as by torchrun, which has started this process as one rank: start `hsdp launch -n {} --comm nccl -- CMD` without torchrun",
            options.ranks
        ));
    }
    let mpirun = Mpirun::find()?.ok_or_else(|| format!("no mpirun in PATH: {ADVICE}"))?;
    let is_allowed = ALLOWED.into_iter().all(|name| env::var_os(name).is_some());
    if mpirun.family == MpiFamily::OpenMpi && Uid::effective().is_root() && !is_allowed {
        let [allow, confirm] = ALLOWED;
        return Err(format!(
            "Open MPI starts nothing for root unless {allow}=1 and {confirm}=1 are set"
        ));
    }
    Ok(mpirun)
}

/// Name of the variable with the socket that attendants connect to.
pub(super) const SOCKET: &str = "HSDP_LAUNCH_SOCKET";

/// Name of the variable with the number of the attempt, from 0.
const RESTART: &str = "HSDP_RESTART";

/// Name of the variable with the rank of a process that this program has started itself. It has
/// precedence over MPI's variables.
pub(super) const LAUNCHED: &str = "HSDP_LAUNCH_RANK";

/// Names of the variables with a process's rank, as set by this program, Open MPI, MPICH and its
/// derivatives, and PMIx.
const RANKS: [&str; 4] = [LAUNCHED, "OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK"];

/// Names of the variables that torchrun sets.
const TORCHRUN: [&str; 3] = ["RANK", "WORLD_SIZE", "MASTER_ADDR"];

/// Names of another job's variables that contradict those of [`meeting`]: a second secret, another
/// port.
const OTHER_MEETING: [&str; 3] =
    ["HSDP_JOB_SECRET_FILE", "HSDP_CONTROL_PORT", "TORCHELASTIC_USE_AGENT_STORE"];

/// Prefixes of the variables in which MPI and `srun` describe a process's place. The variables of a
/// whole Slurm job are not among them, because programs find their folders by its number.
const OTHER_PLACE: [&str; 8] = [
    "OMPI_COMM_WORLD_",
    "PMI_",
    "PMIX_",
    "MPI_LOCAL",
    "SLURM_PROCID",
    "SLURM_LOCALID",
    "SLURM_NTASKS",
    "SLURM_STEP",
];

const SECRET_BYTES: usize = 32;

/// Returns the rank of this process, and the attempt that it belongs to.
///
/// # Errors
/// A text that names the missing or invalid variable.
pub(super) fn own_rank() -> Result<(u32, u32), String> {
    let number = |name: &str| env::var(name).ok().and_then(|value| value.parse().ok());
    let rank = RANKS.into_iter().find_map(number);
    let rank =
        rank.ok_or_else(|| format!("none of the variables {} is a rank", RANKS.join(", ")))?;
    Ok((rank, number(RESTART).ok_or_else(|| format!("{RESTART} is not a number"))?))
}

/// Returns whether torchrun has started this process.
fn is_torchrun() -> bool {
    TORCHRUN.into_iter().all(|name| env::var_os(name).is_some())
}

/// Returns the variables by which ranks without MPI find each other, equal for all ranks: the
/// address of rank 0, and the job's secret, with which ranks authenticate each other.
///
/// # Errors
/// The error of the system.
fn meeting(ranks: u32) -> io::Result<Vec<(&'static str, String)>> {
    // The port is free now. If another process takes it before rank 0 does, rank 0 fails, and does
    // not hang.
    let port = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?.local_addr()?.port();
    let mut secret = [0; SECRET_BYTES];
    getrandom::fill(&mut secret).map_err(io::Error::other)?;
    let secret: String = secret.iter().map(|byte| format!("{byte:02x}")).collect();
    Ok(vec![
        ("WORLD_SIZE", ranks.to_string()),
        ("LOCAL_WORLD_SIZE", ranks.to_string()),
        ("MASTER_ADDR", Ipv4Addr::LOCALHOST.to_string()),
        ("MASTER_PORT", port.to_string()),
        ("HSDP_JOB_SECRET", secret),
    ])
}

/// Returns the further variables of one rank.
fn variables_of(rank: u32) -> [(&'static str, String); 3] {
    [LAUNCHED, "RANK", "LOCAL_RANK"].map(|name| (name, rank.to_string()))
}

/// Returns the variables of this process that ranks must not inherit beside [`meeting`] and
/// [`variables_of`], because another launcher or another job has set them.
fn contrary() -> impl Iterator<Item = OsString> {
    env::vars_os().map(|(name, _)| name).filter(|name| {
        let name = name.to_string_lossy();
        OTHER_MEETING.contains(&&*name) || OTHER_PLACE.iter().any(|it| name.starts_with(it))
    })
}

/// Options of `hsdp launch-exec`.
#[derive(Args, Debug)]
pub(crate) struct ExecArgs {
    /// Pid of the process that started this one
    #[arg(long)]
    parent: u32,

    #[arg(last = true, required = true)]
    command: Vec<OsString>,
}

/// Exit codes of shells for a command that does not exist, and for one that cannot be run.
const NOT_FOUND: u8 = 127;
const NOT_RUN: u8 = 126;

/// Replaces this process with the command. Setting the death signal in the child of a fork would
/// need unsafe code, so this program runs for a moment instead.
pub(crate) fn exec(options: &ExecArgs) -> Result<CommandOutcome, Box<dyn Error>> {
    set_pdeathsig(Signal::SIGKILL)?;
    // A parent that died before this call sends no signal.
    if std::os::unix::process::parent_id() != options.parent {
        return Ok(CommandOutcome::Ended(1));
    }
    let program = &options.command[0]; // clap requires one
    let error = Command::new(program).args(&options.command[1..]).exec();
    hsdp_train::tell("hsdp", format_args!("cannot start {}: {error}", program.display()));
    let is_missing = error.kind() == io::ErrorKind::NotFound;
    Ok(CommandOutcome::Ended(if is_missing { NOT_FOUND } else { NOT_RUN }))
}

/// Returns a command that replaces itself with `program`. It dies with the thread that starts it,
/// which must be the main thread.
pub(super) fn mortal(program: &Path, arguments: &[OsString]) -> io::Result<Command> {
    let parent = std::process::id().to_string();
    let mut command = Command::new(std::env::current_exe()?);
    command.args(["launch-exec", "--parent", &parent, "--"]).arg(program).args(arguments);
    Ok(command)
}
