//! What an optimizer says of itself for a checkpoint, and takes from one.

use std::borrow::Cow;

use hsdp_kernels::copy_past_caches;
use hsdp_sharding::UnitId;
use serde_json::Value;

use crate::error::Error;
use crate::model::{ModelId, ShardedModel};

/// An optimizer whose state goes into checkpoints.
pub trait Checkpointed: Sized + Send + Sync {
    /// Which optimizer it is: `adamw`. A checkpoint of another one is refused.
    const KIND: &'static str;

    /// For which model it was made.
    fn model(&self) -> &ModelId;

    /// The kinds of its state, each of which has an f32 for each trainable element of this rank's shards. In a checkpoint they are
    /// `optimizer:<kind>:<parameter>`.
    fn state_kinds(&self) -> &'static [&'static str];

    /// With what it was made, for people: a program that goes on has its own options, which count.
    fn options(&self) -> Value;

    /// Updates that each parameter of a unit has had, in the unit's order; nothing if it does not count them.
    fn updates(&self, unit: UnitId) -> Vec<u64>;

    /// One kind of its state for a unit, `[trainable elements of this rank's shard]`: where it lies, or a copy.
    ///
    /// # Errors
    /// [`Error::Device`](Error) if it lies on a device that fails.
    fn state<'a>(
        &'a self,
        model: &ShardedModel,
        of: (&str, UnitId),
    ) -> Result<Cow<'a, [f32]>, Error>;

    /// Copies elements of one kind of its state for a unit, from the `from`-th on, as many as there is room for: what training waits for
    /// where a checkpoint is saved in the background.
    ///
    /// # Errors
    /// As of [`state`](Self::state).
    fn copy_state(
        &self,
        model: &ShardedModel,
        of: (&str, UnitId),
        (from, into): (usize, &mut [f32]),
    ) -> Result<(), Error> {
        copy_part(&self.state(model, of)?, (from, into));
        Ok(())
    }

    /// One with the same options and this state. This one is left as it is.
    ///
    /// # Errors
    /// [`Error::Device`](Error) if there is no room on a device.
    fn restored(&self, model: &ShardedModel, state: OptimizerState) -> Result<Self, Error>;
}

/// Copies elements, from the `from`-th on, as many as there is room for.
pub(crate) fn copy_part(all: &[f32], (from, into): (usize, &mut [f32])) {
    copy_past_caches(into, &all[from..from + into.len()]);
}

/// An optimizer's state on this rank.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct OptimizerState {
    /// By kind, in the order of [`Checkpointed::state_kinds`], and by unit: as [`Checkpointed::state`] gave it.
    pub elements: Vec<Vec<Vec<f32>>>,
    /// By unit and parameter: updates it has had.
    pub updates: Vec<Vec<u64>>,
}
