//! Optimizers on shards: each rank updates the shards that it owns.
//!
//! In reading order: `run` (the elements that are updated at once), `assignment` (the optimizer of
//! each parameter), `updating` (an update, as optimizers see it), `interface` (the trait of
//! optimizers); `pieces`, `pass` (one pass over all shards), `update` (the whole of an update),
//! `closure` (updates that a program writes down); `covered` (the parameters of an optimizer, and
//! the places of their state), `exchange` and `owner_workspace` (of matrices, with their owners),
//! `state`, `average` (of the parameters), `ema`; `setting`, `rule` (the options and the update of a
//! kind of optimizer), `options`, `groups` (options by parameter), `grouped` (the frame of all
//! rules), `adamw`, `sgd`, `lion`, `adafactor`, `muon`; `whole` (updates of whole parameters).

mod adafactor;
mod adamw;
mod assignment;
mod average;
mod closure;
mod covered;
pub(crate) mod ema;
mod exchange;
mod grouped;
mod groups;
mod interface;
mod lion;
mod muon;
mod options;
mod owner_workspace;
mod pass;
mod pieces;
mod rule;
mod run;
mod setting;
mod sgd;
mod state;
mod update;
mod updating;
mod whole;

pub use adafactor::{Adafactor, AdafactorOptions};
pub use adamw::{AdamW, AdamWOptions};
pub use grouped::Grouped;
pub use interface::{Optimizer, Selected, Update};
pub use lion::{Lion, LionOptions};
pub use muon::{Muon, MuonOptions, RateScale};
#[doc(hidden)]
pub use rule::RuleExchange;
pub use rule::{Rule, RunState};
pub use run::{DeviceRun, Run};
pub use setting::Setting;
pub use sgd::{Momentum, Sgd, SgdOptions};
pub use updating::Updating;
pub use whole::{Whole, WholeParameters};
