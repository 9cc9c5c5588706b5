//! Saves while training goes on. CHECKPOINT.md, "In the background".

use std::mem;
use std::path::PathBuf;
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::Duration;

use crossbeam::channel::{self, Receiver, RecvTimeoutError, Sender};
use hsdp_checkpoint::{Head, Lease, Place, Writer, nonce};
use hsdp_kernels::memory;
use hsdp_sharding::Rank;
use parking_lot::Mutex;
use serde_json::Value;

use super::save::{self, Saved, Saving};
use super::snapshot::Snapshot;
use super::together::{Problem, Together};
use super::{Checkpointed, Checkpoints};
use crate::error::Error;
use crate::model::ShardedModel;

impl Checkpoints {
    /// Begins a save as [`save`](Self::save) makes it, and comes back as soon as there is a copy of what is saved, in host memory: the
    /// next step need not wait for the disk. Call [`poll`](Self::poll) after each step, and [`finish`](Self::finish) in the end: dropped
    /// before that, it is given up, and the directory is another's when what was written is removed.
    ///
    /// There is one at a time: one that is under way is waited for, and `poll` says what became of it, too. The copy takes
    /// [`Plan::snapshot`](hsdp_sharding::Plan::snapshot) bytes, which the next one uses again.
    ///
    /// Collective over the model's world, between steps. `user` is the same on all ranks.
    ///
    /// # Errors
    /// [`Error::Checkpoint`] on all ranks, if `user` differs, or one cannot make its copy; [`Error::Misuse`] and [`Error::Comm`] as of [`save`](Self::save).
    pub fn save_in_background<O: Checkpointed>(
        &mut self,
        model: &ShardedModel,
        optimizer: &O,
        user: &Value,
    ) -> Result<(), Error> {
        super::check_between_steps(model, "saving")?;
        super::check_owner(model, optimizer, "saving")?;
        self.settle(model)?;
        let saving = Saving::of(&self.store, (model, optimizer), user);
        let (place, head) = saving.agree(nonce())?;
        // Who begins to write while others still copy would keep them, and so itself, waiting where there are fewer cores than threads.
        let copied = self.snapshot.copy(model, optimizer);
        let together = saving.together();
        together.agree(copied)?.map_err(|failed| together.error(failed))?;
        let snapshot = mem::take(&mut self.snapshot);
        let part = Part { rank: model.rank(), writer: saving.writer(), place, snapshot };
        let begun = part.begin(self.lease.clone());
        self.in_flight = Some(InFlight::new((model.committed_steps(), head), begun));
        Ok(())
    }

    /// What became of a save in the background, once, and of the oldest first: `None` while it is under way, or there is none.
    ///
    /// Collective over the model's world: all ranks hear of the same save in the same call. Called between steps; it waits
    /// for no file. Rank 0 makes the generation only when a call has told it that all ranks have written.
    ///
    /// # Errors
    /// [`Error::Checkpoint`] on all ranks if the save failed: what was saved before is as it was, and training may go on.
    /// [`Error::Comm`].
    pub fn poll(&mut self, model: &ShardedModel) -> Result<Option<Saved>, Error> {
        if self.ended.is_empty() {
            self.look(model)?;
        }
        self.ended.pop_front().transpose()
    }

    /// Waits for a save in the background; what became of it, or of an earlier one of which nobody has heard: `None` when all is told.
    ///
    /// Collective over the model's world, between steps.
    ///
    /// # Errors
    /// As of [`poll`](Self::poll).
    pub fn finish(&mut self, model: &ShardedModel) -> Result<Option<Saved>, Error> {
        self.settle(model)?;
        self.ended.pop_front().transpose()
    }

    /// Goes on if all ranks have ended what they were at.
    fn look(&mut self, model: &ShardedModel) -> Result<(), Error> {
        let Some(in_flight) = &mut self.in_flight else { return Ok(()) };
        let together = in_flight.together(model);
        if together.at_work(!in_flight.has_ended(Duration::ZERO))?.is_empty() {
            self.go_on(together)?;
        }
        Ok(())
    }

    /// Waits until nothing is in flight.
    pub(super) fn settle(&mut self, model: &ShardedModel) -> Result<(), Error> {
        while let Some(in_flight) = &mut self.in_flight {
            let together = in_flight.together(model);
            together.wait(|within| in_flight.has_ended(within))?;
            self.go_on(together)?;
        }
        Ok(())
    }

    /// All ranks have ended a stage.
    fn go_on(&mut self, together: Together<'_>) -> Result<(), Error> {
        let Some(in_flight) = &mut self.in_flight else { return Ok(()) };
        let agreed = together.agree(in_flight.end.clone().unwrap_or(Ok(None)))?;
        match (mem::replace(&mut in_flight.stage, Stage::Ending), agreed) {
            (Stage::Writing(head), Ok(_)) => in_flight.tell(Verdict::Commit(head)),
            (Stage::Writing(_), Err(failed)) => {
                in_flight.stage = Stage::Discarding;
                in_flight.tell(Verdict::Discard);
                self.ended.push_back(Err(failure(together.error(failed))));
            }
            (Stage::Ending, agreed) => {
                let step = in_flight.step;
                let ended = agreed.map(|path| Saved { step, path });
                self.ended.push_back(ended.map_err(|failed| failure(together.error(failed))));
                self.land();
            }
            (Stage::Discarding, _) => self.land(),
        }
        Ok(())
    }

    /// Whether a save may become a generation yet.
    pub(super) fn is_saving(&self) -> bool {
        let stage = self.in_flight.as_ref().map(|in_flight| &in_flight.stage);
        matches!(stage, Some(Stage::Writing(_) | Stage::Ending))
    }

    /// It is over: its memory is the next one's.
    fn land(&mut self) {
        let thread = self.in_flight.take().and_then(|in_flight| in_flight.thread);
        if let Some(Ok(snapshot)) = thread.map(JoinHandle::join) {
            self.snapshot = snapshot;
        }
    }
}

/// As it is told to those who look at warnings, too.
fn failure(error: Error) -> Error {
    tracing::warn!(%error, "a checkpoint failed: training goes on without it");
    error
}

/// How a rank has ended what it was at; rank 0 in the end with the generation.
type End = Result<Option<PathBuf>, Problem>;

/// What rank 0 does when all have written, or one has failed.
#[derive(Debug)]
enum Verdict {
    Commit(Box<Head>),
    Discard,
}

#[derive(Debug)]
enum Stage {
    /// All write their parts.
    Writing(Box<Head>),
    /// Rank 0 makes a generation of them.
    Ending,
    /// Rank 0 removes them: of that nothing is told but that it is over.
    Discarding,
}

/// A save in the background, on one rank.
#[derive(Debug)]
pub(super) struct InFlight {
    step: u64,
    stage: Stage,
    thread: Option<JoinHandle<Snapshot>>,
    ends: Option<Receiver<End>>,
    /// To the thread of rank 0, which discards all when this is gone.
    verdicts: Option<Sender<Verdict>>,
    /// How the stage has ended here.
    end: Option<End>,
}

/// A thread that writes, what it says, and what it waits for.
type Begun = (JoinHandle<Snapshot>, Receiver<End>, Option<Sender<Verdict>>);

impl InFlight {
    fn new((step, head): (u64, Head), begun: Result<Begun, Problem>) -> Self {
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

    fn together<'a>(&self, model: &'a ShardedModel) -> Together<'a> {
        Together::new(&model.engine.fabric, ("saving", self.step))
    }

    /// Whether this rank has ended the stage; waits for it so long.
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

    /// What its thread said when it ended without a word of its own.
    fn panicked(&mut self) -> Problem {
        self.ends = None;
        match self.thread.take().map(JoinHandle::join) {
            Some(Err(panic)) => Problem::panicked(&*panic),
            _ => Problem::panicked(&"its thread is gone"),
        }
    }

    /// Begins the next stage: on other ranks than the first it has ended already.
    fn tell(&mut self, verdict: Verdict) {
        let is_told = self.verdicts.take().is_some_and(|verdicts| verdicts.send(verdict).is_ok());
        self.end = (!is_told).then_some(Ok(None));
    }
}

/// What a rank writes.
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
                Some(lease) => self.lead(&lease, (&says, &told)),
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

    /// What rank 0 does: what each does, before it what only one can, and in the end what all have agreed on.
    fn lead(&self, lease: &Mutex<Lease>, (says, told): (&Sender<End>, &Receiver<Verdict>)) {
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

/// Lets threads that train go first, where there are fewer cores than threads: one in ten parts of a core is left to this one.
fn give_way() {
    #[cfg(target_os = "linux")]
    if let Err(error) = rustix::process::nice(10) {
        tracing::debug!(%error, "a checkpoint is written with the priority of training");
    }
}

/// Whoever listens no more has given the save up.
fn say(says: &Sender<End>, end: End) {
    let _ = says.send(end);
}
