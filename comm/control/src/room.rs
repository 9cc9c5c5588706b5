//! State that all connections share: the coordinator's decisions, and a queue of messages for each connection.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use hsdp_sharding::Rank;
use parking_lot::{Condvar, Mutex};
use tokio::sync::mpsc;

use crate::coordinator::Coordinator;
use crate::gate::Ticket;
use crate::limits::most_waiting;
use crate::server::ServerOptions;
use crate::wire::{Failure, FromCoordinator, FromMember, Hello, Loss};
use crate::{Deadlines, Job, Secret};

/// State that all connections share.
pub(crate) struct Room {
    options: ServerOptions,
    inside: Mutex<Inside>,
    changed: Condvar,
    warned: AtomicBool,
}

struct Inside {
    coordinator: Coordinator,
    desks: HashMap<Rank, mpsc::Sender<FromCoordinator>>,
    attending: usize,
}

impl Room {
    pub(crate) fn new(options: ServerOptions) -> Self {
        let (terms, deadlines) = (options.terms.clone(), options.deadlines);
        let coordinator = Coordinator::new(terms, deadlines, Instant::now());
        let inside = Mutex::new(Inside { coordinator, desks: HashMap::new(), attending: 0 });
        Self { options, inside, changed: Condvar::new(), warned: AtomicBool::new(false) }
    }

    pub(crate) fn job(&self) -> &Job {
        &self.options.job
    }

    pub(crate) fn secret(&self) -> &Secret {
        &self.options.secret
    }

    pub(crate) fn world(&self) -> u32 {
        self.options.terms.world()
    }

    pub(crate) fn deadlines(&self) -> &Deadlines {
        &self.options.deadlines
    }

    /// Admits a member, and returns the queue of its messages. The connection calls [`left`](Self::left) at its end.
    pub(crate) fn arrive(
        &self,
        hello: &Hello,
        ticket: &Arc<Ticket>,
    ) -> Result<mpsc::Receiver<FromCoordinator>, Failure> {
        let mut inside = self.inside.lock();
        let arrived = inside.coordinator.arrive(hello, ticket.from(), Instant::now());
        let letters = arrived.map(|rank| {
            ticket.admit();
            let (desk, letters) = mpsc::channel(most_waiting(self.world()));
            inside.desks.insert(rank, desk);
            inside.attending += 1;
            letters
        });
        self.deliver(&mut inside);
        letters
    }

    /// Notes that a connection has sent its last message.
    pub(crate) fn left(&self) {
        self.inside.lock().attending -= 1;
    }

    /// Whether a connection still has to send its last messages.
    pub(crate) fn has_last_letters(&self) -> bool {
        let inside = self.inside.lock();
        inside.attending > inside.coordinator.there().len()
    }

    pub(crate) fn hear(&self, rank: Rank, says: FromMember) {
        let mut inside = self.inside.lock();
        inside.coordinator.hear(rank, says, Instant::now());
        self.deliver(&mut inside);
    }

    pub(crate) fn gone(&self, rank: Rank, loss: Loss, why: &str) {
        let mut inside = self.inside.lock();
        inside.coordinator.gone(rank, loss, why);
        self.deliver(&mut inside);
    }

    /// Logs that a connection was refused: the first time as a warning, then at debug level.
    pub(crate) fn refused(&self, ticket: &Ticket, reason: &str) {
        let from = ticket.from();
        if self.warned.swap(true, Ordering::Relaxed) {
            tracing::debug!(%from, reason, "a connection was refused");
        } else {
            tracing::warn!(%from, reason, "a connection was refused; further refusals are logged at debug level");
        }
    }

    pub(crate) fn tick(&self) {
        let mut inside = self.inside.lock();
        inside.coordinator.tick(Instant::now());
        self.deliver(&mut inside);
    }

    /// Puts messages into the queues of their connections. A member whose queue is full is lost, which makes more messages.
    fn deliver(&self, inside: &mut Inside) {
        loop {
            let letters = inside.coordinator.take_letters();
            if letters.is_empty() {
                break;
            }
            for letter in letters {
                let last = letter.says.is_last();
                let desk = inside.desks.get(&letter.to);
                let sent = desk.is_none_or(|desk| desk.try_send(letter.says).is_ok());
                if last || !sent {
                    inside.desks.remove(&letter.to);
                }
                if !sent && !last {
                    let why = "it does not read its messages";
                    inside.coordinator.gone(letter.to, Loss::Silent, why);
                }
            }
        }
        self.changed.notify_all();
    }

    /// Waits until all ranks have got the failure of the rendezvous, if it has failed; or for `within`.
    pub(crate) fn wait_until_told(&self, within: Duration) {
        let until = Instant::now() + within;
        let mut inside = self.inside.lock();
        while inside.coordinator.is_still_to_tell()
            && !self.changed.wait_until(&mut inside, until).timed_out()
        {}
    }

    /// Waits until no member is connected, or for `within`. Returns the members that still are.
    pub(crate) fn wait_until_empty(&self, within: Duration) -> Vec<Rank> {
        let until = Instant::now() + within;
        let mut inside = self.inside.lock();
        loop {
            let there = inside.coordinator.there();
            if there.is_empty() || self.changed.wait_until(&mut inside, until).timed_out() {
                return there;
            }
        }
    }
}
