//! What the ranks of a local world share, and the steps that they take on it.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::thread;

use hsdp_sharding::Rank;

use super::operation::{Arrival, Arrived, Attendance, Operation};
use super::queue::Queue;
use super::record::Record;
use super::running::{BlockPanic, Running, panic_message};
use super::status::Status;
use super::table::{Key, Table};
use super::wait::Ticket;
use crate::mismatch::{Mismatch, MismatchRow, Wanted};
use crate::options::{Workers, WorldOptions};
use crate::work::Work;
use crate::{AbortReason, Descriptor, Error};

/// Work that writes no more than this is done by the member that arrives last, before its call returns: waking
/// others would take longer.
const INLINE_BYTES: usize = 32 << 10;

/// What the ranks of a local world share.
#[derive(Debug)]
pub(crate) struct Core {
    options: WorldOptions,
    records: Vec<Arc<Record>>,
    status: Arc<Status>,
    table: Table,
    queue: Queue,
    cores: usize,
}

/// Held by every rank: when the last one goes, the workers are joined.
#[derive(Debug)]
pub(crate) struct Lifeline(Arc<Core>);

/// A member that comes to an operation.
pub(crate) struct Member {
    pub(crate) rank: Rank,
    /// The members, by slot.
    pub(crate) ranks: Arc<[Rank]>,
    /// The member's own.
    pub(crate) slot: usize,
}

impl Core {
    pub(crate) fn new(size: usize, options: WorldOptions) -> Arc<Self> {
        Arc::new(Self {
            options,
            records: (0..size).map(|_| Arc::default()).collect(),
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

    pub(super) fn queue(&self) -> &Queue {
        &self.queue
    }

    /// Whether each rank can have a core to itself, so that a short wait is best spent awake.
    pub(super) fn has_a_core_for_each(&self) -> bool {
        self.records.len() <= self.cores
    }

    fn record(&self, rank: Rank) -> &Record {
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
        let Member { rank, ranks, slot } = member;
        let key = Key::from(&*descriptor);
        let admit = || self.status.check(descriptor.epoch);
        let operation = self.table.enter(key, admit, || Operation::new(key, ranks))?;
        let arrival = Arrival { descriptor: Arc::clone(&descriptor), deposit: Box::new(deposit) };
        match operation.arrive(slot, arrival) {
            Arrived::Waiting => self.end_if_missing_left(&operation, &descriptor)?,
            Arrived::Last(arrivals) => {
                self.table.remove(key);
                self.start(&operation, &descriptor, arrivals, assemble)?;
            }
            Arrived::Disagrees(wanted) => {
                let problem = format!("ranks disagree about {}", descriptor.place());
                return Err(self.end_mismatch(&operation, problem, wanted));
            }
            Arrived::Refused(error) => return Err(error),
        }
        Ok(Ticket { core: Arc::clone(self), operation, descriptor, rank, slot })
    }

    /// Makes the work of an operation whose members are all there, and does it or has it done.
    fn start<D, W>(
        self: &Arc<Self>,
        operation: &Arc<Operation>,
        descriptor: &Arc<Descriptor>,
        arrivals: Vec<Arrival>,
        assemble: impl FnOnce(Vec<D>) -> Result<W, String>,
    ) -> Result<(), Error>
    where
        D: Send + 'static,
        W: Work + 'static,
    {
        let wanted = arrivals.iter().map(|arrival| Some(Arc::clone(&arrival.descriptor))).collect();
        let deposits = arrivals.into_iter().map(|arrival| arrival.deposit.downcast::<D>());
        let deposits: Result<Vec<D>, _> = deposits.map(|deposit| deposit.map(|it| *it)).collect();
        let assembled = catch_unwind(AssertUnwindSafe(|| match deposits {
            Ok(deposits) => assemble(deposits),
            Err(_) => Err("ranks call different functions".to_owned()),
        }));
        match assembled {
            Ok(Ok(work)) => self.launch(Running::new(Arc::clone(operation), Arc::clone(descriptor), work)),
            Ok(Err(problem)) => {
                let problem = format!("{problem} in {}", descriptor.place());
                return Err(self.end_mismatch(operation, problem, wanted));
            }
            Err(panic) => {
                let rank = operation.ranks()[0];
                self.end_panicked(operation, BlockPanic { rank, message: panic_message(&*panic) });
            }
        }
        Ok(())
    }

    /// Has the work done: here, if it is small or there is nobody else; or else by whoever is free.
    fn launch(self: &Arc<Self>, running: Running) {
        let wanted = match self.options.workers {
            Workers::Auto => self.cores.min(self.records.len()),
            Workers::Count(count) => count,
        };
        let small = running.blocks() <= 1 || running.bytes() <= INLINE_BYTES;
        if small || self.queue.workers(self, wanted) == 0 {
            return self.run_here(running);
        }
        let useful = running.blocks().min(wanted);
        let running = Arc::new(running);
        self.queue.push(Arc::clone(&running));
        // Members that sleep for this very operation come first: they are of no other use.
        let helpers = running.operation().call_for_help();
        self.queue.wake(useful.saturating_sub(helpers));
        self.let_go(running);
    }

    fn run_here(&self, running: Running) {
        let operation = Arc::clone(running.operation());
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

/// Early ends. PROTOCOL.md, "The two early ends".
impl Core {
    /// The error that says that the world ended by `rank`'s doing.
    pub(crate) fn ended_by(&self, rank: Rank, reason: AbortReason) -> Error {
        let record = self.record(rank);
        Error::WorldAborted { rank, step: record.step(), operation: record.last(), reason }
    }

    /// Ends the world. The error that everybody gets: the first one that ended it.
    pub(crate) fn end(&self, error: Error) -> Error {
        let end = self.status.end_world(error);
        for operation in self.table.drain(None) {
            operation.fail_gathering(&end);
        }
        end
    }

    /// Ends an epoch: operations for which members are missing fail, those that are being worked on complete.
    pub(crate) fn end_epoch(&self, epoch: u64, error: Error) {
        let end = self.status.end_epoch(epoch, error);
        for operation in self.table.drain(Some(epoch)) {
            operation.fail_gathering(&end);
        }
    }

    /// Forgets what no rank can ask for any more.
    pub(crate) fn forget_old_epochs(&self) {
        let oldest = self.records.iter().map(|record| record.epoch()).min();
        self.status.forget_before(oldest.unwrap_or(0));
    }

    /// A rank goes. If others wait for it, now or later, the world ends.
    pub(crate) fn leave(&self, rank: Rank) {
        if !self.record(rank).leave() {
            return;
        }
        for operation in self.table.snapshot() {
            let waits = |attendance: &Attendance| attendance.missing.contains(&rank);
            // Where nobody has arrived yet, whoever does will look.
            if let (true, Some(awaited)) =
                (operation.attendance().as_ref().is_some_and(waits), operation.awaited())
            {
                self.end(self.ended_by(rank, AbortReason::Left { awaited }));
            }
        }
    }

    /// The other half of [`leave`](Self::leave): whoever arrives looks whether a missing member has left.
    fn end_if_missing_left(
        &self,
        operation: &Operation,
        awaited: &Arc<Descriptor>,
    ) -> Result<(), Error> {
        let left = |rank: &Rank| self.record(*rank).has_left();
        if !operation.ranks().iter().any(left) {
            return Ok(());
        }
        let missing = operation.attendance().map_or(Vec::new(), |attendance| attendance.missing);
        match missing.into_iter().find(left) {
            Some(rank) => {
                let awaited = Arc::clone(awaited);
                Err(self.end(self.ended_by(rank, AbortReason::Left { awaited })))
            }
            None => Ok(()),
        }
    }

    /// Ends the world, and `operation` with it, because a block panicked.
    fn end_panicked(&self, operation: &Operation, panic: BlockPanic) {
        let BlockPanic { rank, message } = panic;
        let end = self.end(self.ended_by(rank, AbortReason::Panicked { message }));
        operation.fail(&end);
    }

    /// Ends the world, and `operation` with it, because its members want different things.
    fn end_mismatch(
        &self,
        operation: &Operation,
        problem: String,
        wanted: Vec<Option<Arc<Descriptor>>>,
    ) -> Error {
        let row = |(rank, wanted): (&Rank, Option<_>)| MismatchRow {
            rank: *rank,
            wanted: match wanted {
                Some(descriptor) => Wanted::Arrived(descriptor),
                None => Wanted::Missing(self.record(*rank).last()),
            },
        };
        let rows = operation.ranks().iter().zip(wanted).map(row).collect();
        let end = self.end(Error::CollectiveMismatch { table: Arc::new(Mismatch { problem, rows }) });
        operation.fail(&end);
        end
    }

    /// Ends the world because `rank` has waited for `descriptor` for longer than the deadline.
    pub(super) fn end_late(&self, operation: &Operation, rank: Rank, descriptor: &Arc<Descriptor>) {
        if operation.is_settled() {
            return;
        }
        let attendance = operation.attendance();
        let working = attendance.is_none();
        let Attendance { arrived, missing } = attendance.unwrap_or_else(|| Attendance {
            arrived: operation.ranks().to_vec(),
            missing: Vec::new(),
        });
        let culprit = missing.first().copied().unwrap_or(rank);
        let reason = AbortReason::Deadline {
            awaited: Arc::clone(descriptor),
            deadline: self.options.deadline,
            arrived,
            missing,
        };
        let end = self.end(self.ended_by(culprit, reason));
        if working {
            operation.fail(&end);
        }
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
        self.0.queue.close();
    }
}
