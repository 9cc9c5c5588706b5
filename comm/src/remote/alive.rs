//! Whether the processes of other ranks still run, as far as this machine knows. `REMOTE.md`, "Lost processes".

use std::fs;
use std::time::{Duration, Instant};

use hsdp_sharding::Rank;

use super::hello::Hello;
use crate::sync;

/// How often is looked.
const PERIOD: Duration = Duration::from_millis(100);

/// How many others a rank looks at: the next ones in the order of ranks, after the last one the first. Of processes that are gone, one at
/// least follows a process that runs, and looks.
const LOOKED_AT: usize = 8;

/// A process of this machine: its number, and when it was started, since numbers are used again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Process {
    id: u32,
    started: u64,
}

/// The processes of other ranks on this machine.
#[derive(Debug)]
pub(super) struct Watch {
    own: Rank,
    watched: Vec<(Rank, Process)>,
    /// Those that were not there when they were last looked for: messages that they had sent may still come.
    suspects: Vec<Rank>,
    /// Ranks whose connections have ended, as the transport has reported before.
    disconnected: Vec<Rank>,
    looked: Option<Instant>,
}

impl Watch {
    pub(super) fn of(own: Rank) -> Self {
        let (watched, suspects) = (Vec::new(), Vec::new());
        Self { own, watched, suspects, disconnected: Vec::new(), looked: None }
    }

    /// Watches the process of a hello, if it is another process of this machine, which sees it.
    pub(super) fn see(&mut self, rank: Rank, hello: &Hello) {
        let (id, started) = hello.process();
        let process = Process { id, started };
        if id != std::process::id() && hello.is_of_this_machine() && is_running(process) {
            self.watched.push((rank, process));
            self.watched.sort_unstable_by_key(|(rank, _)| *rank);
        }
    }

    fn looked_at(&self) -> impl Iterator<Item = &(Rank, Process)> {
        let next = self.watched.partition_point(|(rank, _)| *rank < self.own);
        let (before, after) = self.watched.split_at(next);
        after.iter().chain(before).take(LOOKED_AT)
    }

    /// The ranks whose processes are gone: were gone twice, so that all that they had sent has come meanwhile.
    pub(super) fn gone(&mut self) -> Vec<Rank> {
        let now = sync::now();
        if self.looked.is_some_and(|looked| now.saturating_duration_since(looked) < PERIOD) {
            return Vec::new();
        }
        self.looked = Some(now);
        let gone = self.looked_at().filter(|(_, process)| !is_running(*process));
        let gone: Vec<Rank> = gone.map(|(rank, _)| *rank).collect();
        let (still, suspects) = gone.into_iter().partition(|rank| self.suspects.contains(rank));
        self.suspects = suspects;
        self.suspects.extend(&still);
        still
    }

    /// Whether the process of a rank is known to be gone now.
    pub(super) fn is_gone(&self, rank: Rank) -> bool {
        let watched = self.watched.iter().find(|(other, _)| *other == rank);
        watched.is_some_and(|(_, process)| !is_running(*process))
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
        self.watched.retain(|(other, _)| *other != rank);
    }
}

/// When a process was started, as its machine counts; `None` if it is gone, or nothing is known of it.
pub(super) fn started(id: u32) -> Option<u64> {
    let stat = fs::read_to_string(format!("/proc/{id}/stat")).ok()?;
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

fn is_running(process: Process) -> bool {
    started(process.id) == Some(process.started)
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use std::process::{Command, Stdio};

    use super::*;
    use crate::WorldOptions;

    #[test]
    fn a_rank_looks_at_those_that_follow_it() {
        let process = Process { id: 1, started: 1 };
        let watched = (0..20).filter(|rank| *rank != 15).map(|rank| (Rank::new(rank), process));
        let watch = Watch { watched: watched.collect(), ..Watch::of(Rank::new(15)) };
        let looked_at: Vec<_> = watch.looked_at().map(|(rank, _)| rank.index()).collect();
        assert_eq!(looked_at, [16, 17, 18, 19, 0, 1, 2, 3]);
    }

    #[test]
    fn a_process_that_ends_is_gone_at_the_second_look() {
        let mut child = Command::new("cat").stdin(Stdio::piped()).spawn().expect("it starts");
        let own = Hello::of(2, &WorldOptions::default());
        let other = own.clone().by(child.id(), started(child.id()).expect("it runs"));
        let mut watch = Watch::of(Rank::new(0));
        watch.see(Rank::new(0), &own);
        watch.see(Rank::new(1), &other);
        assert_eq!(watch.gone(), []);
        drop(child.stdin.take());
        child.wait().expect("it ends");
        watch.looked = None;
        assert_eq!(watch.gone(), [], "what it has sent may still come");
        assert_eq!(watch.gone(), [], "it is too early to look again");
        watch.looked = None;
        assert_eq!(watch.gone(), [Rank::new(1)]);
        watch.forget(Rank::new(1));
        watch.looked = None;
        assert_eq!(watch.gone(), []);
    }

    #[test]
    fn an_ended_connection_alone_does_not_show_that_a_process_is_gone() {
        let mut child = Command::new("cat").stdin(Stdio::piped()).spawn().expect("it starts");
        let own = Hello::of(2, &WorldOptions::default());
        let other = own.clone().by(child.id(), started(child.id()).expect("it runs"));
        let mut watch = Watch::of(Rank::new(0));
        watch.see(Rank::new(1), &other);
        for elsewhere in [Rank::new(1), Rank::new(2)] {
            assert!(!watch.is_settled(elsewhere), "it may be ending");
            assert!(watch.is_settled(elsewhere) && !watch.is_gone(elsewhere));
        }
        drop(child.stdin.take());
        child.wait().expect("it ends");
        assert!(watch.is_gone(Rank::new(1)) && !watch.is_gone(Rank::new(2)));
        watch.disconnected.clear();
        assert!(watch.is_settled(Rank::new(1)), "a process that is gone needs no second look");
    }

    #[test]
    fn another_process_of_the_same_number_is_not_taken_for_it() {
        let own = Hello::of(2, &WorldOptions::default());
        let (id, started) = own.process();
        let parent = std::os::unix::process::parent_id();
        assert_ne!(id, parent);
        let mut watch = Watch::of(Rank::new(0));
        watch.see(Rank::new(1), &own.by(parent, started + 1));
        assert!(watch.watched.is_empty());
    }
}
