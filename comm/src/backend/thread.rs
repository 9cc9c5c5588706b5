//! Ranks that are threads of one process. `PROTOCOL.md`, beside the sources of this crate, has the steps of each thread and their order.
//!
//! In reading order: `running` and `queue` (work and its threads),
//! `core` (all of it together), `issue` and `helping` (the steps of threads on it), `judging` (waits before the judge), `ends` (early ends),
//! and `wait` (a member waits for its output).

mod core;
mod ends;
mod helping;
mod issue;
mod judging;
mod queue;
mod running;
mod wait;

#[cfg(test)]
mod tests;

pub(crate) use self::core::{Core, MemberCall, OwnRank};
pub(crate) use self::running::InBlock;
pub use self::running::in_work;
pub(crate) use self::wait::Ticket;
