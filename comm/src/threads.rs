//! Ranks that are threads of one process. `PROTOCOL.md`, beside the sources of this crate, has the steps
//! of each thread and their order.
//!
//! In reading order: `work` (work and its threads), `core` (all of it together, and the steps of members
//! that issue), `ends` (early ends), and `wait` (a member waits for its output).

mod core;
mod ends;
mod wait;
mod work;

#[cfg(test)]
mod tests;

pub(crate) use self::core::{Core, MemberCall, OwnRank};
pub(crate) use self::wait::Ticket;
pub(crate) use self::work::InBlock;
pub use self::work::in_work;
