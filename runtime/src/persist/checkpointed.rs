//! The state that an optimizer gives to a checkpoint, and takes from one.

use std::borrow::Cow;
use std::ops::Range;

use hsdp_checkpoint::OptimizerHead;
use hsdp_sharding::{ModelSpec, ParamId};

use crate::error::Error;
use crate::model::ShardedModel;
use crate::persist::problem::Problem;
use crate::persist::saved::SavedState;
use crate::persist::tensors::{Expected, StateTensor, copy_part};
use crate::state::model_id::ModelId;

/// An optimizer whose state goes into checkpoints.
///
/// Several optimizers of one model are one, as a pair or a triple: the state of each goes into the
/// same checkpoint. They keep different kinds of state.
pub trait Checkpointed: Sized + Send + Sync {
    /// Whether the optimizer was made for this model.
    fn is_of(&self, model: &ModelId) -> bool;

    /// Its kind, such as `adamw`: a checkpoint of another kind is refused. Its present options, and
    /// those with which it was made, which a load compares
    /// ([`OtherOptions`](crate::checkpoint::OtherOptions)). The number of updates of each parameter
    /// that it updates, by name; none if it does not count them.
    fn head(&self, spec: &ModelSpec) -> OptimizerHead;

    /// Returns the kinds of state that it keeps, such as `exp_avg`: letters, digits and `_`. No
    /// other optimizer of the same checkpoint has one of them.
    fn kinds(&self) -> Vec<&'static str>;

    /// The tensors of its state, the same on all ranks; none before the first update.
    fn tensors(&self) -> Vec<StateTensor>;

    /// The tensors that it would read from a checkpoint.
    fn expected(&self, saved: &SavedState<'_>) -> Expected;

    /// Elements of a tensor of its state, of a parameter, that this rank has: borrowed, or a copy.
    /// `None` if it has no such tensor.
    ///
    /// # Errors
    /// [`Error::Device`](Error) if the state lies on a device that fails.
    fn state<'a>(
        &'a self,
        model: &ShardedModel,
        of: (&str, ParamId),
        range: Range<usize>,
    ) -> Result<Option<Cow<'a, [f32]>>, Error>;

    /// Copies elements of a tensor of its state, from the `start`-th on, until `into` is full.
    /// `false` if it has no such tensor. Training waits for this copy where a checkpoint is saved
    /// in the background.
    ///
    /// # Errors
    /// As [`state`](Self::state).
    fn copy_state(
        &self,
        model: &ShardedModel,
        of: (&str, ParamId),
        (start, into): (usize, &mut [f32]),
    ) -> Result<bool, Error> {
        let state = self.state(model, of, start..start + into.len())?;
        Ok(state.map(|state| copy_part(&state, (0, into))).is_some())
    }

    /// Returns a new optimizer with the state of a checkpoint, and with the same options, or those
    /// of the checkpoint that it takes. This one does not change.
    ///
    /// # Errors
    /// If the checkpoint cannot be read, or there is no memory for the state.
    fn restored(&self, model: &ShardedModel, saved: &SavedState<'_>) -> Result<Self, Problem>;
}
