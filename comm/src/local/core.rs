//! What the ranks of a local world share, and the steps that they take on it.

use std::mem;
use std::ops::Deref;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use hsdp_sharding::Rank;

use super::operation::{Arrival, Arrived, Operation};
use super::queue::Queue;
use super::record::{Record, Roster};
use super::running::{Running, WorkPanic, discard};
use super::status::Status;
use super::table::{Key, Table};
use super::wait::Ticket;
use crate::flight::{EntryNumber, FlightState, Origin, Recorder};
use crate::options::{Workers, WorldOptions};
use crate::slow::Links;
use crate::sync::thread;
use crate::work::{PerMember, Work};
use crate::{Descriptor, Error};

/// Work that moves no more than this is done by the member that arrives last, before its call returns: waking
/// others would take longer.
const INLINE_BYTES: usize = 32 << 10;

/// What the ranks of a local world share.
#[derive(Debug)]
pub(crate) struct Core {
    options: WorldOptions,
    records: Arc<[Arc<Record>]>,
    status: Arc<Status>,
    table: Table,
    queue: Queue,
    links: Links,
    cores: usize,
}

/// A rank's own handle of what all share: its operations count themselves here, and not where all ranks would count.
#[derive(Debug)]
pub(crate) struct Access {
    core: Arc<Core>,
    roster: Arc<Roster>,
}

/// Held by every rank: when the last one goes, the workers are joined.
#[derive(Debug)]
pub(crate) struct Lifeline(Arc<Core>);

/// A member that comes to an operation.
pub(crate) struct Member {
    pub(crate) access: Arc<Access>,
    pub(crate) rank: Rank,
    /// The members, by slot.
    pub(crate) ranks: Arc<[Rank]>,
    /// The member's own.
    pub(crate) slot: usize,
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
            records: (0..size).map(record).collect(),
            status: Arc::default(),
            table: Table::default(),
            queue: Queue::default(),
            cores: thread::available_parallelism().map_or(1, usize::from),
        })
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

    pub(super) fn record(&self, rank: Rank) -> &Record {
        &self.records[rank.index()]
    }

    /// A member comes to an operation with its deposit; the last one makes the work of all deposits, in slot order,
    /// and starts it. Never waits for another rank.
    pub(crate) fn submit<D, W>(
        self: &Arc<Self>,
        member: Member,
        descriptor: Arc<Descriptor>,
        deposit: D,
        assemble: impl FnOnce(Vec<D>) -> Result<W, String>,
    ) -> Result<Ticket, Error>
    where
        D: Send + 'static,
        W: Work + 'static,
    {
        let (rank, entry) = (member.rank, member.entry);
        let submitted = self.meet(member, descriptor, deposit, assemble);
        if submitted.is_err() {
            // Whoever is not let in, or comes to a failed operation, is none of those for whom it is settled.
            self.record(rank).flight.settle(entry, FlightState::Failed);
        }
        submitted
    }

    fn meet<D, W>(
        self: &Arc<Self>,
        member: Member,
        descriptor: Arc<Descriptor>,
        deposit: D,
        assemble: impl FnOnce(Vec<D>) -> Result<W, String>,
    ) -> Result<Ticket, Error>
    where
        D: Send + 'static,
        W: Work + 'static,
    {
        let Member { access, rank, ranks, slot, entry } = member;
        let key = Key::from(&*descriptor);
        let admit = || self.status.check(descriptor.epoch);
        let make = || Operation::new(key, ranks, Arc::clone(&access.roster));
        let operation = self.table.enter(key, admit, make)?;
        let (deposit, wanted) = (Box::new(deposit), Arc::clone(&descriptor));
        let arrival = Arrival { descriptor: wanted, deposit, entry };
        match operation.arrive(slot, arrival) {
            Arrived::Waiting => self.end_if_missing_left(&operation, &descriptor)?,
            Arrived::Last(arrivals) => {
                self.table.remove(key);
                let running = self.assemble(&operation, &descriptor, arrivals, assemble)?;
                running.into_iter().for_each(|running| self.launch(running, rank));
            }
            Arrived::Disagrees => return Err(self.end_disagreement(&operation, &descriptor)),
            Arrived::Refused(error) => return Err(error),
        }
        Ok(Ticket { core: access, operation, descriptor, rank, slot, entry })
    }

    /// Makes the work of an operation whose members are all there; `None` if that panicked, which ends the world.
    fn assemble<D, W>(
        &self,
        operation: &Arc<Operation>,
        descriptor: &Arc<Descriptor>,
        mut arrivals: PerMember<Arrival>,
        assemble: impl FnOnce(Vec<D>) -> Result<W, String>,
    ) -> Result<Option<Running>, Error>
    where
        D: Send + 'static,
        W: Work + 'static,
    {
        // Deposits that are of no use are dropped in here, too: they are the users'.
        let assembled = catch_unwind(AssertUnwindSafe(|| {
            assemble(deposits(&mut arrivals).ok_or("ranks call different functions")?)
        }));
        match assembled {
            Ok(Ok(work)) => {
                let due = self.links.carry(descriptor, operation.ranks().len());
                let (operation, descriptor) = (Arc::clone(operation), Arc::clone(descriptor));
                Ok(Some(Running::new(operation, descriptor, work).due(due)))
            }
            Ok(Err(problem)) => {
                let problem = format!("{problem} in {}", descriptor.place());
                let wanted = arrivals.into_iter().map(|arrival| Some(arrival.descriptor));
                Err(self.end_mismatch(operation, problem, wanted.collect()))
            }
            Err(panic) => {
                discard(arrivals);
                self.end_panicked(operation, WorkPanic::of_nobody(descriptor, &*panic));
                Ok(None)
            }
        }
    }

    /// Has the work done: here, by `rank`, if it is small or there is nobody else; or else by whoever is free.
    fn launch(self: &Arc<Self>, running: Running, rank: Rank) {
        let wanted = match self.options.workers {
            Workers::Auto => self.cores.min(self.records.len()),
            Workers::Count(count) => count,
        };
        let small = running.blocks() <= 1 || running.bytes() <= INLINE_BYTES;
        if small || self.queue.workers(self, wanted) == 0 {
            return self.run_here(running, rank);
        }
        let useful = running.blocks().min(wanted);
        let running = Arc::new(running);
        self.queue.push(Arc::clone(&running));
        // Members that sleep for this very operation come first: they are of no other use.
        let helpers = running.operation().call_for_help(useful);
        self.queue.wake(useful - helpers);
        self.let_go(running);
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

    /// Runs blocks of `running` until none is left to claim, or `own` is settled.
    pub(super) fn help(&self, running: Arc<Running>, own: Option<&Operation>) {
        let span = running.span();
        let _entered = span.enter();
        while !own.is_some_and(Operation::is_settled) {
            let Some(block) = running.claim() else {
                self.queue.remove(&running);
                break;
            };
            if let Err(panic) = running.run(block, self) {
                running.abandon();
                self.end_panicked(running.operation(), panic);
            }
        }
        self.let_go(running);
    }

    /// Lets go of an operation; whoever does so last completes it.
    fn let_go(&self, running: Arc<Running>) {
        let operation = Arc::clone(running.operation());
        let completed = Arc::into_inner(running).map_or(Ok(()), Running::complete);
        if let Err(panic) = completed {
            self.end_panicked(&operation, panic);
        }
    }
}

/// Takes what the members brought; `None` where one brought something else than a `D`.
fn deposits<D: 'static>(arrivals: &mut [Arrival]) -> Option<Vec<D>> {
    let (members, mut deposits) = (arrivals.len(), Vec::with_capacity(arrivals.len()));
    for arrival in arrivals {
        let deposit = mem::replace(&mut arrival.deposit, Box::new(()));
        deposits.extend(deposit.downcast::<D>().ok().map(|deposit| *deposit));
    }
    (deposits.len() == members).then_some(deposits)
}

impl Access {
    pub(crate) fn new(core: &Arc<Core>) -> Arc<Self> {
        let roster = Arc::new(Roster(Arc::clone(&core.records)));
        Arc::new(Self { core: Arc::clone(core), roster })
    }
}

impl Deref for Access {
    type Target = Arc<Core>;

    fn deref(&self) -> &Arc<Core> {
        &self.core
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
        self.0.queue.close(self.0.options.deadline);
    }
}
