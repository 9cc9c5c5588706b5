//! Predictions for plans of hsdp: the order of all operations of a step, the time that it takes on
//! a machine, and a judge of schedules.
//!
//! The crate computes: it runs no rank, reads no clock and no files. SIMULATOR.md beside the
//! sources says what is modelled; CHECK.md has the rules of the judge.

#![forbid(unsafe_code)]

mod bundled;
mod calibrate;
mod check;
mod collective;
mod computation;
mod error;
mod host;
pub mod machine;
mod prediction;
mod search;
mod simulation;
mod time;
mod traces;

pub use self::calibrate::{
    AllReduceRow, Errors, Fit, Fitted, Measurements, StatedError, StepRow, fit, read_all_reduces,
    read_steps,
};
pub use self::check::{
    CallMismatch, CommunicatorId, Deadlock, Issue, ListedCall, ScheduleVerdict, Schedules, judge,
};
pub use self::collective::{CollectiveCost, CollectiveKind, Shape, Shapes, collective_cost};
pub use self::computation::{
    AttentionScores, AttentionShape, Batch, Computation, GptShape, Hints, Processor, Recompute,
    is_attention, is_lookup,
};
pub use self::error::Error;
pub use self::host::{
    Action, Members, Microbatches, ModelPlacement, Order, Reference, StepBlock, StepOperation, Work,
};
pub use self::machine::Machine;
pub use self::prediction::{Placed, Placing, Prediction, StepMemory, Workload};
pub use self::search::{AfterForwards, Candidate, Found, PlanChoice, Search, Space, Unfit};
pub use self::simulation::{
    Costs, Lane, Level, OperationCost, RankTiming, Share, Shares, Span, Timing, What, WorkCost,
    simulate, trace,
};
pub use self::time::Time;
pub use self::traces::Traces;
