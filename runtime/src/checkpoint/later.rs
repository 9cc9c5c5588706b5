//! The checkpoints after the one that was loaded, and their removal.

use super::checkpoints::Checkpoints;
use super::results::Resumed;
use super::together::Together;
use crate::error::Error;
use crate::model::ShardedModel;

impl Checkpoints {
    /// Removes the checkpoints of all later steps than `step`, and returns their steps: a run that
    /// has gone back to an earlier checkpoint cannot save before the last of these otherwise. The
    /// checkpoint of `step` must be there. If the program ends meanwhile, the checkpoints that are
    /// left are whole, and the same call removes the rest. The call waits for a save in the
    /// background that is under way.
    ///
    /// ```
    /// use hsdp::checkpoint::Checkpoints;
    /// use hsdp::prelude::*;
    ///
    /// /// Goes back to an earlier checkpoint, and gives the later ones up.
    /// fn go_back(
    ///     checkpoints: &mut Checkpoints,
    ///     model: &mut ShardedModel,
    ///     adamw: &mut AdamW,
    ///     step: u64,
    /// ) -> Result<(), hsdp::Error> {
    ///     let resumed = checkpoints.load(model, adamw, step)?;
    ///     if !resumed.later.is_empty() {
    ///         checkpoints.discard_after(model, step)?;
    ///     }
    ///     Ok(())
    /// }
    /// ```
    ///
    /// Collective over the model's world. `step` is the same on all ranks.
    ///
    /// # Errors
    /// [`Error::Checkpoint`] on all ranks if there is no checkpoint of `step` that can be opened,
    /// or ranks have given different steps: then nothing is removed; and if rank 0 cannot remove
    /// one. [`Error::Misuse`] if the checkpoints were opened by [`read_only`](Self::read_only). The
    /// errors of an earlier save and of the communication, as for [`save`](Self::save).
    pub fn discard_after(&mut self, model: &ShardedModel, step: u64) -> Result<Vec<u64>, Error> {
        let operation = "discarding checkpoints";
        self.check_writer(model, operation)?;
        self.settle(model)?;
        let context = &model.engine.context;
        let together =
            Together::new(context, operation, model.committed_steps()).about(self.number);
        together.compare_word(step, |here, there, other| {
            format!("those after step {here} here, and after step {there} on rank {other}")
        })?;
        let lease = &self.lease;
        let discard = || lease.as_ref().map(|lease| lease.lock().discard_after(step)).transpose();
        // Also if it fails: some of the later ones may be gone by then.
        self.made = self.made.take().filter(|made| made.identity.step <= step);
        let discarded = together.run(|| Ok(discard()?))?.unwrap_or_default();
        together.list_of_first(&discarded)
    }

    /// Returns the steps of checkpoints that are later than `step`, as rank 0 sees them.
    /// Collective.
    ///
    /// # Errors
    /// [`Error::Checkpoint`] if ranks have given different steps, or rank 0 cannot read the folder;
    /// [`Error::Comm`].
    pub(super) fn later_than(&self, model: &ShardedModel, step: u64) -> Result<Vec<u64>, Error> {
        // The step that is loaded is in the tags of what follows, so that it cannot differ there.
        self.loading(model, model.committed_steps()).compare_word(step, |here, there, other| {
            format!("the checkpoint of step {here} here, and of step {there} on rank {other}")
        })?;
        let together = self.loading(model, step);
        let steps = together.run(|| {
            let steps = if together.is_first() { self.store.steps()? } else { Vec::new() };
            Ok(steps.into_iter().filter(|it| *it > step).collect::<Vec<_>>())
        })?;
        together.list_of_first(&steps)
    }

    /// Warns on rank 0 that later checkpoints keep this job from saving.
    pub(super) fn told_of_later(&self, model: &ShardedModel, loaded: Resumed) -> Resumed {
        if let (true, 0, Some(last)) =
            (self.access.is_writer(), model.rank().index(), loaded.later.last())
        {
            hsdp_warnings::warn!(
                later = ?loaded.later,
                "there are later checkpoints than that of step {}, which was loaded: no save \
                 succeeds up to step {last}, unless \
                 `Checkpoints::discard_after` removes them",
                loaded.step
            );
        }
        loaded
    }
}
