//! Predictions for plans of hsdp: the order of all operations of a step, the time that it takes on a machine, and a judge of schedules.
//!
//! The crate computes: it runs no rank, reads no clock and no files. SIMULATOR.md beside the sources says what is modelled; CHECK.md has the
//! rules of the judge.

#![forbid(unsafe_code)]

mod error;
mod order;
mod simulation;
mod time;

pub use self::error::Error;
pub use self::order::{
    Action, Block, Data, LossScale, Members, Microbatches, Operation, Order, Placement, Reference,
    Step, Work,
};
pub use self::simulation::{
    Colors, Costs, Lane, Level, OperationCost, Orders, RankTiming, Share, Shares, Span, Timing,
    What, WorkCost, simulate, trace,
};
pub use self::time::Time;
