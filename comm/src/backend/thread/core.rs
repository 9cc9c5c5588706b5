//! The threads of a world, and the state that its ranks share.

use std::fmt;
use std::ops::Deref;
use std::sync::{Arc, OnceLock};

use hsdp_sharding::Rank;

use super::queue::Queue;
use crate::engine::Shared;
use crate::options::WorldOptions;
use crate::remote::Endpoint;
use crate::site::Site;
use crate::slow::Links;
use crate::sync::atomic::AtomicUsize;
use crate::sync::thread;
use hsdp_flight::EntryNumber;

/// The threads of a world: workers, ranks that wait, and the endpoint that stands for ranks of other processes.
pub(crate) struct Core {
    shared: Arc<Shared>,
    pub(super) queue: Queue,
    pub(super) links: Links,
    pub(super) cores: usize,
    /// The number of members that sleep.
    pub(super) sleepers: AtomicUsize,
    /// Where the other ranks share no memory with this one.
    endpoint: OnceLock<Arc<Endpoint>>,
}

/// A rank's own handle of what all share: its operations count themselves here, and not where all ranks would count.
#[derive(Debug)]
pub(crate) struct Access(pub(crate) Arc<Core>);

/// Held by every rank: when the last one goes, the workers are joined.
#[derive(Debug)]
pub(crate) struct Lifeline(pub(crate) Arc<Core>);

/// A member that issues an operation.
pub(crate) struct Member<'a> {
    pub(crate) access: &'a Arc<Access>,
    pub(crate) rank: Rank,
    pub(crate) site: &'a Site,
    /// The entry of the operation in its rank's ring.
    pub(crate) entry: EntryNumber,
}

impl Core {
    pub(crate) fn new(size: usize, options: WorldOptions) -> Arc<Self> {
        Arc::new(Self {
            shared: Shared::new(size, options),
            queue: Queue::default(),
            links: Links::default(),
            cores: thread::available_parallelism().map_or(1, usize::from),
            sleepers: AtomicUsize::new(0),
            endpoint: OnceLock::new(),
        })
    }

    /// From now on the other ranks are heard of by messages.
    pub(crate) fn open_endpoint(&self, endpoint: Arc<Endpoint>) {
        self.endpoint.set(endpoint).expect("a world has one endpoint");
    }

    /// Where the other ranks are heard of, if they share no memory with this one.
    pub(crate) fn endpoint(&self) -> Option<&Arc<Endpoint>> {
        self.endpoint.get()
    }

    /// Whether each rank can have a core to itself, so that a short wait is best spent awake.
    pub(super) fn has_a_core_for_each(&self) -> bool {
        self.records().len() <= self.cores
    }
}

impl fmt::Debug for Core {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Core({} ranks)", self.records().len())
    }
}

impl Deref for Core {
    type Target = Arc<Shared>;

    fn deref(&self) -> &Arc<Shared> {
        &self.shared
    }
}

impl Deref for Access {
    type Target = Arc<Core>;

    fn deref(&self) -> &Arc<Core> {
        &self.0
    }
}

impl Drop for Lifeline {
    fn drop(&mut self) {
        if let Some(endpoint) = self.0.endpoint() {
            endpoint.close(self.0.options().deadline);
        }
        self.0.queue.close(self.0.options().deadline);
    }
}
