//! Saving: each rank writes its part, and rank 0 makes a generation of the parts, at once or while
//! training goes on. CHECKPOINT.md, "In the background".

use std::mem;
use std::path::Path;
use std::thread::JoinHandle;
use std::time::Duration;

use hsdp_checkpoint::Draft;
use serde_json::Value;

use super::checkpoints::{Checkpoints, check_optimizer};
use super::in_flight::{BackgroundPart, SaveStage, SaveVerdict};
use super::saving::{EXISTS, RankSave, fresh, saving};
use super::settings::Saved;
use super::together::{Failed, JointOperation, Undone};
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
        check_optimizer(model, optimizer, "saving")?;
        model.engine.check_updated()?;
        self.settle(model)?;
        let frozen = self.frozen_part(model, saving(model).about(self.number))?;
        let saving = RankSave::of(&self.store, self.number, model, optimizer, user, frozen);
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

    /// Begins a save like [`save`](Self::save), and returns as soon as the saved state is copied to
    /// host memory: the next step need not wait for the disk. Call [`poll`](Self::poll) after each
    /// step, and [`finish`](Self::finish) in the end. If this value is dropped before that, hsdp
    /// cancels the save and removes its files; then another job can use the directory.
    ///
    /// There is one save at a time: the call waits for one that is under way, and `poll` returns
    /// the success of that one, too. If that one has failed, this call returns its error, and
    /// begins nothing: call it again. The copy takes
    /// [`Plan::snapshot`](hsdp_sharding::Plan::snapshot) bytes, which the next save reuses.
    ///
    /// Collective over the model's world, between steps. `user` is the same on all ranks.
    ///
    /// # Errors
    /// [`Error::Checkpoint`] on all ranks, if an earlier save has failed and no call has
    /// returned that failure, `user` differs between ranks or is too large, or a rank cannot make
    /// its copy; [`Error::Misuse`], [`Error::Disagreement`] and [`Error::Comm`] as for
    /// [`save`](Self::save).
    pub fn save_in_background<O: Checkpointed>(
        &mut self,
        model: &ShardedModel,
        optimizer: &O,
        user: &Value,
    ) -> Result<(), Error> {
        self.check_writer(model, "saving")?;
        check_optimizer(model, optimizer, "saving")?;
        model.engine.check_updated()?;
        self.settle(model)?;
        let frozen = self.frozen_part(model, saving(model).about(self.number))?;
        let saving = RankSave::of(&self.store, self.number, model, optimizer, user, frozen);
        let (place, head) = saving.agree(fresh())?;
        // A rank that writes while others still copy would delay them, and so itself, where there
        // are fewer cores than threads.
        let copied = self.snapshot.copy(model, optimizer, self.wanted.content);
        let together = saving.together();
        together.agree(copied).map_err(|undone| together.error(undone))?;
        let snapshot = mem::take(&mut self.snapshot);
        let part = BackgroundPart { rank: model.rank(), writer: saving.writer(), place, snapshot };
        self.in_flight = Some(part.begin(model.committed_steps(), head, self.lease.clone()));
        Ok(())
    }

    /// Returns the result of a save in the background, once: a failure first, then the oldest
    /// success. `None` while the save is under way, or if there is none.
    ///
    /// Collective over the model's world, between steps: all ranks get the result of the same save
    /// in the same call. The call waits for no file. Rank 0 makes the generation only after a call
    /// has told it that all ranks have written.
    ///
    /// # Errors
    /// [`Error::Checkpoint`] on all ranks if the save failed: earlier checkpoints are as they were,
    /// and training may go on. [`Error::Comm`].
    pub fn poll(&mut self, model: &ShardedModel) -> Result<Option<Saved>, Error> {
        self.look(model)?;
        Ok(self.saved.pop_front())
    }

    /// Waits for a save in the background. Returns its result, or first that of an earlier save
    /// that has succeeded and that no call has returned yet; `None` when all results were returned.
    ///
    /// Collective over the model's world, between steps.
    ///
    /// # Errors
    /// As [`poll`](Self::poll).
    pub fn finish(&mut self, model: &ShardedModel) -> Result<Option<Saved>, Error> {
        self.settle(model)?;
        Ok(self.saved.pop_front())
    }

    /// Goes on to the next stage if all ranks have ended this one.
    ///
    /// # Errors
    /// [`Error::Checkpoint`] if the save has failed, and [`Error::Comm`].
    fn look(&mut self, model: &ShardedModel) -> Result<(), Error> {
        let Some(in_flight) = &mut self.in_flight else { return Ok(()) };
        let together = in_flight.together(model, self.number);
        if !together.at_work(!in_flight.has_ended(Duration::ZERO))?.is_empty() {
            return Ok(());
        }
        self.go_on(together)?.map_or(Ok(()), Err)
    }

    /// Waits until nothing is in flight. After a failure it waits until the files are removed, too.
    ///
    /// # Errors
    /// [`Error::Checkpoint`] if a save has failed, and [`Error::Comm`].
    pub(super) fn settle(&mut self, model: &ShardedModel) -> Result<(), Error> {
        let mut failure = None;
        while let Some(in_flight) = &mut self.in_flight {
            let together = in_flight.together(model, self.number);
            together.wait(|within| in_flight.has_ended(within))?;
            failure = self.go_on(together)?.or(failure);
        }
        failure.map_or(Ok(()), Err)
    }

    /// Exchanges how the ranks have ended a stage, and begins the next one. Returns the failure of
    /// the save, if this stage has failed.
    fn go_on(&mut self, together: JointOperation<'_>) -> Result<Option<Error>, Error> {
        let Some(in_flight) = &mut self.in_flight else { return Ok(None) };
        let agreed = match together.agree(in_flight.end.clone().unwrap_or(Ok(None))) {
            Ok(path) => Ok(path),
            Err(Undone::Failed(failed)) => Err(failed),
            Err(Undone::Fatal(error)) => return Err(error),
        };
        match (mem::replace(&mut in_flight.stage, SaveStage::Ending), agreed) {
            (SaveStage::Writing(head), Ok(_)) => in_flight.tell(SaveVerdict::Commit(head)),
            (SaveStage::Writing(_), Err(failed)) => {
                in_flight.stage = SaveStage::Discarding;
                in_flight.tell(SaveVerdict::Discard);
                return Ok(Some(failure(together, failed)));
            }
            (SaveStage::Ending, Ok(path)) => {
                self.saved.push_back(Saved { step: in_flight.step, path });
                self.land();
            }
            (SaveStage::Ending, Err(failed)) => {
                self.land();
                return Ok(Some(failure(together, failed)));
            }
            (SaveStage::Discarding, _) => self.land(),
        }
        Ok(None)
    }

    /// Ends the save. Its memory serves the next one.
    fn land(&mut self) {
        let thread = self.in_flight.take().and_then(|in_flight| in_flight.thread);
        if let Some(Ok(snapshot)) = thread.map(JoinHandle::join) {
            self.snapshot = snapshot;
        }
    }
}

impl Drop for Checkpoints {
    /// Warns of a save whose result no call has returned.
    fn drop(&mut self) {
        let Some(in_flight) = &self.in_flight else { return };
        if let Some(what) = in_flight.unreported() {
            let step = in_flight.step;
            hsdp_warnings::warn!(step, %what, "the last checkpoint may be missing");
        }
    }
}

/// The error of a save that has failed. Rank 0 logs it as a warning, for all ranks.
fn failure(together: JointOperation<'_>, failed: Failed) -> Error {
    let error = together.error(failed);
    if together.is_first() {
        hsdp_warnings::warn!(%error, "a checkpoint failed: training goes on without it");
    }
    error
}
