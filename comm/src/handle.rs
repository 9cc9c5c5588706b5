//! The parts of a world that a rank owns: its sequences, its streams on devices, its communicators,
//! and the process in which it was made.
//!
//! A copy of the process (a fork) has none of the world's other threads, so every call asks for the
//! process. To ask the system for the number of the process takes a tenth of the time of a small
//! call. Where the system calls back in each copy, the copies are counted instead. It does so after
//! `fork`; a copy that was made by the bare system call is not seen.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::{Arc, OnceLock};
use std::thread::{self, ThreadId};

use hsdp_flight::EntryNumber;
use hsdp_kernels::cuda::{CudaError, Device, Stream};
use hsdp_sharding::Rank;

use crate::call::GroupCall;
use crate::fault::Injector;
use crate::nccl::Connected;
use crate::remote::Endpoint;
use crate::site::{Sequence, Site};
use crate::sync::Mutex;
use crate::sync::atomic::{AtomicBool, AtomicU32};
use crate::threads::{Core, OwnRank, in_work};
use crate::{
    AbortReason, CallError, Channel, Descriptor, Error, GroupId, Op, WorldError, WorldOptions,
};

/// A rank's place in its world. All handles of a rank share it; when the last one goes, the rank
/// has left.
#[derive(Debug)]
pub(crate) struct RankHandle {
    pub(crate) own: Arc<OwnRank>,
    pub(crate) size: usize,
    /// The process in which the world was made, and its mark: a copy of it has none of the world's
    /// other threads.
    made_in: (u32, u64),
    pub(crate) backend: Backend,
    /// The faults that a test injects into this rank.
    pub(crate) faults: Injector,
    /// Whether a model has checked the places of the faults.
    pub(crate) faults_taken: AtomicBool,
    /// Number of models that were made in the world, as far as this rank knows.
    pub(crate) models: AtomicU32,
    /// The ranks that have no data, in order, each once.
    pub(crate) absent: Mutex<Arc<[Rank]>>,
    /// The thread that a launch has started for this rank: its panics end the world, which is
    /// announced when it has unwound.
    pub(crate) watched: OnceLock<ThreadId>,
    /// The end of a step that was not announced, since the panic in which it ended was to end the
    /// world.
    pub(crate) withheld: Mutex<Option<(u64, Error)>>,
    sequences: Mutex<HashMap<(GroupId, usize), Arc<Sequence>>>,
    /// The streams of its operations on devices.
    pub(crate) streams: Streams,
    /// Its communicators, where those go by NCCL.
    pub(crate) nccl: Arc<Connected>,
}

/// The way in which the operations of a world take place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Backend {
    /// Among its ranks.
    Ranks,
    /// Without peers: calls and bytes are counted, and no operation meets others.
    Counting,
}

impl RankHandle {
    /// Makes the handle of a rank of this process.
    pub(crate) fn local(core: Arc<Core>, rank: Rank) -> Self {
        let size = core.state.records.len();
        Self::of(core, rank, size, rank.index())
    }

    /// Makes a rank of a world of any size, whose other ranks are not there.
    pub(crate) fn counting(size: usize, rank: Rank) -> Self {
        let core = Core::new(1, WorldOptions::default());
        let mut handle = Self::of(core, rank, size, 0);
        handle.backend = Backend::Counting;
        handle
    }

    fn of(core: Arc<Core>, rank: Rank, size: usize, record: usize) -> Self {
        core.hold();
        let faults = core.state.options.faults.iter().filter(|fault| fault.rank == rank).copied();
        let faults = Injector::new(faults);
        let record = Arc::clone(&core.state.records[record]);
        Self {
            own: Arc::new(OwnRank { rank, record, core }),
            size,
            made_in: (std::process::id(), process_mark()),
            backend: Backend::Ranks,
            faults,
            faults_taken: AtomicBool::new(false),
            models: AtomicU32::new(0),
            absent: Mutex::new(Arc::new([])),
            watched: OnceLock::new(),
            withheld: Mutex::default(),
            sequences: Mutex::default(),
            streams: Streams::default(),
            nccl: Arc::default(),
        }
    }

    /// Whether this thread unwinds, and the end of the world is to follow.
    pub(crate) fn falls(&self) -> bool {
        thread::panicking() && self.watched.get() == Some(&thread::current().id())
    }

    /// The site of a group of `ranks`, in which this rank has `slot`. All handles of one group
    /// share its sequence; only a rank that sends to itself has two slots.
    pub(crate) fn site(
        &self,
        id: GroupId,
        channel: Channel,
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
            self.own.record.flight.know(id, channel, &ranks);
        }
        Site { id, channel, ranks, slot, sequence }
    }

    /// The endpoint of messages, if the other ranks share no memory with this one.
    pub(crate) fn endpoint(&self) -> Option<&Arc<Endpoint>> {
        self.own.endpoint()
    }

    /// Whether an operation may be issued now.
    pub(crate) fn check(&self, op: Op) -> Result<(), Error> {
        if in_work() {
            return Err(CallError::Reentrant { op, rank: self.own.rank }.into());
        }
        let (made_in, mark) = self.made_in;
        if mark != process_mark() {
            let called_in = std::process::id();
            return Err(CallError::Forked { op, rank: self.own.rank, made_in, called_in }.into());
        }
        self.announce_withheld();
        self.own.early_ends().check(self.own.record.epoch())
    }

    /// Gives a call its number on a sequence, and notes it as what this rank did last, in its ring,
    /// too.
    ///
    /// Every operation of every rank passes here before it meets others.
    pub(crate) fn enter(
        &self,
        site: &Site,
        call: GroupCall,
    ) -> Result<(Arc<Descriptor>, EntryNumber), Error> {
        self.check(call.op)?;
        let epoch = self.own.record.epoch();
        let sequence = site.sequence.take(epoch);
        let descriptor = Arc::new(call.described(site.id, site.channel, epoch, sequence));
        self.own.record.enter(&descriptor);
        let entry = self.own.record.flight.issue(&descriptor);
        Ok((descriptor, entry))
    }

    /// Ends the world, in which this rank is at fault, unless it has ended before.
    pub(crate) fn abort(&self, reason: AbortReason) {
        let step = self.own.record.step();
        let operation = self.own.record.last();
        self.own
            .core
            .end(WorldError::Aborted { rank: self.own.rank, step, operation, reason }.into());
    }

    pub(crate) fn out_of_memory(&self, op: Op, bytes: usize, what: String) -> Error {
        CallError::OutOfMemory {
            op,
            rank: self.own.rank,
            step: self.own.record.step(),
            bytes,
            what,
        }
        .into()
    }

    /// The panic in which a step ended was caught, since this rank goes on: now the others hear of
    /// the step.
    pub(crate) fn announce_withheld(&self) {
        if self.watched.get().is_none() || self.falls() {
            return;
        }
        let withheld = self.withheld.lock().take();
        if let Some((epoch, error)) = withheld {
            self.own.core.end_epoch(epoch, error);
        }
    }

    pub(crate) fn leave(&self) {
        // No other rank waits for one that has no peers.
        if self.backend == Backend::Ranks {
            self.nccl.leave(&self.own);
            self.own.core.leave(self.own.rank);
        }
    }
}

impl Drop for RankHandle {
    fn drop(&mut self) {
        self.leave();
        if self.own.early_ends().world_end().is_some() {
            self.nccl.give_up();
        }
        self.own.core.release();
        self.nccl.close();
    }
}

/// Streams by the ordinal of their device and by channel: gathers run ahead of reductions, and
/// neither waits for the all-reduces.
#[derive(Debug, Default)]
pub(crate) struct Streams(Mutex<HashMap<(usize, Channel), Arc<Stream>>>);

impl Streams {
    /// Returns the stream of a channel, and makes it on first use.
    pub(crate) fn of(&self, device: &Device, channel: Channel) -> Result<Arc<Stream>, CudaError> {
        match self.0.lock().entry((device.ordinal(), channel)) {
            Entry::Occupied(stream) => Ok(Arc::clone(stream.get())),
            Entry::Vacant(entry) => Ok(Arc::clone(entry.insert(Arc::new(device.stream()?)))),
        }
    }
}

/// Returns a number that differs in a copy of the process: the copies between it and the process of
/// the first call, or the number of the process if the system does not call back.
#[cfg(all(unix, not(miri)))]
pub(crate) fn process_mark() -> u64 {
    use std::sync::atomic::{AtomicU64, Ordering};

    static COPIES: AtomicU64 = AtomicU64::new(0);
    static COUNTS: OnceLock<bool> = OnceLock::new();

    /// Called in a copy by its only thread, before the fork returns.
    extern "C" fn one_more() {
        COPIES.fetch_add(1, Ordering::Relaxed);
    }

    // SAFETY: CO-3, the function that is called in a copy does only what is allowed there.
    let begin = || unsafe { libc::pthread_atfork(None, None, Some(one_more)) } == 0;
    if *COUNTS.get_or_init(begin) {
        COPIES.load(Ordering::Relaxed)
    } else {
        std::process::id().into()
    }
}

#[cfg(not(all(unix, not(miri))))]
pub(crate) fn process_mark() -> u64 {
    std::process::id().into()
}
