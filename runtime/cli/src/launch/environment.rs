//! Environment variables that name ranks, and those that ranks get.

use std::env;
use std::ffi::OsString;
use std::io;
use std::net::{Ipv4Addr, TcpListener};

/// Name of the variable with the socket that attendants connect to.
pub(super) const SOCKET: &str = "HSDP_LAUNCH_SOCKET";

/// Name of the variable with the number of the attempt, from 0.
pub(super) const RESTART: &str = "HSDP_RESTART";

/// Name of the variable with the rank of a process that this program has started itself. It has
/// precedence over MPI's variables.
pub(super) const LAUNCHED: &str = "HSDP_LAUNCH_RANK";

/// Names of the variables with a process's rank, as set by this program, Open MPI, MPICH and its
/// derivatives, and PMIx.
pub(super) const RANKS: [&str; 4] = [LAUNCHED, "OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK"];

/// Names of the variables that torchrun sets.
pub(super) const TORCHRUN: [&str; 3] = ["RANK", "WORLD_SIZE", "MASTER_ADDR"];

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
pub(super) fn place() -> Result<(u32, u32), String> {
    let number = |name: &str| env::var(name).ok().and_then(|value| value.parse().ok());
    let rank = RANKS.into_iter().find_map(number);
    let rank =
        rank.ok_or_else(|| format!("none of the variables {} is a rank", RANKS.join(", ")))?;
    Ok((rank, number(RESTART).ok_or_else(|| format!("{RESTART} is not a number"))?))
}

/// Returns whether torchrun has started this process.
pub(super) fn is_torchrun() -> bool {
    TORCHRUN.into_iter().all(|name| env::var_os(name).is_some())
}

/// Returns the variables by which ranks without MPI find each other, equal for all ranks: the
/// address of rank 0, and the job's secret, with which ranks authenticate each other.
///
/// # Errors
/// The error of the system.
pub(super) fn meeting(ranks: u32) -> io::Result<Vec<(&'static str, String)>> {
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
pub(super) fn of_rank(rank: u32) -> [(&'static str, String); 3] {
    [LAUNCHED, "RANK", "LOCAL_RANK"].map(|name| (name, rank.to_string()))
}

/// Returns the variables of this process that ranks must not inherit beside [`meeting`] and
/// [`of_rank`], because another launcher or another job has set them.
pub(super) fn contrary() -> impl Iterator<Item = OsString> {
    env::vars_os().map(|(name, _)| name).filter(|name| {
        let name = name.to_string_lossy();
        OTHER_MEETING.contains(&&*name) || OTHER_PLACE.iter().any(|it| name.starts_with(it))
    })
}
