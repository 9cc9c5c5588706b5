//! A call, before and after it has its number.

use std::sync::Arc;

use hsdp_flight::EntryNumber;
use hsdp_kernels::Element;
use hsdp_sharding::{DType, Rank};

use crate::{Channel, Counts, Descriptor, GroupId, Op, Reduction, Scaling, Tag};

/// The part of a [`Descriptor`](crate::Descriptor) that does not say where in the sequence it
/// stands.
#[derive(Clone, Debug)]
pub(crate) struct GroupCall {
    pub(crate) op: Op,
    pub(crate) tag: Tag,
    pub(crate) dtype: Option<DType>,
    pub(crate) counts: Counts,
    pub(crate) reduction: Option<Reduction>,
    pub(crate) root: Option<Rank>,
    pub(crate) peer: Option<Rank>,
    pub(crate) scaling: Option<Scaling>,
}

impl GroupCall {
    pub(crate) fn new(op: Op, tag: Tag) -> Self {
        let dtype = None;
        let reduction = None;
        let root = None;
        let peer = None;
        let scaling = None;
        Self { op, tag, dtype, counts: Counts::Each(0), reduction, root, peer, scaling }
    }

    pub(crate) fn elements<T: Element>(self, count: usize) -> Self {
        self.of(T::DTYPE, count)
    }

    pub(crate) fn of(self, dtype: DType, count: usize) -> Self {
        Self { dtype: Some(dtype), counts: Counts::Each(count), ..self }
    }

    pub(crate) fn splits<T: Element>(self, send: Vec<usize>, receive: Vec<usize>) -> Self {
        Self { dtype: Some(T::DTYPE), counts: Counts::Splits { send, receive }, ..self }
    }

    pub(crate) fn reduction(self, reduction: Reduction) -> Self {
        Self { reduction: Some(reduction), ..self }
    }

    pub(crate) fn root(self, root: Rank) -> Self {
        Self { root: Some(root), ..self }
    }

    pub(crate) fn peer(self, peer: Rank) -> Self {
        Self { peer: Some(peer), ..self }
    }

    pub(crate) fn scaling(self, scaling: Scaling) -> Self {
        Self { scaling: Some(scaling), ..self }
    }

    /// The bytes of the elements that the member sends.
    pub(crate) fn bytes(&self) -> usize {
        self.counts.total().saturating_mul(self.dtype.map_or(0, DType::size_bytes))
    }

    /// Returns its descriptor, as a number of the sequence of a group.
    pub(crate) fn described(
        self,
        group: GroupId,
        channel: Channel,
        epoch: u64,
        sequence: u64,
    ) -> Descriptor {
        let Self { op, tag, dtype, counts, reduction, root, peer, scaling } = self;
        Descriptor {
            group,
            channel,
            epoch,
            sequence,
            op,
            reduction,
            dtype,
            counts,
            root,
            peer,
            scaling,
            tag,
        }
    }
}

/// A call that has its number.
pub(crate) struct Described {
    /// The description that the members compare.
    pub(crate) compared: Arc<Descriptor>,
    /// The description of the elements that the call moves, where a fault has this member tell
    /// something else.
    pub(crate) actual: Option<Arc<Descriptor>>,
}

impl Described {
    /// The description of the elements that the call moves.
    pub(crate) fn actual(&self) -> &Arc<Descriptor> {
        self.actual.as_ref().unwrap_or(&self.compared)
    }
}

/// An operation on devices that a rank issues at once.
#[derive(Clone, Debug)]
#[cfg_attr(not(feature = "nccl"), expect(dead_code, reason = "only NCCL carries it"))]
pub(crate) struct Issuing {
    /// The description that the members compare.
    pub(crate) compared: Arc<Descriptor>,
    /// A digest of the function, the layout and the cuts.
    pub(crate) signature: u64,
    pub(crate) entry: EntryNumber,
}

/// The first barrier of a group, for tests.
#[cfg(test)]
pub(crate) fn barrier_of(group: GroupId) -> Descriptor {
    GroupCall::new(Op::Barrier, Tag::default()).described(group, Channel::User, 0, 0)
}
