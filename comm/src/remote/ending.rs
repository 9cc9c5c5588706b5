//! The end of a world of ranks that share no memory, until it is decided. `REMOTE.md`, "The end of the world".

use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::engine::SharedOperation;
use crate::{Error, sync};

/// How long a rank that sees an end waits for that of the lowest rank.
const GRACE: Duration = Duration::from_millis(500);

/// The end that this rank has seen, until all ranks have one.
#[derive(Debug, Default)]
pub(super) struct WorldEnding {
    /// And when this rank stops waiting for the lowest one.
    own: Option<(Error, Instant)>,
    is_decided: bool,
    /// Operations that fail with the end.
    pub(super) doomed: Vec<Arc<SharedOperation>>,
}

impl WorldEnding {
    /// This rank sees an end; whether it is the first, so that the lowest rank is to be told.
    pub(super) fn see(&mut self, error: &Error) -> bool {
        let is_first = self.own.is_none() && !self.is_decided;
        if is_first {
            self.own = Some((error.clone(), sync::now() + GRACE));
        }
        is_first
    }

    /// The end that this rank has seen, if the lowest rank has been silent for too long.
    pub(super) fn overdue(&self) -> Option<Error> {
        let own = self.own.as_ref().filter(|(_, until)| !self.is_decided && *until <= sync::now());
        own.map(|(error, _)| error.clone())
    }

    /// Whether an end was seen, and is not decided.
    pub(super) fn is_open(&self) -> bool {
        self.own.is_some() && !self.is_decided
    }

    /// Decides, if nothing is decided: the operations that fail with the end.
    pub(super) fn decide(&mut self) -> Option<Vec<Arc<SharedOperation>>> {
        let is_first = !std::mem::replace(&mut self.is_decided, true);
        is_first.then(|| std::mem::take(&mut self.doomed))
    }
}

#[cfg(test)]
mod tests {
    use hsdp_sharding::Rank;

    use super::*;

    fn end(rank: usize) -> Error {
        Error::StepAborted {
            rank: Rank::new(rank),
            step: 1,
            reason: "stands for an end".into(),
            mistake: None,
        }
    }

    #[test]
    fn the_first_end_is_told_to_the_lowest_rank_and_is_taken_if_that_is_silent() {
        let mut ending = WorldEnding::default();
        assert!(!ending.is_open() && ending.overdue().is_none());
        assert!(ending.see(&end(1)) && !ending.see(&end(2)));
        assert!(ending.is_open() && ending.overdue().is_none(), "the lowest rank may answer");
        ending.own = ending.own.map(|(error, until)| (error, until - GRACE));
        assert_eq!(ending.overdue(), Some(end(1)));
    }

    #[test]
    fn an_end_is_decided_once() {
        let mut ending = WorldEnding::default();
        assert!(ending.decide().is_some() && ending.decide().is_none());
        assert!(!ending.see(&end(1)) && !ending.is_open());
    }
}
