//! The groups along which values go, and the order in which their backwards communicate.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use hsdp_comm::{Channel, Group, Tag, World};
use hsdp_sharding::{Axis, Mesh};
use parking_lot::Mutex;

use super::axis::Axes;
use super::carrier::{Applied, Call, Carrier, Record};
use crate::autograd::operation::Collective;
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
/// gradient with values of the first tape, take its tensor by [`into_tensor`](super::Dist::into_tensor).
#[derive(Debug)]
pub struct Gradients<C: Carrier> {
    pub(super) gradients: C::Gradients,
    tape: Tape<C>,
}

impl<C: Carrier> Gradients<C> {
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
