//! Training: the work of each rank, and the launch of the ranks.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use candle_core::Device;
use hsdp::checkpoint::Content;
use hsdp::comm::Messages;
use hsdp::prelude::*;
use hsdp::{Gradients, Shutdown, Update};
use hsdp_candle::Pass;
use hsdp_models::gpt::{self, Gpt};
use hsdp_train::Warnings;
use parking_lot::Mutex;
use serde_json::json;
use tracing::info_span;

use super::inputs;
use super::options::Options;
use super::recipe;
use super::shared::costs::Costs;
use super::shared::ending::{self, Ended};
use super::shared::failure::Failure;
use super::shared::launch::{Outcome, Outcomes, launch};
use super::shared::messages::StepMessages;
use super::shared::norms::{self, StepNorms};
use super::shared::progress::{Progress, StepRecord};
use super::shared::ranks::Ranks;
use super::shared::recipe::model as model_options;
use super::shared::saving::{Ends, Saving};
use super::shared::signals::Signals;
use super::shared::{device, output};
use super::text::{Corpus, Place};
use super::update::MAX_NORM;
use super::verify::{Sharded, Twin, Verified};

/// The inputs of a training run.
#[derive(Debug)]
pub(crate) struct Job<'a> {
    pub(crate) options: &'a Options,
    pub(crate) corpus: &'a Corpus,
    pub(crate) gpt: Gpt,
    pub(crate) signals: Signals,
    pub(crate) warnings: &'a Warnings,
}

/// The results of a training run.
#[derive(Debug)]
pub(crate) struct Run {
    pub(crate) records: Vec<StepRecord>,
    /// By rank.
    pub(crate) costs: Vec<Costs>,
    /// The trained parameters, by name.
    pub(crate) parameters: BTreeMap<String, Vec<f32>>,
    pub(crate) verified: Option<Verified>,
    /// The number of warnings of all ranks.
    pub(crate) warnings: u64,
    /// The most messages of a rank in a step.
    pub(crate) messages: Messages,
}

/// Trains the ranks of this process, which has a job, or a problem that the ranks of other processes learn. The process of rank 0 has
/// the progress, and gets the results.
pub(crate) fn train(
    (options, job): (&Options, Result<&Job<'_>, &Failure>),
    ranks: &Ranks,
    progress: Option<Progress>,
) -> Result<(Option<Run>, Ended), Failure> {
    // Only rank 0 shows progress and compares with the twin, so it takes this state; the other ranks have `None`.
    let progress = Mutex::new(progress);
    let outcomes = launch(ranks, |world| {
        let progress = if world.rank().index() == 0 { progress.lock().take() } else { None };
        let job = inputs::agree(&world, options, job)?;
        let observer = progress.map(|progress| Observer::new(job, progress));
        Rank::new(world, job)?.train(observer)
    })?;
    let Outcomes { costs, ended, first } = outcomes;
    let Some(First { observer, parameters, warnings, messages }) = first else {
        return Ok((None, ended));
    };
    let verified = observer.twin.map(Twin::verified).transpose()?;
    let records = observer.progress.finish()?;
    Ok((Some(Run { records, costs, parameters, verified, warnings, messages }), ended))
}

/// The state by which rank 0 observes the run.
#[derive(Debug)]
struct Observer {
    progress: Progress,
    twin: Option<Twin>,
}

impl Observer {
    fn new(job: &Job<'_>, progress: Progress) -> Self {
        Self { progress, twin: job.options.verify.then(|| Twin::new(job)) }
    }
}

/// The results of rank 0.
#[derive(Debug)]
struct First {
    observer: Observer,
    parameters: BTreeMap<String, Vec<f32>>,
    /// Of all ranks.
    warnings: u64,
    messages: Messages,
}

/// The state of one rank in training.
#[derive(Debug)]
struct Rank<'a> {
    job: &'a Job<'a>,
    model: ShardedModel,
    optimizer: AdamW,
    saving: Option<Saving>,
    messages: StepMessages,
    /// The device on which candle computes.
    device: Device,
}

impl<'a> Rank<'a> {
    fn new(world: World, job: &'a Job<'a>) -> Result<Self, Failure> {
        ending::listen(&world, &job.signals)?;
        let spec = job.gpt.config().spec();
        device::connect(&world, &job.options.run)?;
        let seed = job.options.seed;
        let model = ShardedModel::new(world, spec, model_options(&job.options.run), |param| {
            gpt::init(param, seed)
        })?;
        let optimizer = AdamW::new(&model, recipe::adamw(job.options));
        let text = format!("{:016x}", job.corpus.digest().hash());
        let batches = json!({ "seed": seed, "text": text, "batch": job.options.batch });
        let saving = Saving::open(&model, &job.options.run, (batches, Content::All))?;
        let (messages, device) = (StepMessages::default(), device::of(&job.options.run)?);
        Ok(Self { job, model, optimizer, saving, messages, device })
    }

    /// The number of steps made, including those before the run was resumed.
    fn steps(&self) -> Result<usize, Failure> {
        usize::try_from(self.model.committed_steps()).map_err(Failure::training)
    }

    fn train(mut self, mut observer: Option<Observer>) -> Result<Outcome<First>, Failure> {
        if let Some(saving) = self.saving.as_mut().filter(|_| self.job.options.run.resume) {
            saving.resume(&mut self.model, &mut self.optimizer)?;
        }
        let first = self.steps()?;
        if first < self.job.options.steps {
            output::keep_warnings(self.model.world(), &self.job.options.run, self.job.warnings)?;
            observer.as_mut().map_or(Ok(()), |observer| observer.progress.start(first))?;
        }
        let before = self.model.world().ledger();
        let was_stopped = self.train_from(first, &mut observer)?;
        let steps = self.steps()?;
        let made = (steps - first) as u64;
        let costs = Costs::of(&self.model, (&before, made), &self.job.options.run);
        let warnings = ending::count_warnings(self.model.world(), self.job.warnings)?;
        let messages = self.messages.most_of_all(self.model.world())?;
        self.model.end_run()?;
        let parameters = self.model.full_parameters()?;
        let unsaved = self.saving.as_ref().and_then(Saving::unsaved);
        let ended = Ended { steps, was_stopped, unsaved };
        let first = observer.map(|observer| First { observer, parameters, warnings, messages });
        Ok(Outcome { costs, ended, first })
    }

    /// Trains from step `first` on. Returns whether a signal has ended the run.
    fn train_from(
        &mut self,
        first: usize,
        observer: &mut Option<Observer>,
    ) -> Result<bool, Failure> {
        let steps = self.job.options.steps;
        for step in first..steps {
            let _span = info_span!("step", step).entered();
            self.messages.begin(self.model.world());
            let (record, norms, shutdown) = self.step(step, observer.as_mut())?;
            self.messages.end(self.model.world());
            if let Some(Observer { progress, .. }) = observer {
                progress.add(record, norms)?;
            }
            let is_stopped = shutdown == Shutdown::Asked;
            let ends = if is_stopped || step + 1 == steps { Ends::Yes } else { Ends::No };
            if let Some(saving) = &mut self.saving {
                saving.after_step((&self.model, &self.optimizer), ends)?;
            }
            if is_stopped {
                return Ok(true);
            }
        }
        Ok(false)
    }

    fn step(
        &mut self,
        step: usize,
        observer: Option<&mut Observer>,
    ) -> Result<(StepRecord, Option<StepNorms>, Shutdown), Failure> {
        let options = self.job.options;
        let mut watch = Stopwatch::default();
        let (gradients, shutdown) = watch.time(|| self.gradients(step))?;
        let (loss, grad_norm) = (gradients.loss(), gradients.norm());
        let recorded = (&options.run, step);
        let (gradients, norms) = norms::before_update(&self.model, gradients, recorded)?;
        let mut twin = observer.and_then(|observer| observer.twin.as_mut());
        if options.verify {
            let full = gradients.full(&self.model)?;
            let sharded = Sharded::of(&gradients, &full);
            twin.as_mut().map_or(Ok(()), |twin| twin.check((self.job, &self.device), &sharded))?;
        }
        let update = watch.time(|| {
            let _span = info_span!("optimizer").entered();
            let rate = recipe::learning_rate(options).at(self.model.applied_steps());
            self.optimizer.set_learning_rate(rate);
            self.optimizer.step(&mut self.model, gradients.clip(MAX_NORM))
        })?;
        if options.verify {
            let full = self.model.full_parameters()?;
            twin.map_or(Ok(()), |twin| twin.follow(full))?;
        }
        let tokens =
            options.tokens() * (options.run.microbatches * options.run.mesh.world_size()) as u64;
        let applied = update == Update::Applied;
        let seconds = watch.seconds();
        let norms = norms::after_update(&self.model, norms)?;
        Ok((StepRecord { step, loss, grad_norm, tokens, seconds, applied }, norms, shutdown))
    }

    /// Computes one step's gradients: forward and backward of each microbatch, and the reductions. Also returns whether the step
    /// is the last because of a signal.
    fn gradients(&mut self, step: usize) -> Result<(Gradients, Shutdown), Failure> {
        let Job { options, corpus, gpt, signals, .. } = self.job;
        let rank = self.model.rank();
        let weight = options.tokens();
        let begin = StepOptions {
            weight_hint: Some(weight),
            shutdown: signals.caught().map_or(Shutdown::NotAsked, |_| Shutdown::Asked),
            ..StepOptions::microbatches(options.run.microbatches)
        };
        let mut open = self.model.begin_step(begin)?;
        let shutdown = open.shutdown();
        for microbatch in 0..options.run.microbatches {
            let batch = corpus.batch(Place { step, microbatch, rank }, &self.device)?;
            let pass = Pass::on(open.microbatch()?, &self.device)?;
            let loss = {
                let _span = info_span!("forward", microbatch).entered();
                gpt.loss(&pass, &batch.inputs, &batch.targets)?
            };
            pass.backward(&loss, weight)?;
        }
        let _span = info_span!("finish").entered();
        Ok((open.finish()?, shutdown))
    }
}

/// The time spent on training, without the time spent on comparison.
#[derive(Debug, Default)]
struct Stopwatch(Duration);

impl Stopwatch {
    fn time<T>(&mut self, work: impl FnOnce() -> T) -> T {
        let start = Instant::now();
        let result = work();
        self.0 += start.elapsed();
        result
    }

    fn seconds(&self) -> f64 {
        self.0.as_secs_f64()
    }
}
