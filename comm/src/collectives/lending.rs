//! The collectives that would make buffers for their outputs, with buffers that the caller lends.

use hsdp_kernels::Element;

use super::sum_of;
use crate::call::Call;
use crate::execute::{Lent, Source, Vectors};
use crate::{Error, Group, Op, Pending, Reduction, Tag};

/// # Collectives with buffers that are lent
///
/// These do the same as the collectives without `_into`, but allocate no buffer. Some members may call one form and
/// others the other. To call them repeatedly, lend the buffers that came back:
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
/// All are **collective**. [`broadcast`](Self::broadcast) and [`all_reduce`](Self::all_reduce) work in the
/// caller's buffer anyway, and the collectives that pass vectors on copy nothing.
impl Group {
    /// As [`all_gather`](Self::all_gather).
    ///
    /// `source`: `[n]`; `target`: `[size * n]`.
    ///
    /// # Errors
    /// As `all_gather`, and [`Error::Refused`] if the target has another length.
    pub fn all_gather_into<T: Element>(
        &self,
        tag: Tag,
        lent: Lent<T>,
    ) -> Result<Pending<Lent<T>>, Error> {
        let expected = lent.source.len().saturating_mul(self.size());
        self.check_len(Op::AllGather, "the target", lent.target.len(), expected)?;
        self.issue_gather(Call::new(Op::AllGather, tag), lent.into())
    }

    /// As [`reduce_scatter`](Self::reduce_scatter).
    ///
    /// `source`: `[size * n]`; `target`: `[n]`.
    ///
    /// # Errors
    /// As `reduce_scatter`, and [`Error::Refused`] if the target has another length.
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

    /// As [`reduce`](Self::reduce), but every member gets its buffer back: the root's holds the result, the others are
    /// unchanged.
    ///
    /// `values`: `[n]`; output `[n]`, in the same buffer.
    ///
    /// # Errors
    /// As `reduce`.
    pub fn reduce_in_place<T: Element>(
        &self,
        tag: Tag,
        root: usize,
        reduction: Reduction,
        values: Vec<T>,
    ) -> Result<Pending<Vec<T>>, Error> {
        self.issue_reduce(tag, root, reduction, Source::Lent(values))
    }

    /// As [`gather`](Self::gather).
    ///
    /// `source`: `[n]`; `target`: `[size * n]` on the root, empty on the others.
    ///
    /// # Errors
    /// As `gather`, and [`Error::Refused`] if the target has another length.
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
        let call = Call::new(Op::Gather, tag).root(root_rank);
        self.issue_gather(call, Vectors::new(Source::Lent(source), target))
    }

    /// As [`scatter`](Self::scatter).
    ///
    /// `source`: `[size * n]` on the root, empty on the others; `target`: `[n]`.
    ///
    /// # Errors
    /// As `scatter`.
    pub fn scatter_into<T: Element>(
        &self,
        tag: Tag,
        root: usize,
        lent: Lent<T>,
    ) -> Result<Pending<Lent<T>>, Error> {
        self.check_dealt(root, lent.source.len(), lent.target.len())?;
        self.issue_scatter(tag, root, lent.into())
    }

    /// As [`all_to_all`](Self::all_to_all).
    ///
    /// `source`: `[sum of send_counts]`; `target`: `[sum of receive_counts]`.
    ///
    /// # Errors
    /// As `all_to_all`, and [`Error::Refused`] if the target has another length.
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
