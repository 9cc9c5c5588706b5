//! How long a member has been waiting, and what is due next.

use std::time::{Duration, Instant};

use crate::options::WorldOptions;

/// Longer than anybody waits; a moment this far away can be named on every machine.
const FAR: Duration = Duration::from_secs(365 * 24 * 60 * 60);

/// The moment `wait` from now, or a far one: durations may be of any length.
pub(super) fn from_now(wait: Duration) -> Instant {
    let now = Instant::now();
    now.checked_add(wait.min(FAR)).unwrap_or(now)
}

/// Started when the wait begins.
pub(super) struct Clock {
    started: Instant,
    late: Option<Duration>,
    deadline: Duration,
}

/// What is due.
#[derive(Debug, PartialEq)]
pub(super) enum Alarm {
    /// Nothing, for so long.
    None(Duration),
    /// A warning, after so long.
    Late(Duration),
    /// The end of the wait.
    Deadline,
}

impl Clock {
    pub(super) fn start(options: &WorldOptions) -> Self {
        let late = (options.late < options.deadline).then_some(options.late);
        Self { started: Instant::now(), late, deadline: options.deadline }
    }

    /// What is due now. Each alarm rings once; the deadline begins anew.
    pub(super) fn alarm(&mut self) -> Alarm {
        let waited = self.started.elapsed();
        if waited >= self.deadline {
            self.started = Instant::now();
            return Alarm::Deadline;
        }
        match self.late {
            Some(late) if waited >= late => {
                self.late = None;
                Alarm::Late(late)
            }
            next => Alarm::None(next.unwrap_or(self.deadline) - waited),
        }
    }
}
