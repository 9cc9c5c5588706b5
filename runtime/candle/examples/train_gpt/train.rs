//! Training: what each rank does, and how the ranks are run.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use candle_core::Device;
use hsdp::{AdamW, Gradients, Optimizer as _, ShardedModel, StepOptions, Update, World};
use hsdp_candle::Pass;
use hsdp_candle::gpt::{self, Gpt};
use hsdp_kernels::memory;
use parking_lot::Mutex;
use tracing::info_span;

use super::costs::Costs;
use super::device;
use super::failure::Failure;
use super::options::Options;
use super::progress::{Progress, StepRecord};
use super::recipe;
use super::text::{Corpus, Place};
use super::update::MAX_NORM;
use super::verify::{Sharded, Twin, Verified};

/// What is to be done.
#[derive(Debug)]
pub(crate) struct Job<'a> {
    pub(crate) options: &'a Options,
    pub(crate) corpus: &'a Corpus,
    pub(crate) gpt: Gpt,
}

/// What came of it.
#[derive(Debug)]
pub(crate) struct Run {
    pub(crate) records: Vec<StepRecord>,
    /// By rank.
    pub(crate) costs: Vec<Costs>,
    /// The trained parameters, by name.
    pub(crate) parameters: BTreeMap<String, Vec<f32>>,
    pub(crate) verified: Option<Verified>,
}

/// Trains on as many threads as the mesh has ranks.
pub(crate) fn train(job: &Job<'_>, progress: Progress) -> Result<Run, Failure> {
    let ranks = job.options.mesh.world_size();
    // Rank 0 shows what happens and compares; the others find nothing here.
    let desk = Mutex::new(Some(Desk::new(job, progress)));
    memory::reset_peaks();
    let outcomes = hsdp::launch(ranks, recipe::world(job.options), |world| {
        let desk = if world.rank().index() == 0 { desk.lock().take() } else { None };
        let flight = world.clone();
        let outcome = Rank::new(world, job).and_then(|rank| rank.train(desk));
        // The operations before it failed, which say more than the error alone.
        let record = outcome.is_err().then(|| flight.flight_record());
        (outcome, record)
    });
    let mut records = Vec::new();
    let outcomes = outcomes.into_iter().map(|outcome| {
        let (outcome, record) = outcome.map_err(Failure::training)?;
        records.extend(record);
        outcome
    });
    let gathered = gather(outcomes.collect());
    gathered.map_err(|failure| failure.explained(&records))
}

/// Puts together what the ranks bring; of their failures, the one that the others only echo.
fn gather(outcomes: Vec<Result<Outcome, Failure>>) -> Result<Run, Failure> {
    let (done, failed): (Vec<_>, Vec<_>) = outcomes.into_iter().partition(Result::is_ok);
    let mut failures = failed.into_iter().filter_map(Result::err).collect::<Vec<_>>();
    failures.sort_by_key(|failure| matches!(failure, Failure::Peer(_)));
    if let Some(first) = failures.into_iter().next() {
        return Err(first);
    }
    let mut costs = Vec::new();
    let mut first = None;
    for outcome in done.into_iter().flatten() {
        costs.push(outcome.costs);
        first = first.or(outcome.desk.map(|desk| (desk, outcome.parameters)));
    }
    let (desk, parameters) =
        first.ok_or_else(|| Failure::training("rank 0 has kept no records"))?;
    let verified = desk.twin.map(Twin::verified).transpose()?;
    Ok(Run { records: desk.progress.finish()?, costs, parameters, verified })
}

/// What only rank 0 has.
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

/// What a rank brings home.
#[derive(Debug)]
struct Outcome {
    costs: Costs,
    parameters: BTreeMap<String, Vec<f32>>,
    desk: Option<Desk>,
}

/// A rank at work.
#[derive(Debug)]
struct Rank<'a> {
    job: &'a Job<'a>,
    model: ShardedModel,
    optimizer: AdamW,
    /// Where candle computes.
    device: Device,
}

impl<'a> Rank<'a> {
    fn new(world: World, job: &'a Job<'a>) -> Result<Self, Failure> {
        let spec = job.gpt.config().spec();
        let seed = job.options.seed;
        let model = ShardedModel::new(world, spec, recipe::model(job.options), |param| {
            gpt::init(param, seed)
        })?;
        let optimizer = AdamW::new(&model, recipe::adamw(job.options));
        Ok(Self { job, model, optimizer, device: device::of(job.options)? })
    }

    fn train(mut self, mut desk: Option<Desk>) -> Result<Outcome, Failure> {
        let before = self.model.world().ledger();
        for step in 0..self.job.options.steps {
            let _span = info_span!("step", step).entered();
            let record = self.step(step, desk.as_mut())?;
            if let Some(Desk { progress, .. }) = &mut desk {
                progress.add(record)?;
            }
        }
        let costs = Costs::of(&self.model, &before, self.job.options);
        self.model.end_run()?;
        Ok(Outcome { costs, parameters: self.model.full_parameters()?, desk })
    }

    fn step(&mut self, step: usize, desk: Option<&mut Desk>) -> Result<StepRecord, Failure> {
        let options = self.job.options;
        let mut watch = Stopwatch::default();
        let gradients = watch.time(|| self.gradients(step))?;
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
        Ok(StepRecord { step, loss, grad_norm, tokens, seconds: watch.seconds(), applied })
    }

    /// One step's gradients: the microbatches, forward and backward, and the reductions.
    fn gradients(&mut self, step: usize) -> Result<Gradients, Failure> {
        let Job { options, corpus, gpt } = self.job;
        let rank = self.model.rank();
        let weight = options.tokens();
        let begin = StepOptions {
            weight_hint: Some(weight),
            ..StepOptions::microbatches(options.microbatches)
        };
        let mut open = self.model.begin_step(begin)?;
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
        Ok(open.finish()?)
    }
}

/// Time spent on training, without what is done for comparison.
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
