//! Who looks after the communicators of a rank while it computes, or waits elsewhere.

use std::sync::{Arc, Weak};
use std::thread;
use std::time::Duration;

use super::error::NcclError;
use crate::seat::Seat;

/// How long the watchdog rests between two looks.
const REST: Duration = Duration::from_millis(50);

/// Starts the watchdog of a rank. Where NCCL reports an error of what was issued, it ends the world; and when the world has ended, for
/// whatever reason, it gives the communicators up, so that no stream waits for ranks that will not come. It ends with the rank.
///
/// # Errors
/// [`NcclError::Unwatched`] if there is no thread for it.
pub(super) fn start(seat: &Arc<Seat>) -> Result<(), NcclError> {
    let watched = Arc::downgrade(seat);
    let name = format!("hsdp-nccl-watch-{}", seat.rank);
    let watch = move || {
        while goes_on(&watched) {
            thread::park_timeout(REST);
        }
    };
    let started = thread::Builder::new().name(name).spawn(watch);
    started.map(drop).map_err(|error| NcclError::Unwatched { reason: error.to_string() })
}

/// One look; whether there is to be another.
fn goes_on(watched: &Weak<Seat>) -> bool {
    let Some(seat) = watched.upgrade() else { return false };
    if let Err(error) = seat.nccl.check() {
        seat.abort(&format!("NCCL reports an error: {error}"));
    }
    if seat.status.world_end().is_some() {
        seat.nccl.give_up();
        return false;
    }
    true
}
