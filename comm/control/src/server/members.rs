//! The state that all connections share: the coordinator's decisions, and a queue of messages for
//! each member.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use hsdp_sharding::Rank;
use parking_lot::{Condvar, Mutex};
use tokio::sync::mpsc;

use super::accept::AcceptedConnection;
use crate::coordinator::Coordinator;
use crate::limits::most_waiting;
use crate::wire::{FromCoordinator, Hello};
use crate::{Loss, Options, RendezvousError};

/// The words for a member that is lost because it does not read.
pub(crate) const UNREAD: &str = "it does not read its messages";

/// The members of a job, on the side of the coordinator.
#[derive(Debug)]
pub(crate) struct JobMembers {
    pub(crate) options: Options,
    state: Mutex<ServerState>,
    changed: Condvar,
    refused: AtomicBool,
}

/// The coordinator, and the queues to its members.
#[derive(Debug)]
pub(crate) struct ServerState {
    pub(crate) coordinator: Coordinator,
    queues: HashMap<Rank, mpsc::Sender<FromCoordinator>>,
}

impl JobMembers {
    pub(crate) fn new(options: Options) -> Self {
        let terms = options.terms.clone();
        let deadlines = options.deadlines;
        let coordinator = Coordinator::new(terms, deadlines, Instant::now());
        let state = Mutex::new(ServerState { coordinator, queues: HashMap::new() });
        Self { options, state, changed: Condvar::new(), refused: AtomicBool::new(false) }
    }

    /// Notes that a connection was refused. Returns whether it is the first.
    pub(crate) fn is_first_refusal(&self) -> bool {
        !self.refused.swap(true, Ordering::Relaxed)
    }

    /// Admits a member, and returns its rank and the queue of its messages.
    pub(crate) fn arrive(
        &self,
        hello: &Hello,
        connection: &AcceptedConnection,
    ) -> Result<(Rank, mpsc::Receiver<FromCoordinator>), RendezvousError> {
        self.with(|state| {
            let rank = state.coordinator.arrive(hello, connection.from, Instant::now())?;
            connection.authenticated();
            let (queue, messages) = mpsc::channel(most_waiting(self.options.terms.world));
            state.queues.insert(rank, queue);
            Ok((rank, messages))
        })
    }

    /// Changes the state, and puts the messages of the coordinator into their queues.
    pub(crate) fn with<R>(&self, change: impl FnOnce(&mut ServerState) -> R) -> R {
        let mut state = self.state.lock();
        let result = change(&mut state);
        state.deliver();
        self.changed.notify_all();
        result
    }

    /// The members that are connected.
    pub(crate) fn there(&self) -> Vec<Rank> {
        self.state.lock().coordinator.there()
    }

    /// Waits while `is` holds, for at most `within`. Returns the members that are connected then.
    pub(crate) fn wait_while(
        &self,
        within: Duration,
        is: impl Fn(&Coordinator) -> bool,
    ) -> Vec<Rank> {
        let mut state = self.state.lock();
        self.changed.wait_while_for(&mut state, |state| is(&state.coordinator), within);
        state.coordinator.there()
    }
}

impl ServerState {
    /// Puts messages into the queues of their members. A member whose queue is full is lost, which
    /// makes more messages.
    fn deliver(&mut self) {
        loop {
            let messages = self.coordinator.take_outgoing();
            if messages.is_empty() {
                return;
            }
            for (to, message) in messages {
                let last = message.is_last();
                let queue = self.queues.get(&to);
                let sent = queue.is_none_or(|queue| queue.try_send(message).is_ok());
                if last || !sent {
                    self.queues.remove(&to);
                }
                if !sent && !last {
                    self.coordinator.gone(to, Loss::Silent, UNREAD);
                }
            }
        }
    }
}
