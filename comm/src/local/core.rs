//! What the ranks of a local world share, and the steps that they take on it.

use std::ops::Deref;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, OnceLock};
use std::time::Instant;

use hsdp_sharding::Rank;

use super::operation::{Arrived, Operation};
use super::phase::Arrivals;
use super::queue::Queue;
use super::queued::Queued;
use super::record::Record;
use super::running::{Running, WorkPanic, discard};
use super::status::Status;
use super::table::{Key, Table};
use super::wait::Ticket;
use crate::flight::{EntryNumber, FlightState, Origin, Recorder};
use crate::options::{Workers, WorldOptions};
use crate::remote::Office;
use crate::site::Site;
use crate::slow::Links;
use crate::sync::atomic::{AtomicUsize, Ordering};
use crate::sync::thread;
use crate::work::{Assemble, Work};
use crate::{Descriptor, Error};

/// Work that moves no more than this is done by the member that arrives last, before its call returns: waking
/// others would take longer.
const INLINE_BYTES: usize = 32 << 10;

/// What the ranks of a local world share.
#[derive(Debug)]
pub(crate) struct Core {
    options: WorldOptions,
    origin: Origin,
    records: Arc<[Arc<Record>]>,
    status: Arc<Status>,
    table: Table,
    queue: Queue,
    links: Links,
    cores: usize,
    /// The number of members that sleep.
    sleepers: AtomicUsize,
    /// Where the other ranks share no memory with this one.
    office: OnceLock<Arc<Office>>,
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
            office: OnceLock::new(),
        })
    }

    /// From now on the other ranks are heard of by letters.
    pub(crate) fn open_office(&self, office: Arc<Office>) {
        self.office.set(office).expect("a world has one office");
    }

    /// Where the other ranks are heard of, if they share no memory with this one.
    pub(crate) fn office(&self) -> Option<&Arc<Office>> {
        self.office.get()
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

    pub(super) fn table(&self) -> &Table {
        &self.table
    }

    pub(super) fn queue(&self) -> &Queue {
        &self.queue
    }

    /// Whether each rank can have a core to itself, so that a short wait is best spent awake.
    pub(super) fn has_a_core_for_each(&self) -> bool {
        self.records.len() <= self.cores
    }

    pub(crate) fn record(&self, rank: Rank) -> &Record {
        &self.records[rank.index()]
    }

    /// A member issues an operation, with its contribution; the last member makes the work of all contributions, in slot order, and
    /// starts it. Never waits for another rank.
    pub(crate) fn submit<D: Send + 'static, W: Work>(
        self: &Arc<Self>,
        member: Member<'_>,
        descriptor: Arc<Descriptor>,
        contribution: D,
        assemble: impl Assemble<D, W>,
    ) -> Result<Ticket, Error> {
        let (rank, entry) = (member.rank, member.entry);
        let submitted = self.meet(member, descriptor, contribution, assemble);
        if submitted.is_err() {
            // A member that is refused is none of those for which the operation is settled.
            self.record(rank).flight.settle(entry, FlightState::Failed);
        }
        submitted
    }

    fn meet<D: Send + 'static, W: Work>(
        self: &Arc<Self>,
        member: Member<'_>,
        descriptor: Arc<Descriptor>,
        contribution: D,
        assemble: impl Assemble<D, W>,
    ) -> Result<Ticket, Error> {
        let Member { rank, site, entry, .. } = member;
        let key = Key::from(&*descriptor);
        let operation = self.table.enter(key, || {
            self.admit(descriptor.epoch)?;
            Ok(Arc::new(Operation::new(key, &site.ranks, self.origin)))
        })?;
        // Before it arrives: no rank sees the end sooner than it is in the records of all members that have arrived.
        self.record(rank).flight.ends_with(entry, operation.ending());
        self.arrive((&operation, site.slot), &descriptor, contribution, assemble)?;
        Ok(Ticket::new(member, operation, descriptor))
    }

    /// Whether an operation may be made in `epoch`. Where the other ranks share no memory with this one, it was asked before,
    /// and they were told.
    fn admit(&self, epoch: u64) -> Result<(), Error> {
        match self.office() {
            None => self.status.check(epoch),
            Some(_) => self.status.check_world(),
        }
    }

    /// A member arrives in its slot: one of this process, or the message of a rank that shares no memory with it.
    pub(crate) fn arrive<D: Send + 'static, W: Work>(
        self: &Arc<Self>,
        (operation, slot): (&Arc<Operation>, usize),
        descriptor: &Arc<Descriptor>,
        contribution: D,
        assemble: impl Assemble<D, W>,
    ) -> Result<(), Error> {
        match operation.arrive::<D, W>(slot, descriptor, contribution) {
            // A member whose message is on its way is missed by the courier, which knows all messages that are here.
            Arrived::Waiting if self.office().is_some() => Ok(()),
            Arrived::Waiting => self.end_if_missing_left(operation, descriptor),
            Arrived::Last(contributions, arrivals) => {
                self.table.remove(operation.key());
                let work = || assemble(contributions);
                let running = self.assemble(operation, descriptor, arrivals, work)?;
                let rank = operation.ranks()[slot];
                running.into_iter().for_each(|running| self.launch(running, rank));
                Ok(())
            }
            Arrived::Differs(difference) => {
                Err(self.end_difference(operation, difference, descriptor))
            }
            Arrived::Refused(error) => Err(error),
        }
    }

    /// Work of an operation has another round, to which the member in `slot` brings a contribution. The operation fails if the world
    /// is over.
    pub(crate) fn gather_again<D: Send + 'static, W: Work>(
        &self,
        (operation, slot): (&Arc<Operation>, usize),
        descriptor: &Arc<Descriptor>,
        contribution: D,
    ) {
        operation.gather_again::<D, W>((slot, descriptor), contribution);
        let entered = self.table.enter(operation.key(), || {
            self.status.check_world()?;
            Ok(Arc::clone(operation))
        });
        if let Err(end) = entered {
            operation.fail(&end);
        }
    }

    /// Makes the work of an operation whose members have all arrived; `None` if that panicked, which ends the world.
    fn assemble<W: Work>(
        &self,
        operation: &Arc<Operation>,
        descriptor: &Arc<Descriptor>,
        arrivals: Arrivals,
        work: impl FnOnce() -> Result<W, String>,
    ) -> Result<Option<Running>, Error> {
        // Contributions that are of no use are dropped in here, too: they are the users'.
        match catch_unwind(AssertUnwindSafe(work)) {
            Ok(Ok(work)) => {
                let due = self.links.carry(descriptor, operation.ranks().len());
                let (operation, descriptor) = (Arc::clone(operation), Arc::clone(descriptor));
                Ok(Some(Running::new(operation, descriptor, Box::new(work), due)))
            }
            Ok(Err(problem)) => {
                let problem = format!("{problem} in {}", descriptor.place());
                Err(self.end_mismatch(operation, problem, arrivals))
            }
            Err(panic) => {
                self.end_panicked(operation, WorkPanic::of_no_member(descriptor, &*panic));
                Ok(None)
            }
        }
    }

    /// Has the work done: here, by `rank`, if it is small or no other thread would do it; otherwise by the threads that are free.
    fn launch(self: &Arc<Self>, running: Running, rank: Rank) {
        // The last to arrive may be the courier, for whom others wait: it does no more than it must.
        let is_alone = self.office().is_some();
        let small = (running.blocks() <= 1 && !is_alone) || running.bytes() <= INLINE_BYTES;
        let workers = if small { 0 } else { self.queue.workers(self, self.wanted_workers()) };
        if small || (workers == 0 && !self.has_helpers(running.operation())) {
            return self.run_here(running, rank);
        }
        // Members that wait help, too.
        let threads = self.cores.min(workers + self.records.len());
        let useful = running.blocks().min(threads);
        let queued = Arc::new(Queued::new(running, threads));
        self.queue.push(&queued);
        // Members that sleep for this very operation come first: they are of no other use.
        let helpers = queued.running.operation().wake_helpers(useful);
        if workers + helpers == 0 {
            // Whoever slept is about to look again, or has just looked.
            return self.help_for(queued, rank);
        }
        self.queue.wake(workers.min(useful - helpers));
        self.let_go(queued);
    }

    /// Runs blocks of `queued` for `rank`, which does not wait for it.
    fn help_for(&self, queued: Arc<Queued>, rank: Rank) {
        let operation = Arc::clone(queued.running.operation());
        let _blocked = queued.running.calls_users().then(|| self.record(rank).block_on(&operation));
        self.help(queued, None);
    }

    /// Whether there is a core that no rank uses, and a member that sleeps for this very operation.
    fn has_helpers(&self, operation: &Operation) -> bool {
        let awake = self.records.len() - self.sleepers.load(Ordering::Relaxed);
        awake < self.cores && operation.has_sleepers()
    }

    /// Has a member sleep until its operation changes, or `moment` comes.
    pub(super) fn sleep_on(&self, operation: &Operation, moment: Instant) {
        self.sleepers.fetch_add(1, Ordering::Relaxed);
        operation.sleep_until(moment);
        self.sleepers.fetch_sub(1, Ordering::Relaxed);
    }

    /// The number of worker threads. Between threads, ranks that outnumber the cores keep these busy: a worker would take one
    /// away from a rank that computes.
    fn wanted_workers(&self) -> usize {
        // Where the other ranks are processes, they have workers of their own; while one waits in NCCL, another is left.
        let for_nccl = usize::from(cfg!(feature = "nccl"));
        match (self.options.workers, self.office()) {
            (Workers::Auto, Some(_)) => 1 + for_nccl,
            (Workers::Auto, None) if self.has_a_core_for_each() => self.records.len(),
            (Workers::Auto, None) => 0,
            (Workers::Count(count), Some(_)) => count.max(for_nccl),
            (Workers::Count(count), None) => count,
        }
    }

    /// The exception to waits that end: code of users that is called here may keep `rank` for ever. Its record names the operation,
    /// so that others can find the owner of the code.
    fn run_here(&self, running: Running, rank: Rank) {
        let operation = Arc::clone(running.operation());
        let _blocked = running.calls_users().then(|| self.record(rank).block_on(&operation));
        let span = running.span();
        let _entered = span.enter();
        let ran = (0..running.blocks()).try_for_each(|block| running.run(block, self));
        let completed = match ran {
            Ok(()) => running.complete(),
            Err(panic) => {
                discard(running);
                Err(panic)
            }
        };
        if let Err(panic) = completed {
            self.end_panicked(&operation, panic);
        }
    }

    /// Runs blocks of `queued` until none is left to claim, or `own` is settled.
    pub(super) fn help(&self, queued: Arc<Queued>, own: Option<&Operation>) {
        let running = &queued.running;
        let span = running.span();
        let _entered = span.enter();
        while !own.is_some_and(Operation::is_settled) {
            let Some(blocks) = queued.claim() else {
                self.queue.remove(&queued);
                break;
            };
            // Claimed blocks are run, unless the operation has failed: no member would get anything of it.
            let mut blocks = blocks.take_while(|_| !running.operation().is_settled());
            if let Err(panic) = blocks.try_for_each(|block| running.run(block, self)) {
                queued.abandon();
                self.end_panicked(running.operation(), panic);
            }
        }
        self.let_go(queued);
    }

    /// Lets go of work; the thread that does so last completes it.
    fn let_go(&self, queued: Arc<Queued>) {
        let Some(Queued { running, .. }) = Arc::into_inner(queued) else { return };
        let operation = Arc::clone(running.operation());
        if let Err(panic) = running.complete() {
            self.end_panicked(&operation, panic);
        }
        if let Some(office) = self.office() {
            office.ring();
        }
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
        if let Some(office) = self.0.office() {
            office.close(&self.0.status, self.0.options.deadline);
        }
        self.0.queue.close(self.0.options.deadline);
    }
}
