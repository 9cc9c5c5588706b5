//! The threads of a world, and a rank as its operations hold it.

use std::fmt;
use std::sync::{Arc, OnceLock};

use hsdp_sharding::Rank;

use super::queue::Queue;
use crate::engine::{Record, Status, WorldState};
use crate::options::WorldOptions;
use crate::remote::Endpoint;
use crate::site::Site;
use crate::slow::Links;
use crate::sync::atomic::{AtomicUsize, Ordering};
use crate::sync::thread;
use hsdp_flight::EntryNumber;

/// The threads of a world: workers, ranks that wait, and the endpoint that stands for ranks of other
/// processes.
pub(crate) struct Core {
    pub(crate) state: Arc<WorldState>,
    pub(super) queue: Queue,
    pub(super) links: Links,
    pub(super) cores: usize,
    /// The number of members that sleep.
    pub(super) sleepers: AtomicUsize,
    /// The messages of the other ranks, where these share no memory with this one.
    endpoint: OnceLock<Arc<Endpoint>>,
    /// The number of ranks of this process that have handles.
    handled: AtomicUsize,
}

/// A rank, as all that it has under way holds on to it: the operations of a rank count themselves
/// here, and not where all ranks would count.
#[derive(Debug)]
pub(crate) struct OwnRank {
    pub(crate) rank: Rank,
    /// The record of the rank. A counting world has this one only.
    pub(crate) record: Arc<Record>,
    pub(crate) core: Arc<Core>,
}

/// A member that issues an operation.
pub(crate) struct MemberCall<'a> {
    pub(crate) own: &'a Arc<OwnRank>,
    pub(crate) site: &'a Site,
    /// The entry of the operation in its rank's ring.
    pub(crate) entry: EntryNumber,
}

impl Core {
    pub(crate) fn new(size: usize, options: WorldOptions) -> Arc<Self> {
        Arc::new(Self {
            state: WorldState::new(size, options),
            queue: Queue::default(),
            links: Links::default(),
            cores: thread::available_parallelism().map_or(1, usize::from),
            sleepers: AtomicUsize::new(0),
            endpoint: OnceLock::new(),
            handled: AtomicUsize::new(0),
        })
    }

    /// Receives the other ranks' messages by `endpoint` from now on.
    pub(crate) fn open_endpoint(&self, endpoint: Arc<Endpoint>) {
        self.endpoint.set(endpoint).expect("a world has one endpoint");
    }

    /// Returns the endpoint of messages, if the other ranks share no memory with this one.
    pub(crate) fn endpoint(&self) -> Option<&Arc<Endpoint>> {
        self.endpoint.get()
    }

    /// Returns whether each rank can have a core to itself, so that a short wait is best spent awake.
    pub(super) fn has_a_core_for_each(&self) -> bool {
        self.state.records.len() <= self.cores
    }

    /// Counts a rank of this process that has a handle.
    pub(crate) fn hold(&self) {
        self.handled.fetch_add(1, Ordering::Relaxed);
    }

    /// Uncounts a rank. With the last one, closes the endpoint and joins the workers.
    pub(crate) fn release(&self) {
        if self.handled.fetch_sub(1, Ordering::AcqRel) > 1 {
            return;
        }
        let deadline = self.state.options.deadline;
        if let Some(endpoint) = self.endpoint() {
            endpoint.close(deadline);
        }
        self.queue.close(deadline);
    }
}

impl fmt::Debug for Core {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Core({} ranks)", self.state.records.len())
    }
}

impl OwnRank {
    /// Returns the messages of the other ranks, if these share no memory with this one.
    pub(crate) fn endpoint(&self) -> Option<&Arc<Endpoint>> {
        self.core.endpoint()
    }

    pub(crate) fn options(&self) -> &WorldOptions {
        &self.core.state.options
    }

    pub(crate) fn status(&self) -> &Arc<Status> {
        &self.core.state.status
    }
}
