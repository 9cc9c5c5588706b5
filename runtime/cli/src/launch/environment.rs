//! What the environment says of ranks, and what it says to them.

use std::env;
use std::io;
use std::net::{Ipv4Addr, TcpListener};

/// Where attendants connect to.
pub(super) const SOCKET: &str = "HSDP_LAUNCH_SOCKET";

/// Which attempt this is, from 0.
pub(super) const RESTART: &str = "HSDP_RESTART";

/// The rank of a process that this program has started itself, which MPI's variables do not hide.
pub(super) const LAUNCHED: &str = "HSDP_LAUNCH_RANK";

/// Where starters of MPI jobs say which rank a process is: Open MPI, MPICH and what is made of it, PMIx.
pub(super) const RANKS: [&str; 4] = [LAUNCHED, "OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK"];

/// What torchrun sets.
pub(super) const TORCHRUN: [&str; 3] = ["RANK", "WORLD_SIZE", "MASTER_ADDR"];

const SECRET_BYTES: usize = 32;

/// The rank of this process, and the attempt that it belongs to.
///
/// # Errors
/// In words.
pub(super) fn place() -> Result<(u32, u32), String> {
    let number = |name: &str| env::var(name).ok().and_then(|value| value.parse().ok());
    let rank = RANKS.into_iter().find_map(number);
    let rank = rank.ok_or_else(|| format!("none of {} is a rank", RANKS.join(", ")))?;
    Ok((rank, number(RESTART).ok_or_else(|| format!("{RESTART} is no number"))?))
}

/// Whether torchrun has started this process.
pub(super) fn is_torchrun() -> bool {
    TORCHRUN.into_iter().all(|name| env::var_os(name).is_some())
}

/// What ranks that are no processes of MPI need to find each other, the same for all: where rank 0 is, and a secret by which they know each other.
///
/// # Errors
/// What the system says.
pub(super) fn meeting(ranks: u32) -> io::Result<Vec<(&'static str, String)>> {
    // Free now. Whoever takes it before rank 0 does makes that rank fail, not hang.
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

/// What each of them needs besides.
pub(super) fn seat(rank: u32) -> [(&'static str, String); 3] {
    [LAUNCHED, "RANK", "LOCAL_RANK"].map(|name| (name, rank.to_string()))
}
