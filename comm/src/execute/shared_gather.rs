//! The runtime's all-gather where ranks share a copy: shards of a unit become whole parameters once, for all to read.

use std::sync::Arc;
use std::{iter, mem};

use hsdp_kernels::{HostBuffer, SharedBuffer};
use hsdp_sharding::UnitLayout;

use super::unit_gather::UnitGather;
use super::{Buffers, LAYOUTS_DIFFER, Meter, Outputs, Work};
use crate::pattern::Pattern;

/// The contribution of a member: its shard, to be read where it lies; of the first member also the holder of the parameters' buffers.
pub(crate) struct SharedGatherContribution<T> {
    pub(crate) layout: Arc<UnitLayout>,
    pub(crate) shard: SharedBuffer,
    pub(crate) holder: Option<Arc<T>>,
}

impl<T: Send + Sync + 'static> Buffers for SharedGatherContribution<T> {
    type Output = Option<Arc<T>>;

    fn pattern<'a>(&'a self, plain: Pattern<'a>) -> Pattern<'a> {
        plain.shared(self.layout.shard_size())
    }

    fn output_alone(self, _pattern: &Pattern<'_>) -> Self::Output {
        None
    }
}

/// The first replica's shards, copied into the buffers of one holder.
pub(crate) struct SharedGather<T> {
    gather: UnitGather,
    holder: Arc<T>,
    members: usize,
}

impl<T: AsMut<Vec<HostBuffer>>> SharedGather<T> {
    /// # Errors
    /// If the members do not have the same layout, or the first has no holder.
    pub(crate) fn new(mut members: Vec<SharedGatherContribution<T>>) -> Result<Self, String> {
        let (layout, count) = (Arc::clone(&members[0].layout), members.len());
        if members.iter().any(|member| member.layout != layout) {
            return Err(LAYOUTS_DIFFER.to_owned());
        }
        let mut holder = members[0].holder.take().ok_or("no member brings buffers")?;
        // The shards behind these hold the same.
        members.truncate(layout.shard_size());
        let shards = members.into_iter().map(|member| member.shard).collect();
        let targets = vec![mem::take(alone(&mut holder).as_mut())];
        Ok(Self { gather: UnitGather::of(layout, shards, targets), holder, members: count })
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

    fn finish(self) -> Outputs<Option<Arc<T>>> {
        let Self { gather, mut holder, members } = self;
        gather.filled().for_each(|targets| *alone(&mut holder).as_mut() = targets);
        iter::repeat_n(Some(holder), members).collect()
    }
}

fn alone<T>(holder: &mut Arc<T>) -> &mut T {
    Arc::get_mut(holder).expect("there was no other handle when it was contributed")
}
