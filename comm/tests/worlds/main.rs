//! Worlds, whichever way their ranks exchange data. `comm/tests/apart.sh` runs this program again
//! with ranks that share no memory.

mod absent;
mod circles;
mod collectives;
#[path = "../common/mod.rs"]
mod common;
mod ends;
mod faults;
mod flight;
mod ledger;
mod mismatch;
mod parts;
mod pending;
mod units;
