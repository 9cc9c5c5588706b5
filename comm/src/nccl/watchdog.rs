//! The watchdog: a thread that looks after the communicators of a rank while that computes, or waits elsewhere.

use std::sync::{Arc, Weak};
use std::thread;
use std::time::Duration;

use hsdp_sharding::Rank;

use super::NcclError;
use super::connected::{Connected, OwnRank};
use super::drain::{Drain, Drained};
use super::queue::{CallKey, Queue, left_before, warn_late};
use crate::Descriptor;
use crate::backend::thread::Access;
use crate::engine::judge::MemberWait;
use crate::engine::{Alarm, Clock, Status};
use crate::remote::Urgency;

/// The watchdog's rest between two looks.
const REST: Duration = Duration::from_millis(50);

/// Starts the watchdog of a rank. It waits for the oldest call that is not done, and drains steps that are given up. Where NCCL reports an
/// error of what was issued, it ends the world; and when the world has ended, for whatever reason, it gives the communicators up, so that no stream waits for ranks that will not come. It ends with the communicators,
/// and holds on to nothing whose end is waited for.
///
/// # Errors
/// [`NcclError::Unwatched`] if there is no thread for it.
pub(super) fn start(
    connected: &Arc<Connected>,
    (access, rank): OwnRank<'_>,
) -> Result<(), NcclError> {
    let mut watch = Watch {
        rank,
        connected: Arc::downgrade(connected),
        status: Arc::clone(access.status()),
        access: Arc::downgrade(access),
        drain: Drain::default(),
        stall: None,
    };
    let name = format!("hsdp-nccl-watch-{rank}");
    let watch = move || {
        while watch.goes_on() {
            thread::park_timeout(REST);
        }
    };
    let started = thread::Builder::new().name(name).spawn(watch);
    started.map(drop).map_err(|error| NcclError::Unwatched { reason: error.to_string() })
}

/// The objects of a look.
struct Watch {
    rank: Rank,
    connected: Weak<Connected>,
    status: Arc<Status>,
    access: Weak<Access>,
    drain: Drain,
    /// The oldest call that was not done when this looked last.
    stall: Option<Stall>,
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
    /// The error that ends the world.
    fn look(&mut self, connected: &Connected, access: &Access) -> Result<(), String> {
        let queue = connected.queue();
        if queue.as_ref().is_none_or(|queue| !queue.has_failed()) {
            let healthy = connected.check();
            healthy.map_err(|error| format!("NCCL reports an error: {error}"))?;
        }
        let Some(queue) = queue else { return Ok(()) };
        self.look_at_head(&queue, (connected, access));
        if self.status.world_end().is_some() {
            return Ok(());
        }
        self.drain.go_on(&Drained { rank: self.rank, access, connected, queue: &queue })
    }

    /// The oldest call is waited for, whatever the rank itself does meanwhile.
    fn look_at_head(&mut self, queue: &Queue, (connected, access): (&Connected, &Access)) {
        let record = access.record(self.rank);
        let head = queue.head(record);
        let call = head.as_ref().map(|(call, _)| *call);
        if self.stall.as_ref().map(|stall| stall.call) != call {
            if let Some(stall) = self.stall.take() {
                stall.end((access, self.rank));
            }
            // A call that was drained has none of its own: this rank was not asked for it.
            let operation = head.and_then(|(_, descriptor)| descriptor.or_else(|| record.last()));
            let clock = || Clock::stall(access.options());
            let begins = |(call, operation)| Stall { call, operation, clock: clock() };
            self.stall = call.zip(operation).map(begins);
            return;
        }
        let (rank, Some(stall)) = (self.rank, &mut self.stall) else { return };
        let left = access.endpoint().and_then(|endpoint| endpoint.drains().left_before(stall.call));
        if let Some(left) = left {
            access.end(left_before(access, left, &stall.operation));
            return;
        }
        let others = connected.ranks(stall.call.0).into_iter().filter(|other| *other != rank);
        stall.ring((access, rank), others.collect());
    }
}

/// A device that waits in a call of NCCL.
struct Stall {
    call: CallKey,
    operation: Arc<Descriptor>,
    clock: Clock,
}

impl Stall {
    /// Has the judge look for a reason, if it is time.
    fn ring(&mut self, (access, rank): (&Access, Rank), missing: Vec<Rank>) {
        let (record, index) = (access.record(rank), Some(self.call.1));
        let Some(endpoint) = access.endpoint() else { return };
        let (operation, is_of_issuer) = (Arc::clone(&self.operation), record.has_one_issuer());
        let wait = MemberWait { operation, index, missing, is_of_issuer };
        let (key, operation) = (wait.key(), &wait.operation);
        record.wait_on_device(Some(wait.clone()));
        match self.clock.alarm() {
            Alarm::None(_) => {}
            Alarm::Circle => endpoint.report(self.urgency(access), key),
            Alarm::Late(lateness) => {
                endpoint.report(Urgency::Late, key);
                warn_late((rank, operation), endpoint.culprit(key), lateness);
            }
            Alarm::Deadline => access.end_late_on_device(rank, &wait),
        }
    }

    /// Before the grace has passed, only calls are compared; then ranks may be found to wait for each other.
    fn urgency(&self, access: &Access) -> Urgency {
        match self.clock.waited() < access.options().circle_grace {
            true => Urgency::Late,
            false => Urgency::Stalled,
        }
    }

    /// The device goes on.
    fn end(&self, (access, rank): (&Access, Rank)) {
        let record = access.record(rank);
        let waited = record.device_wait();
        record.wait_on_device(None);
        if let (Some(endpoint), Some(waited)) = (access.endpoint(), waited) {
            endpoint.forget_reports(waited.key());
        }
    }
}
