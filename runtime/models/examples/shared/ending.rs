//! The end of a run.

use hsdp::prelude::*;
use hsdp::{Channel, Reduction, Tag};
use hsdp_program::Warnings;

use super::failure::Failure;
use super::signals::Signals;

/// How training ended. The same on all ranks.
#[derive(Clone, Debug, Default)]
pub(crate) struct Ended {
    /// Steps made, including those before the run was resumed.
    pub(crate) steps: usize,
    /// Whether a signal has ended the run. The signal may have come to another process.
    pub(crate) was_stopped: bool,
    /// The error of the last save that was asked for, if that failed.
    pub(crate) unsaved: Option<String>,
}

impl Ended {
    /// The end of the program `name`, whose report may have failed. If the run has failed besides, that is printed here.
    pub(crate) fn after(
        self,
        (name, reported): (&str, Result<(), Failure>),
        signals: &Signals,
        has_results: bool,
    ) -> Result<(), Failure> {
        let ended = self.outcome(signals, has_results);
        if let (Err(_), Err(failure)) = (&reported, &ended) {
            failure.tell(name);
        }
        reported.and(ended)
    }

    /// The end of a run: it fails if the last checkpoint was not saved, or a signal has ended it. Only the process of rank 0, which
    /// has the results, says so.
    pub(crate) fn outcome(self, signals: &Signals, has_results: bool) -> Result<(), Failure> {
        let signal = signals.caught();
        let stopped = self.was_stopped.then_some(Failure::Stopped { signal, steps: self.steps });
        match (self.unsaved, stopped) {
            (None, None) => Ok(()),
            // Rank 0 is still writing its files, and a launcher would kill it.
            _ if !has_results => Err(Failure::Elsewhere),
            (None, Some(stopped)) => Err(stopped),
            (Some(problem), None) => {
                Err(Failure::Training(format!("the last checkpoint was not saved: {problem}")))
            }
            (Some(problem), Some(stopped)) => {
                Err(Failure::Training(format!("{stopped}, and no checkpoint was saved: {problem}")))
            }
        }
    }
}

/// The number of warnings of all ranks. Collective.
pub(crate) fn count_warnings(world: &World, warnings: &Warnings) -> Result<u64, Failure> {
    // Ranks of one process count together.
    let counts = !world.shares_memory() || world.rank().index() == 0;
    let own = if counts { warnings.count() } else { 0 };
    let group = world.world_group(Channel::User);
    let sum = group.all_reduce(Tag::default(), Reduction::Sum, vec![own]);
    let sum = sum.and_then(|pending| pending.wait()).map_err(hsdp::Error::from)?;
    Ok(sum[0])
}

/// From now on signals end the run after a step. Until the ranks have met, a signal ends the process at once: there is no step to
/// complete.
pub(crate) fn listen(world: &World, signals: &Signals) -> Result<(), Failure> {
    match world.rank().index() == 0 || !world.shares_memory() {
        true => signals.listen().map_err(Failure::training),
        false => Ok(()),
    }
}
