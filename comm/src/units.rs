//! The calls on whole units, as methods of [`Group`]: what the runtime's steps are made of.
//!
//! Each does in one pass over memory what copy-in, a collective and copy-out would do, and rounds
//! at the same points.

use std::sync::Arc;

use hsdp_kernels::{Divisor, GradientValues, HostBuffer, SharedBuffer, Wire};
use hsdp_sharding::{DType, Role, UnitLayout};

use crate::call::GroupCall;
use crate::execute::{
    Accumulator, Contribution, Reduced, SharedGatherContribution, Source, UnitGatherContribution,
    UnitReduceContribution, Vectors,
};
use crate::{Error, Group, Op, Pending, Reduction, Scaling, Tag};

/// # Calls on whole units
///
/// All are **collective**, in the order of the group's channel, with the same tag, layout, dtypes
/// and divisors on all members; all return at once. A group of one member does the arithmetic in
/// the call, rounds nothing to the wire, divides once by both divisors, and counts nothing.
///
/// Before anything is issued, every call refuses arguments that are wrong on this member alone, and
/// [`CallError::Reentrant`](crate::CallError) calls. It returns the error of a step or world that
/// has ended. [`Pending::wait`] returns the errors that only all members together can detect.
impl Group {
    /// Gathers a unit: every member's shard is copied into every member's parameters.
    ///
    /// `shard`: `[layout.shard_len()]`, in the dtype of the targets. It is read in place, so it
    /// must not be written until the operation is complete; after a failed operation, others may
    /// hold it for a while. `targets`: one buffer for each parameter of the unit, `[elements of the
    /// parameter]`. The output is the targets, filled. The ledger counts padding between
    /// parameters, too.
    ///
    /// # Errors
    /// [`CallError::Refused`](crate::CallError) if the layout does not have one shard for each
    /// member, or if the shard or a target does not fit the layout, or if a target has another
    /// dtype than the shard.
    pub fn gather_unit(
        &self,
        tag: Tag,
        layout: Arc<UnitLayout>,
        shard: impl Into<SharedBuffer>,
        targets: Vec<HostBuffer>,
    ) -> Result<Pending<Vec<HostBuffer>>, Error> {
        let op = Op::AllGather;
        let shard = shard.into();
        self.check_layout(op, &layout)?;
        self.check_len(op, "the shard", shard.len(), layout.shard_len())?;
        let dtype = shard.dtype();
        self.check_targets(&layout, &targets, dtype)?;
        let call = GroupCall::new(op, tag).of(dtype, layout.shard_len());
        self.issue(call, UnitGatherContribution { layout, shard, targets })
    }

    /// Gathers a unit once, for all members to read: the shards are copied into the buffers in the
    /// first member's `holder`.
    ///
    /// There may be more members than shards, by replicas: member `i` has shard `i mod shards`.
    /// Members with the same shard hold the same elements, and the shard of the first of them is
    /// read. `shard` and the buffers in `holder` are as in [`gather_unit`](Self::gather_unit); only
    /// the first member passes a holder. Every member gets a handle of that holder, which is
    /// dropped with the last handle. The ledger counts the bytes that the first member receives.
    /// The output is `None` in a counting world, and for a call that a fault skipped.
    ///
    /// # Errors
    /// [`CallError::Refused`](crate::CallError) if the number of members is not a multiple of the
    /// layout's shards, or if the shard or a buffer does not fit the layout, the first member
    /// passes no holder, another member passes one, or there is another handle of the holder, or if
    /// a buffer has another dtype than the shard, or where the members share no memory.
    pub fn gather_unit_shared<T>(
        &self,
        tag: Tag,
        layout: Arc<UnitLayout>,
        shard: impl Into<SharedBuffer>,
        mut holder: Option<Arc<T>>,
    ) -> Result<Pending<Option<Arc<T>>>, Error>
    where
        T: AsMut<Vec<HostBuffer>> + Send + Sync + 'static,
    {
        let op = Op::AllGather;
        let shard = shard.into();
        let dtype = shard.dtype();
        if !self.size().is_multiple_of(layout.shard_size()) {
            return Err(self.bad_layout(op, &layout));
        }
        self.check_len(op, "the shard", shard.len(), layout.shard_len())?;
        let is_first = self.index() == 0;
        let holders = usize::from(holder.is_some());
        self.check_len(op, "the list of holders", holders, usize::from(is_first))?;
        if let Some(holder) = &mut holder {
            let handles = Arc::strong_count(holder) + Arc::weak_count(holder);
            self.check_len(op, "the list of the holder's handles", handles, 1)?;
            let alone = Arc::get_mut(holder).map(AsMut::as_mut);
            self.check_targets(&layout, alone.map_or(&[], |targets| &*targets), dtype)?;
        }
        let call = GroupCall::new(op, tag).of(dtype, layout.shard_len());
        if self.size() > 1 && self.handle().endpoint().is_some() {
            return Err(self.apart(op));
        }
        let contribution = SharedGatherContribution { layout, shard, holder };
        self.issue_or(call, contribution, |_, _, _| Err(self.apart(op)))
    }

    /// Reduces a unit's gradients: member `s` gets the sum over members, in their order, of
    /// `round_to_wire(gradient / pre)`, divided by `post`, for the elements of its trainable shard.
    ///
    /// The output is the accumulator's partial, with the first element of it that is not finite.
    /// Its padding is set to zero when the sum replaces the partial, and stays as it is otherwise.
    /// Members may differ in which gradients are present. The ledger counts padding and absent
    /// gradients, too.
    ///
    /// # Errors
    /// [`CallError::Refused`](crate::CallError) if the layout does not have one shard for each
    /// member, or if a gradient or the partial does not fit the layout.
    pub fn reduce_unit(
        &self,
        tag: Tag,
        layout: Arc<UnitLayout>,
        contribution: Contribution,
        accumulator: Accumulator,
    ) -> Result<Pending<Reduced>, Error> {
        let op = Op::ReduceScatter;
        let Contribution { gradients, scaling } = contribution;
        let Accumulator { partial, fold } = accumulator;
        let part = layout.trainable().shard_len;
        self.check_layout(op, &layout)?;
        self.check_len(op, "the partial", partial.len(), part)?;
        self.check_gradients(&layout, &gradients)?;
        let scaling = self.effective(scaling);
        let call = scaled_sum(op, tag, layout.trainable().len, scaling);
        let contribution =
            UnitReduceContribution { layout, gradients, partial, fold, packed: Vec::new() };
        self.issue(call, contribution)
    }

    /// Sums f32 elements over the members: every member gets the sum in member order of
    /// `round_to_wire(element / pre)`, divided by `post`; the same bits on all members.
    ///
    /// `values`: `[n]`, f32; output `[n]`, in the same buffer.
    ///
    /// # Errors
    /// Only those that all calls on units share.
    pub fn all_reduce_scaled(
        &self,
        tag: Tag,
        values: Vec<f32>,
        scaling: Scaling,
    ) -> Result<Pending<Vec<f32>>, Error> {
        let scaling = self.effective(scaling);
        let call = scaled_sum(Op::AllReduce, tag, values.len(), scaling);
        self.issue(call, Vectors::new(Source::nothing(), Some(values)))
    }

    /// Sums f32 elements over the members, each its own part: member `i` gets in the elements
    /// `cuts[i]..cuts[i + 1]` the bits that [`all_reduce_scaled`](Self::all_reduce_scaled) would
    /// leave there. The other elements are undefined afterwards.
    ///
    /// `values`: `[n]`, f32; output `[n]`, in the same buffer. `cuts`: `[size + 1]`, ascending from
    /// 0 to `n`, the same on all members. If members cut their values in different places, all get
    /// [`WorldError::Mismatch`](crate::WorldError) by [`Pending::wait`].
    ///
    /// # Errors
    /// [`CallError::Refused`](crate::CallError) if the cuts do not ascend from 0 to `n`, or are not
    /// one more than the members.
    pub fn reduce_scatter_scaled(
        &self,
        tag: Tag,
        cuts: Arc<[usize]>,
        values: Vec<f32>,
        scaling: Scaling,
    ) -> Result<Pending<Vec<f32>>, Error> {
        let op = Op::ReduceScatter;
        let count = self.check_cuts(op, &cuts)?;
        self.check_len(op, "the input", values.len(), count)?;
        let scaling = self.effective(scaling);
        let call = scaled_sum(op, tag, count, scaling);
        self.issue(call, Vectors::cut(values, cuts))
    }

    /// The scaling of contributions in this group: among several members as the caller says, alone
    /// by one division.
    pub(crate) fn effective(&self, scaling: Scaling) -> Scaling {
        let Scaling { pre, post, .. } = scaling;
        if self.size() > 1 {
            return scaling;
        }
        // Where the product is no f32, two divisions give the result of one, but for a rounding.
        let (pre, post) = match Divisor::new(pre.value() * post.value()) {
            Ok(product) => (Divisor::ONE, product),
            Err(_) => (pre, post),
        };
        Scaling { wire: Wire::F32, pre, post }
    }

    pub(crate) fn check_layout(&self, op: Op, layout: &UnitLayout) -> Result<(), Error> {
        if layout.shard_size() == self.size() {
            return Ok(());
        }
        Err(self.bad_layout(op, layout))
    }

    fn bad_layout(&self, op: Op, layout: &UnitLayout) -> Error {
        let shards = layout.shard_size();
        let members = self.size();
        let problem =
            format!("the layout has {shards} shards, but the group has {members} members");
        self.refused(op, problem)
    }

    pub(crate) fn check_len(
        &self,
        op: Op,
        what: &str,
        found: usize,
        expected: usize,
    ) -> Result<(), Error> {
        if found == expected {
            return Ok(());
        }
        Err(self.bad_count(op, what, found, expected))
    }

    /// Whether the targets fit the layout and the dtype of the shard.
    fn check_targets(
        &self,
        layout: &UnitLayout,
        targets: &[HostBuffer],
        dtype: DType,
    ) -> Result<(), Error> {
        let op = Op::AllGather;
        self.check_len(op, "the list of targets", targets.len(), layout.params().len())?;
        for (param, target) in layout.params().iter().zip(targets) {
            if target.len() != param.len {
                let what = format!("the target of `{}`", param.name);
                return Err(self.bad_count(op, &what, target.len(), param.len));
            }
            if target.dtype() != dtype {
                return Err(self.bad_dtype(op, target.dtype(), "not the dtype of the shard"));
            }
        }
        Ok(())
    }

    pub(crate) fn check_gradients(
        &self,
        layout: &UnitLayout,
        gradients: &[Option<Arc<dyn GradientValues>>],
    ) -> Result<(), Error> {
        let op = Op::ReduceScatter;
        self.check_len(op, "the list of gradients", gradients.len(), layout.params().len())?;
        for (param, gradient) in layout.params().iter().zip(gradients) {
            let Some(gradient) = gradient else { continue };
            let expected = match param.role {
                Role::Trainable if gradient.len() == param.len => continue,
                Role::Trainable => param.len.to_string(),
                Role::Frozen => "none: it is frozen".to_owned(),
            };
            let what = format!("the gradient of `{}`", param.name);
            return Err(self.bad_count(op, &what, gradient.len(), expected));
        }
        Ok(())
    }
}

/// A call that sums so many elements on the wire of `scaling`.
pub(crate) fn scaled_sum(op: Op, tag: Tag, count: usize, scaling: Scaling) -> GroupCall {
    GroupCall::new(op, tag)
        .of(scaling.wire.dtype(), count)
        .reduction(Reduction::Sum)
        .scaling(scaling)
}
