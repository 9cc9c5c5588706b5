//! This process, as a member of the control plane: what others pass to it, by world.

use std::collections::{HashMap, VecDeque};
use std::fmt;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use hsdp_control::{ControlError, Joined, Membership, Server, Status};
use hsdp_sharding::Rank;
use parking_lot::Mutex;

use super::passage::Piece;

/// This process. When nobody has it any more, it says goodbye.
pub(super) struct Member {
    /// There until the end.
    membership: Option<Membership>,
    /// On rank 0.
    server: Option<Server>,
    /// How long the others are waited for at the end.
    deadline: Duration,
    worlds: AtomicU32,
    arrived: Mutex<Arrived>,
}

/// What has come and was not taken, by world: of one that is not made here yet, too.
type Arrived = HashMap<u32, VecDeque<(Rank, Vec<u8>)>>;

impl Member {
    pub(super) fn new(joined: Joined, deadline: Duration) -> Self {
        let Joined { membership, server, .. } = joined;
        let (worlds, arrived) = (AtomicU32::new(0), Mutex::default());
        Self { membership: Some(membership), server, deadline, worlds, arrived }
    }

    fn membership(&self) -> &Membership {
        self.membership.as_ref().expect("it is there until the end")
    }

    pub(super) fn rank(&self) -> Rank {
        self.membership().rank()
    }

    pub(super) fn size(&self) -> usize {
        self.membership().size()
    }

    pub(super) fn status(&self) -> Status {
        self.membership().status()
    }

    /// The number of the next world.
    pub(super) fn next_world(&self) -> u32 {
        self.worlds.fetch_add(1, Ordering::Relaxed)
    }

    /// How many frames of one member the coordinator keeps for another.
    pub(super) fn most_passed(&self) -> usize {
        self.membership().most_passed()
    }

    pub(super) fn pass(&self, to: Rank, piece: &[u8]) -> Result<(), ControlError> {
        self.membership().pass(to, piece)
    }

    /// What came next of a world, and of whom; what comes of others is kept for them. A piece that is none is everybody's.
    pub(super) fn take(&self, world: u32) -> Option<(Rank, Vec<u8>)> {
        let mut arrived = self.arrived.lock();
        while let Some((from, piece)) = self.membership().take_passed() {
            let its_world = Piece::read(&piece).map_or(world, |piece| piece.world);
            arrived.entry(its_world).or_default().push_back((from, piece));
        }
        arrived.get_mut(&world)?.pop_front()
    }

    /// Nobody takes what comes of a world any more.
    pub(super) fn forget(&self, world: u32) {
        self.arrived.lock().remove(&world);
    }
}

/// Waits for the others to have heard it, and on rank 0 for their goodbyes, for the deadline at the most: who ends the coordinator before
/// would end them.
impl Drop for Member {
    fn drop(&mut self) {
        let heard = self.membership.take().map_or(Ok(()), Membership::leave);
        let finished = self.server.take().map_or(Ok(()), |server| server.finish(self.deadline));
        if let Err(error) = heard.and(finished) {
            tracing::warn!(%error, "the job did not end together");
        }
    }
}

impl fmt::Debug for Member {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Member({:?})", self.membership)
    }
}
