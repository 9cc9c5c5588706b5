//! NCCL: communicators between GPUs. `NCCL.md`, beside the sources of this crate, describes how they are made, used and
//! ended.
//!
//! In reading order: `unique_id`, `patience` (bounded waits), `communicator` (making and aborting one), `transfer`,
//! `collectives`, `connected` (the communicators of a rank), `carrier` (a member's part of an operation), `queue` (the calls of a
//! rank whose peers are processes), `drain` (those of a step that is given up), `watchdog` (a thread that watches the communicators). Without the
//! feature `nccl`, `absent` is in their place. The module `connect` has the calls of a world.

mod carrier;
mod collectives;
mod communicator;
mod connected;
mod drain;
mod patience;
mod queue;
mod transfer;
mod unique_id;
mod watchdog;

pub use crate::error::NcclError;

pub(crate) use self::carrier::Carrier;
pub use self::communicator::Communicator;
pub(crate) use self::connected::Connected;
pub use self::patience::Patience;
pub use self::transfer::{Part, Transfer};
pub use self::unique_id::UniqueId;
