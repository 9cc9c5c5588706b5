//! Saves while training goes on. CHECKPOINT.md, "In the background".

use std::mem;
use std::thread::JoinHandle;
use std::time::Duration;

use serde_json::Value;

use super::checkpoints::Checkpoints;
use super::in_flight::{InFlight, Part, Stage, Verdict};
use super::optimizer;
use super::results::Saved;
use super::saving::{self, Saving};
use super::together::{Failed, Together};
use crate::error::Error;
use crate::model::ShardedModel;
use crate::persist::checkpointed::Checkpointed;

impl Checkpoints {
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
        optimizer::check(model, optimizer, "saving")?;
        model.engine.check_updated()?;
        self.settle(model)?;
        let frozen = self.frozen_part(model, saving::saving(model).about(self.number))?;
        let saving = Saving::of(&self.store, self.number, model, optimizer, user, frozen);
        let (place, head) = saving.agree(saving::fresh())?;
        // A rank that writes while others still copy would delay them, and so itself, where there
        // are fewer cores than threads.
        let copied = self.snapshot.copy(model, optimizer, self.content);
        let together = saving.together();
        together.agree(copied)?.map_err(|failed| together.error(failed))?;
        let snapshot = mem::take(&mut self.snapshot);
        let part = Part { rank: model.rank(), writer: saving.writer(), place, snapshot };
        let begun = part.begin(self.lease.clone());
        self.in_flight = Some(InFlight::new(model.committed_steps(), head, begun));
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
    fn go_on(&mut self, together: Together<'_>) -> Result<Option<Error>, Error> {
        let Some(in_flight) = &mut self.in_flight else { return Ok(None) };
        let agreed = together.agree(in_flight.end.clone().unwrap_or(Ok(None)))?;
        match (mem::replace(&mut in_flight.stage, Stage::Ending), agreed) {
            (Stage::Writing(head), Ok(_)) => in_flight.tell(Verdict::Commit(head)),
            (Stage::Writing(_), Err(failed)) => {
                in_flight.stage = Stage::Discarding;
                in_flight.tell(Verdict::Discard);
                return Ok(Some(failure(together, failed)));
            }
            (Stage::Ending, Ok(path)) => {
                self.saved.push_back(Saved { step: in_flight.step, path });
                self.land();
            }
            (Stage::Ending, Err(failed)) => {
                self.land();
                return Ok(Some(failure(together, failed)));
            }
            (Stage::Discarding, _) => self.land(),
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
fn failure(together: Together<'_>, failed: Failed) -> Error {
    let error = together.error(failed);
    if together.is_first() {
        hsdp_warnings::warn!(%error, "a checkpoint failed: training goes on without it");
    }
    error
}
