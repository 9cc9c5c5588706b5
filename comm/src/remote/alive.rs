//! Whether the processes of other ranks still run, as far as this machine knows. `REMOTE.md`, "Lost processes".

use std::collections::BTreeMap;
use std::time::{Duration, Instant};
use std::{fs, io};

use hsdp_sharding::Rank;

use super::hello::ProcessHello;
use crate::sync;

/// The time between two looks at the other ranks.
const PERIOD: Duration = Duration::from_millis(100);

/// How many others a rank looks at: the next ones in the order of ranks, after the last one the first. Of processes that are gone, one at
/// least follows a process that runs, and looks.
const LOOKED_AT: usize = 8;

/// A process of this machine: its number, and when it was started, since numbers are used again.
type Process = (u32, u64);

/// The processes of other ranks on this machine.
pub(super) struct Processes {
    own: Rank,
    watched: BTreeMap<Rank, Process>,
    /// Those that were not there when they were last looked for: messages that they had sent may still come.
    suspects: Vec<Rank>,
    /// Ranks whose connections have ended, as the transport has reported before.
    disconnected: Vec<Rank>,
    looked: Option<Instant>,
}

impl Processes {
    pub(super) fn of(own: Rank) -> Self {
        let watched = BTreeMap::new();
        let suspects = Vec::new();
        Self { own, watched, suspects, disconnected: Vec::new(), looked: None }
    }

    /// Watches the process of a hello, if it is another process of this machine, which sees it.
    pub(super) fn see(&mut self, rank: Rank, hello: &ProcessHello) {
        let process = (hello.process, hello.started);
        let is_other = process.0 != std::process::id() && hello.is_of_this_machine();
        if is_other && started(process.0) == Some(process.1) {
            self.watched.insert(rank, process);
        }
    }

    fn looked_at(&self) -> impl Iterator<Item = (&Rank, &Process)> {
        let before = self.watched.range(..self.own);
        let after = self.watched.range(self.own..);
        after.chain(before).take(LOOKED_AT)
    }

    /// The ranks whose processes are gone: were gone twice, so that all that they had sent has come meanwhile.
    pub(super) fn gone(&mut self) -> Vec<Rank> {
        let now = sync::now();
        if self.looked.is_some_and(|looked| now.saturating_duration_since(looked) < PERIOD) {
            return Vec::new();
        }
        self.looked = Some(now);
        let gone = self.looked_at().filter(|(_, process)| !is_running(**process));
        let gone: Vec<Rank> = gone.map(|(rank, _)| *rank).collect();
        let (still, suspects) = gone.into_iter().partition(|rank| self.suspects.contains(rank));
        self.suspects = suspects;
        self.suspects.extend(&still);
        still
    }

    /// Whether the process of a rank is known to be gone now.
    pub(super) fn is_gone(&self, rank: Rank) -> bool {
        self.watched.get(&rank).is_some_and(|process| !is_running(*process))
    }

    /// Whether it is settled if the process of a rank whose connection has ended is gone: it is, or it still ran at an earlier look. A
    /// process that is ending closes its connections shortly before it is gone.
    pub(super) fn is_settled(&mut self, rank: Rank) -> bool {
        if self.is_gone(rank) || self.disconnected.contains(&rank) {
            return true;
        }
        self.disconnected.push(rank);
        false
    }

    /// A rank is not looked for any more.
    pub(super) fn forget(&mut self, rank: Rank) {
        self.watched.remove(&rank);
    }
}

/// When a process was started, as its machine counts; `None` if it is gone, or nothing is known of it.
pub(super) fn started(id: u32) -> Option<u64> {
    started_in(&stat(id).ok()?)
}

fn stat(id: u32) -> io::Result<String> {
    fs::read_to_string(format!("/proc/{id}/stat"))
}

/// Returns when the process was started, by its line in `/proc`; `None` if it has ended.
fn started_in(stat: &str) -> Option<u64> {
    // The name of the program is in parentheses, and may have anything in it.
    let (_, fields) = stat.rsplit_once(") ")?;
    let mut fields = fields.split_ascii_whitespace();
    let state = fields.next()?;
    if ["Z", "X"].contains(&state) {
        return None;
    }
    // The 22nd field of all: two were before the parenthesis, and one was taken.
    fields.nth(18)?.parse().ok()
}

fn is_running((id, since): Process) -> bool {
    may_run(stat(id).as_deref(), since)
}

/// Returns whether a process that was started at `since` may still run, by its line in `/proc`. A
/// process without memory or descriptors for that look sees nothing, and must not take others for
/// gone.
fn may_run(stat: Result<&str, &io::Error>, since: u64) -> bool {
    match stat {
        Ok(stat) => started_in(stat) == Some(since),
        Err(error) => {
            let is_gone = error.kind() == io::ErrorKind::NotFound;
            !is_gone && error.raw_os_error() != Some(NO_SUCH_PROCESS)
        }
    }
}

/// The error of Linux (ESRCH) for a process that ends between the opening of its file and the
/// reading.
const NO_SUCH_PROCESS: i32 = 3;

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use std::process::{Command, Stdio};

    use super::*;
    use crate::WorldOptions;

    /// The hello of another process.
    fn of(own: &ProcessHello, (process, started): Process) -> ProcessHello {
        let mut other = own.clone();
        (other.process, other.started) = (process, started);
        other
    }

    #[test]
    fn a_rank_looks_at_those_that_follow_it() {
        let watched = (0..20).filter(|rank| *rank != 15).map(|rank| (Rank::new(rank), (1, 1)));
        let processes = Processes { watched: watched.collect(), ..Processes::of(Rank::new(15)) };
        let looked_at: Vec<_> = processes.looked_at().map(|(rank, _)| rank.index()).collect();
        assert_eq!(looked_at, [16, 17, 18, 19, 0, 1, 2, 3]);
    }

    #[test]
    fn a_process_that_ends_is_gone_at_the_second_look() {
        let mut child = Command::new("cat").stdin(Stdio::piped()).spawn().expect("it starts");
        let own = ProcessHello::of(2, &WorldOptions::default());
        let other = of(&own, (child.id(), started(child.id()).expect("it runs")));
        let mut processes = Processes::of(Rank::new(0));
        processes.see(Rank::new(0), &own);
        processes.see(Rank::new(1), &other);
        assert_eq!(processes.gone(), []);
        drop(child.stdin.take());
        child.wait().expect("it ends");
        processes.looked = None;
        assert_eq!(processes.gone(), [], "what it has sent may still come");
        assert_eq!(processes.gone(), [], "it is too early to look again");
        processes.looked = None;
        assert_eq!(processes.gone(), [Rank::new(1)]);
        processes.forget(Rank::new(1));
        processes.looked = None;
        assert_eq!(processes.gone(), []);
    }

    #[test]
    fn an_ended_connection_alone_does_not_show_that_a_process_is_gone() {
        let mut child = Command::new("cat").stdin(Stdio::piped()).spawn().expect("it starts");
        let own = ProcessHello::of(2, &WorldOptions::default());
        let other = of(&own, (child.id(), started(child.id()).expect("it runs")));
        let mut processes = Processes::of(Rank::new(0));
        processes.see(Rank::new(1), &other);
        for elsewhere in [Rank::new(1), Rank::new(2)] {
            assert!(!processes.is_settled(elsewhere), "it may be ending");
            assert!(processes.is_settled(elsewhere) && !processes.is_gone(elsewhere));
        }
        drop(child.stdin.take());
        child.wait().expect("it ends");
        assert!(processes.is_gone(Rank::new(1)) && !processes.is_gone(Rank::new(2)));
        processes.disconnected.clear();
        assert!(processes.is_settled(Rank::new(1)), "a process that is gone needs no second look");
    }

    #[test]
    fn a_look_that_fails_for_want_of_something_shows_no_end() {
        let lost = |error: io::Error| !may_run(Err(&error), 1);
        assert!(lost(io::ErrorKind::NotFound.into()) && lost(io::Error::from_raw_os_error(3)));
        // ENOMEM, EMFILE, ENFILE, and the error of a string that cannot grow.
        for code in [12, 24, 23] {
            assert!(!lost(io::Error::from_raw_os_error(code)));
        }
        assert!(!lost(io::ErrorKind::OutOfMemory.into()));
    }

    #[test]
    fn another_process_of_the_same_number_is_not_taken_for_it() {
        let own = ProcessHello::of(2, &WorldOptions::default());
        let id = own.process;
        let started = own.started;
        let parent = std::os::unix::process::parent_id();
        assert_ne!(id, parent);
        let mut processes = Processes::of(Rank::new(0));
        processes.see(Rank::new(1), &of(&own, (parent, started + 1)));
        assert!(processes.watched.is_empty());
    }
}
