//! The runtime's all-gather where ranks share a copy: shards of a unit become whole parameters once, for all to read.

use std::sync::Arc;
use std::{iter, mem};

use hsdp_kernels::SharedBuffer;
use hsdp_sharding::UnitLayout;

use super::unit_gather::{GatherLists, UnitGather};
use super::{Deposits, Meter, Outputs, Work};
use crate::Targets;

/// What a member brings: its shard, to be read where it lies; the first one also what holds the parameters' buffers.
pub(crate) struct SharedGatherDeposit<T> {
    pub(crate) layout: Arc<UnitLayout>,
    pub(crate) shard: SharedBuffer,
    pub(crate) holder: Option<Arc<T>>,
}

/// The first replica's shards, copied into the buffers of one holder.
pub(crate) struct SharedGather<T> {
    gather: UnitGather,
    holder: Arc<T>,
    members: usize,
}

impl<T: AsMut<Targets>> SharedGather<T> {
    /// # Errors
    /// If the members do not have the same layout, or the first has no holder.
    pub(crate) fn new(
        lists: GatherLists,
        mut deposits: Deposits<'_, SharedGatherDeposit<T>>,
    ) -> Result<Self, String> {
        let count = deposits.len();
        let first = deposits.next().ok_or("no member takes part")?;
        let SharedGatherDeposit { layout, shard, holder } = first;
        let mut holder = holder.ok_or("no member brings buffers")?;
        let gather = UnitGather::begin(lists, Arc::clone(&layout));
        let others = deposits.map(|member| (member.layout, member.shard));
        let members = iter::once((layout, shard)).chain(others);
        let targets = mem::take(alone(&mut holder).as_mut());
        let gather = gather.into_one(targets, members)?;
        Ok(Self { gather, holder, members: count })
    }
}

impl<T: AsMut<Targets> + Send + Sync + 'static> Work for SharedGather<T> {
    type Output = Option<Arc<T>>;
    type Lists = GatherLists;

    fn blocks(&self) -> usize {
        self.gather.blocks()
    }

    fn bytes(&self) -> usize {
        self.gather.bytes()
    }

    fn run(&self, block: usize, meter: &Meter<'_>) {
        self.gather.run(block, meter);
    }

    fn finish(self, outputs: &mut Outputs<Option<Arc<T>>>) -> GatherLists {
        let Self { gather, mut holder, members } = self;
        let lists = gather.filled(|targets| *alone(&mut holder).as_mut() = targets);
        outputs.extend(iter::repeat_n(Some(holder), members));
        lists
    }
}

fn alone<T>(holder: &mut Arc<T>) -> &mut T {
    Arc::get_mut(holder).expect("nobody else had it when it was brought")
}
