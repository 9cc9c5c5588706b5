//! The judge of schedules: whether all operations of all ranks complete, decided without running
//! them.
//!
//! CHECK.md beside the sources has the format, the rules, and the reason why one order decides for
//! all timings. In reading order: `schedules` (the actions of the hosts of all ranks), `json`,
//! `records` (schedules of a world that was cut off), `judge` (the fixed point, with its verdict),
//! `explanation` (the shortest reason for a deadlock).

mod explanation;
mod json;
mod judge;
mod records;
mod schedules;

pub use self::judge::{CallMismatch, Deadlock, ListedCall, ScheduleVerdict, judge};
pub use self::schedules::{CommunicatorId, Issue, Schedules};
