//! The processes of a job without MPI, and the worlds that they make.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use hsdp_control::{Bootstrap, ControlError, Deadlines, Joined};
use hsdp_sharding::Rank;

use super::member::Member;
use super::transport::ControlTransport;
use crate::launch::run_one;
use crate::{Error, RankFailure, World, WorldOptions};

/// This process's place in a job that `hsdp launch` or torchrun has started. Worlds are made of it, one after the other or several at
/// once. When it and all its worlds are gone, the process says goodbye to the others.
///
/// Letters go by the control plane, through the process of rank 0: a hundred microseconds and more each, and some hundred megabytes
/// a second for all ranks together. That is enough for what ranks agree on, and for descriptors; tensors belong on devices, where NCCL
/// carries them ([`World::connect_nccl`]), or into a job of MPI.
#[derive(Clone)]
pub struct Job {
    member: Arc<Member>,
}

impl Job {
    /// Joins the others, as the environment says: [`Bootstrap::from_env`]. Rank 0 runs the coordinator.
    ///
    /// **Collective**: all processes of the job do so, within the deadline.
    ///
    /// # Errors
    /// [`ControlError::Incomplete`] if not all come; [`ControlError::Environment`] and others, as `Bootstrap` says.
    pub fn from_env(deadline: Duration) -> Result<Self, ControlError> {
        let deadlines = Deadlines { rendezvous: deadline, ..Deadlines::default() };
        Bootstrap::from_env()?.deadlines(deadlines).join().map(|joined| Self::of(joined, deadline))
    }

    /// The same of processes that have joined already. At the end they wait for each other for the deadline at the most.
    #[must_use]
    pub fn of(joined: Joined, deadline: Duration) -> Self {
        Self { member: Arc::new(Member::new(joined, deadline)) }
    }

    /// Which process this is.
    #[must_use]
    pub fn rank(&self) -> Rank {
        self.member.rank()
    }

    /// How many processes there are.
    #[must_use]
    pub fn size(&self) -> usize {
        self.member.size()
    }

    /// A world of the first `size` processes, each a rank; `None` on those that are not among them.
    ///
    /// **Collective**: all processes of the job, also those that are not among them, make the same worlds in the same order. The
    /// first `size` wait for each other, and compare versions, programs and options.
    ///
    /// # Errors
    /// [`Error::ConfigMismatch`] on all ranks, [`Error::Incomplete`] if some do not come within the deadline of the options,
    /// [`Error::BadRank`] if the job has fewer processes.
    pub fn world(&self, size: usize, options: WorldOptions) -> Result<Option<World>, Error> {
        let transport = Box::new(ControlTransport::new(Arc::clone(&self.member)));
        World::of_first(size, (self.rank(), self.size()), options, transport)
    }

    /// Runs a rank of a [world](Self::world) of the first `size` processes on this thread, as [`launch`](crate::launch) runs each of
    /// its own: a panic ends the world for the others, and if the world ended early, the rank leaves its flight record. What the
    /// rank returned; `None` on processes that are not among the first.
    ///
    /// **Collective**, as `world`.
    ///
    /// # Errors
    /// As `world`.
    pub fn launch<T>(
        &self,
        size: usize,
        options: WorldOptions,
        rank: impl FnOnce(World) -> T,
    ) -> Result<Option<Result<T, RankFailure>>, Error> {
        let world = self.world(size, options.clone())?;
        Ok(world.map(|world| run_one(world, &options, rank)))
    }
}

impl fmt::Debug for Job {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Job").field("rank", &self.rank()).field("size", &self.size()).finish()
    }
}
