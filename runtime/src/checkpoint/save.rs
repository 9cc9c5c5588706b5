//! Saving: each rank writes its part, and rank 0 makes a generation of the parts.

use std::path::Path;

use hsdp_checkpoint::Draft;
use serde_json::Value;

use super::checkpoints::Checkpoints;
use super::optimizer;
use super::results::Saved;
use super::saving::{EXISTS, Saving, fresh, saving};
use crate::error::Error;
use crate::model::ShardedModel;
use crate::persist::checkpointed::Checkpointed;

impl Checkpoints {
    /// Saves the model, its optimizer, and `user`, the values that the program needs to go on: a
    /// data cursor, seeds of random numbers. All of it is on the disk when the call returns. If the
    /// save fails, earlier checkpoints are as they were, and training may go on. The call waits for
    /// a save in the background that is under way. If that one has succeeded, [`poll`](Self::poll)
    /// says so; if it has failed, this call returns its error, and saves nothing: call it again.
    ///
    /// The communication may fail when the checkpoint is on the disk already. The same call then
    /// returns it, if it comes before a step or a load, with the same `user`.
    ///
    /// Collective over the model's world, between steps. `user` is the same on all ranks.
    ///
    /// # Errors
    /// [`Error::Checkpoint`] on all ranks: it names the first rank that failed, or whose `user` or
    /// optimizer options differ or are too large
    /// ([`MOST_USER_BYTES`](hsdp_checkpoint::MOST_USER_BYTES)). [`Error::Misuse`] within a step,
    /// while its gradients exist, inside [`ShardedModel::with_shards`], if the optimizer was made
    /// for another model, or if these checkpoints were opened by [`read_only`](Self::read_only).
    /// [`Error::Disagreement`] if ranks have updated the last step with different options.
    /// [`Error::Comm`], also if ranks are at different steps.
    pub fn save<O: Checkpointed>(
        &mut self,
        model: &ShardedModel,
        optimizer: &O,
        user: &Value,
    ) -> Result<Saved, Error> {
        self.check_writer(model, "saving")?;
        optimizer::check(model, optimizer, "saving")?;
        model.engine.check_updated()?;
        self.settle(model)?;
        let frozen = self.frozen_part(model, saving(model).about(self.number))?;
        let saving = Saving::of(&self.store, self.number, model, optimizer, user, frozen);
        let made = self.made.as_ref().and_then(|made| made.path_of(&saving.identity()));
        let (place, head) = saving.agree(if made.is_some() { EXISTS } else { fresh() })?;
        if place.nonce() == EXISTS {
            return Ok(Saved { step: saving.step, path: made.map(Path::to_owned) });
        }
        let mut lease = self.lease.as_ref().map(|lease| lease.lock());
        let draft = saving.begin(lease.as_deref_mut(), &place)?;
        if let Err(error) = saving.write(&place) {
            draft.into_iter().for_each(Draft::discard);
            return Err(error);
        }
        Ok(Saved { step: saving.step, path: saving.commit(draft, head, &mut self.made)? })
    }
}
