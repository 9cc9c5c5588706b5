//! An operation that was issued and not yet waited for.

use std::fmt;

use crate::Error;
use crate::threads::Ticket;

/// The output of an operation in progress. It owns the buffers of the operation;
/// [`wait`](Self::wait) returns them.
///
/// The operation makes progress without its owner: the members that arrive, the members that wait
/// and the worker threads of the world do the work. Dropping a `Pending` does not cancel the
/// operation (the other members get their outputs), never waits, and never frees memory that is
/// being read or written.
///
/// An output cannot be read before the wait:
///
/// ```compile_fail
/// # use hsdp_comm::{Channel, Tag, World};
/// let group = World::single().world_group(Channel::User);
/// let pending = group.all_gather(Tag::default(), vec![1_f32])?;
/// let first = pending[0]; // no: wait for it
/// # Ok::<(), hsdp_comm::Error>(())
/// ```
#[must_use = "an operation without a wait returns no buffers and hides its errors"]
pub struct Pending<T> {
    state: Progressing<T>,
}

enum Progressing<T> {
    /// Done when it was issued: no other rank takes part.
    Ready(T),
    Issued {
        ticket: Ticket,
        /// Waits, and makes of the output what this member gets.
        output: fn(Ticket) -> Result<T, Error>,
    },
}

impl<T> Pending<T> {
    pub(crate) fn ready(output: T) -> Self {
        Self { state: Progressing::Ready(output) }
    }

    /// Waits until the operation is complete, and returns its output.
    ///
    /// A thread that waits helps with the work of this operation, and with the work of others where
    /// that runs no code of users. Members need not wait in the order in which they issued.
    ///
    /// When it returns an output, no other member holds a buffer or gradient that this member lent.
    /// After an error, others may hold them for a while.
    ///
    /// # Errors
    /// The error that ended the operation early: [`WorldError::Mismatch`](crate::WorldError),
    /// [`Error::StepAborted`], [`WorldError::Aborted`](crate::WorldError) or
    /// [`WorldError::WorkFailed`](crate::WorldError) (also when the deadline of the world passes);
    /// or [`CallError::Reentrant`](crate::CallError) when called by the code that lends a gradient
    /// to an operation. The buffers of a failed operation are lost.
    pub fn wait(self) -> Result<T, Error> {
        match self.state {
            Progressing::Ready(output) => Ok(output),
            Progressing::Issued { ticket, output } => output(ticket),
        }
    }

    /// Whether [`wait`](Self::wait) would return at once. Never blocks.
    #[must_use]
    pub fn is_complete(&self) -> bool {
        match &self.state {
            Progressing::Ready(_) => true,
            Progressing::Issued { ticket, .. } => ticket.is_settled(),
        }
    }

    /// The member's output is made of the output of the work, an `O`.
    pub(crate) fn issued<O: 'static>(ticket: Ticket) -> Self
    where
        T: TryFrom<O>,
        Error: From<T::Error>,
    {
        let output = |ticket: Ticket| Ok(T::try_from(ticket.wait::<O>()?)?);
        Self { state: Progressing::Issued { ticket, output } }
    }
}

impl<T> fmt::Debug for Pending<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.state {
            Progressing::Ready(_) => f.write_str("Pending(ready)"),
            Progressing::Issued { ticket, .. } => {
                let end = if ticket.is_settled() { "settled" } else { "on its way" };
                write!(f, "Pending({}, {end})", ticket.descriptor())
            }
        }
    }
}
