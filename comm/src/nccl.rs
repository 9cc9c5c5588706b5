//! NCCL: communicators between GPUs. `NCCL.md`, beside the sources of this crate, describes how
//! they are made, used and ended.
//!
//! In reading order: `communicator` (making and aborting one), `transfer` and `calls` (a member's
//! part of an operation), `connected` (the communicators of a rank), `queue` (the calls of a rank
//! whose peers are processes), `watchdog` (a thread that watches the communicators, and drains a
//! step that is given up). Without the feature `nccl`, `absent` is in their place. The module
//! `connect` has the calls of a world.

mod calls;
mod communicator;
mod connected;
mod queue;
mod transfer;
mod watchdog;

pub use crate::error::NcclError;

pub(crate) use self::calls::NcclCarrier;
pub use self::communicator::{Communicator, Patience, UniqueId};
pub(crate) use self::connected::Connected;
pub use self::transfer::Transfer;
