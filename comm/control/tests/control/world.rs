//! Worlds whose members are threads of the test, each with a connection of its own.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::thread;
use std::time::Duration;

use hsdp_control::{
    ControlError, Deadlines, Job, Membership, Options, Rank, Secret, Server, Terms,
};

/// A time that no test here needs.
pub(crate) const LONG: Duration = Duration::from_secs(20);

/// Deadlines for tests: 100 ms between heartbeats, lost after 1.05 s.
pub(crate) fn quick() -> Deadlines {
    Deadlines {
        rendezvous: Duration::from_secs(2),
        handshake: Duration::from_secs(1),
        beat: Duration::from_millis(100),
        ..Deadlines::default()
    }
}

pub(crate) fn job() -> Job {
    Job { name: "test".to_owned(), start: 1 }
}

pub(crate) fn secret() -> Secret {
    Secret::from_bytes([0x17; 32])
}

pub(crate) fn terms(world: u32) -> Terms {
    Terms { build: "ours".to_owned(), ..Terms::new(world) }
}

/// Options of a world of `size` ranks.
pub(crate) fn options(size: u32) -> Options {
    Options { deadlines: quick(), ..Options::new(job(), secret(), terms(size)) }
}

/// A coordinator.
pub(crate) struct World {
    pub(crate) server: Server,
    pub(crate) size: u32,
    pub(crate) deadlines: Deadlines,
}

impl World {
    pub(crate) fn of(size: u32, deadlines: Deadlines) -> Self {
        let options = Options { deadlines, ..options(size) };
        let server = Server::start(options).expect("a coordinator");
        Self { server, size, deadlines }
    }

    /// The options of its members.
    pub(crate) fn options(&self) -> Options {
        let address = self.server.address();
        let deadlines = self.deadlines;
        Options { address, deadlines, ..options(self.size) }
    }

    pub(crate) fn join_as(&self, rank: u32) -> Result<Membership, ControlError> {
        Membership::join(Rank::new(rank as usize), self.options())
    }

    /// All members.
    pub(crate) fn join(&self) -> Vec<Membership> {
        let joined = each((0..self.size).collect(), |rank| self.join_as(rank));
        joined.into_iter().map(|joined| joined.expect("a member")).collect()
    }
}

/// A clock whose time passes as a thread gets it that sleeps again and again. On a busy machine it is as late as the threads that are
/// tested, so what it has measured does not depend on other processes.
pub(crate) struct Ticks {
    count: Arc<AtomicU32>,
    _runs: Sender<()>,
}

impl Ticks {
    const TICK: Duration = Duration::from_millis(5);

    /// Starts a clock. It stops when it is dropped.
    pub(crate) fn start() -> Self {
        let count = Arc::<AtomicU32>::default();
        let (runs, ended) = channel();
        let counted = Arc::clone(&count);
        thread::spawn(move || {
            while ended.recv_timeout(Self::TICK) == Err(RecvTimeoutError::Timeout) {
                counted.fetch_add(1, Ordering::Relaxed);
            }
        });
        Self { count, _runs: runs }
    }

    /// The time that has passed; never more than on the wall.
    pub(crate) fn elapsed(&self) -> Duration {
        Self::TICK * self.count.load(Ordering::Relaxed)
    }
}

/// Runs the closure for each value at the same time, and returns all results.
pub(crate) fn each<T: Send, R: Send>(of: Vec<T>, does: impl Fn(T) -> R + Sync) -> Vec<R> {
    thread::scope(|scope| {
        let threads: Vec<_> = of.into_iter().map(|one| scope.spawn(|| does(one))).collect();
        threads.into_iter().map(|thread| thread.join().expect("no panic")).collect()
    })
}
