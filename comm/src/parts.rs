//! The gather of parts in place, as a method of [`Group`]. Its buffers come back to their owners,
//! also if it fails.

use std::fmt;
use std::sync::Arc;

use hsdp_kernels::HostBuffer;

use crate::call::GroupCall;
use crate::execute::PartsContribution;
use crate::lease::{Lease, lend};
use crate::threads::{OwnRank, in_work};
use crate::{CallError, Error, Group, Op, Pending, Tag};

/// A gather of parts in progress. It owns the buffer of this member; [`wait`](Self::wait) returns
/// it.
///
/// The operation makes progress without its owner. Dropping a `PendingParts` does not cancel it,
/// and loses the buffer.
#[must_use = "without a wait, the buffer is lost"]
pub struct PendingParts<B> {
    pending: Pending<()>,
    lent: LentParts<B>,
}

/// A gather of parts that was refused or has failed, and the way to the buffer.
///
/// Other threads may still use the buffer: [`reclaim`](Self::reclaim) waits for them.
pub struct Ungathered<B> {
    /// The reason.
    pub error: Error,
    lent: LentParts<B>,
}

/// The claim of a member to the buffer that it has lent.
pub(crate) struct LentParts<B> {
    lease: Lease<B>,
    own: Arc<OwnRank>,
}

impl<B> PendingParts<B> {
    /// Waits until the operation is complete, and returns the buffer with the parts of all members.
    /// Waits as [`Pending::wait`] does.
    ///
    /// # Errors
    /// The errors of [`Pending::wait`], with the way to the buffer.
    pub fn wait(self) -> Result<B, Ungathered<B>> {
        let Self { pending, lent } = self;
        match pending.wait() {
            Ok(()) => Ok(lent.lease.take().expect("it has returned when the gather is complete")),
            Err(error) => Err(Ungathered { error, lent }),
        }
    }

    /// Returns whether [`wait`](Self::wait) would return at once. Never blocks.
    #[must_use]
    pub fn is_complete(&self) -> bool {
        self.pending.is_complete()
    }
}

impl<B> Ungathered<B> {
    /// Waits until no thread uses the buffer, for the deadline of the world at the most, and
    /// returns it. The part of this member is as it was; the others are undefined.
    ///
    /// Not collective: it needs no other rank.
    ///
    /// # Errors
    /// [`CallError::StillLent`] if a thread uses the buffer when the deadline has passed;
    /// [`CallError::Reentrant`] when called by the code that lends a gradient to an operation. Both
    /// keep the way to the buffer, for another try.
    pub fn reclaim(self) -> Result<B, Self> {
        let Self { lent, .. } = self;
        let op = Op::AllGather;
        let rank = lent.own.rank;
        if in_work() {
            return Err(Self { error: CallError::Reentrant { op, rank }.into(), lent });
        }
        let waited = lent.own.options().deadline;
        lent.lease.wait(waited).ok_or_else(|| {
            let step = lent.own.record.step();
            Self { error: CallError::StillLent { op, rank, step, waited }.into(), lent }
        })
    }
}

/// # Gathers of parts
impl Group {
    /// Gathers parts in place: the part of each member is copied into the buffers of all others.
    ///
    /// **Collective**, in the order of the group's channel, with the same tag, cuts and dtype on
    /// all members; returns at once. `cuts`: `[size + 1]`, ascending from 0. Member `i` owns the
    /// elements `cuts[i]..cuts[i + 1]` of its buffer. The output is the same buffer, in which the
    /// elements up to the last cut are those of their owners. Those behind it are neither read nor
    /// written, so buffers may differ in length. The ledger counts the bytes of the parts of the
    /// other members.
    ///
    /// The buffer is never lost: an error has the way to it.
    ///
    /// # Errors
    /// [`CallError::Refused`] if the cuts do not ascend from 0, or are not one more than the
    /// members, or the buffer ends before the last of them; the errors of all calls on units. If
    /// members cut their buffers in different places, all get
    /// [`WorldError::Mismatch`](crate::WorldError) by [`PendingParts::wait`].
    pub fn gather_parts(
        &self,
        tag: Tag,
        cuts: Arc<[usize]>,
        buffer: HostBuffer,
    ) -> Result<PendingParts<HostBuffer>, Ungathered<HostBuffer>> {
        let dtype = buffer.dtype();
        let len = buffer.len();
        let (buffer, lease) = lend(buffer);
        let issued = self.check_parts_of(&cuts, len).and_then(|count| {
            let call = GroupCall::new(Op::AllGather, tag).of(dtype, count);
            self.issue(call, PartsContribution { cuts, buffer })
        });
        self.lent(lease).pending(issued)
    }

    /// Returns the claim to a buffer that was lent to a call.
    pub(crate) fn lent<B>(&self, lease: Lease<B>) -> LentParts<B> {
        LentParts { lease, own: Arc::clone(&self.handle().own) }
    }

    /// Checks the cuts of a buffer of so many elements. Returns the number of elements in all
    /// parts.
    pub(crate) fn check_parts_of(&self, cuts: &[usize], len: usize) -> Result<usize, Error> {
        let op = Op::AllGather;
        let count = self.check_cuts(op, cuts)?;
        if len < count {
            return Err(self.bad_count(op, "the buffer", len, format!("at least {count}")));
        }
        Ok(count)
    }

    /// Checks cuts. Returns the number of elements in all parts.
    pub(crate) fn check_cuts(&self, op: Op, cuts: &[usize]) -> Result<usize, Error> {
        self.check_len(op, "the list of cuts", cuts.len(), self.size() + 1)?;
        match cuts {
            [0, .., count] if cuts.is_sorted() => Ok(*count),
            _ => Err(self.refused(op, format!("the cuts {cuts:?} do not ascend from 0"))),
        }
    }
}

impl<B> LentParts<B> {
    /// Returns the gather that was issued, or the error with this claim.
    pub(crate) fn pending(
        self,
        issued: Result<Pending<()>, Error>,
    ) -> Result<PendingParts<B>, Ungathered<B>> {
        match issued {
            Ok(pending) => Ok(PendingParts { pending, lent: self }),
            Err(error) => Err(Ungathered { error, lent: self }),
        }
    }
}

impl<B> fmt::Debug for PendingParts<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.pending.fmt(f)
    }
}

impl<B> fmt::Debug for Ungathered<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Ungathered({:?})", self.error)
    }
}

#[cfg(all(test, not(shuttle)))]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::{Channel, World, WorldOptions};

    #[test]
    fn a_buffer_that_a_thread_keeps_can_be_reclaimed_later() {
        let deadline = Duration::from_millis(30);
        let options = WorldOptions { deadline, ..WorldOptions::default() };
        let worlds = World::local(1, options);
        let group = worlds[0].world_group(Channel::User);
        let (leased, lease) = lend(vec![1.0]);
        worlds[0].set_step(7);
        let refused = group.refused(Op::AllGather, "a test".to_owned());
        let failed = group.lent(lease).pending(Err(refused));
        let failed = failed.expect_err("it failed").reclaim().expect_err("it is in use");
        let expected = "all_gather on rank 0, step 7: its buffer is still in use after 30ms";
        assert_eq!(failed.error.to_string(), expected);
        drop(leased);
        assert_eq!(failed.reclaim().expect("it is back"), vec![1.0]);
    }
}
