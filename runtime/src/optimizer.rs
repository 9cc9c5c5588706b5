//! Optimizers on shards: each rank updates the shards that it owns.
//!
//! In reading order: `run` (the elements that are updated at once), `assignment` (the optimizer of
//! each parameter), `updating` (an update, as optimizers see it), `interface` (the trait of
//! optimizers); `pieces`, `pass` (one pass over all shards, on the host), `device` (that on a
//! device), `update` (the whole of an update), `closure` (updates that a program writes down);
//! `places`, `covered`, `state` and `held` (the state of an optimizer), `average` (of the
//! parameters), `ema`; `options`, `groups` (options by parameter), `method` (a kind of optimizer),
//! `grouped` (the frame of all kinds with groups), `rule`, `elementwise` (optimizers that update
//! each element from its own state), `adamw`, `sgd`, `lion`; `eight_bit` (`AdamW` with small state),
//! `adafactor`; `whole` (updates of whole matrices), `muon`.

mod adafactor;
mod adamw;
mod assignment;
mod average;
mod closure;
mod covered;
mod eight_bit;
mod elementwise;
pub(crate) mod ema;
mod grouped;
mod groups;
mod held;
mod interface;
mod lion;
mod method;
mod muon;
mod options;
mod pass;
mod pieces;
mod places;
mod rule;
mod run;
mod sgd;
mod update;
mod updating;
mod whole;

pub use adafactor::{Adafactor, AdafactorOptions};
pub use adamw::{AdamW, AdamWOptions};
pub use grouped::Grouped;
pub use interface::{Optimizer, Selected, Update};
pub use lion::{Lion, LionOptions};
pub use muon::{Muon, MuonOptions, RateScale};
pub use options::{OptimizerOptions, Setting};
pub use rule::{Rule, RunState, UnitRun, UnitState};
pub use run::{DeviceRun, Run};
pub use sgd::{Momentum, Sgd, SgdOptions};
pub use updating::Updating;
pub use whole::{Whole, WholeParameters};
