//! One rank's handle of its world.

use std::sync::Arc;
use std::time::Duration;

use hsdp_sharding::Rank;

use crate::ledger::LedgerSnapshot;
use crate::local::{Core, Lifeline};
use crate::options::{Between, WorldOptions};
use crate::remote::{self, Office, Transport};
use crate::seat::{Flavour, Seat};
use crate::{AbortReason, Channel, Error, Fault, FlightRecord, Group, StepFailure};

/// One rank's handle of its world: all clones stand for the same rank.
///
/// A world ends early in two ways. [`abort_step`](Self::abort_step) gives up a step on all ranks, which then go on
/// in the next epoch; [`abort`](Self::abort), a panic, a missed deadline, or a rank that leaves while others wait for
/// it end the world for good. Both end all that is pending with an error that names the rank.
///
/// A rank has left when its last handle is dropped: every `World` and `Group` of it.
#[derive(Clone, Debug)]
pub struct World {
    seat: Arc<Seat>,
}

impl World {
    /// The ranks of a new world in this process, in order. Give each to a thread of its own, or use
    /// [`launch`](crate::launch), which also tells the others when a rank panics.
    #[must_use]
    pub fn local(size: usize, options: WorldOptions) -> Vec<Self> {
        if options.between == Between::Letters {
            return Self::apart(size, &options);
        }
        let core = Core::new(size, options);
        let lifeline = Lifeline::new(core);
        let seat = |rank| Seat::local(Arc::clone(&lifeline), Rank::new(rank));
        (0..size).map(|rank| Self { seat: Arc::new(seat(rank)) }).collect()
    }

    /// The same, where they share no memory. Threads that cannot be started end the world before it begins.
    fn apart(size: usize, options: &WorldOptions) -> Vec<Self> {
        let wires = remote::wires(size);
        let world = |(rank, wire)| Self::by(size, Rank::new(rank), options.clone(), wire);
        wires.into_iter().enumerate().map(world).collect()
    }

    /// The world of the first `size` processes of a job, of which this is number `rank` of `processes`; `None` if it is not among
    /// them.
    ///
    /// # Errors
    /// [`Error::BadRank`] if there are fewer processes; those of greeting.
    #[cfg(any(feature = "mpi", feature = "nccl"))]
    pub(crate) fn of_first(
        size: usize,
        (rank, processes): (Rank, usize),
        options: WorldOptions,
        mut transport: Box<dyn Transport>,
    ) -> Result<Option<Self>, Error> {
        if size <= processes && rank.index() < size {
            let world = Self::by(size, rank, options, transport);
            return world.greet().map(|()| Some(world));
        }
        transport.close(None);
        match size > processes {
            true => Err(Error::BadRank { rank: Rank::new(size - 1), size: processes }),
            false => Ok(None),
        }
    }

    /// One rank, whose peers are at the other end of a transport.
    pub(crate) fn by(
        size: usize,
        rank: Rank,
        options: WorldOptions,
        transport: Box<dyn Transport>,
    ) -> Self {
        let core = Core::new(size, options);
        let office = Office::new(&core, rank, transport);
        core.open_office(Arc::clone(&office));
        if let Err(error) = office.start() {
            let problem = format!("the thread for letters could not be started: {error}");
            let reason = AbortReason::Unreachable { problem: problem.into() };
            core.end(core.ended_by(rank, reason));
        }
        Self { seat: Arc::new(Seat::local(Lifeline::new(core), rank)) }
    }

    /// Compares with the other ranks what all must have in common, where they share no memory; **collective**.
    #[cfg(any(feature = "mpi", feature = "nccl", test))]
    pub(crate) fn greet(&self) -> Result<(), Error> {
        match &self.seat.flavour {
            Flavour::Local { core, .. } => {
                core.office().map_or(Ok(()), |office| office.greet(core, core.options().deadline))
            }
            Flavour::Counting => Ok(()),
        }
    }

    /// A world of one rank. Its collectives are copies at most, and count nothing.
    #[must_use]
    pub fn single() -> Self {
        let lifeline = Lifeline::new(Core::new(1, WorldOptions::default()));
        Self { seat: Arc::new(Seat::local(lifeline, Rank::new(0))) }
    }

    /// A rank of a world of any size that has no other ranks: every collective completes at once, and the ledger
    /// counts what this rank would have issued and received.
    ///
    /// General collectives behave as if every member had brought what this rank brings, where that makes
    /// sense, so agreements agree. The calls on whole units leave their buffers as they are. A permutation brings 0
    /// bytes: whether another member hands its elements to this one is not known.
    ///
    /// # Errors
    /// [`Error::BadRank`] if `rank` is not below `size`.
    pub fn counting(size: usize, rank: Rank) -> Result<Self, Error> {
        if rank.index() >= size {
            return Err(Error::BadRank { rank, size });
        }
        Ok(Self { seat: Arc::new(Seat::counting(size, rank)) })
    }

    /// Which rank this is.
    #[must_use]
    pub fn rank(&self) -> Rank {
        self.seat.rank
    }

    /// How many ranks there are.
    #[must_use]
    pub fn size(&self) -> usize {
        self.seat.size
    }

    /// How long one of its operations is waited for at the most.
    #[must_use]
    pub fn deadline(&self) -> Duration {
        match &self.seat.flavour {
            Flavour::Local { core, .. } => core.options().deadline,
            Flavour::Counting => WorldOptions::default().deadline,
        }
    }

    /// Whether all ranks are threads of this process, and read each other's memory.
    #[must_use]
    pub fn shares_memory(&self) -> bool {
        matches!(self.seat.flavour, Flavour::Local { .. }) && self.seat.office().is_none()
    }

    /// Why NCCL cannot carry what lies on devices, if it cannot.
    #[cfg(feature = "nccl")]
    pub(crate) fn keeps_off_devices(&self) -> Option<&'static str> {
        match &self.seat.flavour {
            Flavour::Counting => Some("it is counted only, and has no other ranks"),
            Flavour::Local { core, .. } => {
                let is_by_letters = core.options().between == Between::Letters;
                is_by_letters.then_some("its ranks are threads that share no memory")
            }
        }
    }

    /// The group of `ranks`, in this order, on `channel`. A local act: nobody waits for anybody.
    ///
    /// Members must list the same ranks in the same order, or they mean different groups. Groups of
    /// the same ranks and channel share one sequence of operations, however often they are made.
    ///
    /// # Errors
    /// [`Error::BadGroup`] if this rank is not among them, one is listed twice, or one is not in the world.
    pub fn group(&self, ranks: &[Rank], channel: Channel) -> Result<Group, Error> {
        Group::new(&self.seat, ranks, channel)
    }

    /// The group of all ranks, in order, on `channel`.
    #[must_use]
    pub fn world_group(&self, channel: Channel) -> Group {
        Group::of_all(&self.seat, channel)
    }

    /// What this rank has issued and received so far.
    #[must_use]
    pub fn ledger(&self) -> LedgerSnapshot {
        self.seat.record.ledger.snapshot()
    }

    /// What this rank did last: its operations, when it issued them, and what became of them. At any time, also when the
    /// world has ended; [`explain`](crate::explain) reads the records of all ranks.
    #[must_use]
    pub fn flight_record(&self) -> FlightRecord {
        let Seat { rank, size, record, status, .. } = &*self.seat;
        FlightRecord::of(*rank, *size, record, status)
    }

    /// Says which step this rank is in, for errors to name.
    pub fn set_step(&self, step: u64) {
        self.seat.record.set_step(step);
    }

    /// Says which ranks have no data in this step, for what users issue meanwhile; none, to say that all have. What was
    /// said last counts.
    ///
    /// On [`Channel::User`], a barrier of a group takes place among the members that have data; everything else of a group,
    /// or of a transfer, with a member that has none is refused, and so is all that an absent rank calls
    /// ([`Error::Absent`]). Other channels are not concerned.
    ///
    /// **Collective** in the sense that all ranks say the same between the same two of their operations. It waits for
    /// nobody: who does not say so means another barrier than the others.
    pub fn set_absent(&self, ranks: &[Rank]) {
        self.seat.set_absent(ranks);
    }

    /// The faults of this rank that have not fired yet, of those in [`WorldOptions::faults`].
    #[must_use]
    pub fn armed_faults(&self) -> Vec<Fault> {
        self.seat.faults.armed()
    }

    /// The epoch of this rank: how many aborted steps it has left behind.
    #[must_use]
    pub fn epoch(&self) -> u64 {
        self.seat.record.epoch()
    }

    /// Gives up the current step on all ranks. Never waits for another rank.
    ///
    /// What is pending in this rank's epoch, and what is issued in it later, ends with
    /// [`Error::StepAborted`] on every rank; operations whose members had all arrived complete. If several ranks
    /// give up, all name the first. Then each rank calls [`next_epoch`](Self::next_epoch); where steps are those of a model,
    /// it does so for its rank, when the step is dropped or refused.
    ///
    /// While the thread of a rank of [`launch`](crate::launch) unwinds, nothing is announced: the end of the world follows. Should
    /// the panic be caught, the rank's next call announces it. Threads of a program's own announce it at once, since
    /// nobody else says that they panicked.
    pub fn abort_step(&self, failure: StepFailure) {
        self.seat.abort_step(self.epoch(), failure);
    }

    /// As [`abort_step`](Self::abort_step), for a step that began in `epoch`. If this rank has left that epoch behind, or never
    /// was in it, nothing happens: the step has ended before, and the rank's next one is another.
    pub fn abort_step_of(&self, epoch: u64, failure: StepFailure) {
        if epoch == self.epoch() {
            self.seat.abort_step(epoch, failure);
        }
    }

    /// Leaves an aborted epoch behind, when this rank has discarded its step; the epoch that it is in now. In an
    /// epoch that is not aborted it does nothing.
    ///
    /// Ranks need not do so together: operations of the new epoch wait for those that come later.
    pub fn next_epoch(&self) -> u64 {
        self.seat.next_epoch()
    }

    /// Ends the world on all ranks, for good. Never waits for another rank; where ranks share no memory, for half a second at the most,
    /// until all know of one end.
    ///
    /// What is pending, and what is issued later, ends with [`Error::WorldAborted`]; operations whose members had all
    /// arrived complete.
    pub fn abort(&self, reason: &str) {
        self.seat.abort(reason);
    }

    /// What ended the world, if it has ended.
    #[must_use]
    pub fn end(&self) -> Option<Error> {
        self.seat.status.world_end()
    }

    pub(crate) fn seat(&self) -> &Arc<Seat> {
        &self.seat
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Worlds apart whose options may differ.
    fn greet(options: [WorldOptions; 2]) -> Vec<Result<(), Error>> {
        let wires = remote::wires(2);
        let worlds = (0..).map(Rank::new).zip(wires).zip(options);
        let worlds: Vec<_> =
            worlds.map(|((rank, wire), options)| World::by(2, rank, options, wire)).collect();
        let greet = |world: &World| world.greet();
        std::thread::scope(|scope| {
            let greeting: Vec<_> =
                worlds.iter().map(|world| scope.spawn(|| greet(world))).collect();
            greeting.into_iter().map(|thread| thread.join().expect("no panic")).collect()
        })
    }

    #[test]
    fn ranks_that_have_all_in_common_make_a_world_and_others_are_told_why_not() {
        let options = WorldOptions::default();
        assert_eq!(greet([options.clone(), options.clone()]), [Ok(()), Ok(())]);
        let other = WorldOptions { deadline: Duration::from_secs(7), ..options.clone() };
        let [one, two] = <[_; 2]>::try_from(greet([options, other])).expect("two ranks");
        let refused = one.expect_err("they differ");
        assert!(
            refused.to_string().starts_with("ranks 0 and 1 differ in their deadline: 120s (proc")
        );
        assert_eq!(two, Err(refused));
    }

    #[test]
    fn who_does_not_come_is_missed_by_name() {
        let deadline = Duration::from_millis(50);
        let options = WorldOptions { deadline, ..WorldOptions::default() };
        let mut wires = remote::wires(2).into_iter();
        let wire = wires.next().expect("two ranks");
        let alone = World::by(2, Rank::new(0), options, wire);
        let missed = Error::Incomplete { deadline, arrived: vec![0], missing: vec![1] };
        assert_eq!(alone.greet(), Err(missed));
    }
}
