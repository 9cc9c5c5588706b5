//! The limit of the device memory that a pool may allocate.

use parking_lot::Mutex;

/// The bytes that a pool has allocated from the driver, and their limit.
#[derive(Debug)]
pub(super) struct Budget(Mutex<Bytes>);

#[derive(Debug)]
struct Bytes {
    taken: usize,
    limit: usize,
}

/// Only the memory of the device limits the pool.
impl Default for Budget {
    fn default() -> Self {
        Self(Mutex::new(Bytes { taken: 0, limit: usize::MAX }))
    }
}

impl Budget {
    pub(super) fn limit(&self, bytes: usize) {
        self.0.lock().limit = bytes;
    }

    /// Counts `bytes` as taken if they are within the limit. Returns whether they are.
    pub(super) fn take(&self, bytes: usize) -> bool {
        let mut held = self.0.lock();
        let fits = bytes <= held.limit.saturating_sub(held.taken);
        held.taken += if fits { bytes } else { 0 };
        fits
    }

    pub(super) fn give_back(&self, bytes: usize) {
        self.0.lock().taken -= bytes;
    }

    /// Applies the limit to the free and total bytes that the device reports.
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
