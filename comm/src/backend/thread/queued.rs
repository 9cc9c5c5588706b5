//! Work in the queue, of which threads claim blocks.

use std::ops::Range;

use super::running::Running;
use crate::sync::atomic::{AtomicUsize, Ordering};

/// Work in the queue.
#[derive(Debug)]
pub(super) struct Queued {
    pub(super) running: Running,
    unclaimed: Unclaimed,
}

impl Queued {
    /// Work of which no block is claimed, for so many threads.
    pub(super) fn new(running: Running, threads: usize) -> Self {
        let unclaimed = Unclaimed::new(running.blocks(), threads);
        Self { running, unclaimed }
    }

    /// The next blocks that are not claimed: many neighbours first, and fewer towards the end.
    pub(super) fn claim(&self) -> Option<Range<usize>> {
        self.unclaimed.claim()
    }

    /// Leaves nothing to be claimed.
    pub(super) fn abandon(&self) {
        self.unclaimed.abandon();
    }
}

/// A claim takes the blocks that are left, divided by so many times the threads.
const CLAIMS_OF_A_THREAD: usize = 4;

/// The blocks that are not claimed.
///
/// `Relaxed`: a claim orders nothing. The work was published with the lock of the queue, and is taken back under it.
#[derive(Debug)]
struct Unclaimed {
    next: AtomicUsize,
    blocks: usize,
    parts: usize,
}

impl Unclaimed {
    fn new(blocks: usize, threads: usize) -> Self {
        Self { next: AtomicUsize::new(0), blocks, parts: CLAIMS_OF_A_THREAD * threads.max(1) }
    }

    /// Memory is fetched ahead of a thread that goes on where it was; one that gets each second block is always at a new place.
    /// And few blocks at the end keep all threads busy to it ("guided self-scheduling", Polychronopoulos and Kuck 1987).
    fn claim(&self) -> Option<Range<usize>> {
        let end = |first: usize| first + (self.blocks - first).div_ceil(self.parts);
        let after = |first: usize| (first < self.blocks).then(|| end(first));
        let first = self.next.fetch_update(Ordering::Relaxed, Ordering::Relaxed, after).ok()?;
        Some(first..end(first))
    }

    fn abandon(&self) {
        self.next.store(self.blocks, Ordering::Relaxed);
    }
}

#[cfg(all(test, not(shuttle)))]
mod tests {
    use super::Unclaimed;

    fn lengths(unclaimed: &Unclaimed) -> Vec<usize> {
        let mut next = 0;
        let mut lengths = Vec::new();
        while let Some(claimed) = unclaimed.claim() {
            assert_eq!(claimed.start, next, "after {lengths:?}");
            next = claimed.end;
            lengths.push(claimed.len());
        }
        lengths
    }

    #[test]
    fn claims_cover_all_blocks_once() {
        for (blocks, threads) in (0..130).flat_map(|blocks| (0..9).map(move |it| (blocks, it))) {
            let lengths = lengths(&Unclaimed::new(blocks, threads));
            assert_eq!(lengths.iter().sum::<usize>(), blocks, "{threads} threads");
            assert!(lengths.iter().all(|length| *length > 0));
            assert!(lengths.is_sorted_by(|one, next| one >= next), "{lengths:?}");
        }
    }

    #[test]
    fn claims_are_long_first_and_single_at_the_end() {
        let lengths = lengths(&Unclaimed::new(64, 2));
        assert_eq!(lengths[..6], [8, 7, 7, 6, 5, 4]);
        assert_eq!(lengths.last(), Some(&1));
    }

    #[test]
    fn nothing_is_claimed_of_what_was_abandoned() {
        let unclaimed = Unclaimed::new(64, 2);
        assert_eq!(unclaimed.claim(), Some(0..8));
        unclaimed.abandon();
        assert_eq!(unclaimed.claim(), None);
    }
}
