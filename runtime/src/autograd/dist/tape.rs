//! The groups along which values go, and the order in which their backwards communicate.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use hsdp_comm::{Channel, Group, Tag, World};
use hsdp_sharding::{Axis, Mesh};
use parking_lot::Mutex;

use super::axis::Axes;
use super::carrier::{Applied, Call, Carrier, Record};
use super::state::{AxisState, State};
use super::tagged::Tagged;
use super::typed::Dist;
use crate::autograd::collective::Collective;
use crate::error::Error;

/// The groups along which values go, and the collectives that were applied so far, in order.
///
/// Ranks apply the same collectives in the same order, as always. An autograd goes back in an order of its own, which
/// depends on how an expression is written, and skips collectives that the loss does not reach. So each collective of a
/// tape has the one before it as a second parent, and the loss has the last one: on all ranks the backwards communicate
/// in the reverse order, and none is skipped, whatever the losses depend on.
///
/// A clone is the same tape. A tape keeps everything that was recorded: make a new one for each forward and backward.
#[derive(Debug)]
pub struct Tape<C: Carrier> {
    shared: Arc<Shared<C::Tensor>>,
}

#[derive(Debug)]
struct Shared<T> {
    /// The next number is the id of the gradients' tape.
    id: u64,
    replicate: Group,
    shard: Group,
    both: Group,
    tag: Tag,
    record: Record,
    last: Mutex<Option<T>>,
}

impl<C: Carrier> Tape<C> {
    /// A tape on the axes of a mesh over all ranks of `world`. Not collective.
    ///
    /// # Errors
    /// [`Error::Collective`] if the mesh does not have as many ranks as the world.
    pub fn of_mesh(world: &World, mesh: Mesh) -> Result<Self, Error> {
        if mesh.world_size() != world.size() {
            let what = format!(
                "mesh {mesh} has {} ranks, the world has {}",
                mesh.world_size(),
                world.size()
            );
            return Err(Error::Collective { operation: "tape", rank: world.rank(), what });
        }
        let along = |axis| world.group(&mesh.group(axis, world.rank()), Channel::User);
        let [replicate, shard] = [along(Axis::Replicate)?, along(Axis::Shard)?];
        Ok(Self::new(replicate, shard, world.world_group(Channel::User)))
    }

    /// A tape on one group of `world`, which is its shard axis; the replicate axis has this rank alone. Not collective.
    ///
    /// # Errors
    /// [`Error::Collective`] if `group` belongs to another rank.
    pub fn of_group(world: &World, group: Group) -> Result<Self, Error> {
        if group.rank() != world.rank() {
            let (rank, other) = (world.rank(), group.rank());
            let what = format!("the group is that of rank {other}");
            return Err(Error::Collective { operation: "tape", rank, what });
        }
        let alone = world.group(&[world.rank()], Channel::User)?;
        Ok(Self::new(alone, group.clone(), group))
    }

    fn new(replicate: Group, shard: Group, both: Group) -> Self {
        static TAPES: AtomicU64 = AtomicU64::new(0);
        let id = TAPES.fetch_add(2, Ordering::Relaxed);
        let (tag, record, last) = (Tag::default(), Record::Gradients, Mutex::new(None));
        Self { shared: Arc::new(Shared { id, replicate, shard, both, tag, record, last }) }
    }

    /// A new tape on the same axes, on which nothing is recorded: there is no backward, and integers are allowed, too.
    #[must_use]
    pub fn without_gradients(&self) -> Self {
        self.anew(self.shared.tag, Record::Nothing)
    }

    /// Returns a new tape on the same axes, whose collectives have the tag `tag`. Ranks compare
    /// tags, so they notice if two tapes with different tags, both in use, are confused.
    #[must_use]
    pub fn tagged(&self, tag: Tag) -> Self {
        self.anew(tag, self.shared.record)
    }

    fn anew(&self, tag: Tag, record: Record) -> Self {
        let Shared { replicate, shard, both, .. } = &*self.shared;
        let new = Self::new(replicate.clone(), shard.clone(), both.clone());
        let shared = Arc::into_inner(new.shared).expect("a new tape has one handle");
        Self { shared: Arc::new(Shared { tag, record, ..shared }) }
    }

    /// The tape of this tape's gradients, always the same one: gradients may go into one function, and have no backward.
    fn of_gradients(&self) -> Self {
        let Shared { id, replicate, shard, both, tag, .. } = &*self.shared;
        let [replicate, shard, both] = [replicate, shard, both].map(Group::clone);
        let (id, record, last) = (id + 1, Record::Nothing, Mutex::new(None));
        Self { shared: Arc::new(Shared { id, replicate, shard, both, tag: *tag, record, last }) }
    }

    /// Makes a value of `tensor`, in the states that the caller names: `R` over the replicate axis, `S` over the shard
    /// axis.
    ///
    /// Nothing checks these states: ranks whose Replicate values differ compute different things.
    #[must_use]
    pub fn assume<R: State, S: State>(&self, tensor: C::Tensor) -> Dist<C, R, S> {
        Dist::new(self.tag(tensor, [R::STATE, S::STATE]))
    }

    /// As [`assume`](Self::assume), with states that are known at run time: over the replicate axis, and over the shard axis.
    #[must_use]
    pub fn tag(&self, tensor: C::Tensor, states: [AxisState; 2]) -> Tagged<C> {
        Tagged::new(self.clone(), tensor, states)
    }

    /// The group along an axis, of which this rank is a member.
    #[must_use]
    pub fn group(&self, axes: Axes) -> &Group {
        match axes {
            Axes::Replicate => &self.shared.replicate,
            Axes::Shard => &self.shared.shard,
            Axes::Both => &self.shared.both,
        }
    }

    /// Whether values of both may go into one function.
    pub(super) fn is(&self, other: &Self) -> bool {
        self.shared.id == other.shared.id
    }

    pub(super) fn apply(
        &self,
        axes: Axes,
        collective: &Collective,
        input: &C::Tensor,
    ) -> Result<Option<C::Tensor>, C::Error> {
        let Shared { tag, record, last, .. } = &*self.shared;
        let mut last = last.lock();
        let (group, after) = (self.group(axes), last.as_ref());
        let call = Call { collective, input, group, tag: *tag, after, record: *record };
        let Applied { output, link } = C::apply(&call)?;
        *last = link;
        Ok(output)
    }

    pub(super) fn backward(&self, loss: &C::Tensor) -> Result<Gradients<C>, C::Error> {
        if self.shared.record == Record::Nothing {
            let rank = self.shared.both.rank();
            let what = "nothing is recorded on its tape: the tape was made without gradients, or is a tape of gradients, which \
                        are not differentiated again"
                .to_owned();
            return Err(Error::Collective { operation: "backward", rank, what }.into());
        }
        let last = self.shared.last.lock().clone();
        C::backward(loss, last.as_ref())
            .map(|gradients| Gradients { gradients, tape: self.of_gradients() })
    }
}

impl<C: Carrier> Clone for Tape<C> {
    fn clone(&self) -> Self {
        Self { shared: Arc::clone(&self.shared) }
    }
}

/// The gradients of a backward.
///
/// Gradients are on a tape of their own, on which nothing is recorded: a second derivative is refused by name. To use a
/// gradient with values of the first tape, take its tensor by [`into_tensor`](Dist::into_tensor).
#[derive(Debug)]
pub struct Gradients<C: Carrier> {
    gradients: C::Gradients,
    tape: Tape<C>,
}

impl<C: Carrier> Gradients<C> {
    /// The gradient of `value`, in the state of its cotangents; `None` if the loss does not depend on it on this rank,
    /// or if the autograd has not kept it.
    ///
    /// For a Replicate value each rank has its own term (Partial), which needs an all_reduce before an optimizer uses
    /// it. For an Invariant value all ranks have the whole gradient.
    #[must_use]
    pub fn of<R: State, S: State>(
        &self,
        value: &Dist<C, R, S>,
    ) -> Option<Dist<C, R::Cotangent, S::Cotangent>> {
        self.of_tagged(value.as_tagged()).map(Dist::new)
    }

    /// The same for a value whose states are known at run time.
    #[must_use]
    pub fn of_tagged(&self, value: &Tagged<C>) -> Option<Tagged<C>> {
        let gradient = C::gradient(&self.gradients, value.tensor())?;
        Some(self.tape.tag(gradient, value.states().map(AxisState::cotangent)))
    }

    /// The tape of the gradients: the same for all backwards of a tape.
    #[must_use]
    pub fn tape(&self) -> &Tape<C> {
        &self.tape
    }

    /// The autograd's own gradients.
    #[must_use]
    pub fn into_inner(self) -> C::Gradients {
        self.gradients
    }
}
