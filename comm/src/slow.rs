//! Channels whose operations take longer than their work, as on a network. PROTOCOL.md, "Slow channels".

use std::collections::HashMap;
use std::num::NonZeroU64;
use std::time::{Duration, Instant};

use hsdp_sharding::{DType, Rank};

use crate::engine::FAR;
use crate::pattern::Pattern;
use crate::sync::{self, Mutex};
use crate::{Channel, Descriptor, GroupId, Op};

/// A channel whose operations are delayed, as on a network: for tests and benches.
///
/// Each group of the channel has a link of its own, which carries one operation at a time. An operation whose last member
/// has arrived waits until the link is free, and then occupies it for `latency` and for the time that its bytes take. No
/// member gets its output earlier. The delay blocks no call, no rank and no worker thread: only the ranks that wait for the
/// operation wait longer. Groups of one have no link.
///
/// ```
/// use std::time::{Duration, Instant};
/// use hsdp_comm::{Channel, SlowChannel, Tag, WorldOptions, launch};
///
/// let latency = Duration::from_millis(20);
/// let slow = SlowChannel { channel: Channel::User, latency, bytes_per_second: None };
/// let options = WorldOptions { slow: vec![slow], ..WorldOptions::default() };
/// let ends = launch(2, options, |world| {
///     let started = Instant::now();
///     world.world_group(Channel::User).barrier(Tag::default())?.wait()?;
///     Ok::<_, hsdp_comm::Error>(started.elapsed())
/// });
/// assert!(ends.into_iter().all(|took| took.unwrap().unwrap() >= latency));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SlowChannel {
    /// The channel.
    pub channel: Channel,
    /// The time that each operation occupies its link, whatever its size.
    pub latency: Duration,
    /// The speed of a link, in bytes a second, where the bytes of an operation are those that one member receives;
    /// `None` for no limit.
    pub bytes_per_second: Option<NonZeroU64>,
}

impl SlowChannel {
    /// How long an operation of these members is on its link.
    fn time_of(&self, descriptor: &Descriptor, ranks: &[Rank]) -> Duration {
        let Some(rate) = self.bytes_per_second else { return self.latency };
        let seconds = received_bytes(descriptor, ranks) / rate.get() as f64;
        self.latency.saturating_add(Duration::try_from_secs_f64(seconds).unwrap_or(Duration::MAX))
    }
}

/// The bytes that a member receives from the others; of an operation with a root, those that it sends or receives in all, and of
/// a gather into one copy for all, what it would receive if it had one of its own.
fn received_bytes(descriptor: &Descriptor, ranks: &[Rank]) -> f64 {
    match descriptor.op {
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
pub(crate) struct Links {
    channels: Box<[SlowChannel]>,
    /// By group: until when its link is taken.
    taken: Mutex<HashMap<GroupId, Instant>>,
}

impl Links {
    pub(crate) fn new(channels: &[SlowChannel]) -> Self {
        Self { channels: channels.into(), taken: Mutex::default() }
    }

    /// When an operation whose last member has just come is through; `None` if its channel is not slow.
    pub(crate) fn carry(&self, descriptor: &Descriptor, ranks: &[Rank]) -> Option<Instant> {
        let mut channels = self.channels.iter();
        let channel = channels.find(|slow| slow.channel == descriptor.channel)?;
        let time = channel.time_of(descriptor, ranks);
        let now = sync::now();
        let mut taken = self.taken.lock();
        let until = taken.entry(descriptor.group).or_insert(now);
        let begins = now.max(*until);
        *until = begins.checked_add(time.min(FAR)).unwrap_or(begins);
        Some(*until)
    }
}
