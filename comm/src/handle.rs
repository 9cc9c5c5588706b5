//! The parts of a world that a rank owns: its record, its sequences, the backend that serves it, and its `streams` on devices.

mod streams;

use std::collections::HashMap;
use std::sync::{Arc, OnceLock};
use std::thread::{self, ThreadId};

use hsdp_sharding::Rank;

use self::streams::Streams;
use crate::backend::thread::{Access, Lifeline, in_work};
use crate::call::Call;
use crate::engine::{Record, Status};
use crate::fault::Injector;
use crate::nccl::{Carrier, Held};
use crate::process::Process;
use crate::remote::Endpoint;
use crate::site::{Sequence, Site};
use crate::sync::Mutex;
use crate::sync::atomic::{AtomicBool, Ordering};
use crate::{AbortReason, Channel, Descriptor, Error, GroupId, Op, StepFailure, WorldOptions};
use hsdp_flight::{EntryNumber, Origin, Recorder};

/// A rank's place in its world. All handles of a rank share it; when the last one goes, the rank has left.
#[derive(Debug)]
pub(crate) struct RankHandle {
    pub(crate) rank: Rank,
    pub(crate) size: usize,
    /// The process in which the world was made: a copy of it has none of the world's other threads.
    process: Process,
    pub(crate) record: Arc<Record>,
    pub(crate) status: Arc<Status>,
    backend: Backend,
    /// The faults that a test injects into this rank.
    pub(crate) faults: Injector,
    /// Whether a model has checked the places of the faults.
    faults_taken: AtomicBool,
    /// The ranks that have no data, in order, each once.
    absent: Mutex<Arc<[Rank]>>,
    /// The thread that a launch has started for this rank: its panics end the world.
    watched: OnceLock<ThreadId>,
    /// The end of a step that was not announced, since the panic in which it ended was to end the world.
    withheld: Mutex<Option<(u64, Error)>>,
    sequences: Mutex<HashMap<(GroupId, usize), Arc<Sequence>>>,
    /// The streams of its operations on devices.
    pub(crate) streams: Streams,
    /// Its communicators, where those go by NCCL.
    pub(crate) nccl: Held,
}

/// The backend that serves the operations of a world.
#[derive(Debug)]
enum Backend {
    /// Operations meet in this process. Its ranks are threads, or messages stand in for the other ranks.
    Local {
        core: Arc<Access>,
        /// Held, not used: the workers end with the last one.
        _lifeline: Arc<Lifeline>,
    },
    /// There is no other rank: calls and bytes are counted.
    Counting,
}

impl RankHandle {
    pub(crate) fn local(lifeline: Arc<Lifeline>, rank: Rank) -> Self {
        let core = lifeline.core();
        let record = Arc::clone(&core.records()[rank.index()]);
        let status = Arc::clone(core.status());
        let (size, access) = (core.records().len(), Access::new(core));
        let faults = core.options().faults.iter().filter(|fault| fault.rank == rank).copied();
        let faults = Injector::new(faults);
        let backend = Backend::Local { core: access, _lifeline: lifeline };
        let mut handle = Self::of((rank, size), record, status, backend);
        handle.faults = faults;
        handle
    }

    pub(crate) fn counting(size: usize, rank: Rank) -> Self {
        let recorder = Recorder::new(WorldOptions::default().flight_entries, Origin::now());
        let record = Arc::new(Record::new(recorder));
        Self::of((rank, size), record, Arc::default(), Backend::Counting)
    }

    fn of(
        (rank, size): (Rank, usize),
        record: Arc<Record>,
        status: Arc<Status>,
        backend: Backend,
    ) -> Self {
        Self {
            rank,
            size,
            process: Process::this(),
            record,
            status,
            backend,
            faults: Injector::default(),
            faults_taken: AtomicBool::new(false),
            absent: Mutex::new(Arc::new([])),
            watched: OnceLock::new(),
            withheld: Mutex::default(),
            sequences: Mutex::default(),
            streams: Streams::default(),
            nccl: Held::default(),
        }
    }

    /// Whether this call is the rank's first one.
    pub(crate) fn takes_faults(&self) -> bool {
        !self.faults_taken.swap(true, Ordering::Relaxed)
    }

    /// Says that a panic of this thread ends the world, which is announced when it has unwound.
    pub(crate) fn watch_this_thread(&self) {
        let _ = self.watched.set(thread::current().id());
    }

    /// Whether this thread unwinds, and the end of the world is to follow.
    fn falls(&self) -> bool {
        thread::panicking() && self.watched.get() == Some(&thread::current().id())
    }

    /// The site of a group of `ranks`, in which this rank has `slot`. All handles of one group share its sequence; only a rank that
    /// sends to itself has two slots.
    pub(crate) fn site(
        &self,
        (id, channel): (GroupId, Channel),
        ranks: Arc<[Rank]>,
        slot: usize,
    ) -> Site {
        let mut is_new = false;
        let begin = || {
            is_new = true;
            Arc::default()
        };
        let sequence = Arc::clone(self.sequences.lock().entry((id, slot)).or_insert_with(begin));
        if is_new {
            self.record.flight.know(id, channel, &ranks);
        }
        Site { id, channel, ranks, slot, sequence }
    }

    /// The ranks that have no data, in order.
    pub(crate) fn absent(&self) -> Arc<[Rank]> {
        Arc::clone(&self.absent.lock())
    }

    pub(crate) fn set_absent(&self, ranks: &[Rank]) {
        if ranks.is_empty() && self.absent.lock().is_empty() {
            return;
        }
        let mut ranks = ranks.to_vec();
        ranks.sort_unstable();
        ranks.dedup();
        *self.absent.lock() = ranks.into();
    }

    /// The endpoint of messages, if the other ranks share no memory with this one.
    pub(crate) fn endpoint(&self) -> Option<&Arc<Endpoint>> {
        self.access()?.endpoint()
    }

    /// The state that the ranks share, where there are others.
    pub(crate) fn access(&self) -> Option<&Arc<Access>> {
        match &self.backend {
            Backend::Local { core, .. } => Some(core),
            Backend::Counting => None,
        }
    }

    /// Whether all other ranks have left.
    pub(crate) fn is_last(&self) -> bool {
        self.access().is_none_or(|core| core.is_last(self.rank))
    }

    /// Whether an operation may be issued now.
    pub(crate) fn check(&self, op: Op) -> Result<(), Error> {
        if in_work() {
            return Err(Error::Reentrant { op, rank: self.rank });
        }
        if !self.process.is_this() {
            let (made_in, called_in) = (self.process.id, std::process::id());
            return Err(Error::Forked { op, rank: self.rank, made_in, called_in });
        }
        self.announce_withheld();
        self.status.check(self.record.epoch())
    }

    /// Gives a call its number on a sequence, and notes it as what this rank did last, in its ring, too.
    ///
    /// Every operation of every rank passes here before it meets others.
    pub(crate) fn enter(
        &self,
        site: &Site,
        call: Call,
    ) -> Result<(Arc<Descriptor>, EntryNumber), Error> {
        self.check(call.op)?;
        let epoch = self.record.epoch();
        let sequence = site.sequence.take(epoch);
        let descriptor = Arc::new(call.described(site, epoch, sequence));
        self.record.enter(&descriptor);
        let entry = self.record.flight.issue(&descriptor);
        Ok((descriptor, entry))
    }

    /// Ends the world, in which this rank is at fault, unless it has ended before.
    pub(crate) fn abort(&self, reason: AbortReason) {
        let (step, operation) = (self.record.step(), self.record.last());
        self.end(Error::WorldAborted { rank: self.rank, step, operation, reason });
    }

    /// Ends the world, with `error` unless it has ended before.
    pub(crate) fn end(&self, error: Error) -> Error {
        match self.access() {
            Some(core) => core.end(error),
            None => self.status.end_world(error),
        }
    }

    pub(crate) fn out_of_memory(&self, op: Op, bytes: usize, what: String) -> Error {
        Error::OutOfMemory { op, rank: self.rank, step: self.record.step(), bytes, what }
    }

    /// Gives up the step that this rank makes in `epoch`.
    pub(crate) fn abort_step(&self, epoch: u64, failure: StepFailure) {
        // A rank that has left says nothing any more: the others were told that it has left.
        if self.record.has_left() {
            return;
        }
        let StepFailure { step, reason } = failure;
        let error = Error::StepAborted { rank: self.rank, step, reason: reason.into() };
        if self.falls() {
            // The others would begin the step again, only to hear of the end of the world.
            self.withheld.lock().get_or_insert((epoch, error));
            return;
        }
        self.end_epoch(epoch, error);
    }

    fn end_epoch(&self, epoch: u64, error: Error) {
        match self.access() {
            Some(core) => core.end_epoch(epoch, error),
            None => drop(self.status.end_epoch(epoch, error)),
        }
    }

    /// The panic in which a step ended was caught, since this rank goes on: now the others hear of the step.
    fn announce_withheld(&self) {
        if self.watched.get().is_none() || self.falls() {
            return;
        }
        let withheld = self.withheld.lock().take();
        if let Some((epoch, error)) = withheld {
            self.end_epoch(epoch, error);
        }
    }

    pub(crate) fn next_epoch(&self) -> u64 {
        self.announce_withheld();
        let epoch = self.record.epoch();
        if self.status.is_aborted(epoch) {
            self.record.advance_epoch(epoch);
            match self.access() {
                Some(core) => core.forget_old_epochs(),
                None => self.status.forget_before(epoch + 1),
            }
        }
        self.record.epoch()
    }

    /// Its carrier of a call of a group on devices, if the group goes by NCCL.
    pub(crate) fn carrier(&self, group: GroupId, step: u64) -> Option<Carrier> {
        match &self.backend {
            Backend::Local { core, .. } => self.nccl.carrier((core, self.rank), group, step),
            Backend::Counting => None,
        }
    }

    /// Waits until the steps that the rank has given up are drained on its device.
    pub(crate) fn await_drained(&self) -> Result<(), Error> {
        match &self.backend {
            Backend::Local { core, .. } => self.nccl.await_drained((core, self.rank)),
            Backend::Counting => Ok(()),
        }
    }

    pub(crate) fn leave(&self) {
        if let Some(core) = self.access() {
            self.nccl.leave(core, self.rank);
            core.leave(self.rank);
        }
    }
}

impl Drop for RankHandle {
    fn drop(&mut self) {
        self.leave();
        if self.status.world_end().is_some() {
            self.nccl.give_up();
        }
    }
}
