//! The time of a wait, and its alarms.

use std::time::{Duration, Instant};

use crate::options::WorldOptions;
use crate::sync;

/// Longer than any thread waits; every machine can name a moment that is so far away.
pub(crate) const FAR: Duration = Duration::from_secs(365 * 24 * 60 * 60);

/// A thread that looks this much later than planned was kept from looking.
const HICCUP: Duration = Duration::from_millis(500);

/// A thread that waits looks at least this often: if a stop begins before the planned look, only
/// its part after that moment can be told from a wait.
const LOOK: Duration = Duration::from_millis(200);

/// A device that waits for so long is asked about.
#[cfg(feature = "nccl")]
const STALL: Duration = Duration::from_millis(250);

/// The moment `wait` from now, or a far one: durations may be of any length.
pub(crate) fn from_now(wait: Duration) -> Instant {
    let now = sync::now();
    now.checked_add(wait.min(FAR)).unwrap_or(now)
}

/// The shortest time from one alarm to its repetition.
const OFTEN: Duration = Duration::from_millis(1);

/// Started when the wait begins.
///
/// Time that no thread could have used does not count, so that a process that was stopped goes on
/// afterwards.
pub(crate) struct WaitClock {
    started: Instant,
    /// When the thread looks again at the latest, if the process runs.
    due: Instant,
    late: Timer,
    circle: Timer,
    deadline: Timer,
}

/// The alarm that is due.
#[derive(Debug, PartialEq)]
pub(crate) enum Alarm {
    /// Nothing, for so long.
    None(Duration),
    /// A warning, after so long.
    Late(Duration),
    /// A look whether ranks wait for each other.
    Circle,
    /// The end of the wait.
    Deadline,
}

/// Something that is due each time that a period has passed.
struct Timer {
    period: Duration,
    /// How long after the start it is due next.
    next: Duration,
}

impl Timer {
    fn every(period: Duration) -> Self {
        Self { period, next: period }
    }

    /// Whether it is due; if so, it is due again when the period has passed once more.
    fn rings(&mut self, waited: Duration) -> bool {
        let rings = waited >= self.next;
        if rings {
            self.next = waited.saturating_add(self.period.max(OFTEN));
        }
        rings
    }
}

impl WaitClock {
    pub(crate) fn start(options: &WorldOptions) -> Self {
        let WorldOptions { late, circle_grace, deadline, .. } = *options;
        Self::with(late, circle_grace, deadline)
    }

    /// Starts the clock of a wait of a device. Its first look is due soon, whatever the grace of
    /// circles, since it also finds calls that differ.
    #[cfg(feature = "nccl")]
    pub(crate) fn stall(options: &WorldOptions) -> Self {
        let WorldOptions { late, circle_grace, deadline, .. } = *options;
        Self::with(late, circle_grace.min(STALL), deadline)
    }

    /// Of a wait of which nothing is due but its end.
    pub(crate) fn until(deadline: Duration) -> Self {
        Self::with(FAR, FAR, deadline)
    }

    fn with(late: Duration, circle_grace: Duration, deadline: Duration) -> Self {
        let [late, circle, deadline] = [late, circle_grace, deadline].map(Timer::every);
        let started = sync::now();
        Self { started, due: started, late, circle, deadline }
    }

    /// How long ago the wait began.
    pub(crate) fn waited(&self) -> Duration {
        sync::now().saturating_duration_since(self.started)
    }

    /// The alarm that is due now. Each rings again when as much time has passed once more.
    pub(crate) fn alarm(&mut self) -> Alarm {
        let now = sync::now();
        self.forgive_stop(now);
        match self.alarm_at(now) {
            Alarm::None(rest) => {
                let rest = rest.min(LOOK);
                self.due = now + rest;
                Alarm::None(rest)
            }
            alarm => {
                self.due = now;
                alarm
            }
        }
    }

    /// The thread has done some work meanwhile, and so could not look: that time counts.
    pub(crate) fn has_worked(&mut self) {
        self.due = sync::now();
    }

    /// Takes time out of the wait in which the thread could not look: the process was stopped, the
    /// machine slept, or there was no processor to be had. Others could not come in that time
    /// either.
    fn forgive_stop(&mut self, now: Instant) {
        let overdue = now.saturating_duration_since(self.due);
        if overdue >= HICCUP {
            hsdp_warnings::warn!(
                ?overdue,
                "the process was stopped, or got no processor time: deadlines are extended by that time"
            );
            self.started += overdue;
        }
    }

    fn alarm_at(&mut self, now: Instant) -> Alarm {
        let waited = now.saturating_duration_since(self.started);
        if self.deadline.rings(waited) {
            return Alarm::Deadline;
        }
        if self.late.rings(waited) {
            return Alarm::Late(waited);
        }
        if self.circle.rings(waited) {
            return Alarm::Circle;
        }
        Alarm::None(self.deadline.next.min(self.late.next).min(self.circle.next) - waited)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn clock() -> WaitClock {
        let second = Duration::from_secs(1);
        WaitClock::start(&WorldOptions { deadline: second, late: FAR, ..WorldOptions::default() })
    }

    #[test]
    fn time_in_which_a_member_worked_counts() {
        let mut clock = clock();
        // It meant to look again a long time ago, and has helped with a block since.
        let begun = Instant::now().checked_sub(Duration::from_secs(3)).expect("not so early");
        (clock.started, clock.due) = (begun, begun);
        clock.has_worked();
        assert_eq!(clock.alarm(), Alarm::Deadline);
    }

    #[test]
    fn a_wait_of_which_only_the_end_is_due_ends_there() {
        let mut clock = WaitClock::until(Duration::from_secs(1));
        let started = clock.started;
        assert_eq!(clock.alarm(), Alarm::None(LOOK), "it looks now and then");
        assert_eq!(clock.alarm_at(started + Duration::from_secs(1)), Alarm::Deadline);
    }

    #[test]
    fn time_in_which_the_process_was_stopped_does_not_count() {
        let stop = Duration::from_secs(10);
        let mut unforgiving = clock();
        let later = unforgiving.due + stop;
        assert_eq!(unforgiving.alarm_at(later), Alarm::Deadline);

        let mut forgiving = clock();
        let later = forgiving.due + stop;
        forgiving.forgive_stop(later);
        assert_eq!(forgiving.alarm_at(later), Alarm::None(WorldOptions::default().circle_grace));
        // Afterwards time counts again.
        forgiving.due = later;
        let waited = later + Duration::from_millis(400);
        forgiving.forgive_stop(waited);
        assert_eq!(forgiving.alarm_at(waited), Alarm::Circle);
    }
}
