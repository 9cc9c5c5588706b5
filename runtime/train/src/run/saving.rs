//! Checkpoints of the run: when they are saved, and how the run resumes from one.

use std::path::Path;

use hsdp::checkpoint::{CheckpointOptions, Checkpointed, Checkpoints, Saved};
use hsdp::{Error, ShardedModel};
use serde_json::{Value, json};

use super::Training;
use super::evaluation::{Evaluations, Past};
use crate::failure::Failure;
use crate::folder::{BEST, CHECKPOINTS};
use crate::options::RunOptions;
use crate::ranks::refused;

/// Name of the evaluations so far, in the user's part of a checkpoint.
const EVALUATIONS: &str = "evaluations";

/// The run's checkpoints.
#[derive(Debug)]
pub(crate) struct Saving {
    checkpoints: Checkpoints,
    best: Option<Checkpoints>,
    every: u64,
    batches: Value,
    /// Error of the last save, if that failed. A later save that succeeds makes up for it.
    unsaved: Option<Error>,
    /// Error of the last save of the best model, if that failed.
    best_unsaved: Option<Error>,
}

impl Saving {
    /// Opens the run's folders of checkpoints, if the options ask for any. Collective.
    pub(crate) fn open(
        model: &ShardedModel,
        options: &RunOptions,
        training: &Training,
    ) -> Result<Option<Self>, Failure> {
        let saves_best = training.evaluation.save_best;
        let saves = options.save_every.is_some();
        if saves_best && !saves {
            return Err(Failure::input("--save-best needs --save-every"));
        }
        let Some(out) = options.out.as_ref().filter(|_| saves || options.resume) else {
            return Ok(None);
        };
        let open = |folder: &Path, keep| {
            let with = CheckpointOptions { keep, content: training.content, ..Default::default() };
            Checkpoints::open(model, folder, with)
        };
        Ok(Some(Self {
            checkpoints: open(&out.join(CHECKPOINTS), options.keep)?,
            best: saves_best.then(|| open(&out.join(BEST), 2)).transpose()?,
            every: options.save_every.map_or(u64::MAX, |every| every as u64),
            batches: training.batches.clone(),
            unsaved: None,
            best_unsaved: None,
        }))
    }

    /// Loads the newest checkpoint, if there is one. Collective.
    ///
    /// # Errors
    /// A failure that rank 0 reports for all ranks, if no checkpoint can be loaded, or if the
    /// checkpoint is of a run with other batches.
    pub(crate) fn resume<O: Checkpointed>(
        &mut self,
        model: &mut ShardedModel,
        optimizer: &mut O,
        evaluations: &mut Evaluations,
    ) -> Result<(), Failure> {
        let world = model.world().clone();
        let loaded = self.checkpoints.load_latest(model, optimizer);
        let loaded = loaded.map_err(|error| match error {
            Error::Checkpoint { .. } => refused(&world, format!("--resume: {error}")),
            error => error.into(),
        })?;
        let Some(resumed) = loaded else { return Ok(()) };
        for (what, value) in self.batches.as_object().into_iter().flatten() {
            let saved = &resumed.user[what];
            if saved != value {
                let problem = format!(
                    "--resume: the checkpoint of step {} was made with {what} {saved}, this run \
                     has {value}",
                    resumed.step
                );
                return Err(refused(&world, problem));
            }
        }
        let past: Option<Past> = serde_json::from_value(resumed.user[EVALUATIONS].clone())?;
        evaluations.resume(past.unwrap_or_default());
        // Better ones may come again, of steps that this run makes once more.
        if let Some(best) = &mut self.best {
            best.discard_after(model, resumed.step)?;
        }
        Ok(())
    }

    /// Saves after a step: in the background if a checkpoint is due, or before it returns if the run
    /// ends. Collective.
    ///
    /// A save that fails does not end the run, because the next one may succeed: see
    /// [`unsaved`](Self::unsaved).
    pub(crate) fn after_step<O: Checkpointed>(
        &mut self,
        model: &ShardedModel,
        optimizer: &O,
        evaluations: &Evaluations,
        ends: Ends,
    ) -> Result<(), Failure> {
        if ends == Ends::No && !model.committed_steps().is_multiple_of(self.every) {
            let ended = self.checkpoints.poll(model);
            return self.note(ended).map(drop);
        }
        self.finish_earlier(model)?;
        let user = self.user(evaluations);
        let saved = match ends {
            Ends::Yes => self.checkpoints.save(model, optimizer, &user).map(Some),
            Ends::No => {
                let begun = self.checkpoints.save_in_background(model, optimizer, &user);
                warn_of(&begun, model);
                begun.map(|()| None)
            }
        };
        self.note(saved).map(drop)
    }

    /// Saves the best model so far, if the options ask for that. Collective.
    ///
    /// A save that fails does not end the run: see [`unsaved`](Self::unsaved).
    pub(crate) fn save_best<O: Checkpointed>(
        &mut self,
        model: &ShardedModel,
        optimizer: &O,
        evaluations: &Evaluations,
    ) -> Result<(), Failure> {
        let user = self.user(evaluations);
        let Some(best) = &mut self.best else { return Ok(()) };
        let saved = best.save(model, optimizer, &user);
        warn_of(&saved, model);
        self.best_unsaved = match saved {
            Ok(_) => None,
            Err(error @ Error::Checkpoint { .. }) => Some(error),
            Err(error) => return Err(error.into()),
        };
        Ok(())
    }

    /// Returns the error of the last save that was asked for, if it has failed: the run then ends
    /// with exit code 1.
    pub(crate) fn unsaved(&self) -> Option<String> {
        self.unsaved.as_ref().or(self.best_unsaved.as_ref()).map(Error::to_string)
    }

    /// Returns the user's part of a checkpoint.
    fn user(&self, evaluations: &Evaluations) -> Value {
        let mut user = self.batches.clone();
        if evaluations.past() != Past::default() {
            user[EVALUATIONS] = json!(evaluations.past());
        }
        user
    }

    /// Takes the results of earlier saves, so that an error of the next call is of the save that it
    /// begins.
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
fn warn_of<T>(begun: &Result<T, Error>, model: &ShardedModel) {
    if let Err(error @ Error::Checkpoint { .. }) = begun
        && model.rank().index() == 0
    {
        hsdp_warnings::warn!(%error, "a checkpoint failed: training goes on without it");
    }
}

/// Whether the run ends with a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Ends {
    /// The run goes on.
    No,
    /// A signal has ended the run, all steps are made, or evaluations have not improved.
    Yes,
}
