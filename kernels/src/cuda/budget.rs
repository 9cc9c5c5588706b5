//! How much of a device's memory a pool may take.

use parking_lot::Mutex;

/// What a pool has taken from the driver, and the most that it may.
#[derive(Debug)]
pub(super) struct Budget(Mutex<Bytes>);

#[derive(Debug)]
struct Bytes {
    taken: usize,
    limit: usize,
}

/// No limit but the device's own.
impl Default for Budget {
    fn default() -> Self {
        Self(Mutex::new(Bytes { taken: 0, limit: usize::MAX }))
    }
}

impl Budget {
    pub(super) fn limit(&self, bytes: usize) {
        self.0.lock().limit = bytes;
    }

    /// Counts bytes as taken; whether they may be.
    pub(super) fn take(&self, bytes: usize) -> bool {
        let mut held = self.0.lock();
        let fits = bytes <= held.limit.saturating_sub(held.taken);
        held.taken += if fits { bytes } else { 0 };
        fits
    }

    pub(super) fn give_back(&self, bytes: usize) {
        self.0.lock().taken -= bytes;
    }

    /// What is free of how much, of a device that says this of itself.
    pub(super) fn within(&self, (free, total): (usize, usize)) -> (usize, usize) {
        let held = self.0.lock();
        (free.min(held.limit.saturating_sub(held.taken)), total.min(held.limit))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_more_is_taken_than_may_be() {
        let budget = Budget::default();
        assert!(budget.take(1 << 40));
        budget.give_back(1 << 40);
        budget.limit(100);
        assert!(budget.take(60) && !budget.take(41) && budget.take(40));
        assert_eq!(budget.within((500, 1000)), (0, 100));
        budget.give_back(60);
        assert_eq!(budget.within((50, 80)), (50, 80));
        budget.limit(10);
        assert!(!budget.take(1), "more is taken already than may be");
    }
}
