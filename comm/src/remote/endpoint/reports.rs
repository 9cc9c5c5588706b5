//! The reports of a rank that cannot go on, and the verdicts of the comparer. `JUDGE.md`, "The comparer".

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use hsdp_sharding::Rank;

use super::{Endpoint, FIRST_NAP, Request};
use crate::engine::Shared;
use crate::engine::from_now;
use crate::engine::judge::{RankState, Rolled, WaitKey};
use crate::remote::comparer::{Calls, Compared, GAP, Report, Urgency, Verdict};
use crate::remote::progress;
use crate::rolling::{Entry, Rolling};
use crate::{GroupId, sync};

/// How long a verdict is waited for.
const PATIENCE: Duration = Duration::from_secs(1);

/// The waits of which this rank has sent a report.
#[derive(Debug, Default)]
pub(super) struct Reports(BTreeMap<WaitKey, Reported>);

#[derive(Debug)]
struct Reported {
    /// The last verdict.
    verdict: Option<Verdict>,
    /// When the last report was sent, and the time from one to the next while the rank is stalled.
    last: Option<Instant>,
    gap: Duration,
}

impl Reports {
    /// Whether a report is to be sent now.
    fn is_due(&mut self, wait: WaitKey, urgency: Urgency) -> bool {
        let new = || Reported { verdict: None, last: None, gap: GAP };
        let (reported, now) = (self.0.entry(wait).or_insert_with(new), sync::now());
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
    pub(crate) fn report(&self, core: &Shared, urgency: Urgency, wait: WaitKey) {
        let Some(to) = self.root(core) else { return };
        if self.reports.lock().is_due(wait, urgency) {
            let said = Compared::Report(Report { urgency, wait });
            self.post(Request::Compare { to, said });
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

    pub(in crate::remote) fn hear_verdict(&self, verdict: Verdict) {
        if let Some(reported) = self.reports.lock().0.get_mut(&verdict.wait) {
            reported.verdict = Some(verdict);
        }
    }

    /// The rank that keeps a wait from ending whose deadline has passed. Waits for the verdict.
    ///
    /// # Errors
    /// The rank that has the comparer, if that is silent for a second.
    pub(crate) fn await_culprit(&self, core: &Shared, wait: WaitKey) -> Result<Option<Rank>, Rank> {
        self.forget_reports(wait);
        let (mut until, mut asked) = (from_now(PATIENCE), None);
        while !progress::is_in_turn() && core.status().world_end().is_none() {
            let comparer = self.root(core);
            if comparer != asked {
                (until, asked) = (from_now(PATIENCE), comparer);
                self.report(core, Urgency::Deadline, wait);
            }
            let verdict = self.reports.lock().0.get(&wait).and_then(|it| it.verdict);
            match (verdict, comparer) {
                (Some(verdict), _) => return Ok(verdict.culprit),
                (None, Some(silent)) if sync::now() > until => return Err(silent),
                (None, None) => break,
                _ if self.hear() => {}
                _ => self.sleep(FIRST_NAP),
            }
        }
        Ok(None)
    }

    /// The state of this rank, with the hashes that are asked for.
    pub(in crate::remote) fn state(&self, core: &Shared, calls: Calls) -> RankState {
        let mut state = core.state(self.rank);
        state.rolled = rolled(&core.record(self.rank).rolling, calls);
        state.issued = self.outgoing.lock().issued.clone();
        state
    }
}

/// The calls of NCCL of a rank, with the hashes that are asked for.
fn rolled(rolling: &Rolling, calls: Calls) -> BTreeMap<GroupId, Rolled> {
    let of = |last: Entry| {
        let (kept, entry) = match calls {
            Calls::All(group) if group == last.group => (rolling.entries_from(group, 0), None),
            Calls::Entry(group, index) if group == last.group => {
                let mut kept = rolling.entries_from(group, index).into_iter();
                (
                    Vec::new(),
                    kept.next().filter(|it| it.index == index).and_then(|it| it.descriptor),
                )
            }
            _ => (Vec::new(), None),
        };
        let (group, count) = (last.group, last.index + 1);
        let hashes = kept.into_iter().chain([last]);
        let hashes = hashes.map(|it| (it.index, u128::from_le_bytes(it.hash))).collect();
        (group, Rolled { count, hashes, entry })
    };
    rolling.last().into_iter().map(of).collect()
}
