//! The checkpoints of a model, and their opening.

use std::collections::VecDeque;
use std::path::Path;
use std::sync::Arc;

use hsdp_checkpoint::{Lease, RESERVED, STATE, Store};
use hsdp_sharding::{ParamId, Role};
use parking_lot::Mutex;

use super::access::{self, Access};
use super::frozen;
use super::in_flight::InFlight;
use super::made::Made;
use super::results::Saved;
use super::settings::{CheckpointOptions, Content, OtherOptions, OtherParameters};
use super::snapshot::Snapshot;
use super::together::Together;
use crate::error::Error;
use crate::model::ShardedModel;
use crate::state::context::ModelId;
use crate::state::control;

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
    pub(super) store: Store,
    /// Number among the checkpoints that were opened of the model, the same on all ranks.
    pub(super) number: u32,
    /// `Some` on rank 0 only. The thread that makes a generation holds the lock.
    pub(super) lease: Option<Arc<Mutex<Lease>>>,
    /// A save in the background.
    pub(super) in_flight: Option<InFlight>,
    /// The generation of a save that failed after it was made. `Some` on rank 0 only.
    pub(super) made: Option<Made>,
    /// The earlier saves in the background that have succeeded, oldest first, until the caller
    /// takes them.
    pub(super) saved: VecDeque<Saved>,
    /// Memory for the copy that the next save in the background makes.
    pub(super) snapshot: Snapshot,
    pub(super) content: Content,
    pub(super) other_options: OtherOptions,
    pub(super) other_parameters: OtherParameters,
    /// This rank's part of the digest of the frozen parameters of a model after a number of loads,
    /// which nothing else changes.
    pub(super) frozen: Option<(ModelId, u64, u64)>,
    pub(super) access: Access,
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
    pub(super) fn frozen_part(
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

    /// # Errors
    /// [`Error::Misuse`] on all ranks if these checkpoints were opened for reading alone.
    pub(super) fn check_writer(
        &self,
        model: &ShardedModel,
        operation: &'static str,
    ) -> Result<(), Error> {
        control::between_steps(model.world(), model.committed_steps(), || {
            if self.access.is_writer() {
                return Ok(());
            }
            let what = "these checkpoints were opened by `Checkpoints::read_only`: open them by \
                        `Checkpoints::open`, which takes the right to write";
            Err(model.engine.context.misuse(operation, model.committed_steps(), what.to_owned()))
        })
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
