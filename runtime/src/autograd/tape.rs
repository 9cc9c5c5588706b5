//! The interface of an autograd whose tensors are distributed values, the groups along which these
//! go, and the order in which their backwards communicate.

use std::fmt::Debug;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use hsdp_comm::{Channel, Group, World};
use hsdp_sharding::{Axis, Mesh};
use parking_lot::Mutex;

use super::operation::Collective;
use super::state::Axes;
use crate::error::Error;

/// An autograd, on whose tensors collectives are recorded.
///
/// Collectives go over the first dim: parts are rows. A type for the autograd has the trait, not
/// the tensor, so that a crate can implement it that owns neither the tensor nor this trait. An
/// autograd that owns its tensor may use the tensor as that type.
pub trait Carrier: Debug + Sized {
    /// The autograd's tensor. The clone of a tensor is the same tensor.
    type Tensor: Clone + Debug;

    /// The autograd's error.
    type Error: From<Error>;

    /// The result of a backward: the gradients of leaves, and of other tensors that were asked for.
    type Gradients;

    /// Applies a collective, and records it so that a backward goes through it, after the backwards
    /// of all collectives that were recorded later. It is recorded also where the input needs no
    /// gradient on this rank, since it may need one on others.
    ///
    /// # Errors
    /// Errors of [`Collective::forward`], a dtype without gradients, and errors of the autograd.
    fn apply(call: &CarrierCall<'_, Self::Tensor>) -> Result<Applied<Self::Tensor>, Self::Error>;

    /// Returns the same elements as `tensor`, as another tensor: the two have gradients of their
    /// own.
    ///
    /// # Errors
    /// The autograd's.
    fn alias(tensor: &Self::Tensor) -> Result<Self::Tensor, Self::Error>;

    /// Runs the backward from `loss`, a scalar whose cotangent is 1. It goes through `last` before
    /// all else.
    ///
    /// # Errors
    /// The autograd's, and those of the collectives.
    fn backward(
        loss: &Self::Tensor,
        last: Option<&Self::Tensor>,
    ) -> Result<Self::Gradients, Self::Error>;

    /// Returns the gradient of `tensor`, if the loss depends on it.
    fn gradient(gradients: &Self::Gradients, tensor: &Self::Tensor) -> Option<Self::Tensor>;
}

/// A collective to be applied, with its input and its group.
#[derive(Debug)]
pub struct CarrierCall<'a, T> {
    /// The collective.
    pub collective: &'a Collective,
    /// The input.
    pub input: &'a T,
    /// The group whose members apply it.
    pub group: &'a Group,
    /// The [`link`](Applied::link) of the collective that was recorded before this one; `None` for
    /// the first. It becomes a parent of this one.
    pub after: Option<&'a T>,
    /// Whether there will be a backward.
    pub record: Recording,
}

/// Whether collectives are recorded for a backward.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Recording {
    /// All collectives are recorded, on all ranks. An element type without a gradient is refused.
    Gradients,
    /// No collective is recorded: there will be no backward.
    Nothing,
}

/// The result of a collective.
#[derive(Clone, Debug)]
pub struct Applied<T> {
    /// This rank's output, if it has one.
    pub output: Option<T>,
    /// The tensor that stands for the collective as a parent of the next one. `None` if nothing was
    /// recorded.
    pub link: Option<T>,
}

/// The groups along which values go, and the collectives that were applied so far, in order.
///
/// Ranks apply the same collectives in the same order, as always. An autograd goes back in an order
/// of its own, which depends on how an expression is written, and skips collectives that the loss
/// does not reach. So each collective of a tape has the one before it as a second parent, and the
/// loss has the last one: on all ranks the backwards communicate in the reverse order, and none is
/// skipped, whatever the losses depend on.
///
/// A clone is the same tape. A tape keeps everything that was recorded: make a new one for each
/// forward and backward.
#[derive(Debug)]
pub struct Tape<C: Carrier> {
    shared: Arc<TapeShared<C::Tensor>>,
}

#[derive(Debug)]
struct TapeShared<T> {
    /// The next number is the id of the gradients' tape.
    id: u64,
    groups: Arc<TapeGroups>,
    record: Recording,
    last: Mutex<Option<T>>,
}

#[derive(Debug)]
struct TapeGroups {
    replicate: Group,
    shard: Group,
    both: Group,
}

impl<C: Carrier> Tape<C> {
    /// Makes a tape on the axes of a mesh over all ranks of `world`. Not collective.
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
        Ok(Self::on(TapeGroups {
            replicate: along(Axis::Replicate)?,
            shard: along(Axis::Shard)?,
            both: world.world_group(Channel::User),
        }))
    }

    /// Makes a tape on one group of `world`, which is its shard axis; the replicate axis has this
    /// rank alone. Not collective.
    ///
    /// # Errors
    /// [`Error::Collective`] if `group` belongs to another rank.
    pub fn of_group(world: &World, group: Group) -> Result<Self, Error> {
        let rank = world.rank();
        if group.rank() != rank {
            let what = format!("the group is that of rank {}", group.rank());
            return Err(Error::Collective { operation: "tape", rank, what });
        }
        let replicate = world.group(&[rank], Channel::User)?;
        Ok(Self::on(TapeGroups { replicate, shard: group.clone(), both: group }))
    }

    fn on(groups: TapeGroups) -> Self {
        Self::new(next_id(), Arc::new(groups), Recording::Gradients)
    }

    fn new(id: u64, groups: Arc<TapeGroups>, record: Recording) -> Self {
        Self { shared: Arc::new(TapeShared { id, groups, record, last: Mutex::new(None) }) }
    }

    /// Makes a new tape on the same axes that records nothing: there is no backward, and
    /// integers are allowed, too.
    #[must_use]
    pub fn without_gradients(&self) -> Self {
        self.unrecorded(next_id())
    }

    fn unrecorded(&self, id: u64) -> Self {
        Self::new(id, Arc::clone(&self.shared.groups), Recording::Nothing)
    }

    /// Returns this rank's group along an axis.
    #[must_use]
    pub fn group(&self, axes: Axes) -> &Group {
        match axes {
            Axes::Replicate => &self.shared.groups.replicate,
            Axes::Shard => &self.shared.groups.shard,
            Axes::Both => &self.shared.groups.both,
        }
    }

    /// Returns whether values of both may go into one function.
    pub(super) fn is(&self, other: &Self) -> bool {
        self.shared.id == other.shared.id
    }

    pub(super) fn apply(
        &self,
        axes: Axes,
        collective: &Collective,
        input: &C::Tensor,
    ) -> Result<Option<C::Tensor>, C::Error> {
        let mut last = self.shared.last.lock();
        let applied = C::apply(&CarrierCall {
            collective,
            input,
            group: self.group(axes),
            after: last.as_ref(),
            record: self.shared.record,
        })?;
        *last = applied.link;
        Ok(applied.output)
    }

    pub(super) fn backward(&self, loss: &C::Tensor) -> Result<TapeGradients<C>, C::Error> {
        if self.shared.record == Recording::Nothing {
            let rank = self.shared.groups.both.rank();
            let what = "nothing is recorded on its tape: the tape was made without gradients, or \
                        is a tape of gradients, which are not differentiated again"
                .to_owned();
            return Err(Error::Collective { operation: "backward", rank, what }.into());
        }
        let last = self.shared.last.lock().clone();
        let gradients = C::backward(loss, last.as_ref())?;
        // Always the same tape: gradients may go into one function, and have no backward.
        let tape = self.unrecorded(self.shared.id + 1);
        Ok(TapeGradients { gradients, tape })
    }
}

/// Returns an even number that no tape has yet.
fn next_id() -> u64 {
    static TAPES: AtomicU64 = AtomicU64::new(0);
    TAPES.fetch_add(2, Ordering::Relaxed)
}

impl<C: Carrier> Clone for Tape<C> {
    fn clone(&self) -> Self {
        Self { shared: Arc::clone(&self.shared) }
    }
}

/// The gradients of a backward.
///
/// Gradients are on a tape of their own, on which nothing is recorded: a second derivative is
/// refused by name. To use a gradient with values of the first tape, take its tensor by
/// [`into_tensor`](super::dist::Dist::into_tensor).
#[derive(Debug)]
pub struct TapeGradients<C: Carrier> {
    pub(super) gradients: C::Gradients,
    tape: Tape<C>,
}

impl<C: Carrier> TapeGradients<C> {
    /// Returns the tape of the gradients: the same for all backwards of a tape.
    #[must_use]
    pub fn tape(&self) -> &Tape<C> {
        &self.tape
    }
}
