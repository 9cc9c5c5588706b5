//! The rights of an opening of checkpoints: all, or to read alone; and the removal of later
//! checkpoints.

use std::sync::Arc;

use hsdp_checkpoint::Error as StoreError;

use super::together::Together;
use super::{CheckpointOptions, Checkpoints, Resumed};
use crate::agree::joint;
use crate::error::Error;
use crate::model::ShardedModel;
use crate::persist::problem::Problem;

/// Rights of an opening of checkpoints.
#[derive(Debug)]
pub(super) enum Access {
    /// Load, save and remove. The model knows by the handle that its checkpoints are saved.
    Write(#[expect(dead_code, reason = "it is counted")] Arc<()>),
    /// Load.
    Read,
}

impl Access {
    pub(super) fn of_writer(model: &ShardedModel) -> Self {
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
pub(super) fn agree(
    together: Together<'_>,
    access: &Access,
    options: &CheckpointOptions,
    opened: u32,
) -> Result<u32, Error> {
    let CheckpointOptions { content, other_options, other_parameters, .. } = options;
    let (access, opened) = (u64::from(access.is_writer()), u64::from(opened));
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
pub(super) fn refused(error: StoreError) -> Problem {
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
            Together::new(context, operation, model.committed_steps()).about(self.number);
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

    /// # Errors
    /// [`Error::Misuse`] on all ranks if these checkpoints were opened for reading alone.
    pub(super) fn check_writer(
        &self,
        model: &ShardedModel,
        operation: &'static str,
    ) -> Result<(), Error> {
        joint::run(model.world(), model.committed_steps(), || {
            if self.access.is_writer() {
                return Ok(());
            }
            let what = "these checkpoints were opened by `Checkpoints::read_only`: open them by \
                        `Checkpoints::open`, which takes the right to write";
            Err(model.engine.context.misuse(operation, model.committed_steps(), what.to_owned()))
        })
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
