//! How long a process waits before it tries again to connect to its coordinator.

use std::time::Duration;

use hsdp_sharding::Rank;

use crate::Job;

const FIRST: Duration = Duration::from_millis(50);
const LONGEST: Duration = Duration::from_secs(1);

/// Pauses that double each time, up to [`LONGEST`]. Each is shortened by up to a half, differently on each rank, so that
/// ranks that were refused together do not try again together. The sequence of a rank is the same for the same number of
/// the start.
#[derive(Debug)]
pub(crate) struct Pauses {
    longest: Duration,
    draws: u64,
}

impl Pauses {
    pub(crate) fn new(rank: Rank, job: &Job) -> Self {
        let draws = job.start() ^ (u64::from(rank.get()) << 32);
        Self { longest: FIRST, draws }
    }

    pub(crate) fn next(&mut self) -> Duration {
        let longest = self.longest;
        self.longest = LONGEST.min(2 * longest);
        longest - longest.mul_f64(self.draw() / 2.0)
    }

    /// A number between 0 and 1: a step of SplitMix64.
    fn draw(&mut self) -> f64 {
        self.draws = self.draws.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut bits = self.draws;
        bits = (bits ^ (bits >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        bits = (bits ^ (bits >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        let [high, ..] = (bits ^ (bits >> 31)).to_be_bytes();
        f64::from(high) / 256.0
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    fn pauses(rank: usize, start: u64) -> Vec<Duration> {
        let mut pauses = Pauses::new(Rank::new(rank), &Job::new("job", start).expect("short"));
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
