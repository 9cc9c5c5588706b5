//! Ranks as processes without MPI: the control plane's coordinator passes their letters on, and NCCL carries what lies on devices.
//! `REMOTE.md`, "The control plane", beside the sources of this crate, says how.
//!
//! In reading order: `passage` (between two ranks), `member` (this process, for all its worlds), `transport`, `job`.

mod job;
mod member;
mod passage;
mod transport;

pub use hsdp_control::{Bootstrap, ControlError, Joined};

pub use self::job::Job;
