//! Optimizers on shards: each rank updates the shards that it owns.
//!
//! In reading order: `interface` (the trait of optimizers, and an update as they see it), `update`
//! (an update of a model, and updates that a program writes down); `rule` (the update and the
//! options of a kind of optimizer), `groups` (options by parameter), `state`, `grouped` (the frame
//! of all rules), `adamw`, `sgd`, `lion`, `adafactor`; `exchange` (of matrices, with their owners),
//! `muon`, `whole` (updates of whole parameters); `ema` (averages of the parameters).

mod adafactor;
mod adamw;
pub(crate) mod ema;
mod exchange;
mod grouped;
mod groups;
mod interface;
mod lion;
mod muon;
mod owner_workspace;
mod rule;
mod sgd;
mod state;
mod update;
mod whole;

pub use adafactor::{Adafactor, AdafactorOptions};
pub use adamw::{AdamW, AdamWOptions};
pub use grouped::Grouped;
pub use interface::{ClippedGradient, DeviceRun, Optimizer, Run, Selected, Update, Updating};
pub use lion::{Lion, LionOptions};
pub use muon::{Muon, MuonOptions, RateScale};
#[doc(hidden)]
pub use rule::RuleExchange;
pub use rule::{Rule, RunState, Setting};
pub use sgd::{Sgd, SgdOptions};
pub use whole::{Whole, WholeParameters};
