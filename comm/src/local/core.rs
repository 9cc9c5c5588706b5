//! What the ranks of a local world share, and the steps that they take on it.

use std::ops::Deref;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, OnceLock};
use std::time::Instant;

use hsdp_sharding::Rank;

use super::identity::{Company, Number};
use super::operation::{Arrived, Operation};
use super::post::Post;
use super::queue::Queue;
use super::queued::Queued;
use super::record::Record;
use super::running::{Running, WorkPanic, discard};
use super::slots::{AnySlots, Slots};
use super::status::Status;
use super::table::Table;
use super::wait::Ticket;
use crate::flight::{EntryNumber, FlightState, Origin, Recorder};
use crate::options::{Workers, WorldOptions};
use crate::remote::Office;
use crate::site::Site;
use crate::slow::Links;
use crate::sync::atomic::{AtomicUsize, Ordering};
use crate::sync::thread;
use crate::work::{Deposits, Work};
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

/// A member that comes to an operation.
pub(crate) struct Member<'a> {
    pub(crate) access: &'a Arc<Access>,
    pub(crate) rank: Rank,
    pub(crate) site: &'a Site,
    /// What its rank has noted of it.
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

    /// A member comes to an operation with its deposit; the last one makes the work of all deposits, in slot order,
    /// and starts it. Never waits for another rank.
    pub(crate) fn submit<D: Send + 'static, W: Work>(
        self: &Arc<Self>,
        member: Member<'_>,
        descriptor: Arc<Descriptor>,
        deposit: D,
        assemble: impl FnOnce(W::Lists, Deposits<'_, D>) -> Result<W, String>,
    ) -> Result<Ticket, Error> {
        let (rank, entry) = (member.rank, member.entry);
        let submitted = self.meet(member, descriptor, deposit, assemble);
        if submitted.is_err() {
            // Whoever is not let in, or comes to a failed operation, is none of those for whom it is settled.
            self.record(rank).flight.settle(entry, FlightState::Failed);
        }
        submitted
    }

    fn meet<D: Send + 'static, W: Work>(
        self: &Arc<Self>,
        member: Member<'_>,
        descriptor: Arc<Descriptor>,
        deposit: D,
        assemble: impl FnOnce(W::Lists, Deposits<'_, D>) -> Result<W, String>,
    ) -> Result<Ticket, Error> {
        let Member { rank, site, entry, .. } = member;
        let post = self.post_at(site);
        let number = Number::from(&*descriptor);
        let operation = post.enter::<D, W>(number, || self.admit(descriptor.epoch))?;
        // Before it comes: nobody sees the end sooner than it is in the records of all who have come.
        self.record(rank).flight.ends_with(entry, operation.ending());
        let place = (&**post, &operation, site.slot);
        if let Err(error) = self.come(place, Arc::clone(&descriptor), deposit, assemble) {
            // Who is told so has no ticket, and takes nothing.
            self.table.forsake(&operation);
            return Err(error);
        }
        Ok(Ticket::new(member, operation, descriptor))
    }

    /// Where the operations of a site meet.
    pub(crate) fn post_at<'a>(&self, site: &'a Site) -> &'a Arc<Post> {
        site.sequence.post(|| {
            let (group, ranks) = (site.id, Arc::clone(&site.ranks));
            self.table.post(Company { group, ranks, origin: self.origin })
        })
    }

    /// Whether an operation may be made in `epoch`. Where the other ranks share no memory with this one, it was asked before,
    /// and they were told.
    fn admit(&self, epoch: u64) -> Result<(), Error> {
        match self.office() {
            None => self.status.check(epoch),
            Some(_) => self.status.check_world(),
        }
    }

    /// A member comes to its slot: one of this process, or what a rank has sent that shares no memory with it.
    pub(crate) fn come<D: Send + 'static, W: Work>(
        self: &Arc<Self>,
        (post, operation, slot): (&Post, &Arc<Operation>, usize),
        descriptor: Arc<Descriptor>,
        deposit: D,
        assemble: impl FnOnce(W::Lists, Deposits<'_, D>) -> Result<W, String>,
    ) -> Result<(), Error> {
        match operation.arrive(slot, Arc::clone(&descriptor), deposit) {
            // Who is on its way by letter is missed by the courier, who knows what has come.
            Arrived::Waiting if self.office().is_some() => Ok(()),
            Arrived::Waiting => self.end_if_missing_left(operation, &descriptor),
            Arrived::Last(slots) => {
                post.remove(operation.number());
                let running = self.assemble(operation, &descriptor, slots, assemble)?;
                let rank = operation.ranks()[slot];
                running.into_iter().for_each(|running| self.launch(running, rank));
                Ok(())
            }
            Arrived::Disagrees(about) => Err(self.end_disagreement(operation, about, &descriptor)),
            Arrived::Refused(error) => Err(error),
        }
    }

    /// An operation gathers again; it fails if the world is over.
    pub(crate) fn readmit(&self, post: &Post, operation: &Arc<Operation>) {
        if let Err(end) = post.readmit(operation, || self.status.check_world()) {
            operation.fail(&end);
        }
    }

    /// Makes the work of an operation whose members are all there; `None` if that panicked, which ends the world.
    fn assemble<D: Send + 'static, W: Work>(
        &self,
        operation: &Arc<Operation>,
        descriptor: &Arc<Descriptor>,
        mut slots: Box<Slots<D, W>>,
        assemble: impl FnOnce(W::Lists, Deposits<'_, D>) -> Result<W, String>,
    ) -> Result<Option<Running>, Error> {
        // Deposits that are of no use are dropped in here, too: they are the users'.
        match catch_unwind(AssertUnwindSafe(|| slots.assemble(assemble))) {
            Ok(Ok(())) => {
                let due = self.links.carry(descriptor, operation.ranks());
                let (operation, descriptor) = (Arc::clone(operation), Arc::clone(descriptor));
                Ok(Some(Running::new(operation, descriptor, slots).due(due)))
            }
            Ok(Err(problem)) => {
                let problem = format!("{problem} in {}", descriptor.place());
                Err(self.end_mismatch(operation, problem, slots.arrivals().to_vec()))
            }
            Err(panic) => {
                discard(slots);
                self.end_panicked(operation, WorkPanic::of_nobody(descriptor, &*panic));
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
        let queued = self.queue.push(running, threads);
        // Members that sleep for this very operation come first: they are of no other use.
        let helpers = queued.operation().call_for_help(useful);
        if workers + helpers == 0 {
            // Whoever slept is about to look again, or has just looked.
            return self.help_for(queued, rank);
        }
        self.queue.wake(workers.min(useful - helpers));
        self.let_go(queued);
    }

    /// Runs blocks of `queued` for `rank`, which does not wait for it.
    fn help_for(&self, queued: Arc<Queued>, rank: Rank) {
        let operation = Arc::clone(queued.operation());
        let _blocked = queued.calls_users().then(|| self.record(rank).block_on(&operation));
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
        operation.park_until(moment);
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

    /// The exception to waits that end: code of users that is called here may keep `rank` for ever. Its record says
    /// in what, for others to name whose code it is.
    fn run_here(&self, running: Running, rank: Rank) {
        let operation = Arc::clone(running.operation());
        let _blocked = running.calls_users().then(|| self.record(rank).block_on(&operation));
        let span = running.span();
        let _entered = span.enter();
        let ran = (0..running.blocks()).try_for_each(|block| running.run(block, self));
        if let Err(panic) = ran.and_then(|()| running.complete()) {
            self.end_panicked(&operation, panic);
        }
    }

    /// Runs blocks of `queued` until none is left to claim, or `own` is settled.
    pub(super) fn help(&self, queued: Arc<Queued>, own: Option<&Operation>) {
        let span = queued.span();
        let _entered = span.enter();
        while !own.is_some_and(Operation::is_settled) {
            let Some(blocks) = queued.claim() else {
                self.queue.remove(&queued);
                break;
            };
            // What was claimed is run, unless the operation has failed: nobody would get anything of it.
            let mut blocks = blocks.take_while(|_| !queued.operation().is_settled());
            if let Err(panic) = blocks.try_for_each(|block| queued.run(block, self)) {
                queued.abandon();
                self.end_panicked(queued.operation(), panic);
            }
        }
        self.let_go(queued);
    }

    /// Lets go of work; whoever does so last completes it.
    fn let_go(&self, queued: Arc<Queued>) {
        let Some(running) = self.queue.let_go(queued) else { return };
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
