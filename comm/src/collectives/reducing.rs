//! reduce_scatter, all_reduce, reduce.

use hsdp_kernels::Element;

use crate::call::Call;
use crate::execute::{Source, Vectors};
use crate::{Error, Group, Op, Pending, Reduction, Tag};

/// # Collectives that combine elements
///
/// All are **collective**, as the collectives that move elements. Elements are combined in member order: f32, f64 and
/// integers in their own type (integers wrap around), f16 and bf16 in f32 with one rounding at the end. The
/// result does not depend on timing, and all members that get it get the same bits.
impl Group {
    /// Member `i` gets the reduction of the `i`-th parts of all members.
    ///
    /// `values`: `[size * n]`; output `[n]`.
    ///
    /// # Errors
    /// [`Error::Refused`] if the length of `values` is not a multiple of the group's size, or for an
    /// average of integers.
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
    pub(super) fn issue_reduce_scatter<T: Element, O: From<Vectors<T>>>(
        &self,
        tag: Tag,
        reduction: Reduction,
        own: Vectors<T>,
    ) -> Result<Pending<O>, Error> {
        let len = own.source.len();
        let call = Call::new(Op::ReduceScatter, tag).elements::<T>(len).reduction(reduction);
        self.issue(call, own)
    }

    /// Returns the number of elements that each member gets of a reduce_scatter of `len`.
    pub(super) fn check_parts<T: Element>(
        &self,
        reduction: Reduction,
        len: usize,
    ) -> Result<usize, Error> {
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
    /// [`Error::Refused`] for an average of integers.
    pub fn all_reduce<T: Element>(
        &self,
        tag: Tag,
        reduction: Reduction,
        values: Vec<T>,
    ) -> Result<Pending<Vec<T>>, Error> {
        self.check_average::<T>(Op::AllReduce, reduction)?;
        let call = Call::new(Op::AllReduce, tag).elements::<T>(values.len()).reduction(reduction);
        self.issue(call, Vectors::new(Source::nothing(), Some(values)))
    }

    /// The root gets the reduction of the elements of all members; the others get `None`.
    ///
    /// `values`: `[n]`; output `[n]`, in the root's buffer. `root` is an index in the group.
    ///
    /// # Errors
    /// [`Error::Refused`] if there is no member `root`, or for an average of integers.
    pub fn reduce<T: Element>(
        &self,
        tag: Tag,
        root: usize,
        reduction: Reduction,
        values: Vec<T>,
    ) -> Result<Pending<Option<Vec<T>>>, Error> {
        self.issue_reduce(tag, root, reduction, Source::Given(values))
    }

    pub(super) fn issue_reduce<T: Element, O: From<Vectors<T>>>(
        &self,
        tag: Tag,
        root: usize,
        reduction: Reduction,
        values: Source<T>,
    ) -> Result<Pending<O>, Error> {
        self.check_average::<T>(Op::Reduce, reduction)?;
        let rank = self.member(Op::Reduce, "the root", root)?;
        let (len, is_root) = (values.len(), self.index() == root);
        let call = Call::new(Op::Reduce, tag).elements::<T>(len).reduction(reduction).root(rank);
        // The result goes where the root's elements are.
        let (source, target) = match is_root {
            true => (Source::nothing(), Some(values.into_elements())),
            false => (values, None),
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
