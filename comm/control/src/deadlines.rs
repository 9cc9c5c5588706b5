//! How long anything may take.

use std::time::{Duration, Instant};

use crate::ControlError;

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

/// Longer than any of them may be, so that none is beyond the clock.
const MOST: Duration = Duration::from_secs(30 * 24 * 3600);

impl Deadlines {
    /// Refuses what nobody can keep to.
    pub(crate) fn check(&self) -> Result<(), ControlError> {
        let Self { rendezvous, handshake, round, beat, suspect, lost } = *self;
        let wrong = |what, problem: String| Err(ControlError::Deadline { what, problem });
        let named = [
            ("rendezvous", rendezvous),
            ("handshake", handshake),
            ("round", round),
            ("beat", beat),
        ];
        for (what, deadline) in named {
            if !(Duration::from_millis(1)..=MOST).contains(&deadline) {
                return wrong(what, format!("{deadline:?}: it must be 1 ms to {MOST:?}"));
            }
        }
        if suspect == 0 || suspect >= lost {
            return wrong(
                "suspect",
                format!(
                    "{suspect} beats: it must be 1 to {} (lost: {lost})",
                    lost.saturating_sub(1)
                ),
            );
        }
        if beat.saturating_mul(lost) > MOST {
            return wrong("lost", format!("{lost} beats of {beat:?}: together at most {MOST:?}"));
        }
        Ok(())
    }

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
    last: Instant,
    most: Duration,
}

impl Wakefulness {
    /// From now on; two beats without a look are a jump.
    pub(crate) fn new(now: Instant, deadlines: &Deadlines) -> Self {
        Self { last: now, most: (2 * deadlines.beat).max(Duration::from_millis(500)) }
    }

    /// Whether nobody has looked for so long that this process was not running.
    pub(crate) fn was_asleep(&mut self, now: Instant) -> bool {
        let slept = now.saturating_duration_since(self.last) >= self.most;
        self.last = now;
        slept
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_nobody_can_keep_to_is_refused() {
        let whole = Deadlines::default();
        assert_eq!(whole.check(), Ok(()));
        let cases = [
            (
                Deadlines { beat: Duration::ZERO, ..whole },
                "the deadline `beat`: 0ns: it must be 1 ms to 2592000s",
            ),
            (
                Deadlines { rendezvous: Duration::MAX, ..whole },
                "the deadline `rendezvous`: 18446744073709551615.999999999s: it must be 1 ms to 2592000s",
            ),
            (
                Deadlines { suspect: 10, ..whole },
                "the deadline `suspect`: 10 beats: it must be 1 to 9 (lost: 10)",
            ),
            (
                Deadlines { lost: u32::MAX, ..whole },
                "the deadline `lost`: 4294967295 beats of 1s: together at most 2592000s",
            ),
        ];
        for (deadlines, said) in cases {
            assert_eq!(deadlines.check().expect_err("refused").to_string(), said);
        }
    }
}
