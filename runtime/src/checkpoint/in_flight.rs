//! A save in the background, on one rank.

use std::path::PathBuf;
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::Duration;

use crossbeam::channel::{self, Receiver, RecvTimeoutError, Sender};
use hsdp_checkpoint::{Head, Lease, Place, Writer};
use hsdp_kernels::memory;
use hsdp_sharding::Rank;
use parking_lot::Mutex;

use super::made;
use super::snapshot::Snapshot;
use super::together::Together;
use crate::model::ShardedModel;
use crate::persist::problem::Problem;

/// How a rank has ended a stage. In the last stage rank 0 has the path of the generation.
pub(super) type End = Result<Option<PathBuf>, Problem>;

/// The instruction for rank 0 when all ranks have written, or one has failed.
#[derive(Debug)]
pub(super) enum Verdict {
    Commit(Box<Head>),
    Discard,
}

#[derive(Debug)]
pub(super) enum Stage {
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
    pub(super) step: u64,
    pub(super) stage: Stage,
    pub(super) thread: Option<JoinHandle<Snapshot>>,
    ends: Option<Receiver<End>>,
    /// To the thread of rank 0, which discards all parts when this sender is dropped.
    verdicts: Option<Sender<Verdict>>,
    /// How the stage has ended on this rank.
    pub(super) end: Option<End>,
}

/// The thread that writes, the receiver of its results, and the sender of the verdict for which it
/// waits.
pub(super) type Begun = (JoinHandle<Snapshot>, Receiver<End>, Option<Sender<Verdict>>);

impl InFlight {
    pub(super) fn new(step: u64, head: Head, begun: Result<Begun, Problem>) -> Self {
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

    pub(super) fn together<'a>(&self, model: &'a ShardedModel, checkpoints: u32) -> Together<'a> {
        Together::new(&model.engine.context, "saving", self.step).about(checkpoints)
    }

    /// Whether this rank has ended the stage. Waits up to `within` for that.
    pub(super) fn has_ended(&mut self, within: Duration) -> bool {
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
    pub(super) fn unreported(&self) -> Option<String> {
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
    pub(super) fn tell(&mut self, verdict: Verdict) {
        let is_told = self.verdicts.take().is_some_and(|verdicts| verdicts.send(verdict).is_ok());
        self.end = (!is_told).then_some(Ok(None));
    }
}

/// The part of a checkpoint that a rank writes.
pub(super) struct Part {
    pub(super) rank: Rank,
    pub(super) writer: Writer,
    pub(super) place: Place,
    pub(super) snapshot: Snapshot,
}

impl Part {
    pub(super) fn begin(self, lease: Option<Arc<Mutex<Lease>>>) -> Result<Begun, Problem> {
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
                say(says, committed.map(made::told).map(Some).map_err(Problem::from));
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
    use crate::persist::problem::ProblemKind;

    fn in_flight(begun: Result<Begun, Problem>) -> InFlight {
        InFlight::new(3, Head::of_step(3), begun)
    }

    fn begun(end: Option<End>) -> (InFlight, Sender<End>) {
        let (says, ends) = channel::unbounded();
        end.into_iter().for_each(|end| say(&says, end));
        (in_flight(Ok((thread::spawn(Snapshot::default), ends, None))), says)
    }

    fn failed() -> Problem {
        Problem { kind: ProblemKind::Lasting, what: "the disk is full".to_owned() }
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
