//! Who looks after the communicators of a rank while it computes, or waits elsewhere.

use std::sync::{Arc, Weak};
use std::thread;
use std::time::Duration;

use hsdp_sharding::Rank;

use super::connected::Connected;
use super::error::NcclError;
use crate::local::Access;
use crate::seat::Seat;

/// How long the watchdog rests between two looks.
const REST: Duration = Duration::from_millis(50);

/// Starts the watchdog of a rank. Where NCCL reports an error of what was issued, it ends the world; and when the world has ended, for
/// whatever reason, it gives the communicators up, so that no stream waits for ranks that will not come. It ends with the communicators,
/// and holds on to nothing whose end is waited for.
///
/// # Errors
/// [`NcclError::Unwatched`] if there is no thread for it.
pub(super) fn start(seat: &Seat) -> Result<(), NcclError> {
    let Some(access) = seat.access().map(Arc::clone) else { return Ok(()) };
    let (watched, rank) = (Arc::downgrade(&seat.nccl), seat.rank);
    let watch = move || {
        while goes_on(&watched, &access, rank) {
            thread::park_timeout(REST);
        }
    };
    let name = format!("hsdp-nccl-watch-{rank}");
    let started = thread::Builder::new().name(name).spawn(watch);
    started.map(drop).map_err(|error| NcclError::Unwatched { reason: error.to_string() })
}

/// One look; whether there is to be another.
fn goes_on(watched: &Weak<Connected>, access: &Access, rank: Rank) -> bool {
    let Some(connected) = watched.upgrade() else { return false };
    if let Err(error) = connected.check() {
        access.end_requested(rank, &format!("NCCL reports an error: {error}"));
    }
    if access.status().world_end().is_some() {
        connected.give_up();
        return false;
    }
    true
}
