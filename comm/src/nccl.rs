//! NCCL: communicators between GPUs. `NCCL.md`, beside the sources of this crate, describes how they are made, used and
//! ended.
//!
//! In reading order: `unique_id`, `patience` (bounded waits), `communicator` (making and aborting one),
//! `collectives`, `connected` (a world whose collectives on devices use NCCL), `watchdog` (a thread that watches the
//! communicators).

mod collectives;
mod communicator;
mod connected;
mod patience;
mod unique_id;
mod watchdog;

pub use crate::error::NcclError;

pub(crate) use self::collectives::{NotIssued, issue_together};
pub use self::communicator::Communicator;
pub(crate) use self::connected::{Held, SharedCommunicator};
pub use self::unique_id::UniqueId;
