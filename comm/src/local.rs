//! The local flavour: ranks are threads of one process. [`PROTOCOL.md`] says who does what in which order.
//!
//! In reading order: `record` (what a rank shows to others), `status` (how a world or a step ends early),
//! `operation` and `table` (where members meet), `running` and `queue` (who does the work), `core` (all of it
//! together), `wait` (how a member gets its output).
//!
//! [`PROTOCOL.md`]: https://github.com/hsdp/hsdp/blob/main/comm/PROTOCOL.md

mod core;
mod operation;
mod queue;
mod record;
mod running;
mod status;
mod table;
mod wait;

pub(crate) use self::core::{Core, Lifeline, Member};
pub(crate) use self::record::Record;
pub(crate) use self::running::{in_block, panic_message};
pub(crate) use self::status::Status;
pub(crate) use self::wait::Ticket;
