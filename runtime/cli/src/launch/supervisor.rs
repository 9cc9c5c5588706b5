//! The reaction to the end of a rank, to a signal, and to a deadline. A pure state machine: its input is events with their times, its
//! output is actions.

use std::fmt;
use std::time::{Duration, Instant};

use nix::sys::signal::Signal;

use super::end::End;

const TERM: i32 = Signal::SIGTERM as i32;
const KILL: i32 = Signal::SIGKILL as i32;

/// How long killed ranks may take to end.
const BURIAL: Duration = Duration::from_secs(5);

/// How long ranks may take to start.
const START: Duration = Duration::from_secs(120);

/// The exit code if no rank has failed, but a rank has not started.
const NOT_STARTED: u8 = 1;

/// The ranks of an attempt.
#[derive(Debug)]
pub(super) struct Supervisor {
    ranks: Vec<Rank>,
    /// The time by which all ranks must have started.
    due: Instant,
    grace: Duration,
    stage: Stage,
    /// The last signal that the launcher got.
    signal: Option<i32>,
    first: Option<Bad>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Rank {
    /// Not started yet.
    Awaited,
    Running,
    Ended,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    Running,
    /// A rank has failed: the others have until this time.
    Ending(Instant),
    /// All ranks were killed, and have until this time to end.
    Killed(Instant),
    /// Ranks have not ended in time, and the process that started them was killed.
    Abandoned,
}

/// The first failure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Bad {
    /// The rank that failed; `None` for mpirun.
    pub(super) rank: Option<u32>,
    /// How it ended. `None` for a rank that has not started in time, and for an mpirun that ended with code 0 before its ranks.
    pub(super) end: Option<End>,
}

/// An action of the launcher.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Action {
    /// Send the command of this rank a signal.
    Signal(u32, i32),
    /// Kill the started processes with their process groups.
    KillStarted,
    /// Print a line for the user.
    Say(String),
}

impl Supervisor {
    /// The supervisor of ranks that were started at `now`.
    pub(super) fn new(ranks: u32, grace: Duration, now: Instant) -> Self {
        let ranks = vec![Rank::Awaited; ranks as usize];
        Self { ranks, due: now + START, grace, stage: Stage::Running, signal: None, first: None }
    }

    /// A rank has started. It gets the signal that it has missed.
    pub(super) fn joined(&mut self, rank: u32) -> Vec<Action> {
        let Some(state) = self.ranks.get_mut(rank as usize) else { return Vec::new() };
        *state = Rank::Running;
        let missed = match (self.stage, self.signal) {
            (Stage::Killed(_) | Stage::Abandoned, _) => Some(KILL),
            (_, Some(signal)) => Some(signal),
            (Stage::Ending(_), None) => Some(TERM),
            (Stage::Running, None) => None,
        };
        missed.map(|signal| Action::Signal(rank, signal)).into_iter().collect()
    }

    /// A rank has ended.
    pub(super) fn ended(&mut self, rank: u32, end: End, now: Instant) -> Vec<Action> {
        let Some(state) = self.ranks.get_mut(rank as usize) else { return Vec::new() };
        *state = Rank::Ended;
        if end.is_bad() {
            self.fail(Bad { rank: Some(rank), end: Some(end) }, now)
        } else {
            Vec::new()
        }
    }

    /// The process that starts the ranks has ended, so ranks that have not started never will.
    pub(super) fn alone(&mut self, end: End, now: Instant) -> Vec<Action> {
        let is_early = !self.is_over();
        for rank in self.ranks.iter_mut().filter(|rank| **rank == Rank::Awaited) {
            *rank = Rank::Ended;
        }
        match end.is_bad() {
            true => self.fail(Bad { rank: None, end: Some(end) }, now),
            false if is_early => self.fail(Bad { rank: None, end: None }, now),
            false => Vec::new(),
        }
    }

    fn fail(&mut self, bad: Bad, now: Instant) -> Vec<Action> {
        self.first.get_or_insert(bad);
        if self.stage != Stage::Running {
            return Vec::new();
        }
        self.stage = Stage::Ending(now + self.grace);
        let left: Vec<u32> = self.running().collect();
        let grace = self.grace.as_secs();
        match (left.is_empty(), self.signal) {
            (true, _) => Vec::new(),
            // The others have received their signal already, and are handling it.
            (false, Some(_)) => {
                vec![Action::Say(format!("{bad}; the others get SIGKILL after {grace} s"))]
            }
            (false, None) => {
                let said = format!("{bad}; the others get SIGTERM, and SIGKILL after {grace} s");
                let all = left.into_iter().map(|rank| Action::Signal(rank, TERM));
                [Action::Say(said)].into_iter().chain(all).collect()
            }
        }
    }

    /// The launcher has got a signal. The first one is passed on, and the second one kills all ranks.
    pub(super) fn signal(&mut self, signal: i32, now: Instant) -> Vec<Action> {
        let name = Signal::try_from(signal).map_or("a signal", Signal::as_str);
        if self.signal.replace(signal).is_some() {
            return self.kill(&format!("{name} again"), now);
        }
        let all = self.running().map(|rank| Action::Signal(rank, signal));
        let said = format!("{name} is passed on to all ranks; a second signal kills them");
        [Action::Say(said)].into_iter().chain(all).collect()
    }

    /// The time at which to call [`late`](Self::late).
    pub(super) fn deadline(&self) -> Option<Instant> {
        match self.stage {
            Stage::Ending(until) | Stage::Killed(until) => Some(until),
            Stage::Running => self.missing().map(|_| self.due),
            Stage::Abandoned => None,
        }
    }

    /// The deadline has passed.
    pub(super) fn late(&mut self, now: Instant) -> Vec<Action> {
        match self.stage {
            Stage::Ending(_) => {
                self.kill(&format!("the grace of {} s is over", self.grace.as_secs()), now)
            }
            Stage::Killed(_) => {
                self.stage = Stage::Abandoned;
                let left = listed(self.running());
                vec![Action::KillStarted, Action::Say(format!("gave up waiting for {left}"))]
            }
            Stage::Running => match self.missing() {
                Some(rank) => self.fail(Bad { rank: Some(rank), end: None }, now),
                None => Vec::new(),
            },
            Stage::Abandoned => Vec::new(),
        }
    }

    fn kill(&mut self, why: &str, now: Instant) -> Vec<Action> {
        if matches!(self.stage, Stage::Killed(_) | Stage::Abandoned) {
            return Vec::new();
        }
        self.stage = Stage::Killed(now + BURIAL);
        let left: Vec<u32> = self.running().collect();
        let said = format!("{why}: SIGKILL for {}", listed(left.iter().copied()));
        let all = left.into_iter().map(|rank| Action::Signal(rank, KILL));
        [Action::Say(said)].into_iter().chain(all).collect()
    }

    /// Whether all ranks have ended, or the launcher has given up waiting.
    pub(super) fn is_over(&self) -> bool {
        self.stage == Stage::Abandoned || self.ranks.iter().all(|rank| *rank == Rank::Ended)
    }

    /// Whether this rank has not started yet.
    pub(super) fn awaits(&self, rank: u32) -> bool {
        self.ranks.get(rank as usize) == Some(&Rank::Awaited)
    }

    pub(super) fn first(&self) -> Option<Bad> {
        self.first
    }

    pub(super) fn signalled(&self) -> Option<i32> {
        self.signal
    }

    /// The first rank that has not started yet.
    fn missing(&self) -> Option<u32> {
        (0..).zip(&self.ranks).find(|(_, state)| **state == Rank::Awaited).map(|(rank, _)| rank)
    }

    fn running(&self) -> impl Iterator<Item = u32> {
        let running = |(rank, state): (u32, &Rank)| (*state == Rank::Running).then_some(rank);
        (0..).zip(&self.ranks).filter_map(running)
    }
}

fn listed(ranks: impl Iterator<Item = u32>) -> String {
    let ranks: Vec<String> = ranks.map(|rank| rank.to_string()).collect();
    match &*ranks {
        [] => "no rank".to_owned(),
        [rank] => format!("rank {rank}"),
        _ => format!("ranks {}", ranks.join(", ")),
    }
}

impl fmt::Display for Bad {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.rank, self.end) {
            (Some(rank), Some(end)) => write!(f, "rank {rank} {end}"),
            (Some(rank), None) => {
                write!(f, "rank {rank} did not start within {} s", START.as_secs())
            }
            (None, Some(end)) => write!(f, "mpirun {end}"),
            (None, None) => f.write_str("mpirun ended before its ranks"),
        }
    }
}

impl Bad {
    pub(super) fn exit_code(&self) -> u8 {
        self.end.map_or(NOT_STARTED, End::exit_code)
    }
}

#[cfg(test)]
mod tests;
