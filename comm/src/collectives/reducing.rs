//! reduce_scatter, all_reduce, reduce.

use hsdp_kernels::Element;
use hsdp_sharding::balanced;

use super::bytes;
use crate::call::Call;
use crate::work::{Receivers, ReduceInPlace, ReduceScatter, RootOnly, combine};
use crate::{Error, Group, Op, Pending, Reduction, Tag};

/// # Collectives that combine elements
///
/// All are **collective**, as those that move elements. Elements are combined in member order: f32, f64 and
/// integers in their own type (integers wrap around), f16 and bf16 in f32 with one rounding at the end. The
/// result does not depend on timing, and where several members get it, they get the same bits.
impl Group {
    /// Member `i` gets the reduction of everybody's `i`-th part.
    ///
    /// `values`: `[size * n]`; output `[n]`.
    ///
    /// # Errors
    /// [`Error::BadCount`] if the members cannot share `values` evenly, [`Error::BadDType`] for an average of
    /// integers.
    pub fn reduce_scatter<T: Element>(
        &self,
        tag: Tag,
        reduction: Reduction,
        values: Vec<T>,
    ) -> Result<Pending<Vec<T>>, Error> {
        let (len, size, index) = (values.len(), self.size(), self.index());
        self.check_average::<T>(Op::ReduceScatter, reduction)?;
        if !len.is_multiple_of(size) {
            let expected = format!("a multiple of the group's {size} members");
            return Err(self.bad_count(Op::ReduceScatter, "the input", len, expected));
        }
        let part = len / size;
        let call = Call::new(Op::ReduceScatter, tag).elements::<T>(len).reduction(reduction);
        let work = move |all| ReduceScatter::new(all, reduction);
        let room = self.room(&call, part, "its output")?;
        self.issue(call, (values, room), work, |(values, _)| {
            let mine = &values[index * part..(index + 1) * part];
            (bytes::<T>((size - 1) * part), of_equals(reduction, mine, size))
        })
    }

    /// Everybody gets the reduction of everybody's elements.
    ///
    /// `values`: `[n]`; output `[n]`, in the same buffer.
    ///
    /// # Errors
    /// [`Error::BadDType`] for an average of integers.
    pub fn all_reduce<T: Element>(
        &self,
        tag: Tag,
        reduction: Reduction,
        values: Vec<T>,
    ) -> Result<Pending<Vec<T>>, Error> {
        self.check_average::<T>(Op::AllReduce, reduction)?;
        let (len, size) = (values.len(), self.size());
        let call = Call::new(Op::AllReduce, tag).elements::<T>(len).reduction(reduction);
        let work = move |all| ReduceInPlace::new(all, reduction, Receivers::All);
        let owned = balanced(len, size, self.index()).len();
        self.issue(call, values, work, |values: Vec<T>| {
            let received = (size - 1) * owned + (len - owned);
            (bytes::<T>(received), of_equals(reduction, &values, size))
        })
    }

    /// The root gets the reduction of everybody's elements; the others get `None`.
    ///
    /// `values`: `[n]`; output `[n]`, in the root's buffer. `root` is an index in the group.
    ///
    /// # Errors
    /// [`Error::BadMember`] if there is no member `root`, [`Error::BadDType`] for an average of integers.
    pub fn reduce<T: Element>(
        &self,
        tag: Tag,
        root: usize,
        reduction: Reduction,
        values: Vec<T>,
    ) -> Result<Pending<Option<Vec<T>>>, Error> {
        self.check_average::<T>(Op::Reduce, reduction)?;
        let root_rank = self.member(Op::Reduce, "the root", root)?;
        let (len, size, is_root) = (values.len(), self.size(), self.index() == root);
        let call =
            Call::new(Op::Reduce, tag).elements::<T>(len).reduction(reduction).root(root_rank);
        let work = move |all| RootOnly::new(all, reduction, root);
        self.issue(call, values, work, |values: Vec<T>| {
            let received = if is_root { (size - 1) * len } else { 0 };
            (bytes::<T>(received), is_root.then(|| of_equals(reduction, &values, size)))
        })
    }

    fn check_average<T: Element>(&self, op: Op, reduction: Reduction) -> Result<(), Error> {
        if reduction == Reduction::Avg && !T::DTYPE.is_float() {
            let problem = "only floating-point elements have an average";
            return Err(Error::BadDType { op, rank: self.rank(), dtype: T::DTYPE, problem });
        }
        Ok(())
    }
}

/// The reduction of `size` members that all brought `values`.
fn of_equals<T: Element>(reduction: Reduction, values: &[T], size: usize) -> Vec<T> {
    let mut result = bytemuck::zeroed_vec(values.len());
    combine(reduction, &mut result, &vec![values; size]);
    result
}
