//! The end of an operation, for the rings of all its members.

use crate::FlightState;
use crate::sync::atomic::{AtomicU64, Ordering};

/// The state in which an operation ended, and the time: written once, by the thread that settles it, and read where the members'
/// entries are.
///
/// Both are in one word, so that a reader who sees the end sees the state: the time above, the state in the two lowest bits.
#[derive(Debug, Default)]
pub struct Ending(AtomicU64);

const NOT_YET: u64 = 0;
const COMPLETE: u64 = 1;
const FAILED: u64 = 2;
const STATE_BITS: u32 = 2;

impl Ending {
    /// It is complete, at `now`. A thread that sees the end sees all that the settling thread did before.
    #[inline]
    pub fn complete(&self, now: u64) {
        self.write(COMPLETE, now);
    }

    /// It has failed, at `now`.
    pub fn fail(&self, now: u64) {
        self.write(FAILED, now);
    }

    fn write(&self, state: u64, now: u64) {
        self.0.store((now << STATE_BITS) | state, Ordering::Release);
    }

    /// Whether the operation has ended.
    #[inline]
    #[must_use]
    pub fn is_written(&self) -> bool {
        self.0.load(Ordering::Acquire) != NOT_YET
    }

    /// The state and the time, once they are written.
    #[inline]
    pub(crate) fn read(&self) -> Option<(FlightState, u64)> {
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
mod tests;
