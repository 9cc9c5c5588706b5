//! The judge of schedules: whether all operations of all ranks complete, decided without running
//! them.
//!
//! CHECK.md beside the sources has the format, the rules, and the reason why one order decides for
//! all timings. In reading order: `schedules` (what the hosts of all ranks do), `json`, `records`
//! (the same of a world that was cut off), `judge`, `verdict`, `explanation` and `cycles` (the
//! shortest reason for a deadlock), `ranks` (lists of ranks in words).

mod explanation;
mod json;
mod judge;
mod records;
mod schedules;

pub use self::judge::{Call, Deadlock, Mismatch, Verdict, judge};
pub use self::schedules::{CommunicatorId, Issue, Schedules};
