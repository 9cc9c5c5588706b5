//! The processes that the launcher starts: mpirun, or the attendants themselves.

use std::env;
use std::ffi::OsString;
use std::fs;
use std::io;
use std::num::NonZeroUsize;
use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::thread;

use nix::unistd::Uid;

use super::replace::split;
use super::{Comm, Options, environment, replace};
use crate::mpirun::{ADVICE, Family, Mpirun};

/// A job that has passed all checks that are possible before its start.
#[derive(Debug)]
pub(super) struct Job {
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

impl Job {
    /// Checks the command, and finds mpirun if the job needs it.
    ///
    /// # Errors
    /// A text with advice.
    pub(super) fn of(options: &Options) -> Result<Self, String> {
        let (program, _) = split(&options.command)?;
        which::which(program)
            .map_err(|_| format!("{}: no such program, here or in PATH", program.display()))?;
        let mpirun = match options.comm {
            Comm::Mpi => Some(mpirun(options)?),
            Comm::Nccl => None,
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
                .env(environment::SOCKET, socket)
                .env(environment::RESTART, attempt.to_string())
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
        if mpirun.family == Family::OpenMpi && self.ranks as usize > cores() {
            arguments.push("--oversubscribe".into());
        }
        arguments.push(env::current_exe()?.into());
        arguments.extend(["launch-rank", "--"].map(OsString::from));
        arguments.extend(self.command.iter().cloned());
        let mut command = replace::command(&mpirun.path, &arguments)?;
        // If this program runs inside another job, an attendant would take its rank in that job for
        // its own.
        environment::RANKS.iter().for_each(|name| {
            command.env_remove(name);
        });
        let (name, seconds) = SLEEP;
        if mpirun.family == Family::OpenMpi && env::var_os(name).is_none() {
            command.env(name, seconds);
        }
        command.stdout(Stdio::piped()).stderr(Stdio::piped());
        Ok(command)
    }

    fn attendants(&self) -> io::Result<Vec<Command>> {
        let meeting = environment::meeting(self.ranks)?;
        let program = env::current_exe()?;
        let attendant = |rank| {
            let mut command = Command::new(&program);
            command.args(["launch-rank", "--"]).args(&self.command).stdout(Stdio::null());
            environment::contrary().for_each(|name| {
                command.env_remove(name);
            });
            command.envs(meeting.iter().cloned()).envs(environment::of_rank(rank));
            command
        };
        Ok((0..self.ranks).map(attendant).collect())
    }
}

fn mpirun(options: &Options) -> Result<Mpirun, String> {
    if environment::is_torchrun() {
        let names = environment::TORCHRUN.join(", ");
        return Err(format!(
            "{names} are set, as by torchrun, which has started this process as one rank: start `hsdp launch -n {} --comm nccl -- CMD` without torchrun",
            options.ranks
        ));
    }
    let mpirun = Mpirun::find()?.ok_or_else(|| format!("no mpirun in PATH: {ADVICE}"))?;
    let is_allowed = ALLOWED.into_iter().all(|name| env::var_os(name).is_some());
    if mpirun.family == Family::OpenMpi && Uid::effective().is_root() && !is_allowed {
        let [allow, confirm] = ALLOWED;
        return Err(format!(
            "Open MPI starts nothing for root unless {allow}=1 and {confirm}=1 are set"
        ));
    }
    Ok(mpirun)
}

/// Returns the number of physical cores, at most the available ones: Open MPI counts cores, not
/// hardware threads.
fn cores() -> usize {
    let available = thread::available_parallelism().map_or(1, NonZeroUsize::get);
    let mut cores: Vec<[String; 2]> = Vec::new();
    for cpu in fs::read_dir("/sys/devices/system/cpu").into_iter().flatten().flatten() {
        let id = |name: &str| fs::read_to_string(cpu.path().join("topology").join(name));
        if let (Ok(package), Ok(core)) = (id("physical_package_id"), id("core_id")) {
            cores.push([package, core]);
        }
    }
    cores.sort();
    cores.dedup();
    if cores.is_empty() { available } else { available.min(cores.len()) }
}
