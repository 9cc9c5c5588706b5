//! Deadlines and intervals.

use std::time::{Duration, Instant};

use crate::{ArgumentError, ControlError};

/// Deadlines and intervals of heartbeats.
///
/// The coordinator's values hold for all members. Of a member's values, only `rendezvous` and
/// `handshake` are used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Deadlines {
    /// The time until all ranks must have joined, from the coordinator's start; and the time for a
    /// member to connect, from its own start. Default 60 s.
    pub rendezvous: Duration,
    /// The time until a connection must have authenticated. Default 5 s.
    pub handshake: Duration,
    /// The interval between two heartbeats. Default 1 s.
    pub beat: Duration,
    /// The number of heartbeats that a member may miss before it is lost, or cut off. Default 10.
    pub lost: u32,
}

impl Default for Deadlines {
    fn default() -> Self {
        Self {
            rendezvous: Duration::from_secs(60),
            handshake: Duration::from_secs(5),
            beat: Duration::from_secs(1),
            lost: 10,
        }
    }
}

/// The longest deadline, so that no sum exceeds the clock.
const MOST: Duration = Duration::from_secs(30 * 24 * 3600);

impl Deadlines {
    /// Refuses deadlines that are out of range.
    pub(crate) fn check(&self) -> Result<(), ControlError> {
        let Self { rendezvous, handshake, beat, lost } = *self;
        let wrong = |what, problem: String| Err(ArgumentError::Deadline { what, problem }.into());
        for (what, deadline) in
            [("rendezvous", rendezvous), ("handshake", handshake), ("beat", beat)]
        {
            if !(Duration::from_millis(1)..=MOST).contains(&deadline) {
                return wrong(what, format!("{deadline:?}: it must be 1 ms to {MOST:?}"));
            }
        }
        if lost == 0 {
            return wrong("lost", "0 beats: it must be 1 at least".to_owned());
        }
        if beat.saturating_mul(lost) > MOST {
            return wrong("lost", format!("{lost} beats of {beat:?}: together at most {MOST:?}"));
        }
        Ok(())
    }

    /// The silence after which a member is lost, or cut off. Half an interval allows for the
    /// network.
    pub(crate) fn until_lost(&self) -> Duration {
        self.beat * self.lost + self.beat / 2
    }

    /// The interval between two checks of the deadlines.
    pub(crate) fn tick(&self) -> Duration {
        (self.beat / 4).clamp(Duration::from_millis(5), Duration::from_millis(250))
    }
}

/// A detector of stops of this process, by the time between two checks of the clock.
#[derive(Debug)]
pub(crate) struct StopDetector {
    last: Instant,
    most: Duration,
}

impl StopDetector {
    /// Begins now. Two intervals without a check count as a stop.
    pub(crate) fn new(now: Instant, deadlines: &Deadlines) -> Self {
        Self { last: now, most: (2 * deadlines.beat).max(Duration::from_millis(500)) }
    }

    /// Whether the last check was so long ago that this process must have been stopped.
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
            (Deadlines { lost: 0, ..whole }, "the deadline `lost`: 0 beats: it must be 1 at least"),
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
