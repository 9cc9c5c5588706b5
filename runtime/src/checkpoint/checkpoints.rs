//! The checkpoints of a model: their opening, the rights of it, the optimizers whose state they can
//! keep, and the checkpoints after the one that was loaded.

use std::collections::{BTreeSet, VecDeque};
use std::path::Path;
use std::sync::Arc;

use hsdp_checkpoint::{Error as StoreError, Lease, OptimizerHead, RESERVED, STATE, Store};
use hsdp_sharding::{Param, ParamId, Role, UnitId};
use parking_lot::Mutex;

use super::differences::LoadWanted;
use super::frozen;
use super::in_flight::{InFlight, Snapshot};
use super::saving::MadeGeneration;
use super::settings::{CheckpointOptions, Content, Resumed, Saved};
use super::together::JointOperation;
use crate::error::Error;
use crate::model::ShardedModel;
use crate::persist::checkpointed::{AND, Checkpointed, ONE_OF_EACH_KIND};
use crate::persist::problem::Problem;
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
    pub(super) made: Option<MadeGeneration>,
    /// The earlier saves in the background that have succeeded, oldest first, until the caller
    /// takes them.
    pub(super) saved: VecDeque<Saved>,
    /// Memory for the copy that the next save in the background makes.
    pub(super) snapshot: Snapshot,
    pub(super) wanted: LoadWanted,
    /// This rank's part of the digest of the frozen parameters of a model after a number of loads,
    /// which nothing else changes.
    pub(super) frozen: Option<(ModelId, u64, u64)>,
    pub(super) access: StoreAccess,
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
    /// the directory, or ranks have another [`Content`],
    /// [`OtherOptions`](super::OtherOptions) or [`OtherParameters`](super::OtherParameters),
    /// or open it in another way; [`Error::Options`] if a parameter or a buffer has a name that
    /// checkpoints reserve; [`Error::Comm`] if the communication fails.
    pub fn open(
        model: &ShardedModel,
        directory: &Path,
        options: CheckpointOptions,
    ) -> Result<Self, Error> {
        Self::opened(model, directory, options, StoreAccess::of_writer(model))
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
        Self::opened(model, directory, options, StoreAccess::Read)
    }

    fn opened(
        model: &ShardedModel,
        directory: &Path,
        options: CheckpointOptions,
        access: StoreAccess,
    ) -> Result<Self, Error> {
        let context = &model.engine.context;
        check_names(model)?;
        let together = JointOperation::new(context, "opening checkpoints", model.committed_steps());
        let number = agree(together, &access, &options, model.engine.state().opened)?;
        let CheckpointOptions { keep, holder, files, content, other_options, other_parameters } =
            options;
        let wanted = LoadWanted { content, other_options, other_parameters };
        let store = Store::new(directory, files).keeping(keep);
        let takes_lease = access.is_writer() && together.is_first();
        let lease = || takes_lease.then(|| store.lease(&holder)).transpose();
        let lease = together.run(|| lease().map_err(refused))?;
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
            wanted,
            frozen: None,
            access,
        })
    }

    /// This rank's part of the digest of the frozen parameters, if checkpoints leave these out.
    /// Collective over the model's world.
    pub(super) fn frozen_part(
        &mut self,
        model: &ShardedModel,
        together: JointOperation<'_>,
    ) -> Result<Option<u64>, Error> {
        if self.wanted.content == Content::All {
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
                let site = together.site();
                let kept = |unit: UnitId| shards[unit.index()].on_host(site);
                Ok(frozen::part(site, kept, is_frozen)?)
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

impl Checkpoints {
    /// Removes the checkpoints of all later steps than `step`, and returns their steps: a run that
    /// has gone back to an earlier checkpoint cannot save before the last of these otherwise. The
    /// checkpoint of `step` must be there. If the program ends meanwhile, the checkpoints that are
    /// left are whole, and the same call removes the rest. The call waits for a save in the
    /// background that is under way.
    ///
    /// ```
    /// use hsdp::checkpoint::Checkpoints;
    /// use hsdp::prelude::*;
    ///
    /// /// Goes back to an earlier checkpoint, and gives the later ones up.
    /// fn go_back(
    ///     checkpoints: &mut Checkpoints,
    ///     model: &mut ShardedModel,
    ///     adamw: &mut AdamW,
    ///     step: u64,
    /// ) -> Result<(), hsdp::Error> {
    ///     let resumed = checkpoints.load(model, adamw, step)?;
    ///     if !resumed.later.is_empty() {
    ///         checkpoints.discard_after(model, step)?;
    ///     }
    ///     Ok(())
    /// }
    /// ```
    ///
    /// Collective over the model's world. `step` is the same on all ranks.
    ///
    /// # Errors
    /// [`Error::Checkpoint`] on all ranks if there is no checkpoint of `step` that can be opened,
    /// or ranks have given different steps: then nothing is removed; and if rank 0 cannot remove
    /// one. [`Error::Misuse`] if the checkpoints were opened by [`read_only`](Self::read_only). The
    /// errors of an earlier save and of the communication, as for [`save`](Self::save).
    pub fn discard_after(&mut self, model: &ShardedModel, step: u64) -> Result<Vec<u64>, Error> {
        let operation = "discarding checkpoints";
        self.check_writer(model, operation)?;
        self.settle(model)?;
        let context = &model.engine.context;
        let together =
            JointOperation::new(context, operation, model.committed_steps()).about(self.number);
        together.compare_word(step, |here, there, other| {
            format!("those after step {here} here, and after step {there} on rank {other}")
        })?;
        let lease = &self.lease;
        let discard = || lease.as_ref().map(|lease| lease.lock().discard_after(step)).transpose();
        // Also if it fails: some of the later ones may be gone by then.
        self.made = self.made.take().filter(|made| made.identity.step <= step);
        let discarded = together.run(|| Ok(discard()?))?.unwrap_or_default();
        together.list_of_first(&discarded)
    }

    /// Returns the steps of checkpoints that are later than `step`, as rank 0 sees them.
    /// Collective.
    ///
    /// # Errors
    /// [`Error::Checkpoint`] if ranks have given different steps, or rank 0 cannot read the folder;
    /// [`Error::Comm`].
    pub(super) fn later_than(&self, model: &ShardedModel, step: u64) -> Result<Vec<u64>, Error> {
        // The step that is loaded is in the tags of what follows, so that it cannot differ there.
        self.loading(model, model.committed_steps()).compare_word(step, |here, there, other| {
            format!("the checkpoint of step {here} here, and of step {there} on rank {other}")
        })?;
        let together = self.loading(model, step);
        let steps = together.run(|| {
            let steps = if together.is_first() { self.store.steps()? } else { Vec::new() };
            Ok(steps.into_iter().filter(|it| *it > step).collect::<Vec<_>>())
        })?;
        together.list_of_first(&steps)
    }

    /// Warns on rank 0 that later checkpoints keep this job from saving.
    pub(super) fn told_of_later(&self, model: &ShardedModel, loaded: Resumed) -> Resumed {
        if let (true, 0, Some(last)) =
            (self.access.is_writer(), model.rank().index(), loaded.later.last())
        {
            hsdp_warnings::warn!(
                later = ?loaded.later,
                "there are later checkpoints than that of step {}, which was loaded: no save \
                 succeeds up to step {last}, unless \
                 `Checkpoints::discard_after` removes them",
                loaded.step
            );
        }
        loaded
    }
}

/// # Errors
/// [`Error::Options`] if a parameter or a buffer has a name that checkpoints reserve.
fn check_names(model: &ShardedModel) -> Result<(), Error> {
    let is_reserved = |name: &str| name == RESERVED || name.starts_with(STATE);
    match model.plan().spec().tensors().find(|tensor| is_reserved(&tensor.name)) {
        None => Ok(()),
        Some(Param { name, buffer, .. }) => {
            let kind = if buffer.is_some() { "buffer" } else { "parameter" };
            let what = format!(
                "{kind} `{name}`: checkpoints reserve names that begin with `{STATE}`, and the \
                 name `{RESERVED}`"
            );
            Err(Error::Options { what })
        }
    }
}

/// Rights of an opening of checkpoints.
#[derive(Debug)]
pub(super) enum StoreAccess {
    /// Load, save and remove. The model knows by the handle that its checkpoints are saved.
    Write(#[expect(dead_code, reason = "it is counted")] Arc<()>),
    /// Load.
    Read,
}

impl StoreAccess {
    fn of_writer(model: &ShardedModel) -> Self {
        Self::Write(Arc::clone(&model.engine.context.checkpoint_writers))
    }

    pub(super) fn is_writer(&self) -> bool {
        matches!(self, Self::Write(_))
    }
}

/// Compares how ranks open checkpoints, and returns the number of these: the largest that is free
/// on all ranks, after `opened` on this one. A rank alone may have failed to open earlier ones.
///
/// # Errors
/// [`Error::Checkpoint`] if only some ranks may write, or ranks have other options;
/// [`Error::Comm`].
fn agree(
    together: JointOperation<'_>,
    access: &StoreAccess,
    options: &CheckpointOptions,
    opened: u32,
) -> Result<u32, Error> {
    let CheckpointOptions { content, other_options, other_parameters, .. } = options;
    let access = u64::from(access.is_writer());
    let opened = u64::from(opened);
    let words = [*content as u64, *other_options as u64, *other_parameters as u64];
    let [content, other_options, other_parameters] = words;
    let said = together.tell([access, content, other_options, other_parameters, opened])?;
    let said = |word: usize| said.iter().map(|words| words[word]).collect::<Vec<_>>();
    together.check_same(&said(0), |here, there, other| {
        let [here, there] = [here, there].map(|is_writer| match is_writer {
            0 => "for reading alone",
            _ => "to save",
        });
        format!("the checkpoints are opened {here}, and on rank {other} {there}")
    })?;
    for (word, name) in [
        (1, "the content of its checkpoints"),
        (2, "its choice of other options"),
        (3, "its choice of other parameters"),
    ] {
        let text = |_, _, other| format!("{name} is another than on rank {other}");
        together.check_same(&said(word), text)?;
    }
    let number = said(4).into_iter().max().unwrap_or(0);
    Ok(u32::try_from(number).unwrap_or(u32::MAX))
}

/// Returns the problem of a lease that was refused, with another way to load.
fn refused(error: StoreError) -> Problem {
    let is_for_readers = match &error {
        StoreError::Leased { .. } => true,
        StoreError::Io { source, .. } => matches!(
            source.kind(),
            std::io::ErrorKind::PermissionDenied | std::io::ErrorKind::ReadOnlyFilesystem
        ),
        _ => false,
    };
    let problem = Problem::from(error);
    match is_for_readers {
        true => Problem::lasting(format!(
            "{}; `Checkpoints::read_only` loads without the right to write",
            problem.what
        )),
        false => problem,
    }
}

/// Refuses a call that does not fit the model's state. The other ranks get the reason.
///
/// # Errors
/// [`Error::Misuse`] within a step, while its gradients exist, inside
/// [`ShardedModel::with_shards`], or if the optimizer was made for another model, or consists of
/// two of one kind.
pub(super) fn check_optimizer<O: Checkpointed>(
    model: &ShardedModel,
    optimizer: &O,
    operation: &'static str,
) -> Result<(), Error> {
    control::between_steps(model.world(), model.committed_steps(), || {
        model.check_between_steps(operation)?;
        check_state(model, optimizer, operation)
    })
}

/// Checks that a checkpoint can tell the tensors of optimizers apart, and has the state of all
/// trainable parameters.
///
/// # Errors
/// [`Error::Misuse`].
fn check_state<O: Checkpointed>(
    model: &ShardedModel,
    optimizer: &O,
    operation: &'static str,
) -> Result<(), Error> {
    let problem = if optimizer.is_of(model.id()) {
        let all = [twice(model, optimizer), unclear(optimizer), partial(model, optimizer)];
        all.into_iter().flatten().next()
    } else {
        Some("the optimizer was made for another model".to_owned())
    };
    let refuse = |what| Err(model.engine.context.misuse(operation, model.committed_steps(), what));
    problem.map_or(Ok(()), refuse)
}

fn twice<O: Checkpointed>(model: &ShardedModel, optimizer: &O) -> Option<String> {
    let kind = optimizer.head(model.plan().spec()).kind;
    let mut kinds = BTreeSet::new();
    let twice = kind.split(AND).find(|kind| !kinds.insert(*kind))?;
    Some(format!("two optimizers are {twice}: {ONE_OF_EACH_KIND}"))
}

fn unclear<O: Checkpointed>(optimizer: &O) -> Option<String> {
    let is_name = |kind: &str| kind.chars().all(|it| it.is_ascii_alphanumeric() || it == '_');
    let mut kinds = BTreeSet::new();
    let mut all = optimizer.kinds().into_iter();
    let unclear = all.find(|kind| !is_name(kind) || !kinds.insert(*kind))?;
    Some(format!(
        "state of kind `{}`: a checkpoint needs a name of letters, digits and `_` that no other \
         optimizer of the update has",
        unclear.escape_debug()
    ))
}

/// One optimizer has updated all trainable parameters, or has no state. Several may each have
/// updated some. A parameter that is updated need not have state.
fn partial<O: Checkpointed>(model: &ShardedModel, optimizer: &O) -> Option<String> {
    let spec = model.plan().spec();
    let OptimizerHead { kind, updates, .. } = optimizer.head(spec);
    let state: BTreeSet<ParamId> = optimizer.tensors().iter().map(|it| it.parameter).collect();
    let is_known = |id, param: &Param| state.contains(&id) || updates.contains_key(&param.name);
    let all = || spec.params().filter(|(_, param)| param.role == Role::Trainable);
    let trainable = all().count();
    let updated = all().filter(|(id, param)| is_known(*id, param)).count();
    if kind.contains(AND) || state.is_empty() || updated == trainable {
        return None;
    }
    Some(format!(
        "{kind} has updated {updated} of {trainable} trainable parameters: a checkpoint needs all \
         optimizers of the update, as a pair"
    ))
}
