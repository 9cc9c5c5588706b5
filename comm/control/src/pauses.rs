//! How long a process waits before it tries again to connect to its coordinator.

use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::time::Duration;

use hsdp_sharding::Rank;

use crate::Job;

const FIRST: Duration = Duration::from_millis(50);
const LONGEST: Duration = Duration::from_secs(1);

/// Pauses that double each time, up to [`LONGEST`]. Each is shortened by up to a half, differently on each rank, so that
/// ranks that were refused together do not try again together. The sequence of a rank is the same for the same number of
/// the start.
#[derive(Debug, Hash)]
pub(crate) struct Pauses {
    longest: Duration,
    attempt: u32,
    rank: u32,
    start: u64,
}

impl Pauses {
    pub(crate) fn new(rank: Rank, job: &Job) -> Self {
        Self { longest: FIRST, attempt: 0, rank: rank.get(), start: job.start }
    }

    pub(crate) fn next(&mut self) -> Duration {
        let mut hasher = DefaultHasher::new();
        self.hash(&mut hasher);
        let [draw, ..] = hasher.finish().to_be_bytes();
        let pause = self.longest - self.longest.mul_f64(f64::from(draw) / 512.0);
        (self.longest, self.attempt) = (LONGEST.min(2 * self.longest), self.attempt + 1);
        pause
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    fn pauses(rank: usize, start: u64) -> Vec<Duration> {
        let mut pauses = Pauses::new(Rank::new(rank), &Job { name: "job".to_owned(), start });
        (0..8).map(|_| pauses.next()).collect()
    }

    #[test]
    fn pauses_become_longer_up_to_a_second() {
        for rank in 0..100 {
            let most = [50, 100, 200, 400, 800, 1000, 1000, 1000].map(Duration::from_millis);
            for (pause, most) in pauses(rank, 3).into_iter().zip(most) {
                assert!(most / 2 < pause && pause <= most, "{pause:?} of {most:?}");
            }
        }
    }

    #[test]
    fn ranks_do_not_come_back_together_and_each_does_the_same_again() {
        assert_eq!(pauses(7, 3), pauses(7, 3));
        assert_ne!(pauses(7, 3), pauses(7, 4));
        for attempt in 0..8 {
            let different: BTreeSet<_> = (0..64).map(|rank| pauses(rank, 0)[attempt]).collect();
            // 64 random draws from 256 values give about 57 different ones.
            assert!(different.len() > 40, "{} of 64 at attempt {attempt}", different.len());
        }
    }
}
