//! The end of an operation, for the rings of all its members.

use crate::FlightState;
use crate::sync::atomic::{AtomicU64, Ordering};

/// The state in which an operation ended, and the time: written once, by the thread that settles it, and read where the members'
/// entries are.
///
/// Both are in one word, so that a reader who sees the end sees the state: the time above, the state in the two lowest bits.
#[derive(Debug, Default)]
pub struct Ending(AtomicU64);

/// The bits of a state. Those of [`FlightState::Issued`] are zero, as is the word before the end.
const STATE_BITS: u32 = 2;

impl Ending {
    /// The operation has ended in this state, which is not `Issued`, at `now`. A thread that sees the end sees all that the settling
    /// thread did before.
    #[inline]
    pub fn write(&self, state: FlightState, now: u64) {
        debug_assert_ne!(state, FlightState::Issued, "an end");
        self.0.store((now << STATE_BITS) | state as u64, Ordering::Release);
    }

    /// Whether the operation has ended.
    #[inline]
    #[must_use]
    pub fn is_written(&self) -> bool {
        self.0.load(Ordering::Acquire) != FlightState::Issued as u64
    }

    /// The state and the time, once they are written.
    #[inline]
    pub(crate) fn read(&self) -> Option<(FlightState, u64)> {
        let word = self.0.load(Ordering::Acquire);
        let bits = word & ((1 << STATE_BITS) - 1);
        let state = FlightState::ALL.into_iter().find(|state| *state as u64 == bits)?;
        (state != FlightState::Issued).then_some((state, word >> STATE_BITS))
    }
}

#[cfg(test)]
mod tests;
