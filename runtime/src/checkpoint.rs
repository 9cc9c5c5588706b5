//! Checkpoints of a model and its optimizer: written by all ranks, read on any mesh. [`hsdp_checkpoint`] defines the files and
//! their guarantees; this module decides which rank writes and reads which part of them.
//!
//! ```
//! use hsdp::checkpoint::{CheckpointOptions, Checkpoints};
//! use hsdp::prelude::*;
//!
//! let folder = tempfile::tempdir().expect("a folder");
//! let spec = || ModelSpec::new().unit(Unit::new("linear").param(Param::new("w", [5, 3])));
//! let run = |ranks, initial: f32| {
//!     let ends = hsdp::world(ranks, |world| -> Result<_, hsdp::Error> {
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
//! In reading order: `checkpointed` (an optimizer's state), `pair` (that of two optimizers), `optimizer` (those that a
//! checkpoint can keep), `portions` (the parts of each tensor that a rank owns), `together`
//! (operations of all ranks, and the exchange of their results), `frozen` (a digest of the parameters that a checkpoint leaves out),
//! `save`, `made` (a save that is called again), `differences` (between a checkpoint and a model), `load`; `snapshot`, `background` (saves while training
//! goes on); `import` (folders that other programs wrote).

mod background;
mod checkpointed;
mod differences;
mod frozen;
mod import;
mod load;
mod made;
mod optimizer;
mod pair;
mod portions;
mod save;
mod snapshot;
mod together;

use std::collections::VecDeque;
use std::path::Path;
use std::sync::Arc;

pub(crate) use checkpointed::copy_part;
pub use checkpointed::{Checkpointed, Expected, SavedState, Spread, StateTensor};
pub use hsdp_checkpoint as format;
use hsdp_checkpoint::{Disk, Files, Lease, RESERVED, STATE, Store};
pub use hsdp_checkpoint::{Exported, Folder, OptimizerHead, Weights, export};
use hsdp_sharding::{Rank, Role};
pub use import::{Import, Imported};
pub use load::Resumed;
use made::Made;
use parking_lot::Mutex;
pub use save::Saved;
pub use together::Problem;
use together::{Failed, Together};

use self::background::InFlight;
use self::optimizer::check_optimizer;
use self::snapshot::Snapshot;

use crate::comparison;
use crate::engine::joint;
use crate::error::Error;
use crate::model::{ModelId, ShardedModel};

/// The checkpoints of one model, in one directory.
///
/// The next call after a save in the background has failed returns its error, whichever call it is, and does nothing else: a save
/// is not begun, nothing is loaded. Call it again. Each error is returned once, by the same call on all ranks.
///
/// No other job can write to the directory while this value exists. If it is dropped during a save in the background, the directory
/// stays locked until that save has ended, and a warning says that the save is given up.
#[derive(Debug)]
pub struct Checkpoints {
    store: Store,
    /// Number among the checkpoints that were opened of the model, the same on all ranks.
    number: u32,
    /// `Some` on rank 0 only. The thread that makes a generation holds the lock.
    lease: Option<Arc<Mutex<Lease>>>,
    /// A save in the background.
    in_flight: Option<InFlight>,
    /// The generation of a save that failed after it was made. `Some` on rank 0 only.
    made: Option<Made>,
    /// The earlier saves in the background that have succeeded, oldest first, until the caller takes them.
    saved: VecDeque<Saved>,
    /// The memory to which the next save in the background copies.
    snapshot: Snapshot,
    content: Content,
    /// This rank's part of the digest of the frozen parameters of a model after a number of loads, which nothing else changes.
    frozen: Option<(ModelId, u64, u64)>,
}

/// The parameters that checkpoints have.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Content {
    /// All parameters. Such a checkpoint can be loaded with either option: it replaces all parameters.
    #[default]
    All,
    /// The trainable parameters, with their optimizer state. This is for adapters of a large frozen base, which the program makes or
    /// [imports](ShardedModel::import) again. A load replaces the trainable parameters, and leaves the frozen ones as they are. They
    /// must have the same bits as those of the model that was saved: a checkpoint has a digest of them.
    ///
    /// A checkpoint without frozen parameters cannot be loaded with [`Content::All`]. Its [`export`] has the trainable parameters alone.
    /// A save in the background copies these alone, fewer bytes than [`Plan::snapshot`](hsdp_sharding::Plan::snapshot) says.
    Trainable,
}

impl Content {
    /// Whether a checkpoint has parameters of this role.
    fn has(self, role: Role) -> bool {
        self == Self::All || role == Role::Trainable
    }
}

/// How checkpoints are written.
#[derive(Clone, Debug)]
pub struct CheckpointOptions {
    /// The number of generations to keep, at least two.
    pub keep: usize,
    /// The description of this job in the error of another job that wants to write to the same directory.
    pub holder: String,
    /// The file system.
    pub files: Arc<dyn Files>,
    /// The parameters that checkpoints have; the same on all ranks.
    pub content: Content,
}

impl Default for CheckpointOptions {
    fn default() -> Self {
        let holder = format!("process {}", std::process::id());
        Self { keep: 2, holder, files: Arc::new(Disk), content: Content::All }
    }
}

impl Checkpoints {
    /// Takes the lease on a directory, creates the directory if needed, and removes files that a crash has left behind.
    ///
    /// Collective over the model's world.
    ///
    /// # Errors
    /// [`Error::Checkpoint`] on all ranks if another job holds the lease, rank 0 cannot write to the directory, or ranks have another
    /// [`Content`]; [`Error::Options`] if a
    /// parameter has a name that checkpoints reserve; [`Error::Comm`] if the communication fails.
    pub fn open(
        model: &ShardedModel,
        directory: &Path,
        options: CheckpointOptions,
    ) -> Result<Self, Error> {
        let CheckpointOptions { keep, holder, files, content } = options;
        let store = Store::new(directory, files).keeping(keep);
        let fabric = &model.engine.fabric;
        check_names(model)?;
        let together = Together::new(fabric, ("opening checkpoints", model.committed_steps()));
        let is_first = fabric.rank().index() == 0;
        let lease = together.run(|| Ok(is_first.then(|| store.lease(&holder)).transpose()?))?;
        let lease = lease.map(|lease| Arc::new(Mutex::new(lease)));
        let number = agree_on_content(together, content, model.engine.state().opened)?;
        model.engine.state().opened = number.saturating_add(1);
        Ok(Self {
            store,
            number,
            lease,
            in_flight: None,
            made: None,
            saved: VecDeque::new(),
            snapshot: Snapshot::default(),
            content,
            frozen: None,
        })
    }

    /// This rank's part of the digest of the frozen parameters, if checkpoints leave these out. Collective over the model's world.
    fn frozen_part(
        &mut self,
        model: &ShardedModel,
        together: Together<'_>,
    ) -> Result<Option<u64>, Error> {
        if self.content == Content::All {
            return Ok(None);
        }
        let loads = model.engine.state().loads;
        let known =
            self.frozen.as_ref().filter(|(id, known, _)| (id, *known) == (model.id(), loads));
        let known = known.map(|(_, _, part)| *part);
        // All ranks meet here, whether they know their part or not: an abort may have left the knowledge to some of them.
        let part = together.run(|| match known {
            Some(part) => Ok(part),
            None => {
                let shards = model.engine.state().shards.clone();
                Ok(frozen::part(&model.engine.fabric, &shards)?)
            }
        })?;
        self.frozen = Some((model.id().clone(), loads, part));
        Ok(Some(part))
    }

    /// The directory and its generations.
    #[must_use]
    pub fn store(&self) -> &Store {
        &self.store
    }
}

/// Compares the content of checkpoints, and returns their number: the largest number that is free
/// on all ranks, after `opened` on this one. A rank alone may have failed to open earlier ones.
///
/// # Errors
/// [`Error::Checkpoint`] if ranks have another content.
fn agree_on_content(together: Together<'_>, content: Content, opened: u32) -> Result<u32, Error> {
    let said = together.tell([content as u64, u64::from(opened)])?;
    let number = said.iter().map(|[_, opened]| *opened).max().unwrap_or(0);
    let said: Vec<u64> = said.into_iter().map(|[content, _]| content).collect();
    let Some([rank, other]) = comparison::odd_one(&said) else {
        return Ok(u32::try_from(number).unwrap_or(u32::MAX));
    };
    let what = format!("the content of its checkpoints is another than on rank {other}");
    Err(together.error(Failed { rank: Rank::new(rank), problem: Problem::lasting(what) }))
}

/// # Errors
/// [`Error::Options`] if a parameter has a name that checkpoints reserve.
fn check_names(model: &ShardedModel) -> Result<(), Error> {
    let mut params = model.plan().spec().params().map(|(_, param)| &param.name);
    match params.find(|name| *name == RESERVED || name.starts_with(STATE)) {
        None => Ok(()),
        Some(name) => {
            let what = format!(
                "parameter `{name}`: checkpoints reserve names that begin with `{STATE}`, and the name `{RESERVED}`"
            );
            Err(Error::Options { what })
        }
    }
}

/// Refuses a call that does not fit the model's state. The other ranks get the reason.
///
/// # Errors
/// [`Error::Misuse`] within a step, while its gradients exist, inside [`ShardedModel::with_shards`], or if the optimizer was made for
/// another model, or consists of two of one kind.
fn check<O: Checkpointed>(
    model: &ShardedModel,
    optimizer: &O,
    operation: &'static str,
) -> Result<(), Error> {
    joint::run(model.world(), model.committed_steps(), || {
        check_between_steps(model, operation)?;
        check_optimizer(model, optimizer, operation)
    })
}

/// # Errors
/// [`Error::Misuse`] within a step, or while its gradients exist: they belong to the present values of the parameters; inside
/// [`ShardedModel::with_shards`].
pub(crate) fn check_between_steps(
    model: &ShardedModel,
    operation: &'static str,
) -> Result<(), Error> {
    let fabric = &model.engine.fabric;
    let state = model.engine.state();
    model.engine.check_own_shards(&state, operation)?;
    if !state.is_in_step() && !fabric.has_gradients_out() {
        return Ok(());
    }
    let what = "a step is under way, or its gradients still exist: first apply the gradients with an optimizer, or drop them";
    Err(fabric.misuse(operation, state.next_step, what.to_owned()))
}
