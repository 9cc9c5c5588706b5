//! A world whose collectives on devices go by NCCL: its communicators, from the first to the last. `NCCL.md`, "In a world".

use std::collections::BTreeMap;
use std::ops::Deref;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use hsdp_kernels::cuda::{Device, Stream};
use hsdp_sharding::Rank;

use super::NcclError;
use super::communicator::Communicator;
use super::drain::tell;
use super::patience::Patience;
use super::queue::Queue;
use super::unique_id::UniqueId;
use super::watchdog;
use crate::backend::thread::Access;
use crate::remote::ALL_EPOCHS;
use crate::sync::Mutex;
use crate::{Channel, Error, Group, GroupId, Stage, Tag, World};

/// A communicator that whoever issues for its rank may use.
pub(crate) type SharedCommunicator = Arc<Mutex<Communicator>>;

/// The needs of a call: the communicator of its group, the rank's stream for all calls, and their queue, where peers are processes.
type Ways = (SharedCommunicator, Arc<Stream>, Option<Arc<Queue>>);

/// The communicators of a rank.
#[derive(Debug, Default)]
pub(crate) struct Connected {
    held: Mutex<Option<Communicators>>,
    /// Held while a group is connected: all of its members know of the group, or none does.
    connecting: Mutex<()>,
    /// Whether the world has ended, for whoever waits in NCCL.
    over: Arc<AtomicBool>,
}

/// Those of a rank, closed when the rank goes: here, though somebody else may be looking after them just then.
#[derive(Debug, Default)]
pub(crate) struct Held(Arc<Connected>);

impl Deref for Held {
    type Target = Arc<Connected>;

    fn deref(&self) -> &Arc<Connected> {
        &self.0
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        let communicators = self.held.lock().take();
        drop(communicators);
    }
}

/// A rank's part in a group.
#[derive(Clone, Debug)]
pub(super) struct Member {
    pub(super) comm: SharedCommunicator,
    pub(super) ranks: Vec<Rank>,
}

/// The groups of a rank.
pub(super) type Members = Vec<(GroupId, Member)>;

#[derive(Debug)]
struct Communicators {
    device: Device,
    /// For all calls of the rank: they run in the order in which it issues them.
    stream: Arc<Stream>,
    /// Of all ranks, to split others from; `None` when a split has failed.
    all: Option<Communicator>,
    /// In an order that all ranks share: they are closed in it.
    groups: BTreeMap<GroupId, Member>,
    patience: Duration,
    /// Where the others are processes, which may need this one's part in what was issued.
    queue: Option<Arc<Queue>>,
}

impl Connected {
    /// The link of a group's calls, if its device operations go by NCCL.
    pub(super) fn of(&self, group: GroupId) -> Option<Ways> {
        let held = self.held.lock();
        let Communicators { stream, groups, queue, .. } = held.as_ref()?;
        Some((Arc::clone(&groups.get(&group)?.comm), Arc::clone(stream), queue.clone()))
    }

    /// The groups of this rank; nothing while one is being connected.
    pub(super) fn members(&self) -> Option<Members> {
        let _connecting = self.connecting.try_lock()?;
        self.known()
    }

    fn known(&self) -> Option<Members> {
        let held = self.held.lock();
        let groups = held.as_ref()?.groups.iter();
        Some(groups.map(|(group, member)| (*group, member.clone())).collect())
    }

    pub(super) fn queue(&self) -> Option<(Arc<Queue>, Arc<Stream>)> {
        let held = self.held.lock();
        let Communicators { stream, queue, .. } = held.as_ref()?;
        Some((Arc::clone(queue.as_ref()?), Arc::clone(stream)))
    }

    /// The rank leaves: its peers are told which calls it has made, before they hear that it has left.
    pub(crate) fn leave(&self, access: &Access, rank: Rank) {
        if access.record(rank).has_left() {
            return;
        }
        let (queue, endpoint, members) = (self.queue(), access.endpoint(), self.known());
        if let (Some((queue, _)), Some(endpoint), Some(members)) = (queue, endpoint, members) {
            let calls = queue.calls(access.record(rank), &members);
            let _told = tell((endpoint, rank, ALL_EPOCHS), calls, &members);
        }
    }

    /// The other members of a group.
    pub(super) fn others(&self, group: GroupId, own: Rank) -> Vec<Rank> {
        let held = self.held.lock();
        let member = held.as_ref().and_then(|it| it.groups.get(&group));
        let ranks = member.map_or(&[][..], |member| &member.ranks);
        ranks.iter().copied().filter(|rank| *rank != own).collect()
    }

    /// The member of a group that has left without a call of it, if one has.
    pub(super) fn left_before(&self, access: &Access, call: (GroupId, u64)) -> Option<Rank> {
        let held = self.held.lock();
        let ranks = &held.as_ref()?.groups.get(&call.0)?.ranks;
        let drains = access.endpoint()?.drains();
        ranks.iter().copied().find(|rank| drains.has_left_before(*rank, call))
    }

    /// What NCCL reports of what was issued. A communicator that somebody is issuing on is left alone.
    pub(super) fn check(&self) -> Result<(), NcclError> {
        let comms = self.communicators();
        comms.iter().filter_map(|comm| comm.try_lock()).try_for_each(|comm| comm.health())
    }

    fn communicators(&self) -> Vec<SharedCommunicator> {
        let held = self.held.lock();
        let groups = held.iter().flat_map(|communicators| communicators.groups.values());
        groups.map(|member| Arc::clone(&member.comm)).collect()
    }

    /// Aborts the communicators of all groups, which are not used any more.
    pub(super) fn abort(&self) {
        self.communicators().iter().for_each(|comm| comm.lock().give_up());
    }

    /// Gives all communicators up at once: the others will not come any more. Who issues on one is told to stop waiting.
    pub(crate) fn give_up(&self) {
        self.over.store(true, Ordering::Relaxed);
        let Some(mut communicators) = self.held.lock().take() else { return };
        communicators.give_up();
    }

    fn device(&self) -> Option<Device> {
        self.held.lock().as_ref().map(|communicators| communicators.device.clone())
    }
}

impl Communicators {
    fn give_up(&mut self) {
        self.all.iter_mut().for_each(Communicator::give_up);
        self.groups.values().for_each(|member| member.comm.lock().give_up());
    }
}

/// Closing waits for the other ranks, and a drop must not: a thread of its own does it. But where they are processes, this one stays
/// until what it has issued is done, as it stays until its messages are sent. Calls of a step that was given up may never be done.
impl Drop for Communicators {
    fn drop(&mut self) {
        if self.queue.as_ref().is_some_and(|queue| queue.owed().is_some()) {
            self.give_up();
        }
        let (groups, all, patience) =
            (std::mem::take(&mut self.groups), self.all.take(), self.patience);
        let close = move || {
            let own = groups.into_values().filter_map(|member| Arc::into_inner(member.comm));
            for communicator in own.map(Mutex::into_inner).chain(all) {
                if let Err(error) = communicator.close(patience) {
                    tracing::debug!(%error, "a communicator was aborted");
                }
            }
        };
        let started = thread::Builder::new().name("hsdp-nccl-close".to_owned()).spawn(close);
        match started {
            Ok(thread) if self.queue.is_some() => drop(thread.join()),
            Ok(_) => {}
            Err(error) => {
                tracing::warn!(%error, "communicators could not be closed: their thread could not be started");
            }
        }
    }
}

/// # Collectives on devices by NCCL
impl World {
    /// Connects the world by NCCL: from now on, collectives on buffers of `device` go by NCCL in the groups that are
    /// [connected](Self::connect_groups). NCCL sums in the dtype of the wire and in an order of its own; without it,
    /// ranks that share a device sum in f32 and in rank order.
    ///
    /// **Collective** over the world, whether its ranks are threads or processes.
    ///
    /// # Errors
    /// [`Error::Connect`] on all ranks, if one of them cannot load NCCL or the ranks do not join in time;
    /// [`Error::NotConnected`] in a counting world, or in a world whose ranks are threads with
    /// [`Between::Messages`](crate::Between::Messages), since these share the memory of the device.
    pub fn connect_nccl(&self, device: &Device) -> Result<(), Error> {
        if let Some(problem) = self.keeps_off_devices() {
            return Err(Error::NotConnected { rank: self.rank(), problem });
        }
        let id = if self.rank().index() == 0 { UniqueId::new() } else { Ok(UniqueId::NONE) };
        let ids = self.exchange_ids(id)?;
        let all = self.join(device, ids[0], (self.rank().index(), self.size()))?;
        let stream = device.stream().map_err(|error| self.not_connected(error.into()))?;
        let access = self.handle().access().filter(|_| !self.shares_memory());
        let communicators = Communicators {
            device: device.clone(),
            stream: Arc::new(stream),
            all: Some(all),
            groups: BTreeMap::new(),
            patience: self.deadline(),
            queue: access.map(|access| Arc::new(Queue::new(access, self.rank()))),
        };
        let before = self.handle().nccl.held.lock().replace(communicators);
        let watched = if before.is_none() { watchdog::start(self.handle()) } else { Ok(()) };
        self.agreed(watched)
    }

    /// The device whose collectives go by NCCL.
    #[must_use]
    pub fn nccl_device(&self) -> Option<Device> {
        self.handle().nccl.device()
    }

    /// Makes the communicators of groups. Each is split from the communicator of all ranks, or made with an id of its
    /// own if the split fails. A group that has a communicator keeps it.
    ///
    /// **Collective** over the world: all ranks pass the same number of groups, and the groups at one position of the list
    /// together cover all ranks, as the groups of an axis of a mesh do.
    ///
    /// # Errors
    /// [`Error::NotConnected`] before [`connect_nccl`](Self::connect_nccl); [`Error::Connect`] on all ranks, if one of them fails.
    pub fn connect_groups(&self, groups: &[&Group]) -> Result<(), Error> {
        groups.iter().try_for_each(|group| self.connect_group(group))
    }

    fn connect_group(&self, group: &Group) -> Result<(), Error> {
        let connected = &self.handle().nccl;
        if connected.of(group.id()).is_some() {
            return Ok(());
        }
        let Some(device) = connected.device() else {
            let problem = "it has no NCCL: call `connect_nccl` first";
            return Err(Error::NotConnected { rank: self.rank(), problem });
        };
        let _connecting = connected.connecting.lock();
        // All are here: nobody waits in a split for a rank that has failed before it.
        self.all_have(true)?;
        let split = self.split(group);
        let made = if self.all_have(split.is_some())? { split } else { None };
        let made = match made {
            Some(split) => split,
            None => self.join_by_id(&device, group)?,
        };
        let made = made.ending_with(&connected.over).waiting(self.patience_of_issuing());
        let member = Member { comm: Arc::new(Mutex::new(made)), ranks: group.ranks().to_vec() };
        if let Some(communicators) = connected.held.lock().as_mut() {
            communicators.groups.insert(group.id(), member);
        }
        Ok(())
    }

    /// The communicator of a group, split from that of all ranks; `None` if there is none any more, or it fails.
    fn split(&self, group: &Group) -> Option<Communicator> {
        let connected = &self.handle().nccl;
        // Not under the lock: whoever looks after the communicators is not held up.
        let mut all = connected.held.lock().as_mut()?.all.take()?;
        let (colour, ended) = (group.ranks()[0].index(), || self.end().is_some());
        let split = all.split_while(Some(colour), group.index(), &self.patience(&ended));
        let split = split.ok().flatten().filter(|split| split.size() == group.size())?;
        connected.held.lock().as_mut()?.all = Some(all);
        Some(split)
    }

    /// The communicator of a group by an id of its own, which its first member makes.
    fn join_by_id(&self, device: &Device, group: &Group) -> Result<Communicator, Error> {
        let id = if group.index() == 0 { UniqueId::new() } else { Ok(UniqueId::NONE) };
        let ids = self.exchange_ids(id)?;
        let id = ids[group.ranks()[0].index()];
        self.join(device, id, (group.index(), group.size()))
    }

    fn join(
        &self,
        device: &Device,
        id: UniqueId,
        place: (usize, usize),
    ) -> Result<Communicator, Error> {
        let ended = || self.end().is_some();
        self.agreed(Communicator::join_while(device, id, place, &self.patience(&ended)))
    }

    /// Half of the world's: who has failed waits for the others, who must have done so by then.
    fn patience<'a>(&self, ended: &'a dyn Fn() -> bool) -> Patience<'a> {
        Patience::until(self.deadline() / 2, ended)
    }

    /// How long it may take to issue something. Among threads that is the host's own work. Processes may have to connect, to one
    /// that waits for a third, whose lateness is for the deadline of the world to find, and to end: this is longer.
    fn patience_of_issuing(&self) -> Duration {
        if self.shares_memory() { self.deadline() / 2 } else { self.deadline().saturating_mul(2) }
    }

    /// What each rank has as an id, by rank; an error on all ranks if one could not make its own.
    fn exchange_ids(&self, own: Result<UniqueId, NcclError>) -> Result<Vec<UniqueId>, Error> {
        let words = own.as_ref().map_or([0; UniqueId::WORDS], UniqueId::words);
        self.agreed(own)?;
        let control = self.world_group(Channel::Control);
        let said = control.all_gather(Tag::new(Stage::Setup), words.to_vec())?.wait()?;
        Ok(said.as_chunks().0.iter().map(UniqueId::of_words).collect())
    }

    /// What this rank made, if all ranks made theirs; the error of the first that did not, as far as it is known here.
    fn agreed<T>(&self, own: Result<T, NcclError>) -> Result<T, Error> {
        let everybody = self.all_have(own.is_ok())?;
        match own {
            Ok(_) if !everybody => Err(self.not_connected(NcclError::Elsewhere)),
            own => own.map_err(|error| self.not_connected(error)),
        }
    }

    fn not_connected(&self, error: NcclError) -> Error {
        Error::Connect { rank: self.rank(), error: Arc::new(error) }
    }

    /// Whether this is so on all ranks.
    fn all_have(&self, own: bool) -> Result<bool, Error> {
        let control = self.world_group(Channel::Control);
        let mine = vec![u64::from(own)];
        let said = control.all_gather(Tag::new(Stage::Setup), mine)?.wait()?;
        Ok(said.iter().all(|said| *said == 1))
    }
}
