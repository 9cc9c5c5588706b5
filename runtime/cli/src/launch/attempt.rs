//! One start of all ranks, until all have ended.

use std::collections::HashMap;
use std::io;
use std::os::unix::net::UnixStream;
use std::process::Child;
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, Sender};
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, killpg};
use nix::sys::wait::{Id, WaitPidFlag, waitid};
use nix::unistd::Pid;

use super::end::End;
use super::frame::{Order, Stream};
use super::job::Job;
use super::lines;
use super::ranks::{Event, News, Ranks};
use super::supervisor::{Action, Bad, Supervisor};
use super::terminal::Terminal;
use super::threads;

/// How long the started processes may take to end after all ranks have ended.
const LEAVING: Duration = Duration::from_secs(10);

/// How long their last lines may take. A process that they have left behind may keep their output open.
const DRAINING: Duration = Duration::from_secs(2);

/// An attempt to start.
pub(super) struct Attempt<'a> {
    pub(super) number: u32,
    pub(super) job: &'a Job,
    pub(super) grace: Duration,
    pub(super) terminal: &'a Arc<Terminal>,
}

/// Whether another attempt may follow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Outlook {
    Again,
    Last,
}

/// How an attempt ended.
#[derive(Clone, Copy, Debug)]
pub(super) struct Ended {
    first: Option<Bad>,
    signal: Option<i32>,
}

impl Ended {
    pub(super) fn code(&self) -> u8 {
        self.first.map_or(0, |bad| bad.exit_code())
    }

    /// Whether no attempt may follow: nothing has failed, or the launcher got a signal.
    pub(super) fn is_final(&self) -> bool {
        self.signal.is_some() || self.first.is_none()
    }

    /// The line for the user; `None` if nothing has failed.
    pub(super) fn tell(&self, number: u32, outlook: Outlook) -> Option<String> {
        let bad = self.first?;
        Some(match outlook {
            Outlook::Again if !self.is_final() => {
                format!("attempt {number} failed: {bad}; starting again as attempt {}", number + 1)
            }
            _ => format!("attempt {number} failed: {bad}"),
        })
    }
}

/// An attempt that is under way.
struct Running<'a> {
    attempt: &'a Attempt<'a>,
    supervisor: Supervisor,
    orders: HashMap<u32, Arc<UnixStream>>,
    /// mpirun, or the attendants by rank; `None` for each that has ended.
    started: Vec<Option<Child>>,
}

impl Attempt<'_> {
    /// Runs the attempt. Must be called on the main thread, since a started process dies with the thread that starts it.
    pub(super) fn run(
        &self,
        (events, received): (&Sender<News>, &Receiver<News>),
        ranks: &Ranks,
    ) -> io::Result<Ended> {
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
        let mut running = Running {
            attempt: self,
            supervisor: Supervisor::new(self.job.ranks(), self.grace, Instant::now()),
            orders: HashMap::new(),
            started: children.into_iter().map(Some).collect(),
        };
        running.until_over(received);
        running.leave(received);
        drop(open);
        // Nothing is sent on this channel: it closes when the threads that show lines have ended.
        let _ = drained.recv_timeout(DRAINING);
        // A signal that came meanwhile is for this attempt: the next one would start its ranks to end them.
        received.try_iter().for_each(|news| {
            let actions = running.hear(news);
            running.act(actions);
        });
        Ok(Ended { first: running.supervisor.first(), signal: running.supervisor.signalled() })
    }

    /// Shows the lines that a started process itself writes, such as the messages of mpirun. Clones of `open` live until the last one.
    fn show(&self, child: &mut Child, open: &Sender<()>) -> io::Result<()> {
        let stdout = child
            .stdout
            .take()
            .map(|it| (Stream::Stdout, Box::new(it) as Box<dyn io::Read + Send>));
        let stderr = child
            .stderr
            .take()
            .map(|it| (Stream::Stderr, Box::new(it) as Box<dyn io::Read + Send>));
        let name = self.job.starter().unwrap_or_default();
        for (stream, from) in stdout.into_iter().chain(stderr) {
            let (terminal, open) = (Arc::clone(self.terminal), open.clone());
            threads::start(move || {
                // A pipe that fails has no more lines.
                let _ = lines::each(from, |line| {
                    terminal.line(name, stream, &line);
                    Ok(())
                });
                drop(open);
            })?;
        }
        Ok(())
    }

    /// Sends an event when the process has ended. Does not reap it, so its pid stays valid.
    fn watch(&self, place: usize, pid: Pid, events: &Sender<News>) -> io::Result<()> {
        let (attempt, events) = (self.number, events.clone());
        threads::start(move || {
            let flags = WaitPidFlag::WEXITED | WaitPidFlag::WNOWAIT;
            while let Err(nix::Error::EINTR) = waitid(Id::Pid(pid), flags) {}
            let _ = events.send(News { attempt: Some(attempt), event: Event::Started { place } });
        })
    }
}

impl Running<'_> {
    fn until_over(&mut self, received: &Receiver<News>) {
        while !self.supervisor.is_over() {
            let now = Instant::now();
            let actions = match self.supervisor.deadline() {
                Some(deadline) if deadline <= now => self.supervisor.late(now),
                Some(deadline) => match received.recv_timeout(deadline - now) {
                    Ok(news) => self.hear(news),
                    Err(_) => continue,
                },
                None => match received.recv() {
                    Ok(news) => self.hear(news),
                    Err(_) => return,
                },
            };
            self.act(actions);
        }
    }

    /// Lets all attendants end, waits for them and for mpirun, and kills processes that do not end. The exit code of mpirun counts
    /// if no rank failed.
    fn leave(&mut self, received: &Receiver<News>) {
        for rank in 0..self.attempt.job.ranks() {
            self.dismiss(rank);
        }
        let until = Instant::now() + LEAVING;
        while self.started.iter().any(Option::is_some) {
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

    /// Lets the attendant of the rank end. One that cannot receive the order is ending.
    fn dismiss(&self, rank: u32) {
        let _ = self.orders.get(&rank).map(|orders| Order::Leave.write_to(&**orders));
    }

    fn hear(&mut self, news: News) -> Vec<Action> {
        let now = Instant::now();
        if news.attempt.is_some_and(|attempt| attempt != self.attempt.number) {
            if let Event::Joined { orders, .. } = news.event {
                turn_away(&orders);
            }
            return Vec::new();
        }
        match news.event {
            // The process of the rank may have ended, and been reaped, before this.
            Event::Joined { rank, orders } if self.supervisor.awaits(rank) => {
                self.orders.insert(rank, orders);
                self.supervisor.joined(rank)
            }
            Event::Joined { orders, .. } => {
                turn_away(&orders);
                Vec::new()
            }
            Event::Ended { rank, end } => {
                // After a bad end mpirun would end the other ranks in its own way, so that attendant stays.
                if !end.is_bad() {
                    self.dismiss(rank);
                }
                self.supervisor.ended(rank, end, now)
            }
            Event::Started { place } => self.reap(place, now),
            Event::Signal(signal) => self.supervisor.signal(signal, now),
        }
    }

    fn reap(&mut self, place: usize, now: Instant) -> Vec<Action> {
        let Some(mut child) = self.started.get_mut(place).and_then(Option::take) else {
            return Vec::new();
        };
        let end = child.wait().map_or(End::LOST, End::of);
        let rank = u32::try_from(place).unwrap_or(u32::MAX);
        match self.attempt.job.starter() {
            Some(_) => self.supervisor.alone(end, now),
            // An attendant that ended before it connected.
            None if self.supervisor.awaits(rank) => self.supervisor.ended(rank, end, now),
            None => Vec::new(),
        }
    }

    fn act(&mut self, actions: Vec<Action>) {
        for action in actions {
            match action {
                Action::Signal(rank, signal) => {
                    // An attendant that cannot receive the order is ending, and its end is another event.
                    let orders = self.orders.get(&rank);
                    let _ = orders.map(|orders| Order::Signal(signal).write_to(&**orders));
                }
                Action::KillStarted => self.kill_started(),
                Action::Say(line) => self.attempt.terminal.say(&line),
            }
        }
    }

    fn kill_started(&mut self) {
        for mut child in self.started.iter_mut().filter_map(Option::take) {
            if let Ok(pid) = i32::try_from(child.id()) {
                // The process leads its group, and is not reaped yet, so the group's number is valid.
                let _ = killpg(Pid::from_raw(pid), Signal::SIGKILL);
            }
            let _ = child.wait();
        }
    }
}

/// Ends an attendant that no attempt waits for, and its command. Without an order it would take the launcher for dead, and remove its socket.
fn turn_away(orders: &UnixStream) {
    for order in [Order::Signal(Signal::SIGKILL as i32), Order::Leave] {
        // An attendant that cannot receive the order is ending.
        let _ = order.write_to(orders);
    }
}
