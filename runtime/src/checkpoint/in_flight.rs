//! A save in the background, on one rank: the copy of the elements that it writes, and the thread
//! that writes them while training goes on with the originals.

use std::path::PathBuf;
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::Duration;

use crossbeam::channel::{self, Receiver, RecvTimeoutError, Sender};
use hsdp_checkpoint::{DraftPlace, Head, Lease, Slice, Writer};
use hsdp_kernels::memory::{self, Category};
use hsdp_sharding::Rank;
use parking_lot::Mutex;

use super::portions::{self, WrittenFrom, WrittenPortion};
use super::saving;
use super::settings::Content;
use super::together::JointOperation;
use crate::model::ShardedModel;
use crate::persist::checkpointed::Checkpointed;
use crate::persist::problem::Problem;

/// Elements of tensors, one after the other. The memory is reused from one snapshot to the next.
#[derive(Debug, Default)]
pub(super) struct Snapshot {
    elements: Vec<f32>,
    written: Vec<WrittenPortion>,
}

impl Snapshot {
    /// Copies the elements that this rank writes of a model and its optimizer.
    ///
    /// # Errors
    /// If there is no memory for it, or a device fails.
    pub(super) fn copy<O: Checkpointed>(
        &mut self,
        model: &ShardedModel,
        optimizer: &O,
        content: Content,
    ) -> Result<(), Problem> {
        self.written = portions::to_write(&model.engine.context, optimizer, content);
        self.make_room()?;
        let site = model.site("saving");
        let mut room = &mut *self.elements;
        for WrittenPortion { source, .. } in &self.written {
            let (into, rest) = room.split_at_mut(source.len());
            match source {
                WrittenFrom::Shard { unit, range } => {
                    let shard = &model.engine.state().shards[unit.index()];
                    shard.copy_to(site, range.start, into)?;
                }
                WrittenFrom::State { kind, parameter, range } => {
                    let start = range.start;
                    let copied = optimizer.copy_state(model, kind, *parameter, start, into)?;
                    debug_assert!(copied, "an optimizer has the tensors that it names");
                }
                WrittenFrom::Buffer { buffer, .. } => {
                    into.copy_from_slice(model.engine.state().buffers.committed_value(*buffer));
                }
                WrittenFrom::BufferState { state, .. } => {
                    let copied = optimizer.copy_buffer_state(*state, into);
                    debug_assert!(copied, "an optimizer has the tensors that it names");
                }
            }
            room = rest;
        }
        Ok(())
    }

    /// The copied elements, as slices for the files.
    pub(super) fn slices(&self) -> Vec<Slice<'_>> {
        let mut elements = &*self.elements;
        let slices = self.written.iter().map(|written| {
            let (own, rest) = elements.split_at(written.source.len());
            elements = rest;
            written.slice(own.into())
        });
        slices.collect()
    }

    fn make_room(&mut self) -> Result<(), Problem> {
        let len = self.written.iter().map(|written| written.source.len()).sum();
        let _snapshot = memory::scope(Category::Snapshot);
        if self.elements.len() != len {
            self.elements = Vec::new();
            self.elements = bytemuck::allocation::try_zeroed_vec(len).map_err(|()| {
                let bytes = len * size_of::<f32>();
                let what =
                    format!("out of memory: the copy of the saved state needs {bytes} bytes");
                Problem::lasting(what)
            })?;
        }
        Ok(())
    }
}

/// How a rank has ended a stage. In the last stage rank 0 has the path of the generation.
pub(super) type PartEnd = Result<Option<PathBuf>, Problem>;

/// The instruction for rank 0 when all ranks have written, or one has failed.
#[derive(Debug)]
pub(super) enum SaveVerdict {
    Commit(Box<Head>),
    Discard,
}

#[derive(Debug)]
pub(super) enum SaveStage {
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
    pub(super) stage: SaveStage,
    pub(super) thread: Option<JoinHandle<Snapshot>>,
    ends: Option<Receiver<PartEnd>>,
    /// To the thread of rank 0, which discards all parts when this sender is dropped.
    verdicts: Option<Sender<SaveVerdict>>,
    /// How the stage has ended on this rank.
    pub(super) end: Option<PartEnd>,
}

impl InFlight {
    pub(super) fn together<'a>(
        &self,
        model: &'a ShardedModel,
        checkpoints: u32,
    ) -> JointOperation<'a> {
        JointOperation::new(&model.engine.context, "saving", self.step).about(checkpoints)
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
            (SaveStage::Discarding, _) => None,
            (_, Some(Err(Problem { what, .. }))) => Some(format!("it has failed: {what}")),
            (SaveStage::Writing(_), _) => {
                Some("it is given up: no call has waited for it".to_owned())
            }
            (SaveStage::Ending, _) => Some("no call has waited for its result".to_owned()),
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
    pub(super) fn tell(&mut self, verdict: SaveVerdict) {
        let is_told = self.verdicts.take().is_some_and(|verdicts| verdicts.send(verdict).is_ok());
        self.end = (!is_told).then_some(Ok(None));
    }
}

/// The part of a checkpoint that a rank writes.
pub(super) struct BackgroundPart {
    pub(super) rank: Rank,
    pub(super) writer: Writer,
    pub(super) place: DraftPlace,
    pub(super) snapshot: Snapshot,
}

impl BackgroundPart {
    /// Begins to write the part on a thread of its own.
    pub(super) fn begin(self, step: u64, head: Head, lease: Option<Arc<Mutex<Lease>>>) -> InFlight {
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
        let stage = SaveStage::Writing(Box::new(head));
        match thread::Builder::new().name(name).spawn(run) {
            Ok(thread) => {
                let thread = Some(thread);
                InFlight { step, stage, thread, ends: Some(ends), verdicts, end: None }
            }
            Err(error) => {
                let end = Some(Err(Problem::no_thread(&error)));
                InFlight { step, stage, thread: None, ends: None, verdicts: None, end }
            }
        }
    }

    fn make_and_write(&self) -> PartEnd {
        self.place.make()?;
        self.write()
    }

    fn write(&self) -> PartEnd {
        self.place.write(self.writer, &self.snapshot.slices())?;
        Ok(None)
    }

    /// Does the work of rank 0: begins the generation, writes its part as every rank does, and in
    /// the end commits or discards, as all ranks have agreed.
    fn lead(&self, lease: &Mutex<Lease>, says: &Sender<PartEnd>, told: &Receiver<SaveVerdict>) {
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
            (Ok(SaveVerdict::Commit(head)), Some(draft)) => {
                let committed = draft.commit(*head, self.writer.of);
                say(says, committed.map(saving::told).map(Some).map_err(Problem::from));
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
fn say(says: &Sender<PartEnd>, end: PartEnd) {
    let _ = says.send(end);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::persist::problem::ProblemKind;

    fn in_flight(ends: Option<Receiver<PartEnd>>, end: Option<PartEnd>) -> InFlight {
        let stage = SaveStage::Writing(Box::new(Head::of_step(3)));
        InFlight { step: 3, stage, thread: None, ends, verdicts: None, end }
    }

    fn begun(end: Option<PartEnd>) -> (InFlight, Sender<PartEnd>) {
        let (says, ends) = channel::unbounded();
        end.into_iter().for_each(|end| say(&says, end));
        (in_flight(Some(ends), None), says)
    }

    fn failed() -> Problem {
        Problem { kind: ProblemKind::Lasting, what: "the disk is full".to_owned() }
    }

    #[test]
    fn a_failure_that_no_call_has_returned_is_told_when_it_is_dropped() {
        let told = Some("it has failed: the disk is full".to_owned());
        assert_eq!(in_flight(None, Some(Err(failed()))).unreported(), told);
        assert_eq!(begun(Some(Err(failed()))).0.unreported(), told);
    }

    #[test]
    fn a_save_that_no_call_has_waited_for_is_told_when_it_is_dropped() {
        for (end, stage, expected) in [
            (None, None, Some("it is given up: no call has waited for it")),
            (Some(Ok(None)), None, Some("it is given up: no call has waited for it")),
            (None, Some(SaveStage::Ending), Some("no call has waited for its result")),
            (None, Some(SaveStage::Discarding), None),
        ] {
            let (mut in_flight, _says) = begun(end);
            in_flight.stage = stage.unwrap_or(in_flight.stage);
            assert_eq!(in_flight.unreported().as_deref(), expected);
        }
    }
}
