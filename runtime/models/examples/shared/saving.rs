//! Checkpoints of the run: when they are saved, and how the run resumes from one.

use std::io::ErrorKind;
use std::path::Path;

use hsdp::Error;
use hsdp::checkpoint::{CheckpointOptions, Checkpointed, Checkpoints, Content, Saved};
use hsdp::prelude::*;
use hsdp_program::file::{self, FileError};
use serde::Deserialize;
use serde_json::Value;

use super::agreement::told_once;
use super::failure::Failure;
use super::options::RunOptions;

/// The folder of checkpoints, in that of `--out`.
const FOLDER: &str = "checkpoints";

/// The run's checkpoints.
#[derive(Debug)]
pub(crate) struct Saving {
    checkpoints: Checkpoints,
    every: usize,
    recipe: Value,
    /// The error of the last save, if that failed. A later save that succeeds makes up for it.
    unsaved: Option<Error>,
}

impl Saving {
    /// Opens the run's folder of checkpoints, if the options ask for any. The `recipe` has the values that determine a step's batches,
    /// besides its number and the mesh. Collective.
    pub(crate) fn open(
        model: &ShardedModel,
        options: &RunOptions,
        (recipe, content): (Value, Content),
    ) -> Result<Option<Self>, Failure> {
        let Some(out) = &options.out else { return Ok(None) };
        if options.save_every.is_none() && !options.resume {
            return Ok(None);
        }
        let with = CheckpointOptions { content, ..CheckpointOptions::default() };
        let checkpoints = Checkpoints::open(model, &out.join(FOLDER), with)?;
        let every = options.save_every.unwrap_or(usize::MAX);
        Ok(Some(Self { checkpoints, every, recipe, unsaved: None }))
    }

    /// Loads the newest checkpoint, if there is one. Collective.
    ///
    /// # Errors
    /// One that rank 0 reports for all ranks: if no checkpoint can be loaded, or if the checkpoint is of a run with another recipe,
    /// whose batches differ from this run's.
    pub(crate) fn resume<O: Checkpointed>(
        &mut self,
        model: &mut ShardedModel,
        optimizer: &mut O,
    ) -> Result<(), Failure> {
        let world = model.world().clone();
        let loaded =
            self.checkpoints.load_latest(model, optimizer).map_err(|error| match error {
                Error::Checkpoint { .. } => told_once(&world, format!("--resume: {error}")),
                error => error.into(),
            })?;
        let Some(resumed) = loaded else { return Ok(()) };
        for (what, value) in self.recipe.as_object().into_iter().flatten() {
            let saved = &resumed.user[what];
            if saved != value {
                let problem = format!(
                    "--resume: the checkpoint of step {} was made with {what} {saved}, this run has {value}",
                    resumed.step
                );
                return Err(told_once(&world, problem));
            }
        }
        Ok(())
    }

    /// Saves after a step: in the background if a checkpoint is due, or before it returns if the run ends. Collective.
    ///
    /// A save that fails does not end the run, because the next one may succeed: see [`unsaved`](Self::unsaved).
    pub(crate) fn after_step<O: Checkpointed>(
        &mut self,
        (model, optimizer): (&ShardedModel, &O),
        ends: Ends,
    ) -> Result<(), Failure> {
        let step = usize::try_from(model.committed_steps()).map_err(Failure::training)?;
        if ends == Ends::No && !step.is_multiple_of(self.every) {
            let ended = self.checkpoints.poll(model);
            return self.note(ended).map(drop);
        }
        self.finish_earlier(model)?;
        let recipe = &self.recipe;
        let saved = match ends {
            Ends::Yes => self.checkpoints.save(model, optimizer, recipe).map(Some),
            Ends::No => {
                let begun = self.checkpoints.save_in_background(model, optimizer, recipe);
                warn_of(&begun, model);
                begun.map(|()| None)
            }
        };
        self.note(saved).map(drop)
    }

    /// The error of the last save that was asked for, if it has failed: the run then ends with exit code 1.
    pub(crate) fn unsaved(&self) -> Option<String> {
        self.unsaved.as_ref().map(Error::to_string)
    }

    /// Takes the results of earlier saves, so that an error of the next call is of the save that it begins.
    fn finish_earlier(&mut self, model: &ShardedModel) -> Result<(), Failure> {
        loop {
            let ended = self.checkpoints.finish(model);
            if !self.note(ended)? {
                return Ok(());
            }
        }
    }

    /// Notes how a save has ended. Returns whether one has.
    fn note(&mut self, ended: Result<Option<Saved>, Error>) -> Result<bool, Failure> {
        match ended {
            Ok(None) => return Ok(false),
            Ok(Some(_)) => self.unsaved = None,
            Err(error @ Error::Checkpoint { .. }) => self.unsaved = Some(error),
            Err(error) => return Err(error.into()),
        }
        Ok(true)
    }
}

/// Warns of a save that could not begin. The library warns of one that fails later.
fn warn_of(begun: &Result<(), Error>, model: &ShardedModel) {
    if let Err(error @ Error::Checkpoint { .. }) = begun
        && model.rank().index() == 0
    {
        tracing::warn!(%error, "a checkpoint failed: training goes on without it");
    }
}

/// Whether the run ends with a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Ends {
    /// The run goes on.
    No,
    /// A signal has ended the run, or all steps are made.
    Yes,
}

/// The most bytes of a line of `metrics.jsonl`: the norms of 80,000 parameters.
const MAX_LINE: u64 = 16 << 20;

/// The part of a line that says its step.
#[derive(Deserialize)]
struct OfStep {
    step: u64,
}

/// The complete lines of `metrics` that are of steps before `step`, without their ends; none if there is no such file. Other lines are left
/// out. They are read one at a time: with the norms of each step, all of them may exceed the memory.
pub(crate) fn lines_before(
    metrics: &Path,
    step: usize,
) -> Result<impl Iterator<Item = Result<Vec<u8>, Failure>> + use<>, Failure> {
    let lines = match file::lines(metrics, MAX_LINE) {
        _ if step == 0 => None,
        Err(FileError::Io { source, .. }) if source.kind() == ErrorKind::NotFound => None,
        lines => Some(lines.map_err(Failure::input)?),
    };
    let is_before = move |line: &Vec<u8>| {
        serde_json::from_slice(line).is_ok_and(|line: OfStep| line.step < step as u64)
    };
    let lines = lines.into_iter().flatten().map(|line| line.map_err(Failure::input));
    Ok(lines.filter(move |line| line.as_ref().map_or(true, is_before)))
}
