//! The world that the environment describes, as torchrun and this project's launcher set it.

use std::env;
use std::net::{SocketAddr, ToSocketAddrs as _};
use std::time::Duration;

use hsdp_sharding::Rank;

use crate::{
    Bind, Client, ClientOptions, ControlError, Deadlines, Job, Membership, Secret, Server,
    ServerOptions, Terms,
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
/// If a host's own name resolves to loopback in its `/etc/hosts`, set `MASTER_ADDR` to an IP address.
#[derive(Clone, Debug)]
pub struct Bootstrap {
    rank: Rank,
    local_rank: u32,
    server: SocketAddr,
    job: Job,
    secret: Secret,
    terms: Terms,
    deadlines: Deadlines,
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
    /// [`ControlError::Environment`] if a variable is missing, is not a number, or contradicts another; the errors of
    /// [`Secret::from_env`].
    pub fn from_env() -> Result<Self, ControlError> {
        let said = Said::read(|name| env::var_os(name).map(|value| value.into_string().ok()))?;
        let secret = match Secret::from_env() {
            Err(ControlError::Environment { .. }) if said.terms.world() == 1 && !any_secret() => {
                Secret::draw()?
            }
            secret => secret?,
        };
        let server = resolve(&said.host, said.port)?;
        let Said { rank, local_rank, job, terms, .. } = said;
        let deadlines = Deadlines::default();
        Ok(Self { rank, local_rank, server, job, secret, terms, deadlines })
    }

    /// This process's rank.
    #[must_use]
    pub fn rank(&self) -> Rank {
        self.rank
    }

    /// Sets the digest of all other settings that the ranks must share.
    #[must_use]
    pub fn config(self, config: u64) -> Self {
        Self { terms: self.terms.config(config), ..self }
    }

    /// Sets the build, a text that distinguishes programs.
    ///
    /// # Errors
    /// [`ControlError::TooLong`] if it has more than 256 bytes.
    pub fn build(self, build: &str) -> Result<Self, ControlError> {
        Ok(Self { terms: self.terms.build(build)?, ..self })
    }

    /// Sets the deadlines.
    #[must_use]
    pub fn deadlines(self, deadlines: Deadlines) -> Self {
        Self { deadlines, ..self }
    }

    /// Starts the coordinator on rank 0, and joins. **Collective**: every process of the job calls it.
    ///
    /// # Errors
    /// The errors of [`Server::start`] and [`Client::join`].
    pub fn join(self) -> Result<Joined, ControlError> {
        let Self { rank, local_rank, server: address, job, secret, terms, deadlines } = self;
        let server = if rank.get() == 0 {
            let options = ServerOptions::new(job.clone(), secret.clone(), terms.clone());
            Some(Server::start(options.bind(Bind::Address(address)).deadlines(deadlines))?)
        } else {
            None
        };
        let options = ClientOptions::new(address, rank, job, secret, terms).deadlines(deadlines);
        let joined = Client::join(options);
        if let (Err(ControlError::ConfigMismatch { .. }), Some(server)) = (&joined, &server) {
            // A rank that joins later would find no coordinator, and never learn the reason.
            server.tell_difference(deadlines.handshake);
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
        self.membership.leave()?;
        self.server.map_or(Ok(()), |server| server.finish(within))
    }
}

/// The values of the variables, without the secret.
#[derive(Debug)]
struct Said {
    rank: Rank,
    local_rank: u32,
    host: String,
    port: u16,
    job: Job,
    terms: Terms,
}

impl Said {
    /// `read` returns `None` for a variable that is not set, and `Some(None)` for a value that is not Unicode.
    fn read(read: impl Fn(&str) -> Option<Option<String>>) -> Result<Self, ControlError> {
        let get = |name: &'static str| match read(name) {
            None => Ok(None),
            Some(Some(value)) => Ok(Some(value)),
            Some(None) => Err(wrong(name, None, "not Unicode")),
        };
        all_or_none(|name| read(name).is_some())?;
        let must = |name| Ok(get(name)?.unwrap_or_default());
        let world: u32 = number("WORLD_SIZE", &must("WORLD_SIZE")?)?;
        let terms = Terms::new(world);
        let terms = terms.map_err(|error| wrong("WORLD_SIZE", Some(world.to_string()), error))?;
        let rank = below("RANK", &must("RANK")?, world)?;
        let local_rank = below("LOCAL_RANK", &must("LOCAL_RANK")?, world)?;
        if local_rank > rank {
            let problem = format!("it must not exceed RANK={rank}, which counts over all hosts");
            return Err(wrong("LOCAL_RANK", Some(local_rank.to_string()), problem));
        }
        let host = must("MASTER_ADDR")?;
        let port = port(&get, number("MASTER_PORT", &must("MASTER_PORT")?)?)?;
        Ok(Self { rank: Rank::new(rank as usize), local_rank, host, port, job: job(&get)?, terms })
    }
}

type Value = Result<Option<String>, ControlError>;

fn job(get: &impl Fn(&'static str) -> Value) -> Result<Job, ControlError> {
    let own = get("HSDP_JOB_ID")?;
    let name = own.map_or_else(|| get("TORCHELASTIC_RUN_ID"), |own| Ok(Some(own)))?;
    let mut start = 0;
    for variable in ["HSDP_JOB_START", "TORCHELASTIC_RESTART_COUNT"] {
        if let Some(value) = get(variable)? {
            start = number(variable, &value)?;
            break;
        }
    }
    Job::new(name.as_deref().unwrap_or("hsdp"), start)
}

fn port(get: &impl Fn(&'static str) -> Value, master: u16) -> Result<u16, ControlError> {
    if let Some(value) = get("HSDP_CONTROL_PORT")? {
        return number("HSDP_CONTROL_PORT", &value);
    }
    if get("TORCHELASTIC_USE_AGENT_STORE")?.as_deref() != Some("True") {
        return Ok(master);
    }
    let problem = "torchrun uses this port itself, and there is no next one: set HSDP_CONTROL_PORT";
    master.checked_add(1).ok_or_else(|| wrong("MASTER_PORT", Some(master.to_string()), problem))
}

/// Launchers set all of the variables, so one that is missing is an error.
fn all_or_none(is_set: impl Fn(&str) -> bool) -> Result<(), ControlError> {
    let (set, missing): (Vec<_>, Vec<_>) = VARIABLES.into_iter().partition(|name| is_set(name));
    let Some(&first) = missing.first() else { return Ok(()) };
    let problem = if set.is_empty() {
        format!("not set, nor are {}: processes are started by a launcher", missing[1..].join(", "))
    } else {
        format!("not set, while {} {}", set.join(", "), if set.len() == 1 { "is" } else { "are" })
    };
    Err(wrong(first, None, problem))
}

fn any_secret() -> bool {
    ["HSDP_JOB_SECRET", "HSDP_JOB_SECRET_FILE"].iter().any(|name| env::var_os(name).is_some())
}

fn below(variable: &'static str, value: &str, world: u32) -> Result<u32, ControlError> {
    let rank = number(variable, value)?;
    if rank < world {
        return Ok(rank);
    }
    let problem = format!("ranks of a world of {world} are numbered from 0 to {}", world - 1);
    Err(wrong(variable, Some(value.to_owned()), problem))
}

fn number<N: std::str::FromStr>(variable: &'static str, value: &str) -> Result<N, ControlError>
where
    N::Err: std::fmt::Display,
{
    let refused = |error| wrong(variable, Some(value.to_owned()), format!("not a number: {error}"));
    value.trim().parse().map_err(refused)
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
    ControlError::Environment { variable, value, problem: problem.to_string() }
}

#[cfg(test)]
mod tests;
