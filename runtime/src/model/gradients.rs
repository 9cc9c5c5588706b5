//! The check of gradients against a model, and copies of them.

use std::collections::BTreeMap;

use hsdp_sharding::UnitId;

use crate::error::Error;
use crate::model::{ShardedModel, export};
use crate::state::control;
use crate::step::gradients::Gradients;

impl Gradients {
    /// Checks that these are the gradients of the last step of `model`. An optimizer calls this
    /// before it changes anything. Not collective.
    ///
    /// # Errors
    /// [`Error::Misuse`] if the gradients belong to another model, or to an earlier step; the
    /// message has both numbers.
    pub fn check_model(&self, model: &ShardedModel) -> Result<(), Error> {
        let refuse = |what| Err(model.engine.context.misuse("optimizer step", self.step, what));
        let finished = model.engine.state().next_step;
        if self.model != *model.id() {
            return refuse("these are the gradients of another model".to_owned());
        }
        if self.step + 1 != finished {
            return refuse(format!(
                "the gradients are those of step {}, the model has finished {finished} steps",
                self.step
            ));
        }
        Ok(())
    }

    /// Returns a copy of this rank's shard of a unit's gradient, in f32, in the layout's order,
    /// divided, before clipping; it is empty if the unit has no trainable parameter. Not collective.
    ///
    /// If the ranks agreed to skip the step, it holds the sums of the reductions without the
    /// division.
    ///
    /// # Errors
    /// [`Error::Kernel`] if there is not enough memory; [`Error::Device`](Error) if the gradients
    /// lie on a device that fails.
    ///
    /// # Panics
    /// If the model has no such unit.
    pub fn shard(&self, model: &ShardedModel, unit: UnitId) -> Result<Vec<f32>, Error> {
        self.shard_in(&model.engine.context, unit)
    }

    /// Returns the whole gradients of all trainable parameters, in f32, row-major, by name, divided,
    /// before clipping. This is for tests and small models.
    ///
    /// Collective over the shard group, one gather for each unit, in the plan's order of reductions.
    /// Every rank gets all gradients.
    ///
    /// # Errors
    /// [`Error::Comm`] if a gather fails; [`Error::Kernel`] if there is not enough memory;
    /// [`Error::Device`](Error) if the gradients lie on a device that fails.
    pub fn full(&self, model: &ShardedModel) -> Result<BTreeMap<String, Vec<f32>>, Error> {
        let context = &model.engine.context;
        control::between_steps(&context.world, self.step, || export::full_gradients(context, self))
    }
}
