//! all_to_all.

use hsdp_kernels::Element;

use super::sum_of;
use crate::call::Call;
use crate::execute::{Source, VectorRoute, Vectors};
use crate::pattern::starts_of;
use crate::{Error, Group, Op, Pending, Tag};

/// # The collective that distributes elements from all members to all members
///
/// **Collective**, as the collectives that move elements.
impl Group {
    /// Member `i` gets the `i`-th part of each member's elements, in member order.
    ///
    /// `values`: `[sum of send_counts]`; output `[sum of receive_counts]`. `send_counts[i]` elements go to member
    /// `i`, `receive_counts[i]` come from it. The two may differ, but the number that one member sends to another must be
    /// the number that the other expects; otherwise all members get [`Error::CollectiveMismatch`].
    ///
    /// # Errors
    /// [`Error::Refused`] if there is not one count for each member, the send counts do not add up to the elements, or the
    /// two counts of this member for itself differ; [`Error::OutOfMemory`] if the receive counts add up to more than memory can hold.
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
    pub(super) fn issue_all_to_all<T: Element, O: From<Vectors<T>>>(
        &self,
        tag: Tag,
        mut own: Vectors<T>,
        send: Vec<usize>,
        receive: Vec<usize>,
    ) -> Result<Pending<O>, Error> {
        own.route = VectorRoute::Dealt { send: starts_of(&send), receive: starts_of(&receive) };
        self.issue(Call::new(Op::AllToAll, tag).splits::<T>(send, receive), own)
    }

    pub(super) fn check_splits(
        &self,
        len: usize,
        send: &[usize],
        receive: &[usize],
    ) -> Result<(), Error> {
        let (size, index) = (self.size(), self.index());
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
