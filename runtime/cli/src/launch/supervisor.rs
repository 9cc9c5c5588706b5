//! The reaction to the end of a rank, to a signal, and to a deadline. This is a pure state machine:
//! its input is events with their times, and its output is actions.

#[cfg(test)]
mod tests;

use std::fmt;
use std::os::unix::process::ExitStatusExt as _;
use std::process::ExitStatus;
use std::time::{Duration, Instant};

use nix::sys::signal::Signal;
use serde::{Deserialize, Serialize};

const TERM: i32 = Signal::SIGTERM as i32;
const KILL: i32 = Signal::SIGKILL as i32;

/// Time that killed ranks have to end.
const BURIAL: Duration = Duration::from_secs(5);

/// Time that the reader of the output has for the last lines: the minimum, and the maximum after a
/// second signal.
const LAST_LINES: Duration = Duration::from_secs(1);

/// Time that ranks have to start.
const START: Duration = Duration::from_secs(120);

/// Exit code if no rank has failed, but a rank has not started.
const NOT_STARTED: u8 = 1;

/// State of an attempt and its ranks.
#[derive(Debug)]
pub(super) struct Supervisor {
    ranks: Vec<RankProgress>,
    /// Time by which all ranks must have started.
    due: Instant,
    grace: Duration,
    stage: LaunchStage,
    /// The last signal that the launcher received.
    signal: Option<i32>,
    first: Option<Bad>,
    /// Time of the first failure or signal, since which the job is being ended.
    since: Option<Instant>,
    /// Time of the second signal.
    hurried: Option<Instant>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum RankProgress {
    /// The rank has not started yet.
    Awaited,
    Running,
    Ended,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum LaunchStage {
    Running,
    /// A rank has failed. The others have until this time.
    Ending(Instant),
    /// All ranks were killed, and have until this time to end.
    Killed(Instant),
    /// Ranks did not end in time, and the process that started them was killed.
    Abandoned,
}

/// The first failure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Bad {
    /// A rank has failed.
    Rank(u32, ProcessEnd),
    /// A rank did not start in time.
    NotStarted(u32),
    /// A rank had not started when the launcher received a signal, nor when the grace period had
    /// passed.
    Interrupted(u32),
    /// The mpirun has failed.
    Starter(ProcessEnd),
    /// The mpirun has ended with code 0 before its ranks.
    StarterGone,
}

/// An action of the launcher.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum LaunchAction {
    /// Send a signal to the command of this rank.
    Signal(u32, i32),
    /// Kill the started processes with their process groups.
    KillStarted,
    /// Print a line for the user.
    Say(String),
}

impl Supervisor {
    /// Creates the supervisor of ranks that were started at `now`.
    pub(super) fn new(ranks: u32, grace: Duration, now: Instant) -> Self {
        let ranks = vec![RankProgress::Awaited; ranks as usize];
        Self {
            ranks,
            due: now + START,
            grace,
            stage: LaunchStage::Running,
            signal: None,
            first: None,
            since: None,
            hurried: None,
        }
    }

    /// Records that a rank has started. Returns the signal that it has missed.
    pub(super) fn joined(&mut self, rank: u32) -> Vec<LaunchAction> {
        let Some(state) = self.ranks.get_mut(rank as usize) else { return Vec::new() };
        *state = RankProgress::Running;
        let missed = match (self.stage, self.signal) {
            (LaunchStage::Killed(_) | LaunchStage::Abandoned, _) => Some(KILL),
            (_, Some(signal)) => Some(signal),
            (LaunchStage::Ending(_), None) => Some(TERM),
            (LaunchStage::Running, None) => None,
        };
        missed.map(|signal| LaunchAction::Signal(rank, signal)).into_iter().collect()
    }

    /// Records that a rank has ended.
    pub(super) fn ended(&mut self, rank: u32, end: ProcessEnd, now: Instant) -> Vec<LaunchAction> {
        let Some(state) = self.ranks.get_mut(rank as usize) else { return Vec::new() };
        *state = RankProgress::Ended;
        if end.is_bad() { self.fail(Bad::Rank(rank, end), now) } else { Vec::new() }
    }

    /// Records that the process that starts the ranks has ended, so that the remaining ranks never
    /// start.
    pub(super) fn alone(&mut self, end: ProcessEnd, now: Instant) -> Vec<LaunchAction> {
        let is_early = !self.is_over();
        for rank in self.ranks.iter_mut().filter(|rank| **rank == RankProgress::Awaited) {
            *rank = RankProgress::Ended;
        }
        match end.is_bad() {
            true => self.fail(Bad::Starter(end), now),
            false if is_early => self.fail(Bad::StarterGone, now),
            false => Vec::new(),
        }
    }

    fn fail(&mut self, bad: Bad, now: Instant) -> Vec<LaunchAction> {
        self.first.get_or_insert(bad);
        self.since.get_or_insert(now);
        if self.stage != LaunchStage::Running {
            return Vec::new();
        }
        self.stage = LaunchStage::Ending(now + self.grace);
        let left: Vec<u32> = self.running().collect();
        let grace = self.grace.as_secs();
        match (left.is_empty(), self.signal) {
            (true, _) => Vec::new(),
            // The other ranks have already received their signal, and are handling it.
            (false, Some(_)) => {
                vec![LaunchAction::Say(format!("{bad}; the others get SIGKILL after {grace} s"))]
            }
            (false, None) => {
                let said = format!("{bad}; the others get SIGTERM, and SIGKILL after {grace} s");
                let all = left.into_iter().map(|rank| LaunchAction::Signal(rank, TERM));
                [LaunchAction::Say(said)].into_iter().chain(all).collect()
            }
        }
    }

    /// Records a signal that the launcher received. The first one is passed on, and the second one
    /// kills all ranks.
    pub(super) fn signal(&mut self, signal: i32, now: Instant) -> Vec<LaunchAction> {
        let name = name_of(signal);
        let is_first = self.signal.replace(signal).is_none();
        self.since.get_or_insert(now);
        if !is_first {
            self.hurried.get_or_insert(now);
            return self.kill(&format!("{name} again"), now);
        }
        if self.is_over() {
            let left = self.last_lines().as_secs();
            let said = format!(
                "{name}: all ranks have ended; lines that are not read within {left} s are lost"
            );
            return vec![LaunchAction::Say(said)];
        }
        // A starter such as mpirun may never start the ranks.
        self.due = self.due.min(now + self.grace);
        let all = self.running().map(|rank| LaunchAction::Signal(rank, signal));
        let said = format!("{name} is passed on to all ranks; a second signal kills them");
        [LaunchAction::Say(said)].into_iter().chain(all).collect()
    }

    /// Returns the time at which lines that nobody reads are lost. `None` while the job is not
    /// being ended. `progress` is the time of the reader's last progress, and `over` the time at
    /// which all ranks had ended.
    ///
    /// While ranks run, a reader that blocks for the grace period must not delay them: they may be
    /// saving a checkpoint. After their end the grace period counts from the end, even if the
    /// reader reads slowly. After a second signal it is short.
    pub(super) fn lines_until(&self, progress: Instant, over: Option<Instant>) -> Option<Instant> {
        let since = self.since?;
        let until = match over {
            None => since.max(progress) + self.last_lines(),
            Some(over) => since.max(over) + self.last_lines(),
        };
        Some(match (self.hurried, over) {
            (Some(at), Some(over)) => until.min(at.max(over) + LAST_LINES),
            _ => until,
        })
    }

    /// Returns whether the job is being ended, because of a failure or a signal.
    pub(super) fn is_ending(&self) -> bool {
        self.since.is_some()
    }

    /// Returns whether a second signal has arrived.
    pub(super) fn is_hurried(&self) -> bool {
        self.hurried.is_some()
    }

    /// Returns the time for the last lines, which is not zero even if the grace period is.
    fn last_lines(&self) -> Duration {
        self.grace.max(LAST_LINES)
    }

    /// Returns the time at which to call [`late`](Self::late).
    pub(super) fn deadline(&self) -> Option<Instant> {
        match self.stage {
            LaunchStage::Ending(until) | LaunchStage::Killed(until) => Some(until),
            LaunchStage::Running => self.missing().map(|_| self.due),
            LaunchStage::Abandoned => None,
        }
    }

    /// Reacts to the passed deadline.
    pub(super) fn late(&mut self, now: Instant) -> Vec<LaunchAction> {
        match self.stage {
            LaunchStage::Ending(_) => {
                self.kill(&format!("the grace of {} s is over", self.grace.as_secs()), now)
            }
            LaunchStage::Killed(_) => {
                self.stage = LaunchStage::Abandoned;
                let left = listed(self.alive());
                vec![
                    LaunchAction::KillStarted,
                    LaunchAction::Say(format!("gave up waiting for {left}")),
                ]
            }
            LaunchStage::Running => match self.missing() {
                Some(rank) => match self.signal {
                    None => self.fail(Bad::NotStarted(rank), now),
                    Some(_) => {
                        self.first.get_or_insert(Bad::Interrupted(rank));
                        self.kill(&format!("rank {rank} has not started"), now)
                    }
                },
                None => Vec::new(),
            },
            LaunchStage::Abandoned => Vec::new(),
        }
    }

    fn kill(&mut self, why: &str, now: Instant) -> Vec<LaunchAction> {
        if matches!(self.stage, LaunchStage::Killed(_) | LaunchStage::Abandoned) {
            return Vec::new();
        }
        let left: Vec<u32> = self.running().collect();
        if left.is_empty() && !self.is_over() {
            self.stage = LaunchStage::Abandoned;
            let said = format!("{why}: SIGKILL for the processes that start the ranks");
            return vec![LaunchAction::Say(said), LaunchAction::KillStarted];
        }
        if left.is_empty() {
            return Vec::new();
        }
        self.stage = LaunchStage::Killed(now + BURIAL);
        let said = format!("{why}: SIGKILL for {}", listed(left.iter().copied()));
        let all = left.into_iter().map(|rank| LaunchAction::Signal(rank, KILL));
        [LaunchAction::Say(said)].into_iter().chain(all).collect()
    }

    /// Returns whether all ranks have ended, or the launcher has given up waiting.
    pub(super) fn is_over(&self) -> bool {
        self.stage == LaunchStage::Abandoned
            || self.ranks.iter().all(|rank| *rank == RankProgress::Ended)
    }

    /// Returns whether this rank has not started yet.
    pub(super) fn awaits(&self, rank: u32) -> bool {
        self.ranks.get(rank as usize) == Some(&RankProgress::Awaited)
    }

    /// Returns the end of the attempt, which has lost `lost` lines.
    pub(super) fn outcome(&self, lost: u64) -> AttemptEnd {
        let is_abandoned = self.ranks.iter().any(|rank| *rank != RankProgress::Ended);
        AttemptEnd { first: self.first, signal: self.signal, is_abandoned, lost }
    }

    /// Returns the first rank that has not started yet.
    fn missing(&self) -> Option<u32> {
        (0..)
            .zip(&self.ranks)
            .find(|(_, state)| **state == RankProgress::Awaited)
            .map(|(rank, _)| rank)
    }

    /// Returns the ranks that have not ended, started or not.
    fn alive(&self) -> impl Iterator<Item = u32> {
        let alive =
            |(rank, state): (u32, &RankProgress)| (*state != RankProgress::Ended).then_some(rank);
        (0..).zip(&self.ranks).filter_map(alive)
    }

    fn running(&self) -> impl Iterator<Item = u32> {
        let running =
            |(rank, state): (u32, &RankProgress)| (*state == RankProgress::Running).then_some(rank);
        (0..).zip(&self.ranks).filter_map(running)
    }
}

/// Names ranks, at least one.
fn listed(ranks: impl Iterator<Item = u32>) -> String {
    let ranks: Vec<String> = ranks.map(|rank| rank.to_string()).collect();
    match &*ranks {
        [rank] => format!("rank {rank}"),
        _ => format!("ranks {}", ranks.join(", ")),
    }
}

fn name_of(signal: i32) -> &'static str {
    Signal::try_from(signal).map_or("a signal", Signal::as_str)
}

impl fmt::Display for Bad {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Rank(rank, end) => write!(f, "rank {rank} {end}"),
            Self::NotStarted(rank) => {
                write!(f, "rank {rank} did not start within {} s", START.as_secs())
            }
            Self::Interrupted(rank) => write!(f, "rank {rank} had not started"),
            Self::Starter(end) => write!(f, "mpirun {end}"),
            Self::StarterGone => f.write_str("mpirun ended before its ranks"),
        }
    }
}

/// End of an attempt.
#[derive(Clone, Copy, Debug)]
pub(super) struct AttemptEnd {
    pub(super) first: Option<Bad>,
    /// The last signal that the launcher received.
    pub(super) signal: Option<i32>,
    /// Whether ranks that have not ended were given up.
    pub(super) is_abandoned: bool,
    /// Number of ranks' lines that were not written.
    pub(super) lost: u64,
}

/// Whether another attempt may follow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Outlook {
    Again,
    Last,
}

impl AttemptEnd {
    /// Returns the exit code of the first failure. Without one, a signal counts if ranks were given
    /// up or lines were lost: then the reaction of the ranks to the signal is unknown.
    pub(super) fn code(&self) -> u8 {
        let of_signal = self.signal.map(|signal| ProcessEnd::Signal(signal).exit_code());
        match self.first {
            Some(Bad::Rank(_, end) | Bad::Starter(end)) => end.exit_code(),
            Some(Bad::NotStarted(_) | Bad::Interrupted(_) | Bad::StarterGone) => {
                of_signal.unwrap_or(NOT_STARTED)
            }
            None if self.is_abandoned || self.lost > 0 => of_signal.unwrap_or(NOT_STARTED),
            None => 0,
        }
    }

    /// Returns whether no attempt may follow, because there was no failure, or because the launcher
    /// received a signal.
    pub(super) fn is_final(&self) -> bool {
        self.signal.is_some() || self.first.is_none()
    }

    /// Returns the line for the user. `None` if all ranks have succeeded, even if lines of them
    /// were lost.
    pub(super) fn tell(&self, number: u32, outlook: Outlook) -> Option<String> {
        let signal = self.signal.map(name_of);
        Some(match (self.first, signal) {
            (Some(bad), None) if outlook == Outlook::Again => {
                format!("attempt {number} failed: {bad}; starting again as attempt {}", number + 1)
            }
            (Some(bad @ (Bad::Interrupted(_) | Bad::StarterGone)), Some(signal)) => {
                format!("attempt {number} was interrupted by {signal}: {bad}")
            }
            (Some(bad), _) => format!("attempt {number} failed: {bad}"),
            (None, Some(signal)) if self.code() != 0 => {
                format!("attempt {number} was interrupted by {signal}")
            }
            (None, _) => return None,
        })
    }
}

/// End of a process: an exit code, or a signal.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum ProcessEnd {
    /// Exit code of a process that ended by itself.
    Code(i32),
    /// Signal that killed the process.
    Signal(i32),
}

impl ProcessEnd {
    pub(super) fn of(status: ExitStatus) -> Self {
        match (status.code(), status.signal()) {
            (Some(code), _) => Self::Code(code),
            (None, signal) => Self::Signal(signal.unwrap_or(Signal::SIGKILL as i32)),
        }
    }

    /// End of a process that disappeared before it could report its end.
    pub(super) const LOST: Self = Self::Signal(Signal::SIGKILL as i32);

    pub(super) fn is_bad(self) -> bool {
        self != Self::Code(0)
    }

    /// Returns the exit code as in shells, which is 128 plus the signal's number for a signal.
    pub(super) fn exit_code(self) -> u8 {
        let code = match self {
            Self::Code(code) => code,
            Self::Signal(signal) => 128_i32.saturating_add(signal),
        };
        // The system keeps only these bits of an exit code.
        u8::try_from(code & 0xff).unwrap_or(u8::MAX)
    }
}

impl fmt::Display for ProcessEnd {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::Code(code) => write!(f, "ended with exit code {code}"),
            Self::Signal(signal) => match Signal::try_from(signal) {
                Ok(known) => write!(f, "was killed by signal {signal} ({known})"),
                Err(_) => write!(f, "was killed by signal {signal}"),
            },
        }
    }
}
