//! The threads of a world, and a rank as its operations hold it. Members issue operations: each
//! arrives, and the last one makes the work (PROTOCOL.md, "Execution"). Waits come before the judge
//! (JUDGE.md).

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, OnceLock};
use std::time::Instant;
use std::{fmt, slice};

use crossbeam::utils::CachePadded;
use hsdp_flight::{EntryNumber, FlightState};
use hsdp_sharding::{ByteCount, Rank};

use super::wait::Ticket;
use super::work::{Queue, Running, WorkPanic};
use crate::engine::judge::{self, JudgeFinding, Look, waiting_for_each_other};
use crate::engine::{Arrivals, Arrived, EarlyEnds, Key, Record, SharedOperation, WorldState};
use crate::execute::Work;
use crate::options::WorldOptions;
use crate::remote::Endpoint;
use crate::site::Site;
use crate::slow::{SlowLinks, WithDue};
use crate::sync::atomic::{AtomicUsize, Ordering};
use crate::sync::thread;
use crate::{Descriptor, Error};

/// The threads of a world: workers, ranks that wait, and the endpoint that stands for ranks of
/// other processes.
pub(crate) struct Core {
    pub(crate) state: Arc<WorldState>,
    pub(super) queue: CachePadded<Queue>,
    pub(super) links: SlowLinks,
    pub(super) cores: usize,
    /// The number of members that sleep.
    pub(super) sleepers: CachePadded<AtomicUsize>,
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
            queue: CachePadded::default(),
            links: SlowLinks::default(),
            cores: thread::available_parallelism().map_or(1, usize::from),
            sleepers: CachePadded::new(AtomicUsize::new(0)),
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

    /// Returns whether each rank can have a core to itself, so that a short wait is best spent
    /// awake.
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

    pub(crate) fn early_ends(&self) -> &Arc<EarlyEnds> {
        &self.core.state.early_ends
    }
}

impl Core {
    /// Issues an operation for a member, with its contribution. The last member makes the work of
    /// all contributions, in slot order, and starts it; `assemble` also returns when the outputs
    /// are due, if the channel is slow. Never waits for another rank.
    pub(crate) fn submit<D: Send + 'static, W: Work>(
        self: &Arc<Self>,
        member: MemberCall<'_>,
        descriptor: Arc<Descriptor>,
        contribution: D,
        assemble: impl FnOnce(Vec<D>, &Descriptor) -> Result<WithDue<W>, String>,
    ) -> Result<Ticket, Error> {
        let key = Key::from(&*descriptor);
        let site = member.site;
        let flight = &member.own.record.flight;
        let operation = self.state.table.enter(key, || {
            self.admit(descriptor.epoch)?;
            Ok(Arc::new(SharedOperation::new(key, &site.ranks, self.state.origin)))
        });
        let submitted = operation.and_then(|operation| {
            // Before it arrives: no rank sees the end sooner than it is in the records of all
            // members that have arrived.
            flight.ends_with(member.entry, &operation.ending);
            self.arrive(&operation, site.slot, &descriptor, contribution, assemble)?;
            Ok(operation)
        });
        // A member that is refused is none of those for which the operation is settled.
        let settle = |_: &Error| flight.settle(member.entry, FlightState::Failed);
        let operation = submitted.inspect_err(settle)?;
        Ok(Ticket::new(member, operation, descriptor))
    }

    /// Checks whether an operation may be made in `epoch`. Where the other ranks share no memory
    /// with this one, that was checked before, and they were told.
    fn admit(&self, epoch: u64) -> Result<(), Error> {
        match self.endpoint() {
            None => self.state.early_ends.check(epoch),
            Some(_) => self.state.early_ends.check_world(),
        }
    }

    /// Has a member arrive in its slot: one of this process, or the message of a rank that shares
    /// no memory with it.
    pub(crate) fn arrive<D: Send + 'static, W: Work>(
        self: &Arc<Self>,
        operation: &Arc<SharedOperation>,
        slot: usize,
        descriptor: &Arc<Descriptor>,
        contribution: D,
        assemble: impl FnOnce(Vec<D>, &Descriptor) -> Result<WithDue<W>, String>,
    ) -> Result<(), Error> {
        match operation.arrive(slot, descriptor, contribution) {
            // A member whose message is on its way is missed by the progress engine, which knows
            // all messages that are here.
            Arrived::Waiting if self.endpoint().is_some() => Ok(()),
            Arrived::Waiting => self.end_if_missing_left(operation, descriptor),
            Arrived::Last(contributions, arrivals) => {
                self.state.table.remove(operation.key);
                let work = || assemble(contributions, descriptor);
                let running = self.assemble(operation, descriptor, arrivals, work)?;
                let rank = operation.ranks[slot];
                running.into_iter().for_each(|running| self.launch(running, rank));
                Ok(())
            }
            Arrived::Differs(difference) => {
                Err(self.end_difference(operation, difference, descriptor))
            }
            Arrived::Refused(error) => Err(error),
        }
    }

    /// Occupies the link of an operation whose last member has just come, if its channel is slow. A
    /// member receives `received` bytes from the others. Returns when the operation is due.
    pub(crate) fn carry(&self, descriptor: &Descriptor, received: ByteCount) -> Option<Instant> {
        self.links.carry(&self.state.options.slow, descriptor, received)
    }

    /// Begins another round of an operation with the contribution of the member in `slot`. The
    /// operation fails if the world is over.
    pub(crate) fn gather_again<D: Send + 'static>(
        &self,
        operation: &Arc<SharedOperation>,
        slot: usize,
        descriptor: &Arc<Descriptor>,
        contribution: D,
    ) {
        operation.gather_again(slot, descriptor, contribution);
        let entered = self.state.table.enter(operation.key, || {
            self.state.early_ends.check_world()?;
            Ok(Arc::clone(operation))
        });
        if let Err(end) = entered {
            operation.fail(&end);
        }
    }

    /// Makes the work of an operation whose members have all arrived; `None` if that panicked,
    /// which ends the world.
    fn assemble<W: Work>(
        &self,
        operation: &Arc<SharedOperation>,
        descriptor: &Arc<Descriptor>,
        arrivals: Arrivals,
        work: impl FnOnce() -> Result<WithDue<W>, String>,
    ) -> Result<Option<Running>, Error> {
        // Contributions that are of no use are dropped in here, too: they are the users'.
        match catch_unwind(AssertUnwindSafe(work)) {
            Ok(Ok((work, due))) => {
                let operation = Arc::clone(operation);
                let descriptor = Arc::clone(descriptor);
                let blocks = work.blocks();
                let work = Box::new(work);
                Ok(Some(Running { operation, descriptor, work, blocks, due }))
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
}

impl Core {
    /// Ends the world if `waiter`, which waits, waits for ranks that wait for each other.
    pub(super) fn end_if_circle(&self, waiter: Rank) {
        let before = self.look(waiter);
        if judge::judge(&before, &before).is_none() {
            return;
        }
        if let Some(JudgeFinding::Circle(rows)) = judge::judge(&self.look(waiter), &before) {
            self.end(waiting_for_each_other(rows));
        }
    }

    /// The states of `waiter`, and of the ranks that it reaches.
    fn look(&self, waiter: Rank) -> Look {
        let own = self.state.rank_state(waiter);
        let mut look = judge::reached(&own.waits, |rank| self.state.rank_state(rank));
        look.insert(waiter, own);
        look
    }

    /// The rank that keeps `operation` from ending: JUDGE.md.
    pub(super) fn culprit(&self, waiter: Rank, operation: &Arc<SharedOperation>) -> Option<Rank> {
        let wait = operation.wait_of(waiter);
        let look = judge::reached(slice::from_ref(&wait), |rank| self.state.rank_state(rank));
        judge::culprit(&look, waiter, &wait)
    }
}
