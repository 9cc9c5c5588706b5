//! Ranks that are threads of one process. `PROTOCOL.md`, beside the sources of this crate, has the steps of each thread and their order.
//!
//! In reading order: `table` (operations that members have yet to come to), `running` and `queue` (work and its threads),
//! `core` (all of it together), `issue` and `helping` (the steps of threads on it), `states` (what the judge sees), `ends` (early ends),
//! and `wait` (a member waits for its output).

mod core;
mod ends;
mod helping;
mod issue;
mod queue;
mod running;
mod states;
mod table;
mod wait;

#[cfg(test)]
mod tests;

pub(crate) use self::core::{Access, Core, Lifeline, Member};
pub(crate) use self::running::InBlock;
pub use self::running::in_work;
pub(crate) use self::states::waiting_for_each_other;
pub(crate) use self::wait::Ticket;
pub(crate) use crate::engine::{Key, Operation, panic_message};
