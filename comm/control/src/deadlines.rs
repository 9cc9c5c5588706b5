//! How long anything may take.

use std::time::Duration;

/// How long anything may take.
///
/// The coordinator's hold for all: what a client has here of rounds and beats is not used, but for who waits how long to come in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Deadlines {
    /// Until all ranks are there, from the coordinator's start; and until a client has come in, from its own. 60 s.
    pub rendezvous: Duration,
    /// Until a connection has proved whose it is. 5 s.
    pub handshake: Duration,
    /// Until all ranks have come to an exchange or a broadcast, from the first of them. 30 s.
    pub round: Duration,
    /// Between two heartbeats. 1 s.
    pub beat: Duration,
    /// Beats that may be missed before a member is suspected. 3.
    pub suspect: u32,
    /// Beats that may be missed before a member is lost, or cut off. 10.
    pub lost: u32,
}

impl Default for Deadlines {
    fn default() -> Self {
        Self {
            rendezvous: Duration::from_secs(60),
            handshake: Duration::from_secs(5),
            round: Duration::from_secs(30),
            beat: Duration::from_secs(1),
            suspect: 3,
            lost: 10,
        }
    }
}

impl Deadlines {
    /// Silence that makes a suspect: half a beat is for the way.
    pub(crate) fn until_suspect(&self) -> Duration {
        self.beat * self.suspect + self.beat / 2
    }

    /// Silence after which a member is lost, or cut off.
    pub(crate) fn until_lost(&self) -> Duration {
        self.beat * self.lost + self.beat / 2
    }

    /// How often it is looked whether a deadline has passed.
    pub(crate) fn tick(&self) -> Duration {
        (self.beat / 4).clamp(Duration::from_millis(5), Duration::from_millis(250))
    }
}

/// A clock's last look at itself: whether this process was stopped meanwhile.
#[derive(Debug)]
pub(crate) struct Wakefulness {
    last: std::time::Instant,
    most: Duration,
}

impl Wakefulness {
    /// From now on; two beats without a look are a jump.
    pub(crate) fn new(now: std::time::Instant, deadlines: &Deadlines) -> Self {
        Self { last: now, most: (2 * deadlines.beat).max(Duration::from_millis(500)) }
    }

    /// Whether nobody has looked for so long that this process was not running.
    pub(crate) fn was_asleep(&mut self, now: std::time::Instant) -> bool {
        let slept = now.saturating_duration_since(self.last) >= self.most;
        self.last = now;
        slept
    }
}
