//! One start of all ranks, to their end.

use std::collections::HashMap;
use std::io;
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::process::Child;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender};
use std::thread;
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

/// How long what was started may take to end when all ranks have.
const LEAVING: Duration = Duration::from_secs(10);

/// What is to be started.
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

/// How it ended.
#[derive(Clone, Copy, Debug)]
pub(super) struct Ended {
    first: Option<Bad>,
    signal: Option<i32>,
}

impl Ended {
    pub(super) fn code(&self) -> u8 {
        self.first.map_or(0, |bad| bad.exit_code())
    }

    /// Whether the launcher was told to end: then nothing is started again.
    pub(super) fn is_final(&self) -> bool {
        self.signal.is_some() || self.first.is_none()
    }

    /// What to tell the user; nothing of what ended well.
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
    orders: HashMap<u32, UnixStream>,
    /// mpirun, or the attendants by rank; none of those that have ended.
    started: Vec<Option<Child>>,
}

impl Attempt<'_> {
    /// Runs it, on the thread that lives as long as the program.
    pub(super) fn run(
        &self,
        (events, received): (&Sender<News>, &Receiver<News>),
        ranks: &Ranks,
    ) -> io::Result<Ended> {
        let mut children = self.job.start(self.number, &ranks.socket())?;
        for (place, child) in children.iter_mut().enumerate() {
            self.show(child);
            self.watch(
                place,
                Pid::from_raw(i32::try_from(child.id()).map_err(io::Error::other)?),
                events,
            );
        }
        let mut running = Running {
            attempt: self,
            supervisor: Supervisor::new(self.job.ranks(), self.grace, Instant::now()),
            orders: HashMap::new(),
            started: children.into_iter().map(Some).collect(),
        };
        running.until_over(received);
        running.leave(received);
        Ok(Ended { first: running.supervisor.first(), signal: running.supervisor.signalled() })
    }

    /// What mpirun itself says.
    fn show(&self, child: &mut Child) {
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
            let terminal = Arc::clone(self.terminal);
            thread::spawn(move || {
                // What cannot be read any more has no more to say.
                let _ = lines::each(from, |line| {
                    terminal.line(name, stream, &line);
                    Ok(())
                });
            });
        }
    }

    /// Tells when it has ended; it is not reaped, so its number stays its own.
    fn watch(&self, place: usize, pid: Pid, events: &Sender<News>) {
        let (attempt, events) = (self.number, events.clone());
        thread::spawn(move || {
            let flags = WaitPidFlag::WEXITED | WaitPidFlag::WNOWAIT;
            while let Err(nix::Error::EINTR) = waitid(Id::Pid(pid), flags) {}
            let _ = events.send(News { attempt: Some(attempt), event: Event::Started { place } });
        });
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

    /// Lets all attendants go, and waits for them, and for mpirun; kills what does not end. What mpirun thinks of it counts if nobody failed.
    fn leave(&mut self, received: &Receiver<News>) {
        for orders in self.orders.values() {
            let _ = Order::Leave.write_to(orders);
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

    fn hear(&mut self, news: News) -> Vec<Action> {
        let now = Instant::now();
        if news.attempt.is_some_and(|attempt| attempt != self.attempt.number) {
            return Vec::new();
        }
        match news.event {
            // Of two with the same number both are lost: one of them would be without orders.
            Event::Joined { rank, orders } if self.supervisor.awaits(rank) => {
                self.orders.insert(rank, orders);
                self.supervisor.joined(rank)
            }
            Event::Joined { orders, .. } => {
                let _ = orders.shutdown(Shutdown::Both);
                Vec::new()
            }
            Event::Ended { rank, end } => self.supervisor.ended(rank, end, now),
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
            // An attendant that never said a word.
            None if self.supervisor.awaits(rank) => self.supervisor.ended(rank, end, now),
            None => Vec::new(),
        }
    }

    fn act(&mut self, actions: Vec<Action>) {
        for action in actions {
            match action {
                Action::Signal(rank, signal) => {
                    // Whoever cannot be told is ending, and will be heard of.
                    let orders = self.orders.get(&rank);
                    let _ = orders.map(|orders| Order::Signal(signal).write_to(orders));
                }
                Action::KillStarted => self.kill_started(),
                Action::Say(line) => self.attempt.terminal.say(&line),
            }
        }
    }

    fn kill_started(&mut self) {
        for mut child in self.started.iter_mut().filter_map(Option::take) {
            if let Ok(pid) = i32::try_from(child.id()) {
                // It leads its group, and was not reaped.
                let _ = killpg(Pid::from_raw(pid), Signal::SIGKILL);
            }
            let _ = child.wait();
        }
    }
}
