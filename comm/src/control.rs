//! Worlds whose ranks are processes without MPI. Messages go over TCP to the coordinator in the
//! process of rank 0, which forwards them (`hsdp-control`), and NCCL carries buffers of devices.
//! `TRANSPORTS.md`, "The control plane", beside the sources of this crate, describes the messages.
//!
//! In reading order: `passage` (between two ranks), `member` (this process, for all its worlds),
//! `losses`, `transport`, `job`.

mod job;
mod losses;
mod member;
mod passage;
mod transport;

pub use hsdp_control::{
    ArgumentError, Bootstrap, ConnectionError, ControlError, JoinError, Joined, RendezvousError,
    ServerError,
};

pub use self::job::Job;
