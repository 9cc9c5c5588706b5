//! The state that an optimizer gives to a checkpoint, and takes from one.

use std::borrow::Cow;

use hsdp_kernels::copy_past_caches;
use hsdp_sharding::UnitId;
use serde_json::Value;

use crate::error::Error;
use crate::model::{ModelId, ShardedModel};

/// An optimizer whose state goes into checkpoints.
pub trait Checkpointed: Sized + Send + Sync {
    /// The kind of optimizer, such as `adamw`. A checkpoint of another kind is refused.
    const KIND: &'static str;

    /// The model for which the optimizer was made.
    fn model(&self) -> &ModelId;

    /// The kinds of its state, each of which has an f32 for each trainable element of this rank's shards. Their tensors
    /// in a checkpoint are called `optimizer:<kind>:<parameter>`.
    fn state_kinds(&self) -> &'static [&'static str];

    /// The options with which it was made, for people to read. A program that resumes uses its own options.
    fn options(&self) -> Value;

    /// The number of updates of each parameter of a unit, in the unit's order; empty if the optimizer does not count
    /// them.
    fn updates(&self, unit: UnitId) -> Vec<u64>;

    /// One kind of its state for a unit, `[trainable elements of this rank's shard]`: borrowed, or a copy.
    ///
    /// # Errors
    /// [`Error::Device`](Error) if the state lies on a device that fails.
    fn state<'a>(
        &'a self,
        model: &ShardedModel,
        of: (&str, UnitId),
    ) -> Result<Cow<'a, [f32]>, Error>;

    /// Copies elements of one kind of its state for a unit, from the `from`-th on, until `into` is full. Training waits
    /// for this copy where a checkpoint is saved in the background.
    ///
    /// # Errors
    /// As [`state`](Self::state).
    fn copy_state(
        &self,
        model: &ShardedModel,
        of: (&str, UnitId),
        (from, into): (usize, &mut [f32]),
    ) -> Result<(), Error> {
        copy_part(&self.state(model, of)?, (from, into));
        Ok(())
    }

    /// A new optimizer with the same options and with `state`. This one does not change.
    ///
    /// # Errors
    /// [`Error::Device`](Error) if a device has no memory for the state.
    fn restored(&self, model: &ShardedModel, state: OptimizerState) -> Result<Self, Error>;
}

/// Copies elements, from the `from`-th on, until `into` is full.
pub(crate) fn copy_part(all: &[f32], (from, into): (usize, &mut [f32])) {
    copy_past_caches(into, &all[from..from + into.len()]);
}

/// An optimizer's state on this rank.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct OptimizerState {
    /// By kind, in the order of [`Checkpointed::state_kinds`], and by unit: the elements that [`Checkpointed::state`]
    /// returned.
    pub elements: Vec<Vec<Vec<f32>>>,
    /// By unit and parameter: the number of updates.
    pub updates: Vec<Vec<u64>>,
}
