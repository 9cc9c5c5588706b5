//! Where a rank whose peers share no memory with it hands in what is to be sent, and the thread that sends and receives.
//! `REMOTE.md`, "The courier".

use std::collections::VecDeque;
use std::fmt;
use std::io;
use std::mem;
use std::sync::Arc;
use std::time::Duration;

use hsdp_sharding::Rank;

use super::buffer::Shelf;
use super::courier::{Courier, Turned};
use super::desk::Receiver;
use super::letter::{Kind, Letter};
use super::hello::{self, Hello};
use super::statement::{self, end_bytes};
use super::transport::Transport;
use crate::local::{Alarm, Clock, Core, Operation, from_now};
use crate::sync::thread::{Builder, JoinHandle};
use crate::sync::{Condvar, Mutex};
use crate::{Error, WorldOptions};

/// What the courier is to do.
#[derive(Debug)]
pub(crate) enum Errand {
    /// Send a letter.
    Send { to: Vec<Rank>, letter: Arc<Letter> },
    /// Lay what comes of an operation into its slots.
    Open { receiver: Arc<dyn Receiver>, operation: Arc<Operation> },
}

/// A rank's dealings with the others.
pub(crate) struct Office {
    rank: Rank,
    size: usize,
    shelf: Arc<Shelf>,
    outgoing: Mutex<Outgoing>,
    /// Rung when there is something to be done.
    bell: Condvar,
    /// Held by whoever sends and receives.
    courier: Mutex<Courier>,
    thread: Mutex<Option<JoinHandle<()>>>,
    /// What the ranks have said first.
    hellos: Mutex<Vec<Option<Hello>>>,
}

#[derive(Debug, Default)]
struct Outgoing {
    errands: VecDeque<Errand>,
    /// The last epoch in which this rank brings nothing more, and how that ended.
    stopped: Option<(u64, Error)>,
    /// Whether the others were told of the end of the world.
    told: bool,
    leaving: Leaving,
}

/// How far this rank has left.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Leaving {
    #[default]
    There,
    /// It has left, and owes the others what it has issued.
    Going,
    /// The thread is to end.
    Closed,
}

/// The longest that the courier sleeps while something is under way; and while nothing is.
const NAPS: [Duration; 2] = [Duration::from_micros(400), Duration::from_millis(5)];

/// The first of the naps, which grow.
const FIRST_NAP: Duration = Duration::from_micros(20);

impl Office {
    /// The office of a world, whose courier's thread has been started.
    pub(crate) fn start(
        core: &Arc<Core>,
        rank: Rank,
        transport: Box<dyn Transport>,
    ) -> io::Result<Arc<Self>> {
        let office = Arc::new(Self {
            rank,
            size: core.records().len(),
            shelf: Arc::default(),
            outgoing: Mutex::default(),
            bell: Condvar::new(),
            courier: Mutex::new(Courier::new(core, rank, transport)),
            thread: Mutex::new(None),
            hellos: Mutex::new(vec![None; core.records().len()]),
        });
        let own = Arc::clone(&office);
        let run = move || own.run();
        let thread = Builder::new().name("hsdp-courier".to_owned()).spawn(run)?;
        *office.thread.lock() = Some(thread);
        Ok(office)
    }

    pub(crate) fn shelf(&self) -> &Arc<Shelf> {
        &self.shelf
    }

    pub(crate) fn post(&self, errand: Errand) {
        self.outgoing.lock().errands.push_back(errand);
        self.bell.notify_one();
    }

    /// Sends what this rank brings to an operation, unless it has said that it brings nothing more to `epoch`: one of the two comes
    /// first, and the others see the same.
    pub(crate) fn commit(&self, epoch: u64, letters: Vec<Errand>) -> Result<(), Error> {
        let mut outgoing = self.outgoing.lock();
        if let Some((_, end)) = outgoing.stopped.as_ref().filter(|(last, _)| epoch <= *last) {
            return Err(end.clone());
        }
        outgoing.errands.extend(letters);
        drop(outgoing);
        self.bell.notify_one();
        Ok(())
    }

    /// Tells the others who this rank is, and waits until all have: within the deadline of the world.
    ///
    /// # Errors
    /// [`Error::ConfigMismatch`] on all ranks; [`Error::Incomplete`] if some do not come.
    pub(crate) fn greet(&self, options: &WorldOptions) -> Result<(), Error> {
        let own = Hello::of(self.size, options);
        self.outgoing.lock().errands.extend(self.to_all(Kind::Hello, &statement::bytes(&own)));
        self.hellos.lock()[self.rank.index()] = Some(own);
        let mut clock = Clock::until(options.deadline);
        loop {
            let hellos: Option<Vec<_>> = self.hellos.lock().iter().cloned().collect();
            if let Some(hellos) = hellos {
                return hello::compare(&hellos);
            }
            match clock.alarm() {
                Alarm::Deadline => return Err(self.incomplete(options.deadline)),
                _ if self.hear() => {}
                _ => self.sleep(FIRST_NAP),
            }
        }
    }

    fn incomplete(&self, deadline: Duration) -> Error {
        let hellos = self.hellos.lock();
        let ranks = |there| {
            let numbered = (0..).zip(hellos.iter());
            numbered.filter(|(_, it)| it.is_some() == there).map(|(rank, _)| rank).collect()
        };
        Error::Incomplete { deadline, arrived: ranks(true), missing: ranks(false) }
    }

    /// A rank has said who it is.
    pub(super) fn greeted(&self, from: Rank, hello: Hello) -> Result<(), String> {
        match self.hellos.lock()[from.index()].replace(hello) {
            None => Ok(()),
            Some(_) => Err("it says a second time who it is".to_owned()),
        }
    }

    /// Tells the others that this rank brings nothing more to `epoch`: once.
    pub(crate) fn tell_stop(&self, epoch: u64, end: &Error) {
        let mut outgoing = self.outgoing.lock();
        if outgoing.stopped.as_ref().is_some_and(|(last, _)| epoch <= *last) {
            return;
        }
        outgoing.stopped = Some((epoch, end.clone()));
        let statement = end_bytes(epoch, end, self.rank);
        outgoing.errands.extend(self.to_all(Kind::Stop, &statement));
        drop(outgoing);
        self.bell.notify_one();
    }

    /// Tells the others how the world ended: once.
    pub(crate) fn tell_end(&self, end: &Error) {
        let mut outgoing = self.outgoing.lock();
        if mem::replace(&mut outgoing.told, true) {
            return;
        }
        let statement = end_bytes(0, end, self.rank);
        outgoing.errands.extend(self.to_all(Kind::End, &statement));
        drop(outgoing);
        self.bell.notify_one();
    }

    /// A letter to everybody else; none where there is no memory even for that.
    fn to_all(&self, kind: Kind, statement: &[u8]) -> Option<Errand> {
        let letter = Arc::new(Letter::write(&self.shelf, (kind, 0), statement, 0)?);
        let others = (0..self.size).map(Rank::new).filter(|rank| *rank != self.rank);
        Some(Errand::Send { to: others.collect(), letter })
    }

    /// This rank goes: the others are told when it has sent what it owes them.
    pub(crate) fn leave(&self) {
        let mut outgoing = self.outgoing.lock();
        if outgoing.leaving == Leaving::There {
            outgoing.leaving = Leaving::Going;
        }
        drop(outgoing);
        self.bell.notify_one();
    }

    /// Sends and receives what there is, unless another thread is at it; whether there was anything.
    pub(crate) fn hear(&self) -> bool {
        let Some(mut courier) = self.courier.try_lock() else { return false };
        courier.turn(self) == Turned::Something
    }

    /// What is to be done, in order.
    pub(super) fn errands(&self) -> VecDeque<Errand> {
        mem::take(&mut self.outgoing.lock().errands)
    }

    /// Tells the others that this rank has left, if it has, and owes them nothing: once.
    pub(super) fn farewell(&self) {
        let mut outgoing = self.outgoing.lock();
        if outgoing.leaving == Leaving::Going && outgoing.errands.is_empty() {
            outgoing.leaving = Leaving::Closed;
            outgoing.errands.extend(self.to_all(Kind::Left, &[]));
        }
    }

    fn run(&self) {
        let mut nap = FIRST_NAP;
        loop {
            let turned = self.courier.lock().turn(self);
            let longest = match turned {
                Turned::Something => {
                    nap = FIRST_NAP;
                    continue;
                }
                Turned::Nothing => NAPS[0],
                Turned::Idle if self.is_closed() => return,
                Turned::Idle => NAPS[1],
            };
            self.sleep(nap);
            nap = (2 * nap).min(longest);
        }
    }

    /// Until there is something to be done, or so long.
    fn sleep(&self, nap: Duration) {
        let mut outgoing = self.outgoing.lock();
        if outgoing.errands.is_empty() {
            self.bell.wait_until(&mut outgoing, from_now(nap));
        }
    }

    fn is_closed(&self) -> bool {
        let outgoing = self.outgoing.lock();
        outgoing.leaving == Leaving::Closed && outgoing.errands.is_empty()
    }

    /// Ends the thread, when it has sent what this rank owes; after `patience` without that.
    pub(crate) fn close(&self, patience: Duration) {
        self.leave();
        let Some(thread) = self.thread.lock().take() else { return };
        let until = from_now(patience);
        while !thread.is_finished() && crate::sync::now() < until {
            let mut outgoing = self.outgoing.lock();
            self.bell.wait_until(&mut outgoing, from_now(NAPS[1]));
        }
        if thread.is_finished() {
            let _ = thread.join();
        } else {
            tracing::warn!(rank = self.rank.get(), ?patience, "letters to other ranks were not sent in time");
            self.outgoing.lock().leaving = Leaving::Closed;
        }
        self.courier.lock().close();
    }
}

impl fmt::Debug for Office {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Office")
            .field("rank", &self.rank)
            .field("size", &self.size)
            .finish_non_exhaustive()
    }
}
