//! Saves the run's checkpoints, and resumes from one.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use hsdp::checkpoint::format::{Disk, Store};
use hsdp::checkpoint::{CheckpointOptions, Checkpointed, Checkpoints, Content, Saved};
use hsdp::{Channel, Error, ShardedModel, Tag};
use serde_json::{Map, Value, json};

use super::Training;
use super::evaluation::{Evaluations, Past};
use crate::failure::Failure;
use crate::folder::{BEST, CHECKPOINTS, cannot_write};
use crate::options::RunOptions;
use crate::setup::refused;

/// Number of best checkpoints that are kept. The newest of them is the best.
const KEPT_BEST: usize = 2;

/// Key of the past evaluations in the user's part of a checkpoint.
const EVALUATIONS: &str = "evaluations";

#[derive(Debug)]
pub(crate) struct RunSaving {
    checkpoints: Checkpoints,
    best: Option<Checkpoints>,
    /// Folder of the best checkpoints, if they are saved.
    best_folder: Option<PathBuf>,
    content: Content,
    every: u64,
    batches: Value,
    /// Error of the last save, if it failed. A later successful save clears it.
    unsaved: Option<Error>,
    /// Error of the last save of the best model, if it failed.
    best_unsaved: Option<Error>,
}

impl RunSaving {
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
        if training.batches.get(EVALUATIONS).is_some() {
            return Err(Failure::work(format!("Training::batches has the key {EVALUATIONS}")));
        }
        let best = out.join(BEST);
        // With `--resume` the folder is opened when the step is known.
        let is_open = saves_best && !options.resume;
        Ok(Some(Self {
            checkpoints: open(&out.join(CHECKPOINTS), options.keep)?,
            best: is_open.then(|| open(&best, KEPT_BEST)).transpose()?,
            best_folder: saves_best.then_some(best),
            content: training.content,
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
    /// checkpoint belongs to a run with other batches.
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
        let Some(resumed) = loaded else { return self.resume_best(model, 0, evaluations) };
        let no_keys = Map::new();
        let [own, saved] =
            [&self.batches, &resumed.user].map(|it| it.as_object().unwrap_or(&no_keys));
        let names: BTreeSet<&String> = own.keys().chain(saved.keys()).collect();
        for what in names.into_iter().filter(|name| *name != EVALUATIONS) {
            let of = |map: &Map<_, _>| map.get(what).cloned().unwrap_or_default();
            let [value, saved] = [own, saved].map(of);
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
        self.resume_best(model, resumed.step, evaluations)
    }

    /// Opens the folder of best checkpoints, if they are saved. Removes those of steps after
    /// `step`, because this run repeats these steps and may save better ones. If none remains, the
    /// next evaluation is the best one. Collective.
    fn resume_best(
        &mut self,
        model: &ShardedModel,
        step: u64,
        evaluations: &mut Evaluations,
    ) -> Result<(), Failure> {
        let Some(folder) = &self.best_folder else { return Ok(()) };
        // Number of remaining checkpoints and step of the newest one, according to rank 0.
        let mut own = vec![0, 0];
        if model.rank().index() == 0 {
            let store = Store::new(folder, Arc::new(Disk));
            let mut steps = if folder.exists() { store.steps()? } else { Vec::new() };
            steps.retain(|it| *it <= step);
            own = vec![steps.len() as u64, steps.into_iter().max().unwrap_or_default()];
            if own[0] == 0 && folder.exists() {
                hsdp_warnings::warn!(
                    "the best checkpoints in {} are removed: they are of steps after step {step}, \
                     from which the run goes on",
                    folder.display()
                );
                fs::remove_dir_all(folder).map_err(|error| cannot_write(folder, &error))?;
            }
        }
        let group = model.world().world_group(Channel::User);
        let of_first = group.all_gather(Tag::default(), own)?.wait()?;
        let left = of_first[0];
        let newest = of_first[1];
        let with =
            CheckpointOptions { keep: KEPT_BEST, content: self.content, ..Default::default() };
        let mut best = Checkpoints::open(model, folder, with)?;
        if left == 0 {
            evaluations.set_best(None);
        } else {
            best.discard_after(model, newest)?;
        }
        self.best = Some(best);
        Ok(())
    }

    /// Saves after a step: in the background if a checkpoint is due, or before returning if the run
    /// ends. Collective.
    ///
    /// A failed save does not end the run, because the next one may succeed: see
    /// [`unsaved`](Self::unsaved).
    pub(crate) fn after_step<O: Checkpointed>(
        &mut self,
        model: &ShardedModel,
        optimizer: &O,
        evaluations: &Evaluations,
        ends: StepEnds,
    ) -> Result<(), Failure> {
        if ends == StepEnds::No && !model.committed_steps().is_multiple_of(self.every) {
            let ended = self.checkpoints.poll(model);
            return self.note(ended).map(drop);
        }
        self.finish_earlier(model)?;
        let user = self.user(evaluations);
        let saved = match ends {
            StepEnds::Yes => self.checkpoints.save(model, optimizer, &user).map(Some),
            StepEnds::No => {
                let begun = self.checkpoints.save_in_background(model, optimizer, &user);
                warn_of(&begun, model);
                begun.map(|()| None)
            }
        };
        self.note(saved).map(drop)
    }

    /// Saves the best model so far, if the options ask for that. Collective.
    ///
    /// A failed save does not end the run: see [`unsaved`](Self::unsaved).
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

    /// Describes a checkpoint that was not saved, with the reason: the last one, or the best one.
    /// The run then ends with exit code 1.
    pub(crate) fn unsaved(&self) -> Option<String> {
        let of = |what, error: &Error| format!("the {what} checkpoint was not saved: {error}");
        let last = self.unsaved.as_ref().map(|error| of("last", error));
        last.or_else(|| self.best_unsaved.as_ref().map(|error| of("best", error)))
    }

    /// Returns the user's part of a checkpoint.
    fn user(&self, evaluations: &Evaluations) -> Value {
        let mut user = self.batches.clone();
        if evaluations.past() != Past::default() {
            user[EVALUATIONS] = json!(evaluations.past());
        }
        user
    }

    /// Collects the results of earlier saves, so that an error of the next call belongs to the save
    /// that it begins.
    fn finish_earlier(&mut self, model: &ShardedModel) -> Result<(), Failure> {
        loop {
            let ended = self.checkpoints.finish(model);
            if !self.note(ended)? {
                return Ok(());
            }
        }
    }

    /// Records the result of a save. Returns whether a save had ended.
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

/// Warns if a save could not begin. The library warns if it fails later.
fn warn_of<T>(begun: &Result<T, Error>, model: &ShardedModel) {
    if let Err(error @ Error::Checkpoint { .. }) = begun
        && model.rank().index() == 0
    {
        hsdp_warnings::warn!(%error, "a checkpoint failed: training goes on without it");
    }
}

/// Whether the run ends after a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum StepEnds {
    /// The run goes on.
    No,
    /// A signal arrived, all steps are done, or evaluations have not improved.
    Yes,
}
