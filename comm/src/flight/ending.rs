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
    /// Writes it down, at `now`. What the settling thread did before is seen by whoever sees the end.
    pub(crate) fn write(&self, state: FlightState, now: u64) {
        let state = match state {
            FlightState::Issued => NOT_YET,
            FlightState::Complete => COMPLETE,
            FlightState::Failed => FAILED,
        };
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
        for (state, now) in [(FlightState::Complete, 0), (FlightState::Failed, u64::MAX >> 2)] {
            let ending = Ending::default();
            assert!(!ending.is_written() && ending.read().is_none());
            ending.write(state, now);
            assert!(ending.is_written());
            assert_eq!(ending.read(), Some((state, now)));
        }
    }
}
