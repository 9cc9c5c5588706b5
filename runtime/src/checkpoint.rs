//! Checkpoints of a model and its optimizer: written by all ranks, read on any mesh.
//! [`hsdp_checkpoint`] defines the files and their guarantees; this module decides which rank
//! writes and reads which part of them.
//!
//! ```
//! use hsdp::checkpoint::{CheckpointOptions, Checkpoints};
//! use hsdp::prelude::*;
//!
//! let folder = tempfile::tempdir().expect("a folder");
//! let spec = || ModelSpec::new().unit(Unit::new("linear").param(Param::new("w", [5, 3])));
//! let run = |ranks, initial: f32| {
//!     let ends = hsdp::launch(ranks, WorldOptions::default(), |world| -> Result<_, hsdp::Error> {
//!         let options = ModelOptions::on(Mesh::new(1, ranks)?);
//!         let mut model = ShardedModel::new(world, spec(), options, |_| vec![initial; 15])?;
//!         let mut adamw = AdamW::new(&model, AdamWOptions::default());
//!         let mut checkpoints =
//!             Checkpoints::open(&model, folder.path(), CheckpointOptions::default())?;
//!         let resumed = checkpoints.load_latest(&mut model, &mut adamw)?;
//!         if resumed.is_none() {
//!             checkpoints.save(&model, &adamw, &serde_json::json!({ "cursor": 7 }))?;
//!         }
//!         let cursor = resumed.map(|resumed| resumed.user["cursor"].clone());
//!         Ok((cursor, model.full_parameters()?["w"][0]))
//!     });
//!     ends.into_iter().next().expect("a rank")
//! };
//! // Saved by two ranks, and read by three.
//! assert_eq!(run(2, 4.5)?, (None, 4.5));
//! assert_eq!(run(3, 0.0)?, (Some(7.into()), 4.5));
//! # Ok::<(), hsdp::Error>(())
//! ```
//!
//! In reading order: `settings` (the choices of a program, and the results of saves and loads),
//! `together` (operations of all ranks, and the exchange of their results), `portions` (the parts
//! of each tensor that a rank owns), `frozen` (a digest of the parameters that a checkpoint leaves
//! out), `saving` (a save that is under way), `in_flight` (a save in the background), `checkpoints`
//! (their opening and rights, the optimizers whose state they can keep, their removal), `save`;
//! `options` (those of optimizers, at a load), `differences` (between a checkpoint and a model, and
//! the part that fits), `load`, `weights` (loads of parameters alone); `import` (folders that other
//! programs wrote).

mod checkpoints;
mod differences;
mod frozen;
mod import;
mod in_flight;
mod load;
mod options;
mod portions;
mod save;
mod saving;
mod settings;
mod together;
mod weights;

pub use checkpoints::Checkpoints;
pub use hsdp_checkpoint as format;
pub use hsdp_checkpoint::{Exported, Folder, OptimizerHead, Weights, export};
pub use import::{Import, Imported};
pub use settings::{CheckpointOptions, Content, OtherOptions, OtherParameters, Resumed, Saved};

pub use crate::persist::checkpointed::{BufferState, Checkpointed, Expected, Spread, StateTensor};
pub use crate::persist::problem::Problem;
pub use crate::persist::saved::SavedState;
