//! This process, as a member of the control plane: its messages to and from the others, of all its worlds.

use std::collections::{BTreeSet, HashMap, VecDeque};
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::Duration;

use hsdp_control::{Bytes, ControlError, Joined, Membership, Passed, State, Status};
use hsdp_sharding::Rank;
use parking_lot::Mutex;

use super::passage::{Passage, Sending};
use crate::remote::{RankMessage, TransportError, Waker};

/// This process. It says goodbye when it is dropped.
pub(super) struct ControlMember {
    /// There until the end.
    joined: Option<Joined>,
    /// The time for the goodbyes of the others at the end.
    deadline: Duration,
    worlds: AtomicU32,
    /// Whether a process did not come to a world: then this process does not wait for it at the end either.
    failed: AtomicBool,
    mail: Mutex<Mail>,
    /// The functions that wake the progress threads, by world. All of them are called after each message, since its world is known only when it
    /// is read. They are called under the lock: so a world that is forgotten is called no more, and no call outlives its progress thread.
    wakers: Arc<Mutex<HashMap<u32, Waker>>>,
}

/// The time for the goodbyes of the others after that: they miss the same process, and leave soon.
const FAREWELL: Duration = Duration::from_secs(2);

/// The messages of all worlds, in both directions.
struct Mail {
    /// By rank.
    passages: Vec<Passage>,
    /// Messages that have come, by world: of one that is not made here yet, too. `None` of a world that is over here.
    arrived: HashMap<u32, Option<VecDeque<(Rank, Bytes)>>>,
}

impl ControlMember {
    pub(super) fn new(joined: Joined, deadline: Duration) -> Self {
        let membership = &joined.membership;
        let passage = |_| Passage::new(membership.most_passed());
        let passages = (0..membership.size()).map(passage).collect();
        let mail = Mail { passages, arrived: HashMap::new() };
        let worlds = AtomicU32::new(0);
        let failed = AtomicBool::new(false);
        let mail = Mutex::new(mail);
        let wakers = Arc::<Mutex<HashMap<u32, Waker>>>::default();
        let called = Arc::clone(&wakers);
        membership.listen(Box::new(move || called.lock().values().for_each(|waker| waker())));
        Self { joined: Some(joined), deadline, worlds, failed, mail, wakers }
    }

    fn membership(&self) -> &Membership {
        &self.joined.as_ref().expect("it is there until the end").membership
    }

    pub(super) fn rank(&self) -> Rank {
        self.membership().rank()
    }

    pub(super) fn size(&self) -> usize {
        self.membership().size()
    }

    /// The number of the next world.
    pub(super) fn next_world(&self) -> u32 {
        self.worlds.fetch_add(1, Ordering::Relaxed)
    }

    /// The states of the others. Those that take nothing any more are sent nothing.
    pub(super) fn status(&self) -> Status {
        let status = self.membership().status();
        let mut mail = self.mail.lock();
        for (passage, state) in mail.passages.iter_mut().zip(&status.states) {
            if status.ended.is_some() || *state != State::Alive {
                passage.give_up();
            }
        }
        status
    }

    pub(super) fn send(
        &self,
        world: u32,
        to: &[Rank],
        message: &Arc<RankMessage>,
    ) -> Result<(), TransportError> {
        let mut mail = self.mail.lock();
        to.iter().for_each(|to| mail.passages[to.index()].send(world, Arc::clone(message)));
        self.pass(&mut mail, to)
    }

    /// Asks the coordinator for an answer.
    pub(super) fn ask(&self) {
        self.membership().ask();
    }

    /// The time since the last message of the coordinator.
    pub(super) fn silence(&self) -> Duration {
        self.membership().silence()
    }

    /// Passes on the pieces that may be under way. The same piece for several ranks goes once.
    fn pass(&self, mail: &mut Mail, to: &[Rank]) -> Result<(), TransportError> {
        loop {
            let next = |to: &Rank| Some((*to, mail.passages[to.index()].next()?));
            let mut all: Vec<_> = to.iter().filter_map(next).collect();
            if all.is_empty() {
                return Ok(());
            }
            all.sort_unstable_by_key(|(to, _)| *to);
            for equal in all.chunk_by(|(_, (_, one)), (_, (_, other))| one == other) {
                let to: Vec<_> = equal.iter().map(|(to, (taken, _))| (*to, *taken)).collect();
                let (_, (_, next)) = &equal[0];
                let piece = next.as_ref().map_or_else(Bytes::new, Sending::piece);
                if let Err(error) = self.membership().pass(&to, piece) {
                    return self.is_passed(error);
                }
            }
        }
    }

    /// If no message passes any more, the status has the reason.
    fn is_passed(&self, error: ControlError) -> Result<(), TransportError> {
        match self.membership().status().ended {
            Some(_) => Ok(()),
            None => Err(TransportError { peer: None, problem: error.to_string() }),
        }
    }

    /// The next message of a world, and its sender; messages of other worlds are kept for them.
    pub(super) fn take(&self, world: u32) -> Result<Option<(Rank, Bytes)>, TransportError> {
        let mut mail = self.mail.lock();
        let mut senders = BTreeSet::new();
        while let Some(Passed { from, number, message }) = self.membership().take_passed() {
            let garbled = |problem| TransportError { peer: Some(from), problem };
            let came = mail.passages[from.index()].take(number, &message).map_err(garbled)?;
            senders.insert(from);
            let Some((its_world, message)) = came else { continue };
            let arrived = mail.arrived.entry(its_world).or_insert_with(|| Some(VecDeque::new()));
            if let Some(arrived) = arrived {
                arrived.push_back((from, message));
            }
        }
        self.pass(&mut mail, &Vec::from_iter(senders))?;
        Ok(mail.arrived.get_mut(&world).and_then(|arrived| arrived.as_mut()?.pop_front()))
    }

    /// Has `waker` called after each message, until the world is [forgotten](Self::forget).
    pub(super) fn wake_by(&self, world: u32, waker: Waker) {
        self.wakers.lock().insert(world, waker);
    }

    /// How many messages of a world are under way.
    pub(super) fn under_way(&self, world: u32) -> usize {
        self.mail.lock().passages.iter().map(|passage| passage.under_way(world)).sum()
    }

    /// Has the process wait only briefly for the others when it ends.
    pub(super) fn fail(&self) {
        self.failed.store(true, Ordering::Relaxed);
    }

    /// The messages of a world are dropped from now on.
    pub(super) fn forget(&self, world: u32) {
        self.wakers.lock().remove(&world);
        self.mail.lock().arrived.insert(world, None);
    }
}

/// Waits for the others to have heard it, and on rank 0 for their goodbyes, for the deadline at the most: without the coordinator they would
/// end early.
impl Drop for ControlMember {
    fn drop(&mut self) {
        let failed = *self.failed.get_mut();
        let within = if failed { self.deadline.min(FAREWELL) } else { self.deadline };
        let ended = self.joined.take().map_or(Ok(()), |joined| joined.finish(within));
        if let Err(error) = ended {
            hsdp_warnings::warn!(%error, "the job did not end together");
        }
    }
}

impl fmt::Debug for ControlMember {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ControlMember({:?})", self.joined)
    }
}
