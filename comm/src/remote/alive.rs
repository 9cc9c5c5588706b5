//! Whether the processes of other ranks still run, as far as this machine knows. `REMOTE.md`, "Processes that are gone".

use std::fs;
use std::time::{Duration, Instant};

use hsdp_sharding::Rank;

use super::hello::Hello;
use crate::sync;

/// How often is looked.
const PERIOD: Duration = Duration::from_millis(100);

/// A process of this machine: its number, and when it was started, since numbers are used again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Process {
    id: u32,
    started: u64,
}

/// The processes that are looked at.
#[derive(Debug, Default)]
pub(super) struct Watch {
    watched: Vec<(Rank, Process)>,
    /// Those that were not there when they were last looked for: letters that they had sent may still come.
    suspects: Vec<Rank>,
    looked: Option<Instant>,
}

impl Watch {
    /// Those of the ranks that this machine runs, and can see.
    pub(super) fn of(hellos: &[Hello], own: Rank) -> Self {
        let ranks = (0..).map(Rank::new).zip(hellos);
        let own = hellos.get(own.index()).map(process);
        let others = ranks.filter(|(_, hello)| {
            let process = process(hello);
            Some(process) != own && hello.is_of_this_machine() && is_running(process)
        });
        Self { watched: others.map(|(rank, it)| (rank, process(it))).collect(), ..Self::default() }
    }

    /// The ranks whose processes are gone: were gone twice, so that all that they had sent has come meanwhile.
    pub(super) fn gone(&mut self) -> Vec<Rank> {
        let now = sync::now();
        if self.looked.is_some_and(|looked| now.saturating_duration_since(looked) < PERIOD) {
            return Vec::new();
        }
        self.looked = Some(now);
        let gone = self.watched.iter().filter(|(_, process)| !is_running(*process));
        let gone: Vec<Rank> = gone.map(|(rank, _)| *rank).collect();
        let (still, suspects) = gone.into_iter().partition(|rank| self.suspects.contains(rank));
        self.suspects = suspects;
        self.suspects.extend(&still);
        still
    }

    /// A rank is not looked for any more.
    pub(super) fn forget(&mut self, rank: Rank) {
        self.watched.retain(|(other, _)| *other != rank);
    }
}

fn process(hello: &Hello) -> Process {
    let (id, started) = hello.process();
    Process { id, started }
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
    fn a_process_that_ends_is_gone_at_the_second_look() {
        let mut child = Command::new("cat").stdin(Stdio::piped()).spawn().expect("it starts");
        let own = Hello::of(2, &WorldOptions::default());
        let other = own.clone().by(child.id(), started(child.id()).expect("it runs"));
        let mut watch = Watch::of(&[own.clone(), other], Rank::new(0));
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
    fn another_process_of_the_same_number_is_not_taken_for_it() {
        let own = Hello::of(2, &WorldOptions::default());
        let (id, started) = own.process();
        let other = own.clone().by(id, started + 1);
        let watch = Watch::of(&[own.clone(), other], Rank::new(0));
        assert!(watch.watched.is_empty());
    }
}
