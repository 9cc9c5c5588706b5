//! A world whose collectives on devices go by NCCL: how its ranks make the communicators.
//! `NCCL.md`, "In a world".

use std::sync::Arc;
use std::time::Duration;

use hsdp_kernels::cuda::Device;

use crate::comparison::gathered;
use crate::handle::Backend;
use crate::nccl::{Communicator, NcclError, Patience, UniqueId};
use crate::threads::OwnRank;
use crate::{Between, Channel, Error, Group, SetupError, World};

/// # Collectives on devices by NCCL
impl World {
    /// Connects the world by NCCL: from now on, collectives on buffers of `device` go by NCCL in
    /// the groups that are [connected](Self::connect_groups). NCCL sums in the dtype of the wire
    /// and in an order of its own; without it, ranks that share a device sum in f32 and in rank
    /// order.
    ///
    /// **Collective** over the world, whether its ranks are threads or processes.
    ///
    /// # Errors
    /// [`SetupError::Connect`] on all ranks, if one of them cannot load NCCL or the ranks do not
    /// join in time; [`SetupError::NotConnected`] in a counting world, or in a world whose ranks
    /// are threads with [`Between::Messages`](crate::Between::Messages), since these share the
    /// memory of the device.
    pub fn connect_nccl(&self, device: &Device) -> Result<(), Error> {
        let own = self.own_rank()?;
        let id = if self.rank().index() == 0 { UniqueId::new() } else { Ok(UniqueId::NONE) };
        let ids = self.exchange_ids(id)?;
        let all = self.join(device, ids[0], self.rank().index(), self.size())?;
        let begun = device.stream().map_err(NcclError::from);
        let begun = begun.and_then(|stream| self.handle().nccl.begin(own, all, stream));
        self.agreed(begun)
    }

    /// The device whose collectives go by NCCL.
    #[must_use]
    pub fn nccl_device(&self) -> Option<Device> {
        self.handle().nccl.device()
    }

    /// Makes the communicators of groups. Each is split from the communicator of all ranks, or made
    /// with an id of its own if the split fails. A group that has a communicator keeps it.
    ///
    /// **Collective** over the world: all ranks pass the same number of groups, and the groups at
    /// one position of the list together cover all ranks, as the groups of an axis of a mesh do.
    ///
    /// # Errors
    /// [`SetupError::NotConnected`] before [`connect_nccl`](Self::connect_nccl);
    /// [`SetupError::Connect`] on all ranks, if one of them fails.
    pub fn connect_groups(&self, groups: &[&Group]) -> Result<(), Error> {
        groups.iter().try_for_each(|group| self.connect_group(group))
    }

    fn connect_group(&self, group: &Group) -> Result<(), Error> {
        let connected = &self.handle().nccl;
        let own = self.own_rank()?;
        if connected.has(group.id()) {
            return Ok(());
        }
        let Some(device) = connected.device() else {
            return Err(self.keeps_off("it has no NCCL: call `connect_nccl` first"));
        };
        // No step can be drained while a group is connected, and another rank may wait for that
        // before it comes here.
        connected.await_drained(own)?;
        let _connecting = connected.connecting();
        // All are here: no rank waits in a split for one that has failed before it.
        self.said_by_all(&[0])?;
        let split = self.split(group);
        let made = if self.all_have(split.as_ref())? { split } else { None };
        let made = match made {
            Some(split) => split,
            None => self.join_by_id(&device, group)?,
        };
        let ranks = group.ranks().to_vec();
        connected.add(own, group.id(), ranks, made, self.patience_of_issuing());
        Ok(())
    }

    /// This rank, where its operations on devices can go by NCCL.
    fn own_rank(&self) -> Result<&Arc<OwnRank>, Error> {
        let own = &self.handle().own;
        if self.handle().backend == Backend::Counting {
            return Err(self.keeps_off("it only counts operations, and has no other ranks"));
        }
        match own.options().between {
            Between::Messages => Err(self.keeps_off("its ranks are threads that share no memory")),
            Between::Memory => Ok(own),
        }
    }

    fn keeps_off(&self, problem: &'static str) -> Error {
        SetupError::NotConnected { rank: self.rank(), problem }.into()
    }

    /// The communicator of a group, split from that of all ranks; `None` if that was given up, or
    /// if it fails.
    fn split(&self, group: &Group) -> Option<Communicator> {
        let all = self.handle().nccl.all()?;
        let mut all = all.lock();
        let color = group.ranks()[0].index();
        let split = all.split(color, group.index()).ok();
        let split = split.filter(|split| split.size() == group.size());
        if split.is_none() {
            all.give_up();
        }
        split
    }

    /// The communicator of a group by an id of its own, which its first member makes.
    fn join_by_id(&self, device: &Device, group: &Group) -> Result<Communicator, Error> {
        let id = if group.index() == 0 { UniqueId::new() } else { Ok(UniqueId::NONE) };
        let ids = self.exchange_ids(id)?;
        let id = ids[group.ranks()[0].index()];
        self.join(device, id, group.index(), group.size())
    }

    fn join(
        &self,
        device: &Device,
        id: UniqueId,
        rank: usize,
        size: usize,
    ) -> Result<Communicator, Error> {
        self.agreed(Communicator::join(device, id, rank, size, self.patience()))
    }

    /// Half of the world's: a rank that has failed waits for the others, which must have done so by
    /// then.
    fn patience(&self) -> Patience {
        let early_ends = Arc::clone(self.handle().own.early_ends());
        Patience::until(self.deadline() / 2, move || early_ends.world_end().is_some())
    }

    /// The time that a call may take to be issued. Among threads that is the host's own work.
    /// Processes may have to connect, to one that waits for a third, whose lateness is for the
    /// deadline of the world to find, and to end: this is longer.
    fn patience_of_issuing(&self) -> Duration {
        if self.shares_memory() { self.deadline() / 2 } else { self.deadline().saturating_mul(2) }
    }

    /// The ids of all ranks, by rank; an error on all ranks if one could not make its own.
    fn exchange_ids(&self, own: Result<UniqueId, NcclError>) -> Result<Vec<UniqueId>, Error> {
        let UniqueId(words) = own.as_ref().copied().unwrap_or(UniqueId::NONE);
        self.agreed(own)?;
        let said = self.said_by_all(&words)?;
        Ok(said.as_chunks().0.iter().copied().map(UniqueId).collect())
    }

    /// This rank's result, if all ranks have theirs; the error of the first that has none, as far
    /// as it is known here.
    fn agreed<T>(&self, own: Result<T, NcclError>) -> Result<T, Error> {
        let everybody = self.all_have(own.as_ref().ok())?;
        match own {
            Ok(_) if !everybody => Err(self.not_connected(NcclError::Elsewhere)),
            own => own.map_err(|error| self.not_connected(error)),
        }
    }

    fn not_connected(&self, error: NcclError) -> Error {
        SetupError::Connect { rank: self.rank(), error: Arc::new(error) }.into()
    }

    /// Whether all ranks have their own.
    fn all_have<T>(&self, own: Option<&T>) -> Result<bool, Error> {
        Ok(self.said_by_all(&[u64::from(own.is_some())])?.iter().all(|said| *said == 1))
    }

    /// The words of all ranks, by rank.
    fn said_by_all(&self, own: &[u64]) -> Result<Vec<u64>, Error> {
        gathered(&self.world_group(Channel::Control), own.to_vec())
    }
}
