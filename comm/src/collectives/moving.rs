//! all_gather, broadcast, gather, scatter.

use hsdp_kernels::Element;

use crate::call::Call;
use crate::execute::{Source, Vectors};
use crate::{Error, Group, Op, Pending, Tag};

/// # Collectives that move elements
///
/// All are **collective**: every member makes the same call, in the same place of the group's sequence, with
/// the same tag, dtype and counts. All return at once; a root is an index in the group.
///
/// Before anything is issued, every call refuses arguments that are wrong on this member alone
/// ([`Error::Refused`]), calls that are not allowed ([`Error::Reentrant`], [`Error::Absent`]), and
/// calls without memory for the output ([`Error::OutOfMemory`]). It returns the error of a step or world that has ended.
/// [`Pending::wait`] returns the errors that only all members together can detect.
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
        self.issue_gather(Call::new(Op::AllGather, tag), own)
    }

    /// Every member gets the root's elements.
    ///
    /// `values`: `[n]` on all members. The output is the same buffer, filled; only the root's elements are read.
    ///
    /// # Errors
    /// [`Error::Refused`] if there is no member `root`.
    pub fn broadcast<T: Element>(
        &self,
        tag: Tag,
        root: usize,
        values: Vec<T>,
    ) -> Result<Pending<Vec<T>>, Error> {
        let rank = self.member(Op::Broadcast, "the root", root)?;
        let call = Call::new(Op::Broadcast, tag).elements::<T>(values.len()).root(rank);
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
    /// [`Error::Refused`] if there is no member `root`.
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
        self.issue_gather(Call::new(Op::Gather, tag).root(root), own)
    }

    /// Issues a gather to all members, or to the root.
    pub(super) fn issue_gather<T: Element, O: From<Vectors<T>>>(
        &self,
        call: Call,
        own: Vectors<T>,
    ) -> Result<Pending<O>, Error> {
        self.issue(call.elements::<T>(own.source.len()), own)
    }

    /// Member `i` gets the root's `i`-th part.
    ///
    /// `values`: `[size * count]` on the root, `None` on the others; output `[count]`.
    ///
    /// # Errors
    /// [`Error::Refused`] if there is no member `root`, or if the root does not pass `size * count`
    /// elements, or another member passes elements.
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
        self.issue_scatter(tag, root, Vectors::new(Source::Given(values), target))
    }

    /// Issues a scatter of a root and elements that were checked.
    pub(super) fn issue_scatter<T: Element, O: From<Vectors<T>>>(
        &self,
        tag: Tag,
        root: usize,
        own: Vectors<T>,
    ) -> Result<Pending<O>, Error> {
        let count = own.target.as_ref().map_or(0, Vec::len);
        let call = Call::new(Op::Scatter, tag).elements::<T>(count).root(self.ranks()[root]);
        self.issue(call, own)
    }

    /// Checks what a member brings to a scatter of `count` elements to each.
    pub(super) fn check_dealt(&self, root: usize, found: usize, count: usize) -> Result<(), Error> {
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
