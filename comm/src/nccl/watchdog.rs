//! Who looks after the communicators of a rank while it computes, or waits elsewhere.

use std::sync::{Arc, Weak};
use std::thread;
use std::time::Duration;

use hsdp_sharding::Rank;

use super::NcclError;
use super::connected::Connected;
use crate::backend::thread::Access;
use crate::engine::Status;
use crate::handle::RankHandle;

/// How long the watchdog rests between two looks.
const REST: Duration = Duration::from_millis(50);

/// Starts the watchdog of a rank. Where NCCL reports an error of what was issued, it ends the world; and when the world has ended, for
/// whatever reason, it gives the communicators up, so that no stream waits for ranks that will not come. It ends with the communicators,
/// and holds on to nothing whose end is waited for.
///
/// # Errors
/// [`NcclError::Unwatched`] if there is no thread for it.
pub(super) fn start(handle: &RankHandle) -> Result<(), NcclError> {
    let Some(access) = handle.access() else { return Ok(()) };
    let watch = Watch {
        rank: handle.rank,
        connected: Arc::downgrade(&handle.nccl),
        status: Arc::clone(&handle.status),
        access: Arc::downgrade(access),
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
}

impl Watch {
    /// One look; whether there is to be another.
    fn goes_on(&self) -> bool {
        let Some(connected) = self.connected.upgrade() else { return false };
        if let (Err(error), Some(access)) = (connected.check(), self.access.upgrade()) {
            access.end_requested(self.rank, &format!("NCCL reports an error: {error}"));
        }
        if self.status.world_end().is_some() {
            connected.give_up();
            return false;
        }
        true
    }
}
