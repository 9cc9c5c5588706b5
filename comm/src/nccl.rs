//! NCCL: communicators between GPUs. `NCCL.md`, beside the sources of this crate, says how they live and end.
//!
//! In reading order: `error` (what its statuses mean here), `unique_id`, `patience`, `communicator` (how one is made and given up), `collectives` (what it does),
//! `connected` (a world whose collectives on devices go by it), `watchdog` (who looks after them).

mod collectives;
mod communicator;
mod connected;
mod error;
mod patience;
mod unique_id;
mod watchdog;

pub(crate) use self::collectives::{NotIssued, issue_together};
pub use self::communicator::Communicator;
pub(crate) use self::connected::{Held, SharedCommunicator};
pub use self::error::NcclError;
pub use self::unique_id::UniqueId;
