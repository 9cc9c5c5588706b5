//! Operations that are refused while a step is under way.

use crate::error::Error;
use crate::model::ShardedModel;

impl ShardedModel {
    /// Checks that the parameters have their own values, and that no step works with them.
    ///
    /// # Errors
    /// [`Error::Misuse`] within a step, or while its gradients exist: they belong to the present
    /// values of the parameters; inside [`with_shards`](Self::with_shards).
    pub(crate) fn check_between_steps(&self, operation: &'static str) -> Result<(), Error> {
        let state = self.engine.state();
        self.engine.check_own_shards(&state, operation)?;
        if !state.is_in_step() && !state.has_gradients_out() {
            return Ok(());
        }
        let what = "a step is under way, or its gradients still exist: first apply the gradients \
                    with an optimizer, or drop them";
        Err(self.engine.context.misuse(operation, state.next_step, what.to_owned()))
    }
}
