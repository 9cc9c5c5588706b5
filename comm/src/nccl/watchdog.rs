//! Who looks after the communicators of a rank while it computes, or waits elsewhere.

use std::sync::{Arc, Weak};
use std::thread;
use std::time::Duration;

use hsdp_sharding::Rank;

use super::NcclError;
use super::connected::Connected;
use super::drain::{Drain, Drained};
use super::queue::{Head, Queue, end_late, warn};
use crate::backend::thread::Access;
use crate::engine::{Alarm, Clock, Status};
use crate::handle::RankHandle;
use crate::{AbortReason, GroupId};

/// How long the watchdog rests between two looks.
const REST: Duration = Duration::from_millis(50);

/// Starts the watchdog of a rank. It waits for the oldest call that is not done, and drains steps that are given up. Where NCCL reports an error of what was issued, it ends the world; and when the world has ended, for
/// whatever reason, it gives the communicators up, so that no stream waits for ranks that will not come. It ends with the communicators,
/// and holds on to nothing whose end is waited for.
///
/// # Errors
/// [`NcclError::Unwatched`] if there is no thread for it.
pub(super) fn start(handle: &RankHandle) -> Result<(), NcclError> {
    let Some(access) = handle.access() else { return Ok(()) };
    let mut watch = Watch {
        rank: handle.rank,
        connected: Arc::downgrade(&handle.nccl),
        status: Arc::clone(&handle.status),
        access: Arc::downgrade(access),
        drain: Drain::default(),
        head: None,
    };
    let name = format!("hsdp-nccl-watch-{}", watch.rank);
    let watch = move || {
        while watch.goes_on() {
            thread::park_timeout(REST);
        }
    };
    let started = thread::Builder::new().name(name).spawn(watch);
    started.map(drop).map_err(|error| NcclError::Unwatched { reason: error.to_string() })
}

/// What is looked at.
struct Watch {
    rank: Rank,
    connected: Weak<Connected>,
    status: Arc<Status>,
    access: Weak<Access>,
    drain: Drain,
    /// The oldest call that was not done when this looked last, and the time since it is.
    head: Option<((GroupId, u64), Clock)>,
}

impl Watch {
    /// One look; whether there is to be another.
    fn goes_on(&mut self) -> bool {
        let Some(connected) = self.connected.upgrade() else { return false };
        if let Some(access) = self.access.upgrade()
            && let Err(error) = self.look(&connected, &access)
        {
            access.end_requested(self.rank, &error);
        }
        if self.status.world_end().is_some() {
            connected.give_up();
            return false;
        }
        true
    }

    /// # Errors
    /// What ends the world.
    fn look(&mut self, connected: &Connected, access: &Access) -> Result<(), String> {
        let queue = connected.queue();
        if queue.as_ref().is_none_or(|(queue, _)| !queue.has_failed()) {
            let healthy = connected.check();
            healthy.map_err(|error| format!("NCCL reports an error: {error}"))?;
        }
        let Some((queue, stream)) = queue else { return Ok(()) };
        self.look_at_head(&queue, (connected, access));
        let (queue, stream, rank) = (&queue, &stream, self.rank);
        self.drain.go_on(&Drained { rank, access, connected, queue, stream })
    }

    /// The oldest call is waited for, whatever the rank itself does meanwhile.
    fn look_at_head(&mut self, queue: &Queue, (connected, access): (&Connected, &Access)) {
        let record = access.record(self.rank);
        let Some(Head { call, descriptor }) = queue.head(record) else {
            self.head = None;
            return;
        };
        let Some((_, clock)) = self.head.as_mut().filter(|(known, _)| *known == call) else {
            self.head = Some((call, Clock::start(access.options())));
            return;
        };
        let Some(operation) = descriptor.or_else(|| record.last()) else { return };
        if let Some(left) = connected.left_before(access, call) {
            let awaited = operation;
            access.end(access.ended_by(left, AbortReason::Left { awaited }));
            return;
        }
        match clock.alarm() {
            Alarm::Late(lateness) => warn(self.rank, &operation, lateness),
            Alarm::Deadline => drop(end_late(access, &operation, Vec::new())),
            Alarm::Circle | Alarm::None(_) => {}
        }
    }
}
