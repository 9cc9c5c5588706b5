//! Members issue operations: each arrives, and the last one makes the work. PROTOCOL.md, "Execution".

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use super::core::{Core, MemberCall};
use super::running::{Running, WorkPanic};
use super::wait::Ticket;
use crate::engine::{Arrivals, Arrived, Key, Operation};
use crate::execute::Work;
use crate::{Descriptor, Error};
use hsdp_flight::FlightState;

impl Core {
    /// Issues an operation for a member, with its contribution; the last member makes the work of all
    /// contributions, in slot order, and starts it. Never waits for another rank.
    pub(crate) fn submit<D: Send + 'static, W: Work>(
        self: &Arc<Self>,
        member: MemberCall<'_>,
        descriptor: Arc<Descriptor>,
        contribution: D,
        assemble: impl FnOnce(Vec<D>) -> Result<W, String>,
    ) -> Result<Ticket, Error> {
        let (key, site) = (Key::from(&*descriptor), member.site);
        let flight = &member.own.record.flight;
        let operation = self.state.table.enter(key, || {
            self.admit(descriptor.epoch)?;
            Ok(Arc::new(Operation::new(key, &site.ranks, self.state.origin)))
        });
        let submitted = operation.and_then(|operation| {
            // Before it arrives: no rank sees the end sooner than it is in the records of all members that have arrived.
            flight.ends_with(member.entry, &operation.ending);
            self.arrive(&operation, site.slot, &descriptor, contribution, assemble)?;
            Ok(operation)
        });
        // A member that is refused is none of those for which the operation is settled.
        let settle = |_: &Error| flight.settle(member.entry, FlightState::Failed);
        let operation = submitted.inspect_err(settle)?;
        Ok(Ticket::new(member, operation, descriptor))
    }

    /// Checks whether an operation may be made in `epoch`. Where the other ranks share no memory with this
    /// one, that was checked before, and they were told.
    fn admit(&self, epoch: u64) -> Result<(), Error> {
        match self.endpoint() {
            None => self.state.status.check(epoch),
            Some(_) => self.state.status.check_world(),
        }
    }

    /// Has a member arrive in its slot: one of this process, or the message of a rank that shares no
    /// memory with it.
    pub(crate) fn arrive<D: Send + 'static, W: Work>(
        self: &Arc<Self>,
        operation: &Arc<Operation>,
        slot: usize,
        descriptor: &Arc<Descriptor>,
        contribution: D,
        assemble: impl FnOnce(Vec<D>) -> Result<W, String>,
    ) -> Result<(), Error> {
        match operation.arrive(slot, descriptor, contribution) {
            // A member whose message is on its way is missed by the progress engine, which knows all
            // messages that are here.
            Arrived::Waiting if self.endpoint().is_some() => Ok(()),
            Arrived::Waiting => self.end_if_missing_left(operation, descriptor),
            Arrived::Last(contributions, arrivals) => {
                self.state.table.remove(operation.key);
                let work = || assemble(contributions);
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

    /// Begins another round of an operation with the contribution of the member in `slot`. The operation
    /// fails if the world is over.
    pub(crate) fn gather_again<D: Send + 'static>(
        &self,
        operation: &Arc<Operation>,
        slot: usize,
        descriptor: &Arc<Descriptor>,
        contribution: D,
    ) {
        operation.gather_again(slot, descriptor, contribution);
        let entered = self.state.table.enter(operation.key, || {
            self.state.status.check_world()?;
            Ok(Arc::clone(operation))
        });
        if let Err(end) = entered {
            operation.fail(&end);
        }
    }

    /// Makes the work of an operation whose members have all arrived; `None` if that panicked, which ends
    /// the world.
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
                let slow = &self.state.options.slow;
                let due = self.links.carry(slow, descriptor, &operation.ranks);
                let (operation, descriptor) = (Arc::clone(operation), Arc::clone(descriptor));
                let (blocks, work) = (work.blocks(), Box::new(work));
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
