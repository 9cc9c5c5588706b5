//! The run: the loop over steps with its checkpoints, evaluations, files and report.

mod costs;
mod evaluation;
mod progress;
mod report;
mod saving;

use std::time::{Duration, Instant};

use hsdp::checkpoint::{Checkpointed, Content};
use hsdp::{
    Channel, Gradients, ModelSpec, Norms, Pass, Placement, Plan, Reduction, ShardedModel, Shutdown,
    StepOptions, Tag, Update,
};
use serde_json::Value;
use tracing::info_span;
use tracing::span::EnteredSpan;

pub use self::evaluation::Better;
pub use self::progress::bar;
pub use self::report::Report;
pub(crate) use self::report::RunEnd;

use self::costs::{Counted, RankCosts};
use self::evaluation::Evaluations;
use self::progress::{RunProgress, StepNorms, after_update, before_update};
use self::saving::{RunSaving, StepEnds};
use crate::failure::Failure;
use crate::folder::{StepRecord, keep_warnings};
use crate::memory::{Need, product};
use crate::options::{EvaluationOptions, Place, RunOptions};
use crate::setup::Setup;

/// Settings of a run that the program chooses rather than its user.
#[derive(Clone, Debug)]
pub struct Training {
    /// Total number of steps, including those before the run was resumed.
    pub steps: u64,
    /// Values that determine the batches of a step besides its number and the mesh, as an object.
    /// Checkpoints store them, and a run with other values cannot resume from them.
    pub batches: Value,
    /// Parameters that checkpoints contain.
    pub content: Content,
    /// Tokens in a microbatch on a rank, for `tokens` in the metrics. If `None`, the items of the
    /// loss on all ranks count.
    pub tokens: Option<u64>,
    /// Approximate weight of a microbatch on a rank: see [`StepOptions::weight_hint`].
    pub weight_hint: Option<u64>,
    /// Name of the loss, on the axis of its plot.
    pub loss: &'static str,
    /// Options of evaluations: see [`Run::evaluate`].
    pub evaluation: EvaluationOptions,
    /// Order of evaluations.
    pub better: Better,
}

impl Training {
    /// Returns a run of `steps` steps whose batches depend on the step and the rank alone.
    #[must_use]
    pub fn of_steps(steps: usize) -> Self {
        Self {
            steps: steps as u64,
            batches: Value::Object(serde_json::Map::new()),
            content: Content::All,
            tokens: None,
            weight_hint: None,
            loss: "loss",
            evaluation: EvaluationOptions::default(),
            better: Better::Lower,
        }
    }
}

/// A run on one rank. All methods are collective: all ranks call them in the same order.
///
/// A step is [`next_step`](Self::next_step), [`gradients`](Self::gradients),
/// [`update`](Self::update), and [`evaluate`](Self::evaluate) if the program evaluates its model.
#[derive(Debug)]
pub struct Run<'a, O> {
    /// The trained model.
    pub model: ShardedModel,
    /// The optimizer, or several of them.
    pub optimizer: O,
    setup: Setup<'a>,
    training: Training,
    saving: Option<RunSaving>,
    evaluations: Evaluations,
    /// Progress bar and files, on rank 0.
    progress: Option<RunProgress<'a>>,
    counted: Counted,
    /// Costs of the steps, recorded before the program works on the model after the last step.
    costs: Option<RankCosts>,
    /// Number of the next step.
    next: u64,
    step: Option<RunStep>,
    /// Whether a signal has ended the run.
    was_stopped: bool,
}

/// State of the current step.
#[derive(Debug)]
struct RunStep {
    number: u64,
    stage: RunStage,
    shutdown: Shutdown,
    /// Time spent in `gradients` and `update`.
    time: Duration,
    evaluation: Option<f64>,
    _span: EnteredSpan,
}

#[derive(Debug)]
enum RunStage {
    Begun,
    Reduced { loss: f64, grad_norm: f64, tokens: u64, norms: Option<Norms> },
    Updated(StepRecord, Option<StepNorms>),
}

impl<'a> Setup<'a> {
    /// Begins the run: opens the folder of checkpoints, and loads the newest one with `--resume`.
    /// **Collective** over the world.
    ///
    /// # Errors
    /// [`Failure::Input`] on rank 0 and [`Failure::Elsewhere`] on the others if a checkpoint cannot
    /// be loaded, or belongs to a run with other [`Training::batches`]. Errors of
    /// [`Checkpoints::open`](hsdp::checkpoint::Checkpoints::open).
    pub fn start<O: Checkpointed>(
        self,
        mut model: ShardedModel,
        mut optimizer: O,
        training: Training,
    ) -> Result<Run<'a, O>, Failure> {
        let options = self.options();
        let mut evaluations = Evaluations::new(training.evaluation.clone(), training.better);
        training.evaluation.check().map_err(|problem| self.refused(problem))?;
        let Training { steps, batches, content, evaluation, better, .. } = &training;
        let compared = format!("{steps} steps, {batches}, {content:?}, {evaluation:?}, {better:?}");
        self.compare("training", &compared)?;
        let mut saving = RunSaving::open(&model, options, &training)?;
        if let Some(saving) = saving.as_mut().filter(|_| options.resume) {
            saving.resume(&mut model, &mut optimizer, &mut evaluations)?;
        }
        let first = model.committed_steps();
        let progress = self.is_first().then(|| RunProgress::new(training.steps, &self));
        let mut run = Run {
            model,
            optimizer,
            setup: self,
            training,
            saving,
            evaluations,
            progress,
            counted: Counted::default(),
            costs: None,
            next: first,
            step: None,
            was_stopped: false,
        };
        if run.goes_on(first) {
            keep_warnings(run.model.world(), options, run.setup.warnings())?;
            if let Some(progress) = &mut run.progress {
                progress.start(first)?;
            }
            match first {
                _ if !options.resume => {}
                0 => run.setup.tell("there is no checkpoint: the run begins at step 0"),
                made => run.setup.tell(format_args!("resumes after step {made}")),
            }
        }
        Ok(run)
    }
}

impl<'a, O: Checkpointed> Run<'a, O> {
    /// Ends the step before, and returns the number of the next one, from 0. Ending a step records
    /// it, and saves a checkpoint if one is due. Returns `None` after the last step, after a
    /// signal, and when evaluations no longer improve.
    ///
    /// # Errors
    /// Errors of files, and errors of saving that no later save can repair. [`Failure::Work`] if
    /// the step before was not updated, or lacks an [evaluation](Self::evaluate) that was due.
    pub fn next_step(&mut self) -> Result<Option<u64>, Failure> {
        if let Some(step) = self.step.take() {
            self.end(step)?;
        }
        let number = self.next;
        if self.was_stopped || !self.goes_on(number) {
            if self.costs.is_none() {
                let microbatches = self.setup.options().microbatches;
                self.costs = Some(self.counted.costs(&self.model, microbatches)?);
            }
            return Ok(None);
        }
        self.step = Some(RunStep {
            number,
            stage: RunStage::Begun,
            shutdown: Shutdown::NotAsked,
            time: Duration::ZERO,
            evaluation: None,
            _span: info_span!("step", step = number).entered(),
        });
        Ok(Some(number))
    }

    /// Computes the gradients of the step: runs `microbatch` for each microbatch of this rank, and
    /// reduces the gradients. `microbatch` must finish its pass.
    ///
    /// # Errors
    /// The error of `microbatch`; errors of [`ShardedModel::begin_step`] and of
    /// [`Step::finish`](hsdp::Step::finish). [`Failure::Work`] if no step has begun.
    pub fn gradients<E: Into<Failure>>(
        &mut self,
        mut microbatch: impl FnMut(Pass<'_>, Place) -> Result<(), E>,
    ) -> Result<Gradients, Failure> {
        let begin = Instant::now();
        let number = match &self.step {
            Some(RunStep { number, stage: RunStage::Begun, .. }) => *number,
            _ => return Err(out_of_order("gradients", "next_step")),
        };
        let rank = self.model.rank();
        let count = self.options().microbatches;
        let asked = self.setup.is_interrupted();
        self.counted.begin(self.model.world());
        let mut step = self.model.begin_step(StepOptions {
            weight_hint: self.training.weight_hint,
            shutdown: if asked { Shutdown::Asked } else { Shutdown::NotAsked },
            ..StepOptions::microbatches(count)
        })?;
        let shutdown = step.shutdown();
        for index in 0..count {
            let place = Place { step: number, microbatch: index, rank };
            microbatch(step.microbatch()?, place).map_err(Into::into)?;
        }
        let span = info_span!("finish").entered();
        let gradients = step.finish()?;
        drop(span);
        let time = begin.elapsed();
        let loss = gradients.loss();
        let grad_norm = gradients.norm();
        let ranks = self.model.world().size() as u64;
        let tokens = match self.training.tokens {
            Some(tokens) => tokens * count as u64 * ranks,
            None => gradients.weight(),
        };
        let is_measured = self.options().norms_every.is_some_and(|n| number % n as u64 == 0);
        let (gradients, norms) = before_update(&self.model, gradients, is_measured)?;
        if let Some(step) = &mut self.step {
            step.stage = RunStage::Reduced { loss, grad_norm, tokens, norms };
            step.shutdown = shutdown;
            step.time += time;
        }
        Ok(gradients)
    }

    /// Updates the parameters with `update`, which receives the model and the optimizer.
    ///
    /// # Errors
    /// The error of `update`. [`Failure::Work`] if the step has no gradients.
    pub fn update<E: Into<Failure>>(
        &mut self,
        update: impl FnOnce(&mut ShardedModel, &mut O) -> Result<Update, E>,
    ) -> Result<Update, Failure> {
        let Some(step) = &mut self.step else { return Err(out_of_order("update", "gradients")) };
        let RunStage::Reduced { loss, grad_norm, tokens, ref mut norms } = step.stage else {
            return Err(out_of_order("update", "gradients"));
        };
        let norms = norms.take();
        let begin = Instant::now();
        let span = info_span!("optimizer").entered();
        let updated = update(&mut self.model, &mut self.optimizer).map_err(Into::into)?;
        drop(span);
        step.time += begin.elapsed();
        let seconds = step.time.as_secs_f64();
        let norms = after_update(&self.model, norms)?;
        let applied = updated == Update::Applied;
        let record = StepRecord { step: step.number, loss, grad_norm, tokens, seconds, applied };
        step.stage = RunStage::Updated(record, norms);
        self.counted.end(self.model.world(), &updated);
        Ok(updated)
    }

    /// Evaluates the model after the update if an evaluation is due: at the interval of
    /// [`EvaluationOptions`], and after the last step. `evaluate` must return a number that is
    /// equal on all ranks. It is written to the metrics as `evaluation`. The best model is saved,
    /// and a run whose evaluations no longer improve ends, if [`EvaluationOptions`] ask for that. A
    /// NaN is a warning, and counts as not better.
    ///
    /// A program with these options calls this method in each step.
    ///
    /// # Errors
    /// The error of `evaluate`. [`Failure::Work`] if the step was not updated, or is evaluated
    /// twice, or if `evaluate` returns a number after it has dropped an evaluation before its end;
    /// [`Failure::Peer`] if the number is not equal on all ranks.
    pub fn evaluate<E: Into<Failure>>(
        &mut self,
        evaluate: impl FnOnce(&mut ShardedModel, &mut O) -> Result<f64, E>,
    ) -> Result<Option<f64>, Failure> {
        let Some(RunStep { number, stage: RunStage::Updated(..), evaluation: None, .. }) =
            self.step
        else {
            return Err(out_of_order("evaluate", "update, and evaluate once after it,"));
        };
        let Some(due) = self.evaluations.due(number + 1, self.training.steps) else {
            return Ok(None);
        };
        let span = info_span!("evaluation").entered();
        let epoch = self.model.world().epoch();
        self.counted.begin_evaluation(&self.model)?;
        let value = evaluate(&mut self.model, &mut self.optimizer).map_err(Into::into)?;
        self.counted.end_evaluation(self.model.world());
        drop(span);
        if self.model.world().epoch() != epoch {
            // The other ranks fail in their evaluation, and would not take part in the comparison.
            let rank = self.model.rank();
            let made = number + 1;
            return Err(Failure::work(format!(
                "evaluate after step {made} on rank {rank}: the evaluation was dropped before \
                 its mean or its finish, or another operation failed, and evaluate has returned \
                 {value}: end the evaluation, or return an error"
            )));
        }
        let compared = format!("{value}");
        self.model.world().compare("evaluation", &compared)?;
        if value.is_nan() && self.setup.is_first() {
            let made = number + 1;
            hsdp_warnings::warn!(
                "the evaluation after step {made} is NaN, and counts as not better"
            );
        }
        let is_best = self.evaluations.add(value, due);
        if let Some(step) = &mut self.step {
            step.evaluation = Some(value);
        }
        if let Some(saving) = self.saving.as_mut().filter(|_| is_best) {
            saving.save_best(&self.model, &self.optimizer, &self.evaluations)?;
        }
        Ok(Some(value))
    }

    /// Ends the run on all ranks, and returns its report. The model and the optimizer remain
    /// usable.
    ///
    /// # Errors
    /// Errors of [`ShardedModel::end_run`].
    pub fn finish(&mut self) -> Result<Report, Failure> {
        match (self.next_step()?, self.costs.take()) {
            (None, Some(costs)) => Report::of(self, costs),
            _ => Err(out_of_order("finish", "next_step, until it returns None")),
        }
    }

    fn options(&self) -> &'a RunOptions {
        self.setup.options()
    }

    /// Describes why the run makes no further step.
    fn reason(&self) -> String {
        let made = self.next;
        let steps = self.training.steps;
        if self.was_stopped {
            format!("a signal has ended the run after step {made} of {steps}")
        } else if made == steps {
            format!("all {steps} steps are made")
        } else if made > steps {
            format!("all {steps} steps are made: the checkpoint is of step {made}")
        } else {
            let since = self.evaluations.past().since;
            format!("ended after step {made} of {steps}: {since} evaluations were not better")
        }
    }

    /// Returns whether step `number` is to follow, signals aside.
    fn goes_on(&self, number: u64) -> bool {
        number < self.training.steps && !self.evaluations.is_enough()
    }

    /// Records a step, and saves a checkpoint if one is due.
    fn end(&mut self, step: RunStep) -> Result<(), Failure> {
        let RunStep { number, stage, shutdown, evaluation, .. } = step;
        let RunStage::Updated(record, norms) = stage else {
            return Err(out_of_order("next_step", "update"));
        };
        if evaluation.is_none() && self.evaluations.due(number + 1, self.training.steps).is_some() {
            let before = format!("evaluate, which is due after step {},", number + 1);
            return Err(out_of_order("next_step", &before));
        }
        if let Some(progress) = &mut self.progress {
            progress.add(record, norms, evaluation)?;
        }
        self.next = number + 1;
        // A signal after the last step ends no run.
        self.was_stopped = shutdown == Shutdown::Asked && self.goes_on(self.next);
        let ends =
            if self.was_stopped || !self.goes_on(self.next) { StepEnds::Yes } else { StepEnds::No };
        match &mut self.saving {
            Some(saving) => {
                saving.after_step(&self.model, &self.optimizer, &self.evaluations, ends)
            }
            None => Ok(()),
        }
    }

    /// Returns the number of warnings on all ranks. Collective.
    fn count_warnings(&self) -> Result<u64, Failure> {
        let world = self.model.world();
        // Ranks of one process share a count of warnings.
        let counts = !world.shares_memory() || world.rank().index() == 0;
        let own = vec![if counts { self.setup.warnings().count() } else { 0 }];
        let group = world.world_group(Channel::User);
        Ok(group.all_reduce(Tag::default(), Reduction::Sum, own)?.wait()?[0])
    }
}

/// Returns the failure of a program that calls the methods of a run out of order.
fn out_of_order(called: &str, before: &str) -> Failure {
    Failure::work(format!("{called} was called out of order: call {before} before it"))
}

impl Need {
    /// Returns the memory of a run of `steps` steps in this process: a record of each step, and the
    /// sharded model of each rank here. Memory on a device is not counted.
    ///
    /// # Errors
    /// [`Failure::Input`] if the mesh or the options cannot have this model.
    pub fn of_run(options: &RunOptions, spec: ModelSpec, steps: usize) -> Result<Self, Failure> {
        let plan = Plan::new(spec, options.mesh, options.model().plan_options());
        let plan = plan.map_err(Failure::input)?;
        let records = product(&[steps, size_of::<StepRecord>()]);
        let need = Self::default().with("a record of each step", records);
        let model = plan.memory().total().get().saturating_mul(options.ranks_here() as u64);
        Ok(match options.device {
            Placement::Host => need.with("the sharded model", model),
            _ => need,
        })
    }
}
