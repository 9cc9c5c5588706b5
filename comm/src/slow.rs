//! Channels whose operations take longer than their work, as on a network. FAULTS.md, "Slow
//! channels".

use std::collections::HashMap;
use std::time::{Duration, Instant};

use hsdp_sharding::{DType, Rank};

use crate::engine::FAR;
use crate::options::SlowChannel;
use crate::pattern::Pattern;
use crate::sync::{self, Mutex};
use crate::{Descriptor, GroupId, Op, Stage};

/// The time of an operation of these members on its link.
fn time_of(channel: &SlowChannel, descriptor: &Descriptor, ranks: &[Rank]) -> Duration {
    let Some(rate) = channel.bytes_per_second else { return channel.latency };
    let seconds = received_bytes(descriptor, ranks) / rate.get() as f64;
    channel.latency.saturating_add(Duration::try_from_secs_f64(seconds).unwrap_or(Duration::MAX))
}

/// The bytes that a member receives from the others; of an operation with a root, those that it
/// sends or receives in all, of a gather into one copy for all, those that it would receive for a
/// copy of its own, and of a gather of slices, those of even ones.
fn received_bytes(descriptor: &Descriptor, ranks: &[Rank]) -> f64 {
    match descriptor.op {
        Op::AllGather if descriptor.tag.stage == Stage::GatherSlices => {
            let size = descriptor.dtype.map_or(0, DType::size_bytes);
            let others = (ranks.len() - 1) as f64 / ranks.len() as f64;
            descriptor.counts.total() as f64 * size as f64 * others
        }
        Op::AllGather | Op::ReduceScatter | Op::AllReduce => {
            Pattern::of(descriptor, ranks, 0).received().get() as f64
        }
        _ => {
            let size = descriptor.dtype.map_or(0, DType::size_bytes);
            descriptor.counts.total() as f64 * size as f64
        }
    }
}

/// The links of a world's slow channels.
#[derive(Debug, Default)]
pub(crate) struct SlowLinks {
    /// By group: until when its link is taken.
    taken: Mutex<HashMap<GroupId, Instant>>,
}

impl SlowLinks {
    /// When an operation whose last member has just come is through; `None` if its channel is none
    /// of those that are `slow`.
    pub(crate) fn carry(
        &self,
        slow: &[SlowChannel],
        descriptor: &Descriptor,
        ranks: &[Rank],
    ) -> Option<Instant> {
        let channel = slow.iter().find(|slow| slow.channel == descriptor.channel)?;
        let time = time_of(channel, descriptor, ranks);
        let now = sync::now();
        let mut taken = self.taken.lock();
        let until = taken.entry(descriptor.group).or_insert(now);
        let begins = now.max(*until);
        *until = begins.checked_add(time.min(FAR)).unwrap_or(begins);
        Some(*until)
    }
}
