//! The collectives on vectors of any element type, as methods of [`Group`](crate::Group).
//!
//! In reading order: elements go as they are, also dealt out; elements are combined; vectors change
//! hands; some of them again, with buffers that the caller lends.

use hsdp_kernels::Element;

use crate::call::GroupCall;
use crate::execute::{Filled, Lent, Source, VectorRoute, Vectors};
use crate::pattern::starts_of;
use crate::{Error, Group, Op, Pending, Reduction, Tag};

/// Returns the sum of counts that a caller gives; as many as can be counted, if they are more. No
/// buffer has so many elements, so a comparison with a length fails, and so does an allocation.
pub(crate) fn sum_of(counts: &[usize]) -> usize {
    counts.iter().fold(0, |sum, count| sum.saturating_add(*count))
}

/// # Collectives that move elements
///
/// All are **collective**: every member makes the same call, in the same place of the group's
/// sequence, with the same tag, dtype and counts. All return at once; a root is an index in the
/// group.
///
/// Before anything is issued, every call refuses arguments that are wrong on this member alone
/// ([`CallError::Refused`](crate::CallError)), calls that are not allowed
/// ([`CallError::Reentrant`](crate::CallError), [`CallError::Absent`](crate::CallError)), and calls
/// without memory for the output ([`CallError::OutOfMemory`](crate::CallError)). It returns the
/// error of a step or world that has ended. [`Pending::wait`] returns the errors that only all
/// members together can detect.
impl Group {
    /// Every member gets the elements of all members, in member order.
    ///
    /// `values`: `[n]`; output `[size * n]`.
    ///
    /// # Errors
    /// The errors listed above.
    pub fn all_gather<T: Element>(
        &self,
        tag: Tag,
        values: Vec<T>,
    ) -> Result<Pending<Vec<T>>, Error> {
        let len = values.len().saturating_mul(self.size());
        let target = Some(self.room(Op::AllGather, tag, len)?);
        let own = Vectors::new(Source::Given(values), target);
        self.issue_gather(GroupCall::new(Op::AllGather, tag), own)
    }

    /// Every member gets the root's elements.
    ///
    /// `values`: `[n]` on all members. The output is the same buffer, filled; only the root's
    /// elements are read.
    ///
    /// # Errors
    /// [`CallError::Refused`](crate::CallError) if there is no member `root`.
    pub fn broadcast<T: Element>(
        &self,
        tag: Tag,
        root: usize,
        values: Vec<T>,
    ) -> Result<Pending<Vec<T>>, Error> {
        let rank = self.member(Op::Broadcast, "the root", root)?;
        let call = GroupCall::new(Op::Broadcast, tag).elements::<T>(values.len()).root(rank);
        let (source, target) = match self.index() == root {
            true => (Source::Lent(values), None),
            false => (Source::nothing(), Some(values)),
        };
        self.issue(call, Vectors::new(source, target))
    }

    /// The root gets the elements of all members, in member order; the others get `None`.
    ///
    /// `values`: `[n]`; output `[size * n]`.
    ///
    /// # Errors
    /// [`CallError::Refused`](crate::CallError) if there is no member `root`.
    pub fn gather<T: Element>(
        &self,
        tag: Tag,
        root: usize,
        values: Vec<T>,
    ) -> Result<Pending<Option<Vec<T>>>, Error> {
        let root = self.member(Op::Gather, "the root", root)?;
        let len = values.len().saturating_mul(self.size());
        let room = || self.room(Op::Gather, tag, len);
        let target = (self.rank() == root).then(room).transpose()?;
        let own = Vectors::new(Source::Given(values), target);
        self.issue_gather(GroupCall::new(Op::Gather, tag).root(root), own)
    }

    /// Issues a gather to all members, or to the root.
    fn issue_gather<T: Element, O: From<Filled<T>>>(
        &self,
        call: GroupCall,
        own: Vectors<T>,
    ) -> Result<Pending<O>, Error> {
        self.issue(call.elements::<T>(own.source.len()), own)
    }

    /// Member `i` gets the root's `i`-th part.
    ///
    /// `values`: `[size * count]` on the root, `None` on the others; output `[count]`.
    ///
    /// # Errors
    /// [`CallError::Refused`](crate::CallError) if there is no member `root`, or if the root does
    /// not pass `size * count` elements, or another member passes elements.
    pub fn scatter<T: Element>(
        &self,
        tag: Tag,
        root: usize,
        values: Option<Vec<T>>,
        count: usize,
    ) -> Result<Pending<Vec<T>>, Error> {
        let values = values.unwrap_or_default();
        self.check_dealt(root, values.len(), count)?;
        let target = Some(self.room(Op::Scatter, tag, count)?);
        let call = GroupCall::new(Op::Scatter, tag).elements::<T>(count).root(self.ranks()[root]);
        self.issue(call, Vectors::new(Source::Given(values), target))
    }

    /// Checks what a member brings to a scatter of `count` elements to each.
    fn check_dealt(&self, root: usize, found: usize, count: usize) -> Result<(), Error> {
        self.member(Op::Scatter, "the root", root)?;
        let is_root = self.index() == root;
        let expected = if is_root { count.saturating_mul(self.size()) } else { 0 };
        if found == expected {
            return Ok(());
        }
        let expected = format!("{expected}: {count} for each of {} members", self.size());
        Err(self.bad_count(Op::Scatter, "the input", found, expected))
    }
}

/// # The collective that distributes elements from all members to all members
///
/// **Collective**, as the collectives that move elements.
impl Group {
    /// Member `i` gets the `i`-th part of each member's elements, in member order.
    ///
    /// `values`: `[sum of send_counts]`; output `[sum of receive_counts]`. `send_counts[i]`
    /// elements go to member `i`, `receive_counts[i]` come from it. The two may differ, but the
    /// number that one member sends to another must be the number that the other expects; otherwise
    /// all members get [`WorldError::Mismatch`](crate::WorldError).
    ///
    /// # Errors
    /// [`CallError::Refused`](crate::CallError) if there is not one count for each member, the send
    /// counts do not add up to the elements, or the two counts of this member for itself differ;
    /// [`CallError::OutOfMemory`](crate::CallError) if the receive counts add up to more than
    /// memory can hold.
    pub fn all_to_all<T: Element>(
        &self,
        tag: Tag,
        values: Vec<T>,
        send_counts: Vec<usize>,
        receive_counts: Vec<usize>,
    ) -> Result<Pending<Vec<T>>, Error> {
        self.check_splits(values.len(), &send_counts, &receive_counts)?;
        let target = Some(self.room(Op::AllToAll, tag, sum_of(&receive_counts))?);
        let own = Vectors::new(Source::Given(values), target);
        self.issue_all_to_all(tag, own, send_counts, receive_counts)
    }

    /// Issues an all_to_all with counts that were checked.
    fn issue_all_to_all<T: Element, O: From<Filled<T>>>(
        &self,
        tag: Tag,
        mut own: Vectors<T>,
        send: Vec<usize>,
        receive: Vec<usize>,
    ) -> Result<Pending<O>, Error> {
        own.route = VectorRoute::Dealt { send: starts_of(&send), receive: starts_of(&receive) };
        self.issue(GroupCall::new(Op::AllToAll, tag).splits::<T>(send, receive), own)
    }

    fn check_splits(&self, len: usize, send: &[usize], receive: &[usize]) -> Result<(), Error> {
        let size = self.size();
        let index = self.index();
        let refused =
            |what, found, expected| Err(self.bad_count(Op::AllToAll, what, found, expected));
        let lists = [("the list of send counts", send), ("the list of receive counts", receive)];
        if let Some((what, counts)) = lists.into_iter().find(|(_, counts)| counts.len() != size) {
            return refused(what, counts.len(), format!("one for each of {size} members"));
        }
        if sum_of(send) != len {
            return refused("the input", len, format!("the sum of the send counts {send:?}"));
        }
        if send[index] != receive[index] {
            let expected = format!("{}, as it sends to itself", send[index]);
            return refused("the part that it expects from itself", receive[index], expected);
        }
        Ok(())
    }
}

/// # Collectives that combine elements
///
/// All are **collective**, as the collectives that move elements. Elements are combined in member
/// order: f32, f64 and integers in their own type (integers wrap around), f16 and bf16 in f32 with
/// one rounding at the end. The result does not depend on timing, and all members that get it get
/// the same bits.
impl Group {
    /// Member `i` gets the reduction of the `i`-th parts of all members.
    ///
    /// `values`: `[size * n]`; output `[n]`.
    ///
    /// # Errors
    /// [`CallError::Refused`](crate::CallError) if the length of `values` is not a multiple of the
    /// group's size, or for an average of integers.
    pub fn reduce_scatter<T: Element>(
        &self,
        tag: Tag,
        reduction: Reduction,
        values: Vec<T>,
    ) -> Result<Pending<Vec<T>>, Error> {
        let part = self.check_parts::<T>(reduction, values.len())?;
        let target = Some(self.room(Op::ReduceScatter, tag, part)?);
        let own = Vectors::new(Source::Given(values), target);
        self.issue_reduce_scatter(tag, reduction, own)
    }

    /// Issues a reduce_scatter of elements that were checked.
    fn issue_reduce_scatter<T: Element, O: From<Filled<T>>>(
        &self,
        tag: Tag,
        reduction: Reduction,
        own: Vectors<T>,
    ) -> Result<Pending<O>, Error> {
        let len = own.source.len();
        let call = GroupCall::new(Op::ReduceScatter, tag).elements::<T>(len).reduction(reduction);
        self.issue(call, own)
    }

    /// Returns the number of elements that each member gets of a reduce_scatter of `len`.
    fn check_parts<T: Element>(&self, reduction: Reduction, len: usize) -> Result<usize, Error> {
        let size = self.size();
        self.check_average::<T>(Op::ReduceScatter, reduction)?;
        if len.is_multiple_of(size) {
            return Ok(len / size);
        }
        let expected = format!("a multiple of the group's {size} members");
        Err(self.bad_count(Op::ReduceScatter, "the input", len, expected))
    }

    /// Every member gets the reduction of the elements of all members.
    ///
    /// `values`: `[n]`; output `[n]`, in the same buffer.
    ///
    /// # Errors
    /// [`CallError::Refused`](crate::CallError) for an average of integers.
    pub fn all_reduce<T: Element>(
        &self,
        tag: Tag,
        reduction: Reduction,
        values: Vec<T>,
    ) -> Result<Pending<Vec<T>>, Error> {
        self.check_average::<T>(Op::AllReduce, reduction)?;
        let call =
            GroupCall::new(Op::AllReduce, tag).elements::<T>(values.len()).reduction(reduction);
        self.issue(call, Vectors::new(Source::nothing(), Some(values)))
    }

    /// The root gets the reduction of the elements of all members; the others get `None`.
    ///
    /// `values`: `[n]`; output `[n]`, in the root's buffer. `root` is an index in the group.
    ///
    /// # Errors
    /// [`CallError::Refused`](crate::CallError) if there is no member `root`, or for an average of
    /// integers.
    pub fn reduce<T: Element>(
        &self,
        tag: Tag,
        root: usize,
        reduction: Reduction,
        values: Vec<T>,
    ) -> Result<Pending<Option<Vec<T>>>, Error> {
        self.check_average::<T>(Op::Reduce, reduction)?;
        let rank = self.member(Op::Reduce, "the root", root)?;
        let len = values.len();
        let is_root = self.index() == root;
        let call =
            GroupCall::new(Op::Reduce, tag).elements::<T>(len).reduction(reduction).root(rank);
        // The result goes where the root's elements are.
        let (source, target) = match is_root {
            true => (Source::nothing(), Some(values)),
            false => (Source::Given(values), None),
        };
        self.issue(call, Vectors::new(source, target))
    }

    fn check_average<T: Element>(&self, op: Op, reduction: Reduction) -> Result<(), Error> {
        if reduction == Reduction::Avg && !T::DTYPE.is_float() {
            let problem = "only floating-point elements have an average";
            return Err(self.bad_dtype(op, T::DTYPE, problem));
        }
        Ok(())
    }
}

/// # Collectives that pass vectors on
///
/// Between ranks that share memory, the vector itself changes its owner, and nothing is copied.
/// permute and barrier are **collective**, as the collectives that move elements. A transfer
/// involves only its two members: the transfers from one member to another are a sequence of their
/// own, in which the n-th [`send`](Self::send) meets the n-th [`recv`](Self::recv).
impl Group {
    /// Sends this member's elements to member `destination`, or to no member. Gets the elements of
    /// the member that sends to this one, or zeros if there is none.
    ///
    /// `values`: `[n]`; output `[n]`. Two members with the same destination are a mismatch, on all
    /// members.
    ///
    /// # Errors
    /// [`CallError::Refused`](crate::CallError) if there is no member `destination`.
    pub fn permute<T: Element>(
        &self,
        tag: Tag,
        destination: Option<usize>,
        values: Vec<T>,
    ) -> Result<Pending<Vec<T>>, Error> {
        if let Some(destination) = destination {
            self.member(Op::Permute, "the destination", destination)?;
        }
        let call = GroupCall::new(Op::Permute, tag).elements::<T>(values.len());
        self.issue(call, Vectors::handed(values, destination))
    }

    /// Sends elements to member `to`, which calls [`recv`](Self::recv). Complete when that call is
    /// issued: the receiver owns the elements then, whether or not it has waited for them.
    ///
    /// `values`: `[n]`. A member may send to itself.
    ///
    /// # Errors
    /// [`CallError::Refused`](crate::CallError) if there is no member `to`.
    pub fn send<T: Element>(
        &self,
        tag: Tag,
        to: usize,
        values: Vec<T>,
    ) -> Result<Pending<()>, Error> {
        let peer = self.member(Op::Send, "the destination", to)?;
        let call = GroupCall::new(Op::Send, tag).elements::<T>(values.len()).peer(peer);
        let own = Vectors::handed(values, Some(1));
        let ticket = self.transfer(call, [self.rank(), peer], own)?;
        Ok(ticket.map_or_else(|| Pending::ready(()), Pending::issued::<Filled<T>>))
    }

    /// Receives the elements that member `from` sends with [`send`](Self::send).
    ///
    /// Output `[count]`; the sender must send as many.
    ///
    /// # Errors
    /// [`CallError::Refused`](crate::CallError) if there is no member `from`;
    /// [`CallError::OutOfMemory`](crate::CallError) if the rank has no peers, and no memory for the
    /// output.
    pub fn recv<T: Element>(
        &self,
        tag: Tag,
        from: usize,
        count: usize,
    ) -> Result<Pending<Vec<T>>, Error> {
        let peer = self.member(Op::Recv, "the source", from)?;
        let call = GroupCall::new(Op::Recv, tag).elements::<T>(count).peer(peer);
        let own = Vectors::<T>::handed(Vec::new(), None);
        match self.transfer(call, [peer, self.rank()], own)? {
            Some(ticket) => Ok(Pending::issued::<Filled<T>>(ticket)),
            None => Ok(Pending::ready(self.room(Op::Recv, tag, count)?)),
        }
    }

    /// Completes when every member has issued it. To wait for the others, call [`Pending::wait`].
    ///
    /// # Errors
    /// As the collectives that move elements.
    pub fn barrier(&self, tag: Tag) -> Result<Pending<()>, Error> {
        self.issue(GroupCall::new(Op::Barrier, tag), Vectors::<f32>::nothing())
    }
}

/// # Collectives with buffers that are lent
///
/// These do the same as the collectives without `_into`, but allocate no buffer. Some members may
/// call one form and others the other. To call them repeatedly, lend the buffers that came back:
///
/// ```
/// use hsdp_comm::{Channel, Error, Lent, Reduction, Tag, WorldOptions, launch};
///
/// let ends = launch(2, WorldOptions::default(), |world| -> Result<(), Error> {
///     let group = world.world_group(Channel::User);
///     let mut lent = Lent { source: vec![1.0_f32; 1000], target: vec![0.0; 500] };
///     for _ in 0..3 {
///         lent = group.reduce_scatter_into(Tag::default(), Reduction::Sum, lent)?.wait()?;
///     }
///     assert_eq!(lent, Lent { source: vec![1.0; 1000], target: vec![2.0; 500] });
///     Ok(())
/// });
/// assert_eq!(ends, [Ok(()), Ok(())]);
/// ```
///
/// All are **collective**. [`broadcast`](Self::broadcast) and [`all_reduce`](Self::all_reduce) work
/// in the caller's buffer anyway, and the collectives that pass vectors on copy nothing.
impl Group {
    /// As [`all_gather`](Self::all_gather).
    ///
    /// `source`: `[n]`; `target`: `[size * n]`.
    ///
    /// # Errors
    /// As `all_gather`, and [`CallError::Refused`](crate::CallError) if the target has another
    /// length.
    pub fn all_gather_into<T: Element>(
        &self,
        tag: Tag,
        lent: Lent<T>,
    ) -> Result<Pending<Lent<T>>, Error> {
        let expected = lent.source.len().saturating_mul(self.size());
        self.check_len(Op::AllGather, "the target", lent.target.len(), expected)?;
        self.issue_gather(GroupCall::new(Op::AllGather, tag), lent.into())
    }

    /// As [`reduce_scatter`](Self::reduce_scatter).
    ///
    /// `source`: `[size * n]`; `target`: `[n]`.
    ///
    /// # Errors
    /// As `reduce_scatter`, and [`CallError::Refused`](crate::CallError) if the target has another
    /// length.
    pub fn reduce_scatter_into<T: Element>(
        &self,
        tag: Tag,
        reduction: Reduction,
        lent: Lent<T>,
    ) -> Result<Pending<Lent<T>>, Error> {
        let part = self.check_parts::<T>(reduction, lent.source.len())?;
        self.check_len(Op::ReduceScatter, "the target", lent.target.len(), part)?;
        self.issue_reduce_scatter(tag, reduction, lent.into())
    }

    /// As [`gather`](Self::gather).
    ///
    /// `source`: `[n]`; `target`: `[size * n]` on the root, empty on the others.
    ///
    /// # Errors
    /// As `gather`, and [`CallError::Refused`](crate::CallError) if the target has another length.
    pub fn gather_into<T: Element>(
        &self,
        tag: Tag,
        root: usize,
        lent: Lent<T>,
    ) -> Result<Pending<Lent<T>>, Error> {
        let root_rank = self.member(Op::Gather, "the root", root)?;
        let takers = if self.index() == root { self.size() } else { 0 };
        let expected = lent.source.len().saturating_mul(takers);
        self.check_len(Op::Gather, "the target", lent.target.len(), expected)?;
        let Lent { source, target } = lent;
        let target = (self.index() == root).then_some(target);
        let call = GroupCall::new(Op::Gather, tag).root(root_rank);
        self.issue_gather(call, Vectors::new(Source::Lent(source), target))
    }

    /// As [`all_to_all`](Self::all_to_all).
    ///
    /// `source`: `[sum of send_counts]`; `target`: `[sum of receive_counts]`.
    ///
    /// # Errors
    /// As `all_to_all`, and [`CallError::Refused`](crate::CallError) if the target has another
    /// length.
    pub fn all_to_all_into<T: Element>(
        &self,
        tag: Tag,
        lent: Lent<T>,
        send_counts: Vec<usize>,
        receive_counts: Vec<usize>,
    ) -> Result<Pending<Lent<T>>, Error> {
        self.check_splits(lent.source.len(), &send_counts, &receive_counts)?;
        self.check_len(Op::AllToAll, "the target", lent.target.len(), sum_of(&receive_counts))?;
        self.issue_all_to_all(tag, lent.into(), send_counts, receive_counts)
    }
}
