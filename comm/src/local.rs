//! The local flavour: ranks are threads of one process. `PROTOCOL.md`, beside the sources of this crate, says who does
//! what in which order.
//!
//! In reading order: `record` (what a rank shows to others), `status` (how a world or a step ends early),
//! `phase`, `operation`, `attendance` and `table` (how members meet), `any_work`, `running`, `queued` and `queue` (who does the work), `core` (all of it
//! together), `ends` (how it ends early), `circle` (when ranks wait for each other), `clock` and `wait` (how a member gets its output).

mod any_work;
mod attendance;
mod circle;
mod clock;
mod core;
mod ends;
mod operation;
mod phase;
mod queue;
mod queued;
mod record;
mod running;
mod status;
mod table;
mod wait;

#[cfg(test)]
mod tests;

pub(crate) use self::circle::waiting_for_each_other;
pub(crate) use self::clock::{Alarm, Clock, FAR, from_now};
pub(crate) use self::core::{Access, Core, Lifeline, Member};
pub(crate) use self::operation::Operation;
pub(crate) use self::record::Record;
pub use self::running::in_work;
pub(crate) use self::running::{InBlock, panic_message};
pub(crate) use self::status::Status;
pub(crate) use self::table::Key;
pub(crate) use self::wait::Ticket;
