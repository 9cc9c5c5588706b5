//! One attempt: a start of all ranks, until all have ended.

use std::collections::{HashMap, HashSet};
use std::os::unix::net::UnixStream;
use std::process::Child;
use std::sync::mpsc::{Receiver, Sender, TryRecvError};
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};
use std::{io, thread};

use nix::sys::signal::{Signal, killpg};
use nix::unistd::Pid;

use super::frame::{LauncherOrder, LineWindow, await_end, cost, each_line, pipes_of, send};
use super::job::LaunchJob;
use super::ranks::{AttendantSocket, JobEvent, News};
use super::start_thread;
use super::supervisor::{AttemptEnd, LaunchAction, ProcessEnd, Supervisor};
use super::terminal::{LineSource, Terminal};

/// Time that the started processes have to end after all ranks have ended.
const LEAVING: Duration = Duration::from_secs(10);

/// Time that mpirun's output may stay open and empty after mpirun has ended. A process that it has
/// left behind may hold it open.
const DRAINING: Duration = Duration::from_secs(2);

/// Interval between checks for lines that wait for a reader.
const LOOK: Duration = Duration::from_millis(50);

/// Time that attendants have to send lines that are already given up.
const FLUSHING: Duration = Duration::from_secs(5);

/// Time that killed processes have to end.
const BURIAL: Duration = Duration::from_secs(2);

/// Settings of an attempt.
pub(super) struct LaunchAttempt<'a> {
    pub(super) number: u32,
    pub(super) job: &'a LaunchJob,
    pub(super) grace: Duration,
    pub(super) terminal: &'a Arc<Terminal>,
}

/// An attempt in progress.
struct RunningAttempt<'a> {
    attempt: &'a LaunchAttempt<'a>,
    supervisor: Supervisor,
    orders: HashMap<u32, Arc<UnixStream>>,
    /// The mpirun, or the attendants by rank. `None` for processes that have ended.
    started: Vec<Option<Child>>,
    /// Ranks whose lines have not all arrived.
    open: HashSet<u32>,
    /// Closes when all lines of the started processes themselves have arrived.
    drained: Receiver<()>,
    /// Time at which all ranks had ended.
    over: Option<Instant>,
}

impl LaunchAttempt<'_> {
    /// Runs the attempt. Must be called on the main thread, because a started process dies with the
    /// thread that starts it.
    pub(super) fn run(
        &self,
        events: &Sender<News>,
        received: &Receiver<News>,
        ranks: &AttendantSocket,
    ) -> io::Result<AttemptEnd> {
        let mut children = self.job.start(self.number, &ranks.socket())?;
        let (open, drained) = mpsc::channel();
        for (place, child) in children.iter_mut().enumerate() {
            self.show(child, &open)?;
            self.watch(
                place,
                Pid::from_raw(i32::try_from(child.id()).map_err(io::Error::other)?),
                events,
            )?;
        }
        let mut running = RunningAttempt {
            attempt: self,
            supervisor: Supervisor::new(self.job.ranks(), self.grace, Instant::now()),
            orders: HashMap::new(),
            started: children.into_iter().map(Some).collect(),
            open: HashSet::new(),
            drained,
            over: None,
        };
        // The threads that show lines have clones.
        drop(open);
        running.until_over(received);
        running.over = Some(Instant::now());
        running.until(received, |running| running.open.is_empty());
        running.leave(received);
        running.until_shown(received);
        // A signal that arrived meanwhile belongs to this attempt. The next attempt would start its
        // ranks only to end them.
        received.try_iter().for_each(|news| {
            let actions = running.hear(news);
            running.act(actions);
        });
        Ok(running.supervisor.outcome(self.terminal.tell_lost()))
    }

    /// Shows the lines that a started process itself writes, such as mpirun's messages. Clones of
    /// `open` live until the last line.
    fn show(&self, child: &mut Child, open: &Sender<()>) -> io::Result<()> {
        let name = self.job.starter().unwrap_or_default();
        for (stream, from) in pipes_of(child) {
            let terminal = Arc::clone(self.terminal);
            let open = open.clone();
            let window = Arc::new(LineWindow::new());
            start_thread(move || {
                // A pipe that fails has no further lines.
                let _ = each_line(from, |line| {
                    window.take(cost(&line));
                    terminal.line(name, LineSource::Starter(Arc::clone(&window)), stream, &line);
                    Ok(())
                });
                drop(open);
            })?;
        }
        Ok(())
    }

    /// Sends an event when the process has ended. Does not reap it, so its pid stays valid.
    fn watch(&self, place: usize, pid: Pid, events: &Sender<News>) -> io::Result<()> {
        let attempt = self.number;
        let events = events.clone();
        start_thread(move || {
            await_end(pid);
            let _ =
                events.send(News { attempt: Some(attempt), event: JobEvent::Started { place } });
        })
    }
}

impl RunningAttempt<'_> {
    fn until_over(&mut self, received: &Receiver<News>) {
        while !self.supervisor.is_over() {
            let now = Instant::now();
            let look = self.supervisor.is_ending().then_some(now + LOOK);
            let deadline = self.supervisor.deadline();
            let actions = match deadline.into_iter().chain(look).min() {
                _ if deadline.is_some_and(|deadline| deadline <= now) => self.supervisor.late(now),
                Some(until) => match received.recv_timeout(until - now) {
                    Ok(news) => self.hear(news),
                    Err(_) => Vec::new(),
                },
                None => match received.recv() {
                    Ok(news) => self.hear(news),
                    Err(_) => return,
                },
            };
            self.act(actions);
            self.give_up_lines();
        }
    }

    /// Waits until `done` returns true, after the end of all ranks. Returns earlier once lines have
    /// been given up for [`FLUSHING`].
    fn until(&mut self, received: &Receiver<News>, mut done: impl FnMut(&Self) -> bool) {
        while !done(self) {
            if let Ok(news) = received.recv_timeout(LOOK) {
                let actions = self.hear(news);
                self.act(actions);
            }
            self.give_up_lines();
            let last = self.lines_until().map(|until| until + FLUSHING);
            if last.is_some_and(|last| last <= Instant::now()) {
                return;
            }
        }
    }

    /// Waits until all lines are written, including mpirun's.
    fn until_shown(&mut self, received: &Receiver<News>) {
        let mut quiet = Instant::now();
        self.until(received, |running| {
            let is_drained = running.drained.try_recv() == Err(TryRecvError::Disconnected);
            let is_shown = running.attempt.terminal.waits_since().is_none();
            if !is_shown {
                quiet = Instant::now();
            }
            is_shown && (is_drained || quiet.elapsed() >= DRAINING)
        });
    }

    fn lines_until(&self) -> Option<Instant> {
        let progress = self.attempt.terminal.waits_since().unwrap_or_else(Instant::now);
        self.supervisor.lines_until(progress, self.over)
    }

    /// Gives up lines that have waited too long for their reader.
    fn give_up_lines(&self) {
        let now = Instant::now();
        let is_late = |progress| {
            self.supervisor.lines_until(progress, self.over).is_some_and(|until| until <= now)
        };
        self.attempt.terminal.give_up(is_late);
    }

    /// Orders all attendants to end, waits for them and for mpirun, and kills processes that do not
    /// end. The exit code of mpirun counts if no rank failed.
    fn leave(&mut self, received: &Receiver<News>) {
        for rank in 0..self.attempt.job.ranks() {
            self.dismiss(rank);
        }
        let until = Instant::now() + LEAVING;
        while self.started.iter().any(Option::is_some) && !self.supervisor.is_hurried() {
            let left = until.saturating_duration_since(Instant::now());
            match received.recv_timeout(left) {
                Ok(news) => {
                    let actions = self.hear(news);
                    self.act(actions);
                }
                Err(_) => break,
            }
        }
        self.kill_started();
    }

    /// Orders the attendant of a rank to end. An attendant that cannot receive the order is already
    /// ending.
    fn dismiss(&self, rank: u32) {
        let _ = self.orders.get(&rank).map(|orders| send(&**orders, &LauncherOrder::Leave));
    }

    fn hear(&mut self, news: News) -> Vec<LaunchAction> {
        let now = Instant::now();
        if news.attempt.is_some_and(|attempt| attempt != self.attempt.number) {
            if let JobEvent::Joined { orders, .. } = news.event {
                turn_away(&orders);
            }
            return Vec::new();
        }
        match news.event {
            // The rank's process may have ended, and been reaped, before this event.
            JobEvent::Joined { rank, orders } if self.supervisor.awaits(rank) => {
                self.orders.insert(rank, orders);
                self.open.insert(rank);
                self.supervisor.joined(rank)
            }
            JobEvent::Joined { orders, .. } => {
                turn_away(&orders);
                Vec::new()
            }
            JobEvent::Ended { rank, end } => self.supervisor.ended(rank, end, now),
            JobEvent::Drained { rank, end } => {
                self.open.remove(&rank);
                // After a failure mpirun would end the other ranks in its own way, so that
                // attendant stays.
                if !end.is_bad() {
                    self.dismiss(rank);
                }
                Vec::new()
            }
            JobEvent::Started { place } => self.reap(place, now),
            JobEvent::Signal(signal) => self.supervisor.signal(signal, now),
        }
    }

    fn reap(&mut self, place: usize, now: Instant) -> Vec<LaunchAction> {
        let Some(mut child) = self.started.get_mut(place).and_then(Option::take) else {
            return Vec::new();
        };
        let end = child.wait().map_or(ProcessEnd::LOST, ProcessEnd::of);
        let rank = u32::try_from(place).unwrap_or(u32::MAX);
        match self.attempt.job.starter() {
            Some(_) => self.supervisor.alone(end, now),
            // An attendant ended before it connected.
            None if self.supervisor.awaits(rank) => self.supervisor.ended(rank, end, now),
            None => Vec::new(),
        }
    }

    fn act(&mut self, actions: Vec<LaunchAction>) {
        for action in actions {
            match action {
                LaunchAction::Signal(rank, signal) => {
                    // An attendant that cannot receive the order is already ending, and its end is
                    // another event.
                    let orders = self.orders.get(&rank);
                    let _ = orders.map(|orders| send(&**orders, &LauncherOrder::Signal(signal)));
                }
                LaunchAction::KillStarted => self.kill_started(),
                LaunchAction::Say(line) => self.attempt.terminal.say(&line),
            }
        }
    }

    /// Kills the processes that have not ended, and reaps them. Leaves a process that does not end
    /// within [`BURIAL`] to the system.
    fn kill_started(&mut self) {
        let mut killed: Vec<Child> = self.started.iter_mut().filter_map(Option::take).collect();
        for child in &killed {
            if let Ok(pid) = i32::try_from(child.id()) {
                // The process leads its group, and is not reaped yet, so the group's number is
                // valid.
                let _ = killpg(Pid::from_raw(pid), Signal::SIGKILL);
            }
        }
        let until = Instant::now() + BURIAL;
        while !killed.is_empty() && Instant::now() < until {
            killed.retain_mut(|child| matches!(child.try_wait(), Ok(None)));
            if !killed.is_empty() {
                thread::park_timeout(Duration::from_millis(5));
            }
        }
    }
}

/// Ends an attendant that no attempt waits for, and its command. Without an order it would believe
/// that the launcher has died, and remove its socket.
fn turn_away(orders: &UnixStream) {
    for order in [LauncherOrder::Signal(Signal::SIGKILL as i32), LauncherOrder::Leave] {
        // An attendant that cannot receive the order is already ending.
        let _ = send(orders, &order);
    }
}
