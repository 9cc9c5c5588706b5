//! Mistakes between steps that ranks announce by an abort of their epoch. All ranks may make the
//! same mistake, one after the other: the epoch that it costs is aborted once.

use std::sync::Arc;

use hsdp_sharding::Rank;

use crate::Error;

/// The last mistakes that concern a rank.
#[derive(Debug, Default)]
pub(crate) struct Mistakes {
    /// Epoch and text of the last mistake that this rank has announced.
    own: Option<(u64, String)>,
    /// The mistake of another rank by which this rank has left its last epoch in an earlier call.
    /// It may come to make the same.
    owed: Option<Owed>,
}

#[derive(Debug)]
struct Owed {
    /// Epoch of this rank since then.
    epoch: u64,
    by: Rank,
    reason: Arc<str>,
}

impl Mistakes {
    /// Notes that `rank` makes a mistake in `epoch`. Returns `false` if that is the mistake by
    /// which it has left the epoch before: the others have left that epoch too, and go on.
    pub(crate) fn make(&mut self, rank: Rank, epoch: u64, reason: &str) -> bool {
        let is_owed = |owed: &Owed| {
            owed.epoch == epoch && are_the_same((owed.by, &owed.reason), (rank, reason))
        };
        if self.owed.take_if(|owed| is_owed(owed)).is_some() {
            return false;
        }
        self.own = Some((epoch, reason.to_owned()));
        true
    }

    /// Notes that `rank` leaves `epoch`, which ended with `end`.
    pub(crate) fn leave(&mut self, rank: Rank, epoch: u64, end: Option<Error>) {
        let own = self.own.take().filter(|(made_in, _)| *made_in == epoch);
        self.owed = match end {
            Some(Error::StepAborted { rank: by, reason, .. }) if by != rank => {
                let made = |(_, own): &(u64, String)| are_the_same((by, &reason), (rank, own));
                let is_made = own.as_ref().is_some_and(made);
                (!is_made).then_some(Owed { epoch: epoch + 1, by, reason })
            }
            _ => None,
        };
    }

    /// Notes that all ranks have met in this rank's epoch: the others are not ahead of it.
    pub(crate) fn meet(&mut self) {
        self.owed = None;
    }
}

/// Whether two ranks have made the same mistake: their texts differ in the rank alone.
fn are_the_same((by, reason): (Rank, &str), (rank, own): (Rank, &str)) -> bool {
    reason.replace(&format!("rank {by},"), &format!("rank {rank},")) == own
        || reason.replace(&format!("rank {by}:"), &format!("rank {rank}:")) == own
}

#[cfg(test)]
mod tests {
    use super::*;

    const OWN: Rank = Rank::new(0);

    fn text(rank: Rank) -> String {
        format!("begin_step on rank {rank}, step 3: inside with_shards")
    }

    fn aborted(by: Rank) -> Option<Error> {
        Some(Error::StepAborted { rank: by, step: 3, reason: text(by).into() })
    }

    #[test]
    fn a_mistake_of_all_ranks_ends_one_epoch() {
        let mut mistakes = Mistakes::default();
        // Another rank was ahead, and this one left the epoch in an earlier call.
        mistakes.leave(OWN, 7, aborted(Rank::new(12)));
        assert!(!mistakes.make(OWN, 8, &text(OWN)));
        // The next one is another mistake, also if it has the same text.
        assert!(mistakes.make(OWN, 8, &text(OWN)));
    }

    #[test]
    fn a_mistake_that_was_made_in_the_epoch_itself_is_not_owed() {
        let mut mistakes = Mistakes::default();
        assert!(mistakes.make(OWN, 7, &text(OWN)));
        mistakes.leave(OWN, 7, aborted(Rank::new(1)));
        assert!(mistakes.make(OWN, 8, &text(OWN)));
    }

    #[test]
    fn other_mistakes_and_those_after_a_meeting_are_announced() {
        let left = || {
            let mut mistakes = Mistakes::default();
            mistakes.leave(OWN, 7, aborted(Rank::new(1)));
            mistakes
        };
        assert!(left().make(OWN, 8, "another"));
        assert!(left().make(OWN, 9, &text(OWN)));
        let mut met = left();
        met.meet();
        assert!(met.make(OWN, 8, &text(OWN)));
        let mut of_itself = Mistakes::default();
        of_itself.leave(OWN, 7, aborted(OWN));
        assert!(of_itself.make(OWN, 8, &text(OWN)));
    }
}
