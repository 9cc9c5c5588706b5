//! Mistakes between steps that ranks announce by an abort of their epoch. All ranks may make the
//! same mistake, one after the other: the epoch that it costs is aborted once.

use hsdp_sharding::Rank;

use crate::{Error, Mistake};

/// The mistakes that concern a rank.
#[derive(Debug, Default)]
pub(crate) struct Mistakes {
    /// The last mistake that this rank has announced.
    own: Option<Own>,
    /// Mistakes of other ranks by which this rank has left epochs in earlier calls. It may come to
    /// make them, too.
    owed: Vec<Owed>,
}

#[derive(Debug)]
struct Own {
    epoch: u64,
    mistake: Mistake,
}

#[derive(Debug)]
struct Owed {
    /// Epoch that this rank has left by the mistake.
    left: u64,
    by: Rank,
    mistake: Mistake,
}

impl Mistakes {
    /// Notes that this rank makes `mistake` in `epoch`. Returns `false` if it has left an epoch by
    /// that: the others have left that epoch too, and go on.
    pub(crate) fn make(&mut self, epoch: u64, mistake: Mistake) -> bool {
        let owed = self.owed.iter().position(|owed| owed.mistake == mistake);
        if let Some(owed) = owed {
            self.owed.remove(owed);
            return false;
        }
        self.own = Some(Own { epoch, mistake });
        true
    }

    /// Notes that `rank`, this one, leaves `epoch`, which ended with `end`.
    pub(crate) fn leave(&mut self, rank: Rank, epoch: u64, end: Option<Error>) {
        let own = self.own.take().filter(|own| own.epoch == epoch);
        if let Some(Error::StepAborted { rank: by, mistake: Some(mistake), .. }) = end
            && by != rank
            && own.is_none_or(|own| own.mistake != mistake)
        {
            self.owed.push(Owed { left: epoch, by, mistake });
        }
    }

    /// Notes that an operation of `epoch` has taken place with these members: those that had been
    /// ahead of this rank in an earlier epoch were not ahead in this one.
    pub(crate) fn meet(&mut self, epoch: u64, members: &[Rank]) {
        self.owed.retain(|owed| owed.left >= epoch || !members.contains(&owed.by));
    }

    /// Whether this rank may come to make a mistake that another one has announced.
    pub(crate) fn is_owed(&self) -> bool {
        !self.owed.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const OWN: Rank = Rank::new(0);
    const AHEAD: Rank = Rank::new(12);

    fn begun_wrongly() -> Mistake {
        Mistake::of(&("begin_step", 3))
    }

    fn saved_wrongly() -> Mistake {
        Mistake::of(&("save", 3))
    }

    fn aborted(by: Rank, mistake: Option<Mistake>) -> Option<Error> {
        Some(Error::StepAborted { rank: by, step: 3, reason: "a test".into(), mistake })
    }

    /// Another rank was ahead, and this one left epoch 7 in an earlier call.
    fn left() -> Mistakes {
        let mut mistakes = Mistakes::default();
        mistakes.leave(OWN, 7, aborted(AHEAD, Some(begun_wrongly())));
        mistakes
    }

    #[test]
    fn a_mistake_of_all_ranks_ends_one_epoch() {
        let mut mistakes = left();
        assert!(!mistakes.make(8, begun_wrongly()));
        assert!(mistakes.make(8, begun_wrongly()), "the next one is another mistake");
    }

    #[test]
    fn several_mistakes_of_a_rank_that_is_ahead_end_an_epoch_each() {
        let mut mistakes = left();
        mistakes.leave(OWN, 8, aborted(AHEAD, Some(saved_wrongly())));
        assert!(!mistakes.make(9, begun_wrongly()) && !mistakes.make(9, saved_wrongly()));
        assert!(mistakes.make(9, saved_wrongly()));
    }

    #[test]
    fn a_mistake_that_was_made_in_the_epoch_itself_is_not_owed() {
        let mut mistakes = Mistakes::default();
        assert!(mistakes.make(7, begun_wrongly()));
        mistakes.leave(OWN, 7, aborted(AHEAD, Some(begun_wrongly())));
        assert!(mistakes.make(8, begun_wrongly()));
    }

    #[test]
    fn other_mistakes_and_ends_of_other_kinds_are_announced() {
        assert!(left().make(8, saved_wrongly()));
        for end in [aborted(OWN, Some(begun_wrongly())), aborted(AHEAD, None), None] {
            let mut mistakes = Mistakes::default();
            mistakes.leave(OWN, 7, end);
            assert!(mistakes.make(8, begun_wrongly()));
        }
    }

    #[test]
    fn a_mistake_is_announced_after_an_operation_with_the_rank_that_was_ahead() {
        let mut met = left();
        met.meet(8, &[OWN, AHEAD]);
        assert!(!met.is_owed() && met.make(8, begun_wrongly()));
        for (epoch, members) in [(7, [OWN, AHEAD]), (8, [OWN, Rank::new(1)])] {
            let mut apart = left();
            apart.meet(epoch, &members);
            assert!(apart.is_owed() && !apart.make(8, begun_wrongly()));
        }
    }
}
