//! The state that the ranks of a local world share.

use std::ops::Deref;
use std::sync::{Arc, OnceLock};

use hsdp_sharding::Rank;

use super::queue::Queue;
use super::table::Table;
use crate::engine::{Record, Status};
use crate::options::WorldOptions;
use crate::remote::Endpoint;
use crate::site::Site;
use crate::slow::Links;
use crate::sync::atomic::AtomicUsize;
use crate::sync::thread;
use hsdp_flight::{EntryNumber, Origin, Recorder};

/// The state that the ranks of a local world share.
#[derive(Debug)]
pub(crate) struct Core {
    options: WorldOptions,
    pub(super) origin: Origin,
    records: Arc<[Arc<Record>]>,
    pub(super) status: Arc<Status>,
    pub(super) table: Table,
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
pub(crate) struct Access(Arc<Core>);

/// Held by every rank: when the last one goes, the workers are joined.
#[derive(Debug)]
pub(crate) struct Lifeline(Arc<Core>);

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
        let (entries, origin) = (options.flight_entries, Origin::now());
        let record = |_| Arc::new(Record::new(Recorder::new(entries, origin)));
        Arc::new(Self {
            links: Links::new(&options.slow),
            options,
            origin,
            records: (0..size).map(record).collect(),
            status: Arc::default(),
            table: Table::default(),
            queue: Queue::default(),
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

    pub(crate) fn options(&self) -> &WorldOptions {
        &self.options
    }

    pub(crate) fn records(&self) -> &[Arc<Record>] {
        &self.records
    }

    pub(crate) fn status(&self) -> &Arc<Status> {
        &self.status
    }

    /// Whether each rank can have a core to itself, so that a short wait is best spent awake.
    pub(super) fn has_a_core_for_each(&self) -> bool {
        self.records.len() <= self.cores
    }

    pub(crate) fn record(&self, rank: Rank) -> &Record {
        &self.records[rank.index()]
    }
}

impl Access {
    pub(crate) fn new(core: &Arc<Core>) -> Arc<Self> {
        Arc::new(Self(Arc::clone(core)))
    }
}

impl Deref for Access {
    type Target = Arc<Core>;

    fn deref(&self) -> &Arc<Core> {
        &self.0
    }
}

impl Lifeline {
    pub(crate) fn new(core: Arc<Core>) -> Arc<Self> {
        Arc::new(Self(core))
    }

    pub(crate) fn core(&self) -> &Arc<Core> {
        &self.0
    }
}

impl Drop for Lifeline {
    fn drop(&mut self) {
        if let Some(endpoint) = self.0.endpoint() {
            endpoint.close(&self.0.status, self.0.options.deadline);
        }
        self.0.queue.close(self.0.options.deadline);
    }
}
