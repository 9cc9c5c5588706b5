//! The world that the environment describes, as torchrun and this project's launcher set it.

use std::env::{self, VarError};
use std::fmt::Display;
use std::net::{SocketAddr, ToSocketAddrs as _};
use std::str::FromStr;
use std::time::Duration;

use hsdp_sharding::Rank;

use crate::options::check_world;
use crate::{
    ArgumentError, ControlError, Job, Membership, Options, RendezvousError, Secret, Server, Terms,
};

/// The variables that every launcher sets.
const VARIABLES: [&str; 5] = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"];

/// The world of this process, as the environment describes it.
///
/// | variable | meaning |
/// |---|---|
/// | `RANK`, `WORLD_SIZE`, `LOCAL_RANK` | this process's rank, the number of ranks, its rank on its host |
/// | `MASTER_ADDR`, `MASTER_PORT` | the address at which rank 0's coordinator listens; it need not be loopback |
/// | `HSDP_CONTROL_PORT` | the port, if it is not `MASTER_PORT`. torchrun's agent uses that port itself and then sets `TORCHELASTIC_USE_AGENT_STORE`: the coordinator takes the next port |
/// | `HSDP_JOB_SECRET`, `HSDP_JOB_SECRET_FILE` | the [`Secret`]; a world of one rank needs none |
/// | `HSDP_JOB_ID`, `HSDP_JOB_START` | the [`Job`]; otherwise torchrun's `TORCHELASTIC_RUN_ID` and `TORCHELASTIC_RESTART_COUNT` |
///
/// If a host's own name resolves to loopback in its `/etc/hosts`, set `MASTER_ADDR` to an IP
/// address.
#[derive(Clone, Debug)]
pub struct Bootstrap {
    /// The rank of this process.
    pub rank: Rank,
    /// Its rank on its host.
    pub local_rank: u32,
    /// The address, job and secret from the environment, with default
    /// [`Deadlines`](crate::Deadlines). The build and the digest of the [`Terms`] are the program's
    /// to set.
    pub options: Options,
}

/// A process that has joined its world; on rank 0 with the coordinator.
#[derive(Debug)]
pub struct Joined {
    /// This process as a member.
    pub membership: Membership,
    /// The coordinator, on rank 0.
    pub server: Option<Server>,
    /// The rank of this process on its host.
    pub local_rank: u32,
}

impl Bootstrap {
    /// Reads the environment.
    ///
    /// # Errors
    /// [`ArgumentError::Environment`] if a variable is missing, is not a number, or contradicts
    /// another, or no secret is given; the errors of [`Secret::from_file`].
    pub fn from_env() -> Result<Self, ControlError> {
        let get = |name: &'static str| match env::var(name) {
            Ok(value) => Ok(Some(value)),
            Err(VarError::NotPresent) => Ok(None),
            Err(VarError::NotUnicode(_)) => Err(wrong(name, None, "not Unicode")),
        };
        Self::read(&get, Secret::from_env)
    }

    /// `secret` gets the number of ranks.
    fn read(
        get: Get<'_>,
        secret: impl FnOnce(u32) -> Result<Secret, ControlError>,
    ) -> Result<Self, ControlError> {
        all_or_none(get)?;
        let world: u32 = number(get, "WORLD_SIZE")?.unwrap_or_default();
        let wrong_size = |error| wrong("WORLD_SIZE", Some(world.to_string()), error);
        check_world(world).map_err(wrong_size)?;
        let rank = below(get, "RANK", world)?;
        let local_rank = below(get, "LOCAL_RANK", world)?;
        if local_rank > rank {
            let problem = format!("it must not exceed RANK={rank}, which counts over all hosts");
            return Err(wrong("LOCAL_RANK", Some(local_rank.to_string()), problem));
        }
        let host = get("MASTER_ADDR")?.unwrap_or_default();
        let port = port(get)?;
        let options = Options::new(job(get)?, secret(world)?, Terms::new(world));
        let options = Options { address: resolve(&host, port)?, ..options };
        Ok(Self { rank: Rank::new(rank as usize), local_rank, options })
    }

    /// Starts the coordinator on rank 0, and joins. **Collective**: every process of the job calls
    /// it.
    ///
    /// # Errors
    /// The errors of [`Server::start`] and [`Membership::join`].
    pub fn join(self) -> Result<Joined, ControlError> {
        let Self { rank, local_rank, options } = self;
        let handshake = options.deadlines.handshake;
        let server = (rank.get() == 0).then(|| Server::start(options.clone())).transpose()?;
        let joined = Membership::join(rank, options);
        if let (
            Err(ControlError::Rendezvous(RendezvousError::ConfigMismatch { .. })),
            Some(server),
        ) = (&joined, &server)
        {
            // A rank that joins later would find no coordinator, and never learn the reason.
            server.tell_difference(handshake);
        }
        Ok(Joined { membership: joined?, server, local_rank })
    }
}

impl Joined {
    /// Leaves, and on rank 0 waits until all ranks have left or are lost, for at most `within`.
    ///
    /// # Errors
    /// The errors of [`Membership::leave`] and [`Server::finish`].
    pub fn finish(self, within: Duration) -> Result<(), ControlError> {
        let left = self.membership.leave().map_err(ControlError::from);
        // If leaving failed, too: the others need the coordinator.
        left.and(self.server.map_or(Ok(()), |server| server.finish(within)))
    }
}

/// The value of a variable, if it is set.
type Get<'a> = &'a dyn Fn(&'static str) -> Result<Option<String>, ControlError>;

fn job(get: Get<'_>) -> Result<Job, ControlError> {
    let first = |names: [&'static str; 2]| match get(names[0]) {
        Ok(None) => names[1],
        _ => names[0],
    };
    let name = get(first(["HSDP_JOB_ID", "TORCHELASTIC_RUN_ID"]))?;
    let start = number(get, first(["HSDP_JOB_START", "TORCHELASTIC_RESTART_COUNT"]))?;
    let name = name.unwrap_or_else(|| "hsdp".to_owned());
    Ok(Job { name, start: start.unwrap_or_default() })
}

fn port(get: Get<'_>) -> Result<u16, ControlError> {
    if let Some(port) = number(get, "HSDP_CONTROL_PORT")? {
        return Ok(port);
    }
    let master: u16 = number(get, "MASTER_PORT")?.unwrap_or_default();
    if get("TORCHELASTIC_USE_AGENT_STORE")?.as_deref() != Some("True") {
        return Ok(master);
    }
    let problem = "torchrun uses this port itself, and there is no next one: set HSDP_CONTROL_PORT";
    master.checked_add(1).ok_or_else(|| wrong("MASTER_PORT", Some(master.to_string()), problem))
}

/// Launchers set all of the variables, so one that is missing is an error.
fn all_or_none(get: Get<'_>) -> Result<(), ControlError> {
    let is_set = |name: &&'static str| !matches!(get(name), Ok(None));
    let (set, missing): (Vec<_>, Vec<_>) = VARIABLES.into_iter().partition(is_set);
    let Some(&first) = missing.first() else { return Ok(()) };
    let problem = if set.is_empty() {
        format!("not set, nor are {}: processes are started by a launcher", missing[1..].join(", "))
    } else {
        format!("not set, while {} {}", set.join(", "), if set.len() == 1 { "is" } else { "are" })
    };
    Err(wrong(first, None, problem))
}

fn below(get: Get<'_>, variable: &'static str, world: u32) -> Result<u32, ControlError> {
    let rank = number(get, variable)?.unwrap_or_default();
    if rank < world {
        return Ok(rank);
    }
    let problem = format!("ranks of a world of {world} are numbered from 0 to {}", world - 1);
    Err(wrong(variable, Some(rank.to_string()), problem))
}

fn number<N>(get: Get<'_>, variable: &'static str) -> Result<Option<N>, ControlError>
where
    N: FromStr<Err: Display>,
{
    let Some(value) = get(variable)? else { return Ok(None) };
    let number = value.trim().parse().map_err(|error| format!("not a number: {error}"));
    number.map(Some).map_err(|problem| wrong(variable, Some(value), problem))
}

fn resolve(host: &str, port: u16) -> Result<SocketAddr, ControlError> {
    let refused = |problem: String| wrong("MASTER_ADDR", Some(host.to_owned()), problem);
    let found = (host, port).to_socket_addrs();
    let first = found.map_err(|error| refused(format!("no such host: {error}")))?.next();
    let address = first.ok_or_else(|| refused("the host has no address".to_owned()))?;
    if address.ip().is_unspecified() {
        return Err(refused(
            "it stands for all addresses, and no process can connect to it".to_owned(),
        ));
    }
    Ok(address)
}

fn wrong(variable: &'static str, value: Option<String>, problem: impl ToString) -> ControlError {
    ArgumentError::Environment { variable, value, problem: problem.to_string() }.into()
}

#[cfg(test)]
mod tests;
