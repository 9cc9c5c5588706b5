//! How ranks that share no memory come to one end of their world. `REMOTE.md`, "The end of the world".

use std::sync::Arc;
use std::time::{Duration, Instant};

use hsdp_sharding::Rank;

use crate::backend::thread::Operation;
use crate::sync;
use crate::{AbortReason, Error};

/// How long is waited for what the others say of the end: who is frozen says nothing.
const GRACE: Duration = Duration::from_millis(500);

/// What the ranks say of the end, until it is known what all of them get.
#[derive(Debug, Default)]
pub(super) struct Ending {
    /// By rank: what it passes on, and who was the first to say it.
    said: Vec<Option<Proposal>>,
    since: Option<Instant>,
    /// Operations that fail with the end.
    doomed: Vec<Arc<Operation>>,
}

/// An end, and the rank that saw it.
#[derive(Clone, Debug)]
pub(super) struct Proposal {
    pub(super) origin: Rank,
    pub(super) error: Error,
}

impl Ending {
    pub(super) fn of(size: usize) -> Self {
        Self { said: vec![None; size], ..Self::default() }
    }

    /// A rank says how the world ends: what `own` is to pass on, if it has said nothing yet: that, or its `answer`.
    pub(super) fn say(
        &mut self,
        rank: Rank,
        own: Rank,
        proposal: Proposal,
        answer: Option<Proposal>,
    ) -> Option<Proposal> {
        self.since.get_or_insert_with(sync::now);
        let is_news = self.said[own.index()].is_none();
        self.said[rank.index()].get_or_insert_with(|| proposal.clone());
        let own = self.said[own.index()].get_or_insert(answer.unwrap_or(proposal));
        is_news.then(|| own.clone())
    }

    /// Whether somebody has said that the world ends.
    pub(super) fn has_begun(&self) -> bool {
        self.since.is_some()
    }

    pub(super) fn doom(&mut self, operation: Arc<Operation>) {
        self.doomed.push(operation);
    }

    /// What fails with an end that is not this one's.
    pub(super) fn take_doomed(&mut self) -> Vec<Arc<Operation>> {
        std::mem::take(&mut self.doomed)
    }

    /// The end, once all have said one who are there, or it was waited for long enough: that of the lowest rank that saw one. And
    /// what fails with it.
    pub(super) fn verdict(
        &mut self,
        is_there: impl Fn(Rank) -> bool,
    ) -> Option<(Error, Vec<Arc<Operation>>)> {
        let since = self.since?;
        let ranks = self.said.iter().enumerate();
        let mut silent = ranks.filter(|(_, said)| said.is_none()).map(|(rank, _)| Rank::new(rank));
        let waits = silent.any(is_there);
        if waits && sync::now().saturating_duration_since(since) < GRACE {
            return None;
        }
        let first = self.said.iter().flatten().min_by_key(|proposal| proposal.origin)?;
        let error = self.root_of(first).error.clone();
        Some((error, self.take_doomed()))
    }

    /// Who is said to be late, and has said whom it waits for itself, is not the one to name.
    fn root_of<'a>(&'a self, first: &'a Proposal) -> &'a Proposal {
        let mut proposal = first;
        for _ in &self.said {
            let Some(late) = late(&proposal.error) else { break };
            let own = self.said.get(late.index()).and_then(Option::as_ref);
            match own.filter(|own| own.origin == late) {
                Some(own) => proposal = own,
                None => break,
            }
        }
        proposal
    }
}

/// Whom an error names as late.
pub(super) fn late(error: &Error) -> Option<Rank> {
    match error {
        Error::WorldAborted { rank, reason: AbortReason::Deadline { .. }, .. } => Some(*rank),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn proposal(origin: usize) -> Proposal {
        let rank = Rank::new(origin);
        let error = Error::StepAborted { rank, step: 1, reason: "stands for an end".into() };
        Proposal { origin: rank, error }
    }

    #[test]
    fn all_come_to_the_end_that_the_lowest_rank_saw() {
        let [zero, one, two] = [0, 1, 2].map(Rank::new);
        let all = |_| true;
        // Rank 2 saw one; rank 1 saw another before it heard of that; rank 0 passes on what it heard first.
        for order in [[two, one], [one, two]] {
            let mut ending = Ending::of(3);
            assert!(ending.verdict(all).is_none() && !ending.has_begun());
            let passed_on = ending.say(order[0], zero, proposal(order[0].index()), None);
            assert_eq!(passed_on.expect("it is news").origin, order[0]);
            assert!(ending.verdict(all).is_none(), "the third has not spoken");
            assert!(ending.say(order[1], zero, proposal(order[1].index()), None).is_none());
            let (error, _) = ending.verdict(all).expect("all have spoken");
            assert_eq!(error, proposal(1).error);
        }
    }

    #[test]
    fn who_is_gone_is_not_waited_for_and_who_says_nothing_only_for_some_time() {
        let [zero, one] = [0, 1].map(Rank::new);
        let mut ending = Ending::of(2);
        let _ = ending.say(zero, zero, proposal(0), None);
        assert!(ending.verdict(|rank| rank == one).is_none());
        assert!(ending.verdict(|_| false).is_some(), "nobody else is there");
        ending.since = sync::now().checked_sub(GRACE);
        assert!(ending.verdict(|_| true).is_some(), "it was waited for long enough");
    }
}
