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
//! In reading order: `optimizer` (the optimizers that a checkpoint can keep), `portions` (the parts
//! of each tensor that a rank owns), `together` (operations of all ranks, and the exchange of their
//! results), `frozen` (a digest of the parameters that a checkpoint leaves out), `save`, `made` (a
//! save that is called again), `options` (those of optimizers, at a load), `differences` (between a
//! checkpoint and a model), `fitting` (loads in spite of them), `load`; `snapshot`, `background`
//! (saves while training goes on); `import` (folders that other programs wrote); `access` (openings
//! for reading alone, and the removal of later checkpoints), `weights` (loads of parameters
//! alone).

mod access;
mod background;
mod differences;
mod fitting;
mod frozen;
mod import;
mod load;
mod made;
mod optimizer;
mod options;
mod portions;
mod save;
mod snapshot;
mod together;
mod weights;

use std::collections::VecDeque;
use std::path::Path;
use std::sync::Arc;

pub use fitting::OtherParameters;
pub use hsdp_checkpoint as format;
use hsdp_checkpoint::{Disk, Files, Lease, RESERVED, STATE, Store};
pub use hsdp_checkpoint::{Exported, Folder, OptimizerHead, Weights, export};
use hsdp_sharding::{ParamId, Role};
pub use import::{Import, Imported};
pub use load::Resumed;
use made::Made;
pub use options::OtherOptions;
use parking_lot::Mutex;
pub use save::Saved;
use together::Together;

use self::access::Access;
use self::background::InFlight;
use self::optimizer::check_optimizer;
use self::snapshot::Snapshot;

use crate::agree::joint;
use crate::error::Error;
use crate::model::ShardedModel;
pub use crate::persist::checkpointed::Checkpointed;
pub use crate::persist::problem::Problem;
pub use crate::persist::saved::SavedState;
pub use crate::persist::tensors::{Expected, Spread, StateTensor};
use crate::state::model_id::ModelId;

/// The checkpoints of one model, in one directory.
///
/// The next call after a save in the background has failed returns its error, whichever call it is,
/// and does nothing else: a save is not begun, nothing is loaded. Call it again. Each error is
/// returned once, by the same call on all ranks.
///
/// No other job can write to the directory while this value exists, unless it was opened by
/// [`read_only`](Self::read_only). If it is dropped during a save in the background, the directory
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
    /// The earlier saves in the background that have succeeded, oldest first, until the caller
    /// takes them.
    saved: VecDeque<Saved>,
    /// The memory to which the next save in the background copies.
    snapshot: Snapshot,
    content: Content,
    other_options: OtherOptions,
    other_parameters: OtherParameters,
    /// This rank's part of the digest of the frozen parameters of a model after a number of loads,
    /// which nothing else changes.
    frozen: Option<(ModelId, u64, u64)>,
    access: Access,
}

/// The parameters that checkpoints have.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Content {
    /// All parameters. Such a checkpoint can be loaded with either option: it replaces all
    /// parameters.
    #[default]
    All,
    /// The trainable parameters, with their optimizer state. This is for adapters of a large frozen
    /// base, which the program makes or [imports](ShardedModel::import) again. A load replaces the
    /// trainable parameters, and leaves the frozen ones as they are. They must have the same bits
    /// as those of the model that was saved: a checkpoint has a digest of them.
    ///
    /// A checkpoint without frozen parameters cannot be loaded with [`Content::All`]. Its
    /// [`export`] has the trainable parameters alone. A save in the background copies these alone,
    /// fewer bytes than [`Plan::snapshot`](hsdp_sharding::Plan::snapshot) says.
    Trainable,
}

impl Content {
    /// Whether a checkpoint has parameters of this role.
    fn has(self, role: Role) -> bool {
        self == Self::All || role == Role::Trainable
    }
}

/// Options of writing and loading checkpoints.
#[derive(Clone, Debug)]
pub struct CheckpointOptions {
    /// The number of generations to keep, at least two.
    pub keep: usize,
    /// The description of this job in the error of another job that wants to write to the same
    /// directory.
    pub holder: String,
    /// The file system.
    pub files: Arc<dyn Files>,
    /// The parameters that checkpoints have; the same on all ranks.
    pub content: Content,
    /// Rule of a load where the optimizer was made with other options; the same on all ranks.
    pub other_options: OtherOptions,
    /// Rule of a load where the checkpoint has other parameters; the same on all ranks.
    pub other_parameters: OtherParameters,
}

impl Default for CheckpointOptions {
    fn default() -> Self {
        let holder = format!("process {}", std::process::id());
        Self {
            keep: 2,
            holder,
            files: Arc::new(Disk),
            content: Content::default(),
            other_options: OtherOptions::default(),
            other_parameters: OtherParameters::default(),
        }
    }
}

impl Checkpoints {
    /// Takes the lease on a directory, creates the directory if needed, and removes files that a
    /// crash has left behind.
    ///
    /// While these checkpoints exist, an update of the model by two optimizers of one kind is
    /// refused: no checkpoint could keep the state of both.
    ///
    /// Collective over the model's world.
    ///
    /// # Errors
    /// [`Error::Checkpoint`] on all ranks if another job holds the lease, rank 0 cannot write to
    /// the directory, or ranks have another [`Content`], [`OtherOptions`] or [`OtherParameters`],
    /// or open it in another way; [`Error::Options`] if a parameter has a name that checkpoints
    /// reserve; [`Error::Comm`] if the communication fails.
    pub fn open(
        model: &ShardedModel,
        directory: &Path,
        options: CheckpointOptions,
    ) -> Result<Self, Error> {
        Self::opened(model, directory, options, Access::of_writer(model))
    }

    /// Opens a directory for loading alone: from a folder that cannot be written, or beside the job
    /// that writes there. Takes no lease, and creates and removes nothing; `keep` and `holder` have
    /// no effect. Saves are refused.
    ///
    /// If the job that writes removes a checkpoint while it is loaded,
    /// [`load_latest`](Self::load_latest) begins again with the newest one, and
    /// [`load`](Self::load) says so in its error. A directory that does not exist has no
    /// checkpoints.
    ///
    /// Collective over the model's world.
    ///
    /// # Errors
    /// As [`open`](Self::open), but for those of the lease.
    pub fn read_only(
        model: &ShardedModel,
        directory: &Path,
        options: CheckpointOptions,
    ) -> Result<Self, Error> {
        Self::opened(model, directory, options, Access::Read)
    }

    fn opened(
        model: &ShardedModel,
        directory: &Path,
        options: CheckpointOptions,
        access: Access,
    ) -> Result<Self, Error> {
        let context = &model.engine.context;
        check_names(model)?;
        let together = Together::new(context, "opening checkpoints", model.committed_steps());
        let number = access::agree(together, &access, &options, model.engine.state().opened)?;
        let CheckpointOptions { keep, holder, files, content, other_options, other_parameters } =
            options;
        let store = Store::new(directory, files).keeping(keep);
        let takes_lease = access.is_writer() && together.is_first();
        let lease = || takes_lease.then(|| store.lease(&holder)).transpose();
        let lease = together.run(|| lease().map_err(access::refused))?;
        let lease = lease.map(|lease| Arc::new(Mutex::new(lease)));
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
            other_options,
            other_parameters,
            frozen: None,
            access,
        })
    }

    /// This rank's part of the digest of the frozen parameters, if checkpoints leave these out.
    /// Collective over the model's world.
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
        // All ranks meet here, whether they know their part or not: an abort may have left the
        // knowledge to some of them.
        let part = together.run(|| match known {
            Some(part) => Ok(part),
            None => {
                let shards = model.engine.state().shards.clone();
                let context = &model.engine.context;
                let is_frozen = |id: ParamId| context.plan.spec()[id].role == Role::Frozen;
                Ok(frozen::part(context, &shards, is_frozen)?)
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

/// # Errors
/// [`Error::Options`] if a parameter has a name that checkpoints reserve.
fn check_names(model: &ShardedModel) -> Result<(), Error> {
    let mut params = model.plan().spec().params().map(|(_, param)| &param.name);
    match params.find(|name| *name == RESERVED || name.starts_with(STATE)) {
        None => Ok(()),
        Some(name) => {
            let what = format!(
                "parameter `{name}`: checkpoints reserve names that begin with `{STATE}`, and the \
                 name `{RESERVED}`"
            );
            Err(Error::Options { what })
        }
    }
}

/// Refuses a call that does not fit the model's state. The other ranks get the reason.
///
/// # Errors
/// [`Error::Misuse`] within a step, while its gradients exist, inside
/// [`ShardedModel::with_shards`], or if the optimizer was made for another model, or consists of
/// two of one kind.
fn check<O: Checkpointed>(
    model: &ShardedModel,
    optimizer: &O,
    operation: &'static str,
) -> Result<(), Error> {
    joint::run(model.world(), model.committed_steps(), || {
        model.check_between_steps(operation)?;
        check_optimizer(model, optimizer, operation)
    })
}
