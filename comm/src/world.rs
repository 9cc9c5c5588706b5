//! One rank's handle of its world.

use std::sync::Arc;
use std::time::Duration;

use hsdp_sharding::Rank;

use crate::flight::Dump;
use crate::handle::{Backend, RankHandle};
use crate::ledger::{LedgerSnapshot, Messages};
use crate::options::{Between, WorldOptions};
use crate::remote::{self, Asked, Endpoint, Transport};
use crate::sync::atomic::Ordering;
use crate::threads::{Core, OwnRank};
use crate::{
    AbortReason, CallError, Channel, Error, Fault, FlightRecord, Group, Mistake, SetupError,
    StepFailure,
};

/// The most ranks of a world in one process, as many as the control plane has.
pub(crate) const MOST_RANKS: usize = 4096;

/// Checks that `size` ranks may be threads of one process, before memory is taken for them.
///
/// # Errors
/// [`SetupError::TooManyRanks`].
pub(crate) fn check_size(size: usize) -> Result<(), Error> {
    if size > MOST_RANKS {
        return Err(SetupError::TooManyRanks { size, most: MOST_RANKS }.into());
    }
    Ok(())
}

/// One rank's handle of its world. All clones stand for the same rank.
///
/// Work ends early in two ways. [`abort_step`](Self::abort_step) aborts a step on all ranks, which
/// then go on in the next epoch. [`abort`](Self::abort), a panic, a missed deadline, or a rank that
/// leaves while others wait for it end the world for good. Both end all pending operations with an
/// error that names the rank.
///
/// A rank has left when its last handle is dropped: every `World` and `Group` of it.
#[derive(Clone, Debug)]
pub struct World {
    handle: Arc<RankHandle>,
}

impl World {
    /// Makes a world in this process and returns the handles of its ranks, in order. Give each to a
    /// thread of its own, or use [`launch`](crate::launch), which also tells the others when a rank
    /// panics.
    ///
    /// If the world [cannot have](WorldOptions::check) its options, it has ended before it begins:
    /// every call on it returns that error.
    ///
    /// # Panics
    /// If `size` is more than 4096.
    #[must_use]
    pub fn local(size: usize, options: WorldOptions) -> Vec<Self> {
        if let Err(error) = check_size(size) {
            panic!("{error}");
        }
        let refused = options.check(size).err();
        let worlds = match options.between {
            Between::Memory => Self::together(size, options),
            Between::Messages => Self::apart(size, &options),
        };
        if let Some(error) = refused {
            worlds.iter().for_each(|world| world.end_here(&error));
        }
        worlds
    }

    /// Ends the world for the ranks of this process.
    fn end_here(&self, error: &Error) {
        self.handle.own.core.state.end_here(error.clone(), &[]);
    }

    fn together(size: usize, options: WorldOptions) -> Vec<Self> {
        let core = Core::new(size, options);
        let handle = |rank| RankHandle::local(Arc::clone(&core), Rank::new(rank));
        (0..size).map(|rank| Self { handle: Arc::new(handle(rank)) }).collect()
    }

    /// The same, where they share no memory. Threads that cannot be started end the world before it
    /// begins.
    fn apart(size: usize, options: &WorldOptions) -> Vec<Self> {
        let wires = remote::wires(size);
        let asked = Asked { size, processes: size };
        let world = |(rank, wire)| Self::by(size, Rank::new(rank), asked, options.clone(), wire);
        wires.into_iter().enumerate().map(world).collect()
    }

    /// The world of the first `size` processes of a job, of which this is number `rank` of
    /// `processes`; `None` if it is not among them. All processes of the job compare their
    /// requests, also those that are no ranks.
    ///
    /// # Errors
    /// Errors of the comparison; [`CallError::BadRank`] if there are fewer processes;
    /// [`WorldError::BadFault`](crate::WorldError), which the other ranks are told.
    #[cfg(any(feature = "mpi", feature = "nccl", test))]
    pub(crate) fn of_first(
        size: usize,
        rank: Rank,
        processes: usize,
        options: WorldOptions,
        transport: Box<dyn Transport>,
    ) -> Result<Option<Self>, Error> {
        let asked = Asked { size, processes };
        let refused = options.check(size).err();
        let is_rank = size <= processes && rank.index() < size;
        let world = if is_rank {
            Self::by(size, rank, asked, options, transport)
        } else {
            // It is there for the comparison alone, and issues nothing.
            let options = WorldOptions { flight_entries: 0, faults: Vec::new(), ..options };
            Self::by(processes, rank, asked, options, transport)
        };
        world.greet()?;
        if size > processes {
            let last = Rank::new((size - 1).min(u32::MAX as usize));
            return Err(CallError::BadRank { rank: last, size: processes }.into());
        }
        match refused.filter(|_| is_rank) {
            Some(error) => {
                world.abort(&error.to_string());
                Err(error)
            }
            None => Ok(is_rank.then_some(world)),
        }
    }

    /// One rank, whose peers are at the other end of a transport.
    pub(crate) fn by(
        size: usize,
        rank: Rank,
        asked: Asked,
        options: WorldOptions,
        transport: Box<dyn Transport>,
    ) -> Self {
        let core = Core::new(size, options);
        let endpoint = Endpoint::new(&core.state, rank, asked, transport);
        core.open_endpoint(Arc::clone(&endpoint));
        if let Err(error) = endpoint.start() {
            let problem = format!("the progress thread could not be started: {error}");
            let reason = AbortReason::Unreachable { problem: problem.into() };
            core.end(core.state.ended_by(rank, reason));
        }
        Self { handle: Arc::new(RankHandle::local(core, rank)) }
    }

    /// Compares with the other processes what all must have in common, where they share no memory;
    /// **collective**. Without all of them there is no world: it is over, so that its end waits for
    /// none of them either.
    #[cfg(any(feature = "mpi", feature = "nccl", test))]
    pub(crate) fn greet(&self) -> Result<(), Error> {
        let own = &self.handle.own;
        let Some(endpoint) = own.endpoint() else { return Ok(()) };
        let greeted = endpoint.greet(own.options().deadline);
        greeted.inspect_err(|error| {
            if matches!(error, Error::Setup(SetupError::Incomplete { .. })) {
                self.end_here(error);
            }
        })
    }

    /// A world of one rank. Its collectives copy at most, and do not count in the ledger.
    #[must_use]
    pub fn single() -> Self {
        Self::together(1, WorldOptions::default()).remove(0)
    }

    /// One rank of a world of `size` whose other ranks do not exist. Every collective completes at
    /// once, and the ledger counts the calls that this rank issues and the bytes that it would have
    /// received.
    ///
    /// General collectives behave as if every member had passed the same input as this rank, where
    /// that makes sense, so agreements agree. The calls on whole units leave their buffers as they
    /// are. A permutation counts 0 bytes, since it is unknown whether another member would send to
    /// this one.
    ///
    /// # Errors
    /// [`CallError::BadRank`] if `rank` is not below `size`.
    pub fn counting(size: usize, rank: Rank) -> Result<Self, Error> {
        if rank.index() >= size {
            return Err(CallError::BadRank { rank, size }.into());
        }
        Ok(Self { handle: Arc::new(RankHandle::counting(size, rank)) })
    }

    /// This rank.
    #[must_use]
    pub fn rank(&self) -> Rank {
        self.handle.own.rank
    }

    /// The number of ranks.
    #[must_use]
    pub fn size(&self) -> usize {
        self.handle.size
    }

    /// The longest time that a rank waits for one operation: [`WorldOptions::deadline`].
    #[must_use]
    pub fn deadline(&self) -> Duration {
        self.handle.own.options().deadline
    }

    /// Whether all ranks are threads of this process that read each other's memory.
    #[must_use]
    pub fn shares_memory(&self) -> bool {
        self.handle.backend == Backend::Ranks && self.handle.endpoint().is_none()
    }

    /// The group of `ranks`, in this order, on `channel`. Not collective: the call waits for no
    /// other rank.
    ///
    /// All members must list the same ranks in the same order: another order is another group.
    /// Groups of the same ranks and channel share one sequence of operations, however often they
    /// are made.
    ///
    /// # Errors
    /// [`CallError::BadGroup`] if this rank is not listed, a rank is listed twice, or a rank is not
    /// in the world.
    pub fn group(&self, ranks: &[Rank], channel: Channel) -> Result<Group, Error> {
        Group::new(&self.handle, ranks, channel)
    }

    /// The group of all ranks, in order, on `channel`.
    #[must_use]
    pub fn world_group(&self, channel: Channel) -> Group {
        Group::of_all(&self.handle, channel)
    }

    /// The calls that this rank has issued and the bytes that it has received so far.
    #[must_use]
    pub fn ledger(&self) -> LedgerSnapshot {
        self.handle.own.record.ledger.snapshot()
    }

    /// The messages of this rank so far; none where ranks share memory.
    #[must_use]
    pub fn messages(&self) -> Messages {
        self.handle.own.record.ledger.messages()
    }

    /// This rank's last operations, with their times and their states. Can be called at any time,
    /// also after the world has ended; [`explain`](crate::explain) compares the records of all
    /// ranks.
    #[must_use]
    pub fn flight_record(&self) -> FlightRecord {
        Dump::of(&self.handle, None).record()
    }

    /// Sets the step that this rank is in. Errors name it.
    pub fn set_step(&self, step: u64) {
        self.handle.own.record.set_step(step);
    }

    /// Sets the ranks that have no data in this step, for operations on [`Channel::User`]. An empty
    /// list means that all ranks have data. The last call counts.
    ///
    /// On [`Channel::User`], a barrier of a group takes place among the members that have data.
    /// Every other collective of a group, and every transfer, with a member that has no data is
    /// refused, and so are all calls of an absent rank ([`CallError::Absent`]). Other channels are
    /// not affected.
    ///
    /// **Collective** in the sense that all ranks must set the same list between the same two of
    /// their operations. The call waits for no rank; a rank with another list joins another barrier
    /// than the others.
    pub fn set_absent(&self, ranks: &[Rank]) {
        let mut absent = self.handle.absent.lock();
        if ranks.is_empty() && absent.is_empty() {
            return;
        }
        let mut ranks = ranks.to_vec();
        ranks.sort_unstable();
        ranks.dedup();
        *absent = ranks.into();
    }

    /// For hsdp: the faults of all ranks, [`WorldOptions::faults`], as this process has them, in
    /// this rank's first call; none in a later one. A program that uses a world for several models
    /// checks the places of the faults with one of them only.
    #[doc(hidden)]
    #[must_use]
    pub fn take_faults(&self) -> &[Fault] {
        if self.handle.faults_taken.swap(true, Ordering::Relaxed) {
            return &[];
        }
        &self.handle.own.options().faults
    }

    /// For hsdp: the number of models that were made in this world, as far as this rank knows. It
    /// never goes down.
    #[doc(hidden)]
    #[must_use]
    pub fn models(&self) -> u32 {
        self.handle.models.load(Ordering::Relaxed)
    }

    /// For hsdp: notes the number of models that were made in this world, after all ranks have
    /// agreed on it.
    #[doc(hidden)]
    pub fn count_models(&self, models: u32) {
        self.handle.models.fetch_max(models, Ordering::Relaxed);
    }

    /// The faults of this rank in [`WorldOptions::faults`] that have not fired yet.
    #[must_use]
    pub fn armed_faults(&self) -> Vec<Fault> {
        self.handle.faults.armed()
    }

    /// The epoch of this rank: the number of aborted steps that it has left behind.
    #[must_use]
    pub fn epoch(&self) -> u64 {
        self.handle.own.record.epoch()
    }

    /// Aborts the current step on all ranks. Never waits for another rank.
    ///
    /// Operations that are pending in this rank's epoch, and operations that are issued in it
    /// later, end with [`Error::StepAborted`] on every rank; operations whose members had all
    /// arrived complete. If several ranks abort, all errors name the first. Then each rank calls
    /// [`next_epoch`](Self::next_epoch); where a model makes the steps, the model makes that call
    /// for its rank, when the step is dropped or refused.
    ///
    /// While the thread of a rank of [`launch`](crate::launch) unwinds, the abort is not announced,
    /// since the end of the world follows. If the panic is caught, the rank's next call announces
    /// it. Threads that the program started itself announce it at once, since the world is not told
    /// of their panics.
    pub fn abort_step(&self, failure: StepFailure) {
        self.abort_step_of(self.epoch(), failure);
    }

    /// As [`abort_step`](Self::abort_step), for a step that began in `epoch`. Does nothing if this
    /// rank is in another epoch: the step has ended, and the rank's present step is another.
    pub fn abort_step_of(&self, epoch: u64, failure: StepFailure) {
        self.abort_by(epoch, failure, None);
    }

    fn abort_by(&self, epoch: u64, failure: StepFailure, mistake: Option<Mistake>) {
        // A rank that has left says nothing any more: the others were told that it has left.
        if epoch != self.epoch() || self.handle.own.record.has_left() {
            return;
        }
        let StepFailure { step, reason } = failure;
        let rank = self.rank();
        let error = Error::StepAborted { rank, step, reason: reason.into(), mistake };
        if self.handle.falls() {
            // The others would begin the step again, only to hear of the end of the world.
            self.handle.withheld.lock().get_or_insert((epoch, error));
            return;
        }
        self.handle.own.core.end_epoch(epoch, error);
    }

    /// For hsdp: as [`abort_step_of`](Self::abort_step_of), for a mistake between steps, which all
    /// ranks may make. Does nothing if this rank has left an epoch because another rank had
    /// announced the same mistake, and has completed no operation with that rank since: that rank
    /// is ahead, and goes on in the present epoch.
    #[doc(hidden)]
    pub fn announce_mistake(&self, epoch: u64, failure: StepFailure, mistake: Mistake) {
        if self.handle.own.record.make_mistake(epoch, mistake) {
            self.abort_by(epoch, failure, Some(mistake));
        }
    }

    /// Leaves an aborted epoch, after this rank has discarded its step. Returns the epoch that the
    /// rank is in now. In an epoch that is not aborted it does nothing.
    ///
    /// Ranks need not call it together: operations of the new epoch wait for the ranks that come
    /// later.
    pub fn next_epoch(&self) -> u64 {
        self.handle.announce_withheld();
        let OwnRank { rank, record, core } = &*self.handle.own;
        let early_ends = &core.state.early_ends;
        let epoch = record.epoch();
        if early_ends.is_aborted(epoch) {
            record.leave_epoch(*rank, epoch, early_ends.check(epoch).err());
            core.state.forget_old_epochs();
        }
        record.epoch()
    }

    /// Ends the world on all ranks, for good. Where ranks share memory, it waits for no other rank.
    /// Where they do not, it waits for at most half a second, until all ranks agree on one end.
    ///
    /// Pending operations, and operations that are issued later, end with
    /// [`WorldError::Aborted`](crate::WorldError); operations whose members had all arrived
    /// complete.
    pub fn abort(&self, reason: &str) {
        self.handle.abort(AbortReason::Requested { reason: reason.into() });
    }

    /// The error that ended the world, if it has ended.
    #[must_use]
    pub fn end(&self) -> Option<Error> {
        self.handle.own.early_ends().world_end()
    }

    pub(crate) fn handle(&self) -> &Arc<RankHandle> {
        &self.handle
    }
}

#[cfg(test)]
mod tests;
