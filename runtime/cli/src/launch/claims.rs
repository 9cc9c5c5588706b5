//! Ranks that attendants have claimed.

use std::collections::HashSet;
use std::ops::Range;

/// Claims of the current attempt. The first claimant of a rank keeps it, even if it fails.
#[derive(Debug, Default)]
pub(super) struct Claims {
    attempt: u32,
    ranks: Range<u32>,
    taken: HashSet<u32>,
}

impl Claims {
    /// Returns the claims at the start of an attempt.
    pub(super) fn of(attempt: u32, ranks: u32) -> Self {
        Self { attempt, ranks: 0..ranks, taken: HashSet::new() }
    }

    /// Claims a rank.
    ///
    /// # Errors
    /// A text, if the rank is not free in the current attempt.
    pub(super) fn take(&mut self, attempt: u32, rank: u32) -> Result<(), String> {
        if attempt != self.attempt {
            return Err(format!("attempt {attempt} is over, or not begun"));
        }
        if !self.ranks.contains(&rank) {
            return Err(format!("the job has {} ranks", self.ranks.end));
        }
        if !self.taken.insert(rank) {
            return Err("another process runs the rank".to_owned());
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_claimant_keeps_its_rank() {
        let mut claims = Claims::of(1, 2);
        assert_eq!(claims.take(1, 0), Ok(()));
        assert_eq!(claims.take(1, 0), Err("another process runs the rank".to_owned()));
        assert_eq!(claims.take(1, 2), Err("the job has 2 ranks".to_owned()));
        for attempt in [0, 2] {
            let refused = format!("attempt {attempt} is over, or not begun");
            assert_eq!(claims.take(attempt, 1), Err(refused));
        }
        assert_eq!(claims.take(1, 1), Ok(()));
    }
}
