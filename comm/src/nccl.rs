//! NCCL: communicators between GPUs. `NCCL.md`, beside the sources of this crate, says how they live and end.
//!
//! In reading order: `error` (what its statuses mean here), `communicator` (how one is made and given up), `collectives` (what it does).

mod collectives;
mod communicator;
mod error;

pub use self::communicator::{Communicator, UniqueId};
pub use self::error::NcclError;
