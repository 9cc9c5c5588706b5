//! Saves while training goes on. CHECKPOINT.md, "In the background".

use std::mem;
use std::path::PathBuf;
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::Duration;

use crossbeam::channel::{self, Receiver, RecvTimeoutError, Sender};
use hsdp_checkpoint::{Head, Lease, Place, Writer};
use hsdp_kernels::memory;
use hsdp_sharding::Rank;
use parking_lot::Mutex;
use serde_json::Value;

use super::Checkpoints;
use super::save::{self, Saved, Saving};
use super::snapshot::Snapshot;
use super::together::{Failed, Together};
use crate::error::Error;
use crate::model::ShardedModel;
use crate::persist::checkpointed::Checkpointed;
use crate::persist::problem::Problem;

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
        super::check(model, optimizer, "saving")?;
        model.engine.check_updated()?;
        self.settle(model)?;
        let frozen = self.frozen_part(model, save::saving(model).about(self.number))?;
        let saving = Saving::of(&self.store, self.number, model, optimizer, user, frozen);
        let (place, head) = saving.agree(save::fresh())?;
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

/// How a rank has ended a stage. In the last stage rank 0 has the path of the generation.
type End = Result<Option<PathBuf>, Problem>;

/// The instruction for rank 0 when all ranks have written, or one has failed.
#[derive(Debug)]
enum Verdict {
    Commit(Box<Head>),
    Discard,
}

#[derive(Debug)]
enum Stage {
    /// All ranks write their parts.
    Writing(Box<Head>),
    /// Rank 0 makes a generation of the parts.
    Ending,
    /// Rank 0 removes the parts. The stage has no result but its end.
    Discarding,
}

/// A save in the background, on one rank.
#[derive(Debug)]
pub(super) struct InFlight {
    step: u64,
    stage: Stage,
    thread: Option<JoinHandle<Snapshot>>,
    ends: Option<Receiver<End>>,
    /// To the thread of rank 0, which discards all parts when this sender is dropped.
    verdicts: Option<Sender<Verdict>>,
    /// How the stage has ended on this rank.
    end: Option<End>,
}

/// The thread that writes, the receiver of its results, and the sender of the verdict for which it
/// waits.
type Begun = (JoinHandle<Snapshot>, Receiver<End>, Option<Sender<Verdict>>);

impl InFlight {
    fn new(step: u64, head: Head, begun: Result<Begun, Problem>) -> Self {
        let stage = Stage::Writing(Box::new(head));
        match begun {
            Ok((thread, ends, verdicts)) => {
                Self { step, stage, thread: Some(thread), ends: Some(ends), verdicts, end: None }
            }
            Err(problem) => {
                let end = Some(Err(problem));
                Self { step, stage, thread: None, ends: None, verdicts: None, end }
            }
        }
    }

    fn together<'a>(&self, model: &'a ShardedModel, checkpoints: u32) -> Together<'a> {
        Together::new(&model.engine.context, "saving", self.step).about(checkpoints)
    }

    /// Whether this rank has ended the stage. Waits up to `within` for that.
    fn has_ended(&mut self, within: Duration) -> bool {
        if self.end.is_none() {
            self.end = match self.ends.as_ref().map(|ends| ends.recv_timeout(within)) {
                Some(Ok(end)) => Some(end),
                Some(Err(RecvTimeoutError::Timeout)) => None,
                Some(Err(RecvTimeoutError::Disconnected)) => Some(Err(self.panicked())),
                None => Some(Ok(None)),
            };
        }
        self.end.is_some()
    }

    /// The end of a save that no call has returned, as far as it is known. Does not wait for it.
    fn unreported(&self) -> Option<String> {
        let end = self.end.clone().or_else(|| self.ends.as_ref()?.try_recv().ok());
        match (&self.stage, end) {
            (Stage::Discarding, _) => None,
            (_, Some(Err(Problem { what, .. }))) => Some(format!("it has failed: {what}")),
            (Stage::Writing(_), _) => Some("it is given up: no call has waited for it".to_owned()),
            (Stage::Ending, _) => Some("no call has waited for its result".to_owned()),
        }
    }

    /// The problem of a thread that ended without a result.
    fn panicked(&mut self) -> Problem {
        self.ends = None;
        match self.thread.take().map(JoinHandle::join) {
            Some(Err(panic)) => Problem::panicked(&*panic),
            _ => Problem::panicked(&"its thread ended without a result"),
        }
    }

    /// Begins the next stage, which has ended already on all ranks but rank 0.
    fn tell(&mut self, verdict: Verdict) {
        let is_told = self.verdicts.take().is_some_and(|verdicts| verdicts.send(verdict).is_ok());
        self.end = (!is_told).then_some(Ok(None));
    }
}

/// The part of a checkpoint that a rank writes.
struct Part {
    rank: Rank,
    writer: Writer,
    place: Place,
    snapshot: Snapshot,
}

impl Part {
    fn begin(self, lease: Option<Arc<Mutex<Lease>>>) -> Result<Begun, Problem> {
        let (says, ends) = channel::unbounded();
        let (verdicts, told) = channel::unbounded();
        let verdicts = lease.is_some().then_some(verdicts);
        let name = format!("hsdp-checkpoint-{}", self.rank);
        let run = move || {
            memory::set_rank(self.rank);
            give_way();
            match lease {
                Some(lease) => self.lead(&lease, &says, &told),
                None => say(&says, self.make_and_write()),
            }
            self.snapshot
        };
        let thread = thread::Builder::new().name(name).spawn(run);
        let thread = thread.map_err(|error| Problem::no_thread(&error))?;
        Ok((thread, ends, verdicts))
    }

    fn make_and_write(&self) -> End {
        self.place.make()?;
        self.write()
    }

    fn write(&self) -> End {
        self.place.write(self.writer, &self.snapshot.slices())?;
        Ok(None)
    }

    /// Does the work of rank 0: begins the generation, writes its part as every rank does, and in
    /// the end commits or discards, as all ranks have agreed.
    fn lead(&self, lease: &Mutex<Lease>, says: &Sender<End>, told: &Receiver<Verdict>) {
        let mut lease = lease.lock();
        let written = lease.begin_at(self.place.clone()).map_err(Problem::from);
        let written = written.and_then(|draft| self.write().map(|_| draft));
        let draft = match written {
            Ok(draft) => {
                say(says, Ok(None));
                Some(draft)
            }
            Err(problem) => {
                say(says, Err(problem));
                None
            }
        };
        match (told.recv(), draft) {
            (Ok(Verdict::Commit(head)), Some(draft)) => {
                let committed = draft.commit(*head, self.writer.of);
                say(says, committed.map(save::told).map(Some).map_err(Problem::from));
            }
            _ => {
                self.place.clone().discard();
                say(says, Ok(None));
            }
        }
    }
}

/// Lets the threads that train go first, where there are fewer cores than threads: a tenth of a
/// core is left to this thread.
fn give_way() {
    #[cfg(target_os = "linux")]
    if let Err(error) = rustix::process::nice(10) {
        tracing::debug!(%error, "a checkpoint is written with the priority of training");
    }
}

/// Sends how a stage has ended. If the receiver is gone, the save was given up.
fn say(says: &Sender<End>, end: End) {
    let _ = says.send(end);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::persist::problem::Kind;

    fn in_flight(begun: Result<Begun, Problem>) -> InFlight {
        InFlight::new(3, Head::of_step(3), begun)
    }

    fn begun(end: Option<End>) -> (InFlight, Sender<End>) {
        let (says, ends) = channel::unbounded();
        end.into_iter().for_each(|end| say(&says, end));
        (in_flight(Ok((thread::spawn(Snapshot::default), ends, None))), says)
    }

    fn failed() -> Problem {
        Problem { kind: Kind::Lasting, what: "the disk is full".to_owned() }
    }

    #[test]
    fn a_failure_that_no_call_has_returned_is_told_when_it_is_dropped() {
        let told = Some("it has failed: the disk is full".to_owned());
        assert_eq!(in_flight(Err(failed())).unreported(), told);
        assert_eq!(begun(Some(Err(failed()))).0.unreported(), told);
    }

    #[test]
    fn a_save_that_no_call_has_waited_for_is_told_when_it_is_dropped() {
        for (end, stage, expected) in [
            (None, None, Some("it is given up: no call has waited for it")),
            (Some(Ok(None)), None, Some("it is given up: no call has waited for it")),
            (None, Some(Stage::Ending), Some("no call has waited for its result")),
            (None, Some(Stage::Discarding), None),
        ] {
            let (mut in_flight, _says) = begun(end);
            in_flight.stage = stage.unwrap_or(in_flight.stage);
            assert_eq!(in_flight.unreported().as_deref(), expected);
        }
    }
}
