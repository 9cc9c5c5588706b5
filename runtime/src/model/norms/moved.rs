//! How far an update has moved the parameters, which the optimizer's pass measures where it is asked to.

use hsdp_comm::{PartKind, Reduction};

use crate::error::Error;
use crate::model::ShardedModel;
use crate::model::norms::{Norms, over_shards, trained};
use crate::model::updates::Moved;
use crate::state::context::ModelId;
use crate::state::control;

/// How far an update has moved the parameters of a model: this rank's part, until ranks add up theirs.
#[derive(Clone, Debug)]
pub struct MeasuredUpdate {
    model: ModelId,
    finished: u64,
    moved: Moved,
}

impl ShardedModel {
    /// How far the last update has moved the parameters; `None` if it was not [measured](crate::Gradients::measured), or if all ranks
    /// skipped the step. Not collective.
    ///
    /// ```
    /// use hsdp::prelude::*;
    /// # fn step(model: &mut ShardedModel, adamw: &mut AdamW, gradients: hsdp::Gradients) -> Result<(), hsdp::Error> {
    /// adamw.step(model, gradients.measured())?;
    /// if let Some(update) = model.last_update() {
    ///     for (name, ratio) in update.ratios(model)?.iter() {
    ///         println!("{name}: {ratio:.1e}");
    ///     }
    /// }
    /// # Ok(())
    /// # }
    /// ```
    #[must_use]
    pub fn last_update(&self) -> Option<MeasuredUpdate> {
        let moved = self.updates.lock().moved.clone()?;
        let finished = self.engine.state().next_step;
        Some(MeasuredUpdate { model: self.id().clone(), finished, moved })
    }
}

impl MeasuredUpdate {
    /// The 2-norm of the change of each trainable parameter, in f64: with the decay of weights, and after clipping. 0 for a parameter
    /// that was not updated.
    ///
    /// Collective over the shard group: one all-reduce of two f64 for each parameter. All ranks get the same bits.
    ///
    /// # Errors
    /// [`Error::Misuse`] if it is an update of another model; [`Error::Comm`] if the all-reduce fails.
    pub fn norms(&self, model: &ShardedModel) -> Result<Norms, Error> {
        self.of_squares(model, |[_, change]| change.sqrt())
    }

    /// The 2-norm of the change of each trainable parameter over the 2-norm of the parameter before the update. 0 for a parameter
    /// that was not updated; infinite for one that was zero and has changed.
    ///
    /// Collective over the shard group: one all-reduce of two f64 for each parameter. All ranks get the same bits.
    ///
    /// # Errors
    /// As [`norms`](Self::norms).
    pub fn ratios(&self, model: &ShardedModel) -> Result<Norms, Error> {
        self.of_squares(model, |[before, change]| match change {
            0.0 => 0.0,
            change => (change / before).sqrt(),
        })
    }

    fn of_squares(
        &self,
        model: &ShardedModel,
        value: impl Fn([f64; 2]) -> f64,
    ) -> Result<Norms, Error> {
        let (context, step) = (&model.engine.context, self.finished);
        let squares = control::between_steps(&context.world, step, || {
            if self.model != *model.id() {
                let what = "this is an update of another model".to_owned();
                return Err(context.misuse("norms of an update", step, what));
            }
            let squares = self.moved.squares.clone();
            over_shards(context, step, Some(PartKind::Change), Reduction::Sum, squares)
        })?;
        Ok(trained(model, &squares, |of| value([of[0], of[1]])))
    }
}
