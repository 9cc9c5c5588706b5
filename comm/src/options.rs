//! Options of a world.

use std::env;
use std::num::NonZeroU64;
use std::path::PathBuf;
use std::time::Duration;

use crate::fault::Fault;
use crate::{Channel, Error};

/// Options of a world.
///
/// ```
/// use std::time::Duration;
/// use hsdp_comm::WorldOptions;
///
/// let options = WorldOptions { deadline: Duration::from_secs(5), ..WorldOptions::default() };
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct WorldOptions {
    /// How long a rank waits for one operation before it ends the world. The time counts from the
    /// beginning of the wait, not from the call that issued the operation. Of any length; default
    /// 120 s.
    pub deadline: Duration,
    /// How long a rank waits for one operation before it warns and names the missing ranks. It
    /// warns again after each further period of this length. Default 5 s; there is no warning after
    /// the deadline.
    pub late: Duration,
    /// How long a rank waits for one operation before it checks for a circle: ranks that wait for
    /// each other, each in an operation that another of them has not issued, so that none can go
    /// on. A circle ends the world with [`WorldError::Mismatch`](crate::WorldError). Default 200 ms.
    ///
    /// A rank that has issued from several threads is never part of a circle. If a thread may issue
    /// for the very first time while its rank waits elsewhere, set `Duration::MAX`: then only the
    /// deadline ends such waits.
    pub circle_grace: Duration,
    /// Worker threads that do the work of operations beside the ranks.
    pub workers: Workers,
    /// How ranks that are threads of one process exchange data. Default [`Between::Memory`], or
    /// [`Between::Messages`] if the environment has `HSDP_APART=1`.
    pub between: Between,
    /// How many operations each rank records for
    /// [`World::flight_record`](crate::World::flight_record): some 200 bytes each, allocated with
    /// the world. Default 1024, at most 65,536; 0 turns recording off.
    pub flight_entries: usize,
    /// The folder into which each rank of a [`launch`](crate::launch) that ends early writes its
    /// flight record, as `rank-<n>.json`; none by default. The folder is made if it does not exist.
    /// A failed write is a warning.
    pub flight_dir: Option<PathBuf>,
    /// Faults to inject, for tests. Each fires once. A world that [cannot have](Self::check) one of
    /// them does not begin.
    pub faults: Vec<Fault>,
    /// Channels to slow down, for tests and benches. Of several entries for one channel, only the
    /// first counts.
    pub slow: Vec<SlowChannel>,
}

impl WorldOptions {
    /// Checks that a world of `size` ranks can have these options. Every world checks them when it
    /// is made: a program that has them from its user can call this first.
    ///
    /// # Errors
    /// [`WorldError::BadFault`](crate::WorldError) for a fault of a rank that the world does not
    /// have, or of a gradient that would be finite.
    pub fn check(&self, size: usize) -> Result<(), Error> {
        self.faults.iter().try_for_each(|fault| fault.check(size))
    }
}

impl Default for WorldOptions {
    fn default() -> Self {
        Self {
            deadline: Duration::from_secs(120),
            late: Duration::from_secs(5),
            circle_grace: Duration::from_millis(200),
            workers: Workers::Auto,
            between: Between::default(),
            flight_entries: 1024,
            flight_dir: None,
            faults: Vec::new(),
            slow: Vec::new(),
        }
    }
}

/// A channel whose operations are delayed, as on a network: for tests and benches.
///
/// Each group of the channel has a link of its own, which carries one operation at a time. An
/// operation whose last member has arrived waits until the link is free, and then occupies it for
/// `latency` and for the time that its bytes take. No member gets its output earlier. The delay
/// blocks no call, no rank and no worker thread: only the ranks that wait for the operation wait
/// longer. Groups of one have no link.
///
/// ```
/// use std::time::{Duration, Instant};
/// use hsdp_comm::{Channel, SlowChannel, Tag, WorldOptions, launch};
///
/// let latency = Duration::from_millis(20);
/// let slow = SlowChannel { channel: Channel::User, latency, bytes_per_second: None };
/// let options = WorldOptions { slow: vec![slow], ..WorldOptions::default() };
/// let ends = launch(2, options, |world| {
///     let started = Instant::now();
///     world.world_group(Channel::User).barrier(Tag::default())?.wait()?;
///     Ok::<_, hsdp_comm::Error>(started.elapsed())
/// });
/// assert!(ends.into_iter().all(|took| took.unwrap() >= latency));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SlowChannel {
    /// The channel.
    pub channel: Channel,
    /// The time that each operation occupies its link, whatever its size.
    pub latency: Duration,
    /// The speed of a link, in bytes a second, where the bytes of an operation are those that one
    /// member receives; `None` for no limit.
    pub bytes_per_second: Option<NonZeroU64>,
}

/// How ranks that are threads of one process exchange data. Results do not depend on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Between {
    /// The ranks read each other's memory.
    Memory,
    /// The ranks share no memory and exchange messages, as ranks in separate processes do. It is
    /// slower, and serves to test a program as if its ranks were processes.
    Messages,
}

/// Reads the environment: [`Between::Messages`] with `HSDP_APART=1`, else [`Between::Memory`].
impl Default for Between {
    fn default() -> Self {
        let apart = env::var_os("HSDP_APART").is_some_and(|value| value == "1");
        if apart { Self::Messages } else { Self::Memory }
    }
}

/// The number of worker threads that do the work of operations beside the ranks. Results do not
/// depend on it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Workers {
    /// One for each rank; none if there are more ranks than cores.
    #[default]
    Auto,
    /// This many. With 0 the members do all the work: the one that arrives last, before its call
    /// returns, or those that sleep for it.
    Count(usize),
}
