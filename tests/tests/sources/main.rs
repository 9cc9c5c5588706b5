//! The sources themselves: their layers, their unsafe code, what threads may share.

mod architecture;
mod invariants;
mod send_sync;
