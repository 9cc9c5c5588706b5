//! The rights of an opening of checkpoints: all, or to read alone.

use std::sync::Arc;

use hsdp_checkpoint::Error as StoreError;

use super::settings::CheckpointOptions;
use super::together::Together;
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
