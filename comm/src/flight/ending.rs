//! How an operation ended, for the rings of all its members.

use super::FlightState;
use crate::sync::atomic::{AtomicU64, Ordering};

/// How an operation ended, and when: written once, by whoever settles it, and read where the members' entries are.
///
/// In one word, so that who sees that it has ended sees how: the time above, the state in the two lowest bits.
#[derive(Debug, Default)]
pub(crate) struct Ending(AtomicU64);

const NOT_YET: u64 = 0;
const COMPLETE: u64 = 1;
const FAILED: u64 = 2;
const STATE_BITS: u32 = 2;

impl Ending {
    /// It is complete, at `now`. What the settling thread did before is seen by whoever sees the end.
    pub(crate) fn complete(&self, now: u64) {
        self.write(COMPLETE, now);
    }

    /// It has failed, at `now`.
    pub(crate) fn fail(&self, now: u64) {
        self.write(FAILED, now);
    }

    fn write(&self, state: u64, now: u64) {
        self.0.store((now << STATE_BITS) | state, Ordering::Release);
    }

    pub(crate) fn is_written(&self) -> bool {
        self.0.load(Ordering::Acquire) != NOT_YET
    }

    /// The state and the time, once they are written.
    pub(super) fn read(&self) -> Option<(FlightState, u64)> {
        let word = self.0.load(Ordering::Acquire);
        let state = match word & ((1 << STATE_BITS) - 1) {
            COMPLETE => FlightState::Complete,
            FAILED => FlightState::Failed,
            _ => return None,
        };
        Some((state, word >> STATE_BITS))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_written_is_read() {
        let [complete, failed] = [Ending::default(), Ending::default()];
        assert!(!complete.is_written() && complete.read().is_none());
        complete.complete(0);
        failed.fail(u64::MAX >> STATE_BITS);
        assert!(complete.is_written() && failed.is_written());
        assert_eq!(complete.read(), Some((FlightState::Complete, 0)));
        assert_eq!(failed.read(), Some((FlightState::Failed, u64::MAX >> STATE_BITS)));
    }
}
