//! Channels whose operations take longer than their work, as on a network. FAULTS.md, "Slow
//! channels".

use std::collections::HashMap;
use std::time::{Duration, Instant};

use hsdp_sharding::{ByteCount, DType};

use crate::engine::FAR;
use crate::options::SlowChannel;
use crate::sync::{self, Mutex};
use crate::{Descriptor, GroupId, Op};

/// Work, and the time when its outputs are due, if its channel is slow.
pub(crate) type WithDue<W> = (W, Option<Instant>);

/// Returns the time that an operation occupies its link. A member receives `received` bytes from
/// the others.
fn time_of(channel: &SlowChannel, descriptor: &Descriptor, received: ByteCount) -> Duration {
    let Some(rate) = channel.bytes_per_second else { return channel.latency };
    let seconds = carried_bytes(descriptor, received) / rate.get() as f64;
    channel.latency.saturating_add(Duration::try_from_secs_f64(seconds).unwrap_or(Duration::MAX))
}

/// Returns the bytes that an operation moves over its link: those that a member receives, or where
/// members differ by their nature, as a root does, those of the elements in the descriptor.
fn carried_bytes(descriptor: &Descriptor, received: ByteCount) -> f64 {
    match descriptor.op {
        Op::AllGather | Op::ReduceScatter | Op::AllReduce => received.get() as f64,
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
    /// Occupies the link of an operation whose last member has just come. A member receives
    /// `received` bytes from the others. Returns the time when the operation is due; `None` if its
    /// channel is not `slow`.
    pub(crate) fn carry(
        &self,
        slow: &[SlowChannel],
        descriptor: &Descriptor,
        received: ByteCount,
    ) -> Option<Instant> {
        let channel = slow.iter().find(|slow| slow.channel == descriptor.channel)?;
        let time = time_of(channel, descriptor, received);
        let now = sync::now();
        let mut taken = self.taken.lock();
        let until = taken.entry(descriptor.group).or_insert(now);
        let begins = now.max(*until);
        *until = begins.checked_add(time.min(FAR)).unwrap_or(begins);
        Some(*until)
    }
}
