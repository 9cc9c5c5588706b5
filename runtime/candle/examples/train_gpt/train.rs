//! Training: the work of each rank, and the launch of the ranks.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use candle_core::Device;
use hsdp::prelude::*;
use hsdp::{Channel, Gradients, Reduction, Shutdown, Tag, Update, memory};
use hsdp_candle::Pass;
use hsdp_candle::gpt::{self, Gpt};
use hsdp_program::Warnings;
use parking_lot::Mutex;
use tracing::info_span;

use super::costs::Costs;
use super::device;
use super::failure::Failure;
use super::inputs;
use super::options::Options;
use super::output;
use super::progress::{Progress, StepRecord};
use super::ranks::Ranks;
use super::recipe;
use super::saving::{Ends, Saving};
use super::signals::Signals;
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

/// How training ended in this process.
#[derive(Debug)]
pub(crate) struct Ended {
    /// The results, if rank 0 is in this process.
    pub(crate) run: Option<Run>,
    /// Steps made, including those before the run was resumed.
    pub(crate) steps: usize,
    /// Whether a signal has ended the run. The signal may have come to another process.
    pub(crate) was_stopped: bool,
    /// The error of the last save that was asked for, if that failed.
    pub(crate) unsaved: Option<String>,
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
}

/// Trains the ranks of this process, which has a job, or a problem that the ranks of other processes learn. The process of rank 0 has
/// the progress.
pub(crate) fn train(
    (options, job): (&Options, Result<&Job<'_>, &Failure>),
    ranks: &Ranks,
    progress: Option<Progress>,
) -> Result<Ended, Failure> {
    // Only rank 0 shows progress and compares with the twin, so it takes this state; the other ranks have `None`.
    let progress = Mutex::new(progress);
    memory::reset_peaks();
    let outcomes = ranks.launch(options, |world| {
        let progress = if world.rank().index() == 0 { progress.lock().take() } else { None };
        let flight = world.clone();
        let outcome = inputs::agree(&world, options, job).and_then(|job| {
            let desk = progress.map(|progress| Desk::new(job, progress));
            Rank::new(world, job).and_then(|rank| rank.train(desk))
        });
        // The record has the operations before the failure, which explain more than the error alone.
        let record = outcome.is_err().then(|| flight.flight_record());
        (outcome, record)
    })?;
    let mut records = Vec::new();
    let outcomes = outcomes.into_iter().map(|outcome| {
        let (outcome, record) = outcome.map_err(Failure::training)?;
        records.extend(record);
        outcome
    });
    let gathered = gather(outcomes.collect());
    gathered.map_err(|failure| failure.explained(&records))
}

/// Combines the outcomes of this process's ranks, with the results of the run if rank 0 is among them. If ranks failed, returns the
/// original failure, not one that only echoes it.
fn gather(outcomes: Vec<Result<Outcome, Failure>>) -> Result<Ended, Failure> {
    let (done, failed): (Vec<_>, Vec<_>) = outcomes.into_iter().partition(Result::is_ok);
    let mut failures = failed.into_iter().filter_map(Result::err).collect::<Vec<_>>();
    failures.sort_by_key(|failure| matches!(failure, Failure::Peer(_)));
    if let Some(first) = failures.into_iter().next() {
        return Err(first);
    }
    let (mut costs, mut first) = (Vec::new(), None);
    let mut ended = Ended { run: None, steps: 0, was_stopped: false, unsaved: None };
    for outcome in done.into_iter().flatten() {
        let Outcome { steps, was_stopped, unsaved, .. } = outcome;
        ended = Ended { run: None, steps, was_stopped, unsaved };
        costs.push(outcome.costs);
        first = first.or(outcome.desk.map(|desk| (desk, outcome.parameters, outcome.warnings)));
    }
    let Some((desk, parameters, warnings)) = first else { return Ok(ended) };
    let verified = desk.twin.map(Twin::verified).transpose()?;
    let records = desk.progress.finish()?;
    let run = Run { records, costs, parameters, verified, warnings };
    Ok(Ended { run: Some(run), ..ended })
}

/// The state that only rank 0 has.
#[derive(Debug)]
struct Desk {
    progress: Progress,
    twin: Option<Twin>,
}

impl Desk {
    fn new(job: &Job<'_>, progress: Progress) -> Self {
        Self { progress, twin: job.options.verify.then(|| Twin::new(job)) }
    }
}

/// The results of one rank.
#[derive(Debug)]
struct Outcome {
    costs: Costs,
    parameters: BTreeMap<String, Vec<f32>>,
    desk: Option<Desk>,
    steps: usize,
    was_stopped: bool,
    unsaved: Option<String>,
    /// Of all ranks.
    warnings: u64,
}

/// The state of one rank in training.
#[derive(Debug)]
struct Rank<'a> {
    job: &'a Job<'a>,
    model: ShardedModel,
    optimizer: AdamW,
    saving: Option<Saving>,
    /// The device on which candle computes.
    device: Device,
}

impl<'a> Rank<'a> {
    fn new(world: World, job: &'a Job<'a>) -> Result<Self, Failure> {
        // Until the ranks have met, a signal ends the process at once: there is no step to complete.
        if world.rank().index() == 0 || !world.shares_memory() {
            job.signals.listen().map_err(Failure::training)?;
        }
        let spec = job.gpt.config().spec();
        device::connect(&world, job.options)?;
        let seed = job.options.seed;
        let model = ShardedModel::new(world, spec, recipe::model(job.options), |param| {
            gpt::init(param, seed)
        })?;
        let optimizer = AdamW::new(&model, recipe::adamw(job.options));
        let saving = Saving::open(&model, (job.options, job.corpus))?;
        Ok(Self { job, model, optimizer, saving, device: device::of(job.options)? })
    }

    /// The number of steps made, including those before the run was resumed.
    fn steps(&self) -> Result<usize, Failure> {
        usize::try_from(self.model.committed_steps()).map_err(Failure::training)
    }

    fn train(mut self, mut desk: Option<Desk>) -> Result<Outcome, Failure> {
        if let Some(saving) = self.saving.as_mut().filter(|_| self.job.options.resume) {
            saving.resume(&mut self.model, &mut self.optimizer)?;
        }
        let first = self.steps()?;
        if first < self.job.options.steps {
            output::keep_warnings(self.model.world(), self.job)?;
            desk.as_mut().map_or(Ok(()), |desk| desk.progress.start(first))?;
        }
        let before = self.model.world().ledger();
        let was_stopped = self.train_from(first, &mut desk)?;
        let steps = self.steps()?;
        let made = (steps - first) as u64;
        let costs = Costs::of(&self.model, (&before, made), self.job.options);
        let warnings = self.warnings()?;
        self.model.end_run()?;
        let parameters = self.model.full_parameters()?;
        let unsaved = self.saving.as_ref().and_then(Saving::unsaved);
        Ok(Outcome { costs, parameters, desk, steps, was_stopped, unsaved, warnings })
    }

    /// The number of warnings of all ranks. Collective.
    fn warnings(&self) -> Result<u64, Failure> {
        let world = self.model.world();
        // Ranks of one process count together.
        let counts = !world.shares_memory() || world.rank().index() == 0;
        let own = if counts { self.job.warnings.count() } else { 0 };
        let group = world.world_group(Channel::User);
        let sum = group.all_reduce(Tag::default(), Reduction::Sum, vec![own]);
        let sum = sum.and_then(|pending| pending.wait()).map_err(hsdp::Error::from)?;
        Ok(sum[0])
    }

    /// Trains from step `first` on. Returns whether a signal has ended the run.
    fn train_from(&mut self, first: usize, desk: &mut Option<Desk>) -> Result<bool, Failure> {
        let steps = self.job.options.steps;
        for step in first..steps {
            let _span = info_span!("step", step).entered();
            let (record, shutdown) = self.step(step, desk.as_mut())?;
            if let Some(Desk { progress, .. }) = desk {
                progress.add(record)?;
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
        desk: Option<&mut Desk>,
    ) -> Result<(StepRecord, Shutdown), Failure> {
        let options = self.job.options;
        let mut watch = Stopwatch::default();
        let (gradients, shutdown) = watch.time(|| self.gradients(step))?;
        let (loss, grad_norm) = (gradients.loss(), gradients.norm());
        let mut twin = desk.and_then(|desk| desk.twin.as_mut());
        if options.verify {
            let full = gradients.full(&self.model)?;
            let sharded = Sharded::of(&gradients, &full);
            twin.as_mut().map_or(Ok(()), |twin| twin.check((self.job, &self.device), &sharded))?;
        }
        let update = watch.time(|| {
            let _span = info_span!("optimizer").entered();
            self.optimizer.set_learning_rate(recipe::learning_rate(options).at(step as u64));
            self.optimizer.step(&mut self.model, gradients.clip(MAX_NORM))
        })?;
        if options.verify {
            let full = self.model.full_parameters()?;
            twin.map_or(Ok(()), |twin| twin.follow(full))?;
        }
        let tokens = options.tokens() * (options.microbatches * options.mesh.world_size()) as u64;
        let applied = update == Update::Applied;
        let seconds = watch.seconds();
        Ok((StepRecord { step, loss, grad_norm, tokens, seconds, applied }, shutdown))
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
            ..StepOptions::microbatches(options.microbatches)
        };
        let mut open = self.model.begin_step(begin)?;
        let shutdown = open.shutdown();
        for microbatch in 0..options.microbatches {
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
