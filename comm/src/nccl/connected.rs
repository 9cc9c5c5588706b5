//! The communicators of a rank, from the first to the last. `NCCL.md`, "In a world".

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use hsdp_kernels::cuda::{Device, Stream};
use hsdp_sharding::Rank;

use super::calls::NcclCarrier;
use super::communicator::{Communicator, Patience};
use super::queue::CallQueue;
use super::watchdog::tell;
use super::{NcclError, watchdog};
use crate::remote::{ALL_EPOCHS, Endpoint};
use crate::sync::{Mutex, MutexGuard};
use crate::threads::OwnRank;
use crate::{Error, GroupId};

/// A communicator that each thread may use that issues for its rank.
pub(crate) type SharedCommunicator = Arc<Mutex<Communicator>>;

/// The communicators of a rank.
#[derive(Debug, Default)]
pub(crate) struct Connected {
    held: Mutex<Option<Communicators>>,
    /// Held while a group is connected: all of its members know of the group, or none does.
    connecting: Mutex<()>,
    /// Whether nothing of these communicators is waited for any more.
    over: Arc<AtomicBool>,
}

/// A rank's part in a group.
#[derive(Clone, Debug)]
pub(super) struct GroupConnection {
    pub(super) comm: SharedCommunicator,
    pub(super) ranks: Vec<Rank>,
}

/// A rank's part in each of its groups, in an order that all ranks share: they are closed in it.
pub(super) type NcclGroups = BTreeMap<GroupId, GroupConnection>;

#[derive(Debug)]
struct Communicators {
    /// For all calls of the rank: they run in the order in which it issues them.
    stream: Arc<Stream>,
    /// Of all ranks, to split others from; given up when a split has failed.
    all: SharedCommunicator,
    groups: NcclGroups,
    deadline: Duration,
    /// `None` where all ranks are threads. Other processes may need this rank's part in what was
    /// issued.
    queue: Option<Arc<CallQueue>>,
}

/// # Making them
impl Connected {
    /// Begins with the communicator of all ranks, and with the stream of all calls.
    ///
    /// # Errors
    /// [`NcclError::Unwatched`].
    pub(crate) fn begin(
        self: &Arc<Self>,
        own: &Arc<OwnRank>,
        all: Communicator,
        stream: Stream,
    ) -> Result<(), NcclError> {
        let stream = Arc::new(stream);
        let queue = || Arc::new(CallQueue::new(own, Arc::clone(&stream)));
        let communicators = Communicators {
            queue: own.endpoint().map(|_| queue()),
            stream,
            all: Arc::new(Mutex::new(all)),
            groups: BTreeMap::new(),
            deadline: own.options().deadline,
        };
        let before = self.held.lock().replace(communicators);
        match before {
            None => watchdog::start(self, own),
            Some(before) => {
                before.close(&AtomicBool::new(false));
                Ok(())
            }
        }
    }

    /// The device of the communicators.
    pub(crate) fn device(&self) -> Option<Device> {
        self.held.lock().as_ref().map(|communicators| communicators.stream.device().clone())
    }

    pub(crate) fn has(&self, group: GroupId) -> bool {
        self.held.lock().as_ref().is_some_and(|it| it.groups.contains_key(&group))
    }

    /// Begins to connect a group, which ends with the guard.
    pub(crate) fn connecting(&self) -> MutexGuard<'_, ()> {
        self.connecting.lock()
    }

    /// The communicator of all ranks, out of the lock: a split takes long, and the watchdog needs
    /// the lock.
    pub(crate) fn all(&self) -> Option<SharedCommunicator> {
        self.held.lock().as_ref().map(|communicators| Arc::clone(&communicators.all))
    }

    /// Adds the communicator of a group. Its calls may take `patience` to be issued, and no longer
    /// than until the world ends, or a member turns out to have left without the call.
    pub(crate) fn add(
        &self,
        own: &Arc<OwnRank>,
        group: GroupId,
        ranks: Vec<Rank>,
        mut comm: Communicator,
        patience: Duration,
    ) {
        let over = Arc::clone(&self.over);
        let early_ends = Arc::clone(own.early_ends());
        // A communicator may be closed after its world, and is not to keep it.
        let own = Arc::downgrade(own);
        let ended = move || {
            over.load(Ordering::Relaxed)
                || early_ends.check_world().is_err()
                || own.upgrade().is_some_and(|own| has_lost_a_member(&own, group))
        };
        comm.patience = Patience::until(patience, ended);
        let member = GroupConnection { comm: Arc::new(Mutex::new(comm)), ranks };
        if let Some(communicators) = self.held.lock().as_mut() {
            communicators.groups.insert(group, member);
        }
    }
}

/// Returns whether a member of a group has left without the last call that this rank has made
/// there.
fn has_lost_a_member(own: &OwnRank, group: GroupId) -> bool {
    let last = own.record.rolling.count(group).checked_sub(1);
    let is_left = |(last, endpoint): (u64, &Arc<Endpoint>)| {
        endpoint.drains().left_before(group, last).is_some()
    };
    last.zip(own.endpoint()).is_some_and(is_left)
}

/// # Using them
impl Connected {
    /// The carrier of a call of a group, if the group goes by NCCL.
    pub(crate) fn carrier(
        &self,
        own: &Arc<OwnRank>,
        group: GroupId,
        step: u64,
    ) -> Option<NcclCarrier> {
        let held = self.held.lock();
        let Communicators { stream, groups, queue, .. } = held.as_ref()?;
        Some(NcclCarrier {
            own: Arc::clone(own),
            step,
            comm: Arc::clone(&groups.get(&group)?.comm),
            stream: Arc::clone(stream),
            queue: queue.clone(),
            issuing: None,
        })
    }

    /// Waits until the steps that the rank has given up are drained.
    ///
    /// # Errors
    /// The end of its epoch or of the world, also by the deadline of this wait.
    pub(crate) fn await_drained(&self, own: &OwnRank) -> Result<(), Error> {
        match self.queue() {
            Some(queue) => queue.await_drained(own, own.record.epoch()),
            None => Ok(()),
        }
    }

    /// The groups of this rank; `None` while one is being connected.
    pub(super) fn groups(&self) -> Option<NcclGroups> {
        let _connecting = self.connecting.try_lock()?;
        self.known()
    }

    fn known(&self) -> Option<NcclGroups> {
        self.held.lock().as_ref().map(|held| held.groups.clone())
    }

    pub(super) fn queue(&self) -> Option<Arc<CallQueue>> {
        self.held.lock().as_ref()?.queue.clone()
    }

    /// The members of a group.
    pub(super) fn ranks(&self, group: GroupId) -> Vec<Rank> {
        let held = self.held.lock();
        let member = held.as_ref().and_then(|it| it.groups.get(&group));
        member.map_or_else(Vec::new, |member| member.ranks.clone())
    }

    /// NCCL's report of the calls that were issued. A communicator on which a thread issues is left
    /// alone.
    pub(super) fn check(&self) -> Result<(), NcclError> {
        let groups = self.known().unwrap_or_default();
        let mut comms = groups.values().filter_map(|member| member.comm.try_lock());
        comms.try_for_each(|comm| comm.health())
    }
}

/// # Ending them
impl Connected {
    /// The rank leaves: its peers are told which calls it has made, before they hear that it has
    /// left.
    pub(crate) fn leave(&self, own: &OwnRank) {
        if own.record.has_left() {
            return;
        }
        let queue = self.queue();
        let endpoint = own.endpoint();
        let groups = self.known();
        if let (Some(queue), Some(endpoint), Some(groups)) = (queue, endpoint, groups) {
            let calls = queue.last_calls(&own.record, &groups);
            let _told = tell(endpoint, own.rank, ALL_EPOCHS, calls, &groups);
        }
    }

    /// Closes the communicators, though the watchdog may be looking after them just then.
    pub(crate) fn close(&self) {
        let held = self.held.lock().take();
        if let Some(communicators) = held {
            communicators.close(&self.over);
        }
    }

    /// Aborts the communicators of all groups, which are not used any more. A thread that issues on
    /// one stops.
    pub(super) fn abort(&self) {
        self.over.store(true, Ordering::Relaxed);
        let groups = self.known().unwrap_or_default();
        groups.values().for_each(|member| member.comm.lock().give_up());
    }

    /// Gives all communicators up at once: the other ranks do not come any more. A thread that
    /// issues on one stops.
    pub(crate) fn give_up(&self) {
        self.over.store(true, Ordering::Relaxed);
        let held = self.held.lock().take();
        held.iter().for_each(Communicators::give_up);
    }
}

impl Communicators {
    fn give_up(&self) {
        self.groups.values().for_each(|member| member.comm.lock().give_up());
        // The last one: a thread that splits it holds its lock.
        self.all.lock().give_up();
    }

    /// Closing waits for operations, and so for their other ranks, and a drop must not: a thread of
    /// its own does it. But where they are processes, this one stays until what it has issued is
    /// done, as it stays until its messages are sent. Calls of a step that was given up may never
    /// be done: then the communicators are aborted, and a watchdog in the midst of a call is told
    /// by `over` to stop.
    fn close(self, over: &AtomicBool) {
        if self.queue.as_ref().is_some_and(|queue| queue.owed().is_some()) {
            over.store(true, Ordering::Relaxed);
            self.give_up();
        }
        let is_waited_for = self.queue.is_some();
        let close = move || self.close_here();
        match thread::Builder::new().name("hsdp-nccl-close".to_owned()).spawn(close) {
            Ok(thread) if is_waited_for => drop(thread.join()),
            Ok(_) => {}
            Err(error) => {
                hsdp_warnings::warn!(%error, "communicators could not be closed: their thread could not be started");
            }
        }
    }

    /// Closes one after the other, up to the deadline.
    fn close_here(self) {
        let began = Instant::now();
        let close = |comm: &SharedCommunicator| {
            if let Err(error) = comm.lock().close(self.deadline.saturating_sub(began.elapsed())) {
                tracing::debug!(%error, "a communicator was aborted");
            }
        };
        self.groups.values().for_each(|member| close(&member.comm));
        close(&self.all);
    }
}
