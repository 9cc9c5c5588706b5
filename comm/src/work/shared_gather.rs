//! The runtime's all-gather where ranks share a copy: shards of a unit become whole parameters once, for all to read.

use std::sync::Arc;

use hsdp_kernels::{HostBuffer, SharedBuffer};
use hsdp_sharding::UnitLayout;

use super::unit_gather::UnitGather;
use super::{Meter, UnitGatherDeposit, Work};

/// What a member brings: its shard, to be read where it lies; the first one also what holds the parameters' buffers.
pub(crate) struct SharedGatherDeposit<T> {
    pub(crate) layout: Arc<UnitLayout>,
    pub(crate) shard: SharedBuffer,
    pub(crate) holder: Option<T>,
}

/// The first replica's shards, copied into the buffers of one holder.
pub(crate) struct SharedGather<T> {
    gather: UnitGather,
    holder: T,
    members: usize,
}

impl<T: AsMut<Vec<HostBuffer>>> SharedGather<T> {
    /// # Errors
    /// If the members do not have the same layout, or the first has no holder.
    pub(crate) fn new(members: Vec<SharedGatherDeposit<T>>) -> Result<Self, String> {
        let count = members.len();
        let mut holder = None;
        let mut deposits = Vec::with_capacity(count);
        for SharedGatherDeposit { layout, shard, holder: brought } in members {
            holder = holder.or(brought);
            deposits.push(UnitGatherDeposit { layout, shard, targets: Vec::new() });
        }
        let mut holder = holder.ok_or("nobody brings buffers")?;
        deposits[0].targets = std::mem::take(holder.as_mut());
        Ok(Self { gather: UnitGather::into_first(deposits)?, holder, members: count })
    }
}

impl<T: AsMut<Vec<HostBuffer>> + Send + Sync + 'static> Work for SharedGather<T> {
    type Output = Option<Arc<T>>;

    fn blocks(&self) -> usize {
        self.gather.blocks()
    }

    fn bytes(&self) -> usize {
        self.gather.bytes()
    }

    fn run(&self, block: usize, meter: &Meter<'_>) {
        self.gather.run(block, meter);
    }

    fn finish(self) -> Vec<Option<Arc<T>>> {
        let Self { gather, mut holder, members } = self;
        *holder.as_mut() = gather.finish().swap_remove(0);
        vec![Some(Arc::new(holder)); members]
    }
}
