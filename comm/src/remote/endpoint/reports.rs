//! The reports of a rank that cannot go on, and the verdicts of the comparer. `JUDGE.md`, "The comparer".

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use hsdp_sharding::Rank;

use super::{Endpoint, EndpointRequest, FIRST_NAP};
use crate::engine::from_now;
use crate::engine::judge::{RankState, WaitKey};
use crate::remote::comparer::{Compared, GAP, Hashes, Urgency, WaitReport, WaitVerdict, rolled};
use crate::remote::progress;
use crate::sync;

/// The longest wait for a verdict.
const PATIENCE: Duration = Duration::from_secs(1);

/// The waits of which this rank has sent a report.
#[derive(Debug, Default)]
pub(super) struct Reports(BTreeMap<WaitKey, Reported>);

#[derive(Debug)]
struct Reported {
    /// The last verdict.
    verdict: Option<WaitVerdict>,
    /// When the last report was sent, and the time from one to the next while the rank is stalled.
    last: Option<Instant>,
    gap: Duration,
}

impl Reports {
    /// Whether a report is to be sent now.
    fn is_due(&mut self, wait: WaitKey, urgency: Urgency) -> bool {
        let new = || Reported { verdict: None, last: None, gap: GAP };
        let reported = self.0.entry(wait).or_insert_with(new);
        let now = sync::now();
        let gap = match urgency {
            Urgency::Stalled => reported.gap,
            Urgency::Late => GAP,
            Urgency::Deadline => Duration::ZERO,
        };
        let is_due = reported.last.is_none_or(|last| last + gap <= now);
        if is_due {
            reported.last = Some(now);
            reported.gap *= 1 + u32::from(urgency == Urgency::Stalled);
        }
        is_due
    }
}

impl Endpoint {
    /// This rank cannot go on: the comparer is told.
    pub(crate) fn report(&self, urgency: Urgency, wait: WaitKey) {
        let Some(to) = self.lowest() else { return };
        if self.reports.lock().is_due(wait, urgency) {
            let said = Compared::Report(WaitReport { urgency, wait });
            self.post(EndpointRequest::Compare { to, said });
        }
    }

    /// The rank that keeps a wait from ending, by the last verdict.
    pub(crate) fn culprit(&self, wait: WaitKey) -> Option<Rank> {
        self.reports.lock().0.get(&wait)?.verdict?.culprit
    }

    /// The wait is over.
    pub(crate) fn forget_reports(&self, wait: WaitKey) {
        self.reports.lock().0.remove(&wait);
    }

    pub(in crate::remote) fn hear_verdict(&self, verdict: WaitVerdict) {
        if let Some(reported) = self.reports.lock().0.get_mut(&verdict.wait) {
            reported.verdict = Some(verdict);
        }
    }

    /// The rank that keeps a wait from ending whose deadline has passed. Waits for the verdict.
    ///
    /// # Errors
    /// The rank that has the comparer, if that is silent for a second.
    pub(crate) fn await_culprit(&self, wait: WaitKey) -> Result<Option<Rank>, Rank> {
        self.forget_reports(wait);
        let verdict = || self.reports.lock().0.get(&wait).and_then(|it| it.verdict);
        let end = || self.state.early_ends.world_end().map(|_| None);
        let found = || verdict().map(|it| it.culprit).or_else(end);
        let tell = |_| self.report(Urgency::Deadline, wait);
        Ok(self.ask(PATIENCE, tell, found)?.flatten())
    }

    /// This rank knows that ranks differ in calls of NCCL: the comparer is told, which finds the first difference. Waits for the end of
    /// the world.
    ///
    /// # Errors
    /// The rank that has the comparer, if that does not answer within the deadline.
    pub(crate) fn tell_difference(&self) -> Result<(), Rank> {
        let tell = |to| self.post(EndpointRequest::Compare { to, said: Compared::Differ });
        let found = || self.state.early_ends.world_end();
        self.ask(self.state.options.deadline, tell, found).map(drop)
    }

    /// Tells the comparer something, and each that follows it, and waits for its finding.
    ///
    /// # Errors
    /// The rank that has the comparer, if that is silent for so long.
    fn ask<T>(
        &self,
        patience: Duration,
        tell: impl Fn(Rank),
        found: impl Fn() -> Option<T>,
    ) -> Result<Option<T>, Rank> {
        let mut until = from_now(patience);
        let mut asked = None;
        while !progress::is_in_turn() {
            if let Some(found) = found() {
                return Ok(Some(found));
            }
            let Some(comparer) = self.lowest() else { break };
            if asked != Some(comparer) {
                (until, asked) = (from_now(patience), Some(comparer));
                tell(comparer);
            }
            if sync::now() > until {
                return Err(comparer);
            }
            if !self.hear() {
                self.sleep(FIRST_NAP);
            }
        }
        Ok(None)
    }

    /// The state of this rank, with the hashes that are asked for.
    pub(in crate::remote) fn state(&self, hashes: Hashes) -> RankState {
        let mut state = self.state.rank_state(self.rank);
        state.rolled = rolled(&self.state.record(self.rank).rolling, hashes);
        state.issued = self.outgoing.lock().issued.clone();
        state
    }
}
