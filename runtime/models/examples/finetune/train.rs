//! Training: the work of each rank, and the launch of the ranks.

use std::collections::BTreeMap;
use std::time::Instant;

use candle_core::Device;
use hsdp::checkpoint::{Content, Imported};
use hsdp::comm::Messages;
use hsdp::memory::{self, Category};
use hsdp::prelude::*;
use hsdp::{Adafactor, ByteCount, Ema, Gradients, Lion, Muon, Shutdown, Update};
use hsdp_candle::Pass;
use hsdp_train::Warnings;
use parking_lot::Mutex;
use serde_json::json;
use tracing::info_span;

use super::data::{Place, Sequences};
use super::inputs::{self, Inputs};
use super::optimizers::Optimizers;
use super::options::{Optimizer as Choice, Options};
use super::recipe::MAX_NORM;
use super::shared::agreement::told_once;
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
use super::shared::{device, output};

/// The category under which the tensors that candle makes in the first step are counted: no checkpoint is written then.
const ACTIVATIONS: Category = Category::Snapshot;

/// The results of a run.
#[derive(Debug)]
pub(crate) struct Run {
    pub(crate) records: Vec<StepRecord>,
    /// By rank.
    pub(crate) costs: Vec<Costs>,
    pub(crate) measured: Measured,
    /// The trained parameters by name, if they are exported.
    pub(crate) parameters: Option<BTreeMap<String, Vec<f32>>>,
}

/// Numbers of a rank, besides those of steps.
#[derive(Clone, Debug, Default)]
pub(crate) struct Measured {
    /// The loss on the held-out sequences before the first step and after the last, if there are such sequences.
    pub(crate) held_out: [Option<f64>; 2],
    /// That of the average of the weights after the last step, if one is kept.
    pub(crate) of_average: Option<f64>,
    /// The peak bytes of candle's tensors in the first step: activations, and their gradients.
    pub(crate) activations: ByteCount,
    /// The number of warnings of all ranks.
    pub(crate) warnings: u64,
    /// The most messages of a rank in a step.
    pub(crate) messages: Messages,
}

/// Trains the ranks of this process, which has inputs, or a problem that the ranks of other processes learn. The process of rank 0 has
/// the progress, and gets the results.
pub(crate) fn train(
    (options, inputs): (&Options, Result<&Inputs, &Failure>),
    ranks: &Ranks,
    (progress, warnings): (Option<Progress>, &Warnings),
) -> Result<(Option<Run>, Ended), Failure> {
    // Only rank 0 shows progress.
    let progress = Mutex::new(progress);
    let outcomes = launch(ranks, |world| {
        let progress = if world.rank().index() == 0 { progress.lock().take() } else { None };
        let inputs = inputs::agree(&world, options, inputs)?;
        let rank = (world, (inputs, warnings));
        match options.optimizer {
            Choice::Adamw | Choice::Adamw8bit => with::<AdamW>(rank, progress),
            Choice::Muon => with::<(Muon, AdamW)>(rank, progress),
            Choice::Lion => with::<Lion>(rank, progress),
            Choice::Adafactor => with::<Adafactor>(rank, progress),
        }
    })?;
    let Outcomes { costs, ended, first } = outcomes;
    let Some(First { progress, measured, parameters }) = first else { return Ok((None, ended)) };
    let records = progress.finish()?;
    Ok((Some(Run { records, costs, measured, parameters }), ended))
}

/// Trains one rank by these optimizers, with an average of the weights if the options ask for one.
fn with<O: Optimizers>(
    (world, (inputs, warnings)): (World, (&Inputs, &Warnings)),
    progress: Option<Progress>,
) -> Result<Outcome<First>, Failure> {
    match inputs.options.ema {
        None => Rank::<O>::new(world, (inputs, warnings))?.train(progress),
        Some(_) => Rank::<(O, Ema)>::new(world, (inputs, warnings))?.train(progress),
    }
}

/// The results of rank 0.
#[derive(Debug)]
struct First {
    progress: Progress,
    measured: Measured,
    parameters: Option<BTreeMap<String, Vec<f32>>>,
}

/// The state of one rank in training.
#[derive(Debug)]
struct Rank<'a, O> {
    inputs: &'a Inputs,
    warnings: &'a Warnings,
    model: ShardedModel,
    optimizers: O,
    saving: Option<Saving>,
    messages: StepMessages,
    /// The device on which candle computes.
    device: Device,
    measured: Measured,
}

impl<'a, O: Optimizers> Rank<'a, O> {
    fn new(world: World, (inputs, warnings): (&'a Inputs, &'a Warnings)) -> Result<Self, Failure> {
        ending::listen(&world, &inputs.signals)?;
        let options = &inputs.options;
        device::connect(&world, &options.run)?;
        let model = model(world, inputs)?;
        let optimizers = O::new(&model, options)?;
        let batches = json!({
            "seed": options.seed,
            "data": format!("{:016x}", inputs.data.digest().hash()),
            "batch": options.batch,
            "context": options.context,
        });
        let content = match options.lora {
            Some(_) => Content::Trainable,
            None => Content::All,
        };
        let saving = Saving::open(&model, &options.run, (batches, content))?;
        let (device, measured) = (device::of(&options.run)?, Measured::default());
        let messages = StepMessages::default();
        Ok(Self { inputs, warnings, model, optimizers, saving, messages, device, measured })
    }

    /// The number of steps made, including those before the run was resumed.
    fn steps(&self) -> Result<usize, Failure> {
        usize::try_from(self.model.committed_steps()).map_err(Failure::training)
    }

    fn train(mut self, mut progress: Option<Progress>) -> Result<Outcome<First>, Failure> {
        let options = &self.inputs.options.run;
        if let Some(saving) = self.saving.as_mut().filter(|_| options.resume) {
            saving.resume(&mut self.model, &mut self.optimizers)?;
        }
        let first = self.steps()?;
        if first < self.inputs.steps {
            output::keep_warnings(self.model.world(), options, self.warnings)?;
            progress.as_mut().map_or(Ok(()), |progress| progress.start(first))?;
        }
        self.measured.held_out[0] = held_out(&mut self.model, (self.inputs, &self.device))?;
        let before = self.model.world().ledger();
        let was_stopped = self.train_from(first, &mut progress)?;
        let steps = self.steps()?;
        let costs = Costs::of(&self.model, (&before, (steps - first) as u64), options);
        self.measured.held_out[1] = held_out(&mut self.model, (self.inputs, &self.device))?;
        if let Some(average) = self.optimizers.average() {
            let evaluate = |model: &mut _| held_out(model, (self.inputs, &self.device));
            self.measured.of_average = self.model.with_shards(average, evaluate)?;
        }
        self.measured.warnings = ending::count_warnings(self.model.world(), self.warnings)?;
        self.measured.messages = self.messages.most_of_all(self.model.world())?;
        self.model.end_run()?;
        let is_exported = self.inputs.options.export.is_some() && !was_stopped;
        let parameters = is_exported.then(|| self.parameters()).transpose()?;
        let unsaved = self.saving.as_ref().and_then(Saving::unsaved);
        let ended = Ended { steps, was_stopped, unsaved };
        let measured = self.measured;
        let first = progress.map(|progress| First { progress, measured, parameters });
        Ok(Outcome { costs, ended, first })
    }

    /// Trains from step `first` on. Returns whether a signal has ended the run.
    fn train_from(
        &mut self,
        first: usize,
        progress: &mut Option<Progress>,
    ) -> Result<bool, Failure> {
        let steps = self.inputs.steps;
        for step in first..steps {
            let _span = info_span!("step", step).entered();
            let counted = (step == first).then(|| memory::scope(ACTIVATIONS));
            self.messages.begin(self.model.world());
            let (record, norms, shutdown) = self.step(step)?;
            self.messages.end(self.model.world());
            if counted.is_some() {
                self.measured.activations = memory::usage(self.model.rank(), ACTIVATIONS).peak;
            }
            drop(counted);
            progress.as_mut().map_or(Ok(()), |progress| progress.add(record, norms))?;
            let is_stopped = shutdown == Shutdown::Asked;
            let ends = if is_stopped || step + 1 == steps { Ends::Yes } else { Ends::No };
            if let Some(saving) = &mut self.saving {
                saving.after_step((&self.model, &self.optimizers), ends)?;
            }
            if is_stopped {
                return Ok(true);
            }
        }
        Ok(false)
    }

    fn step(&mut self, step: usize) -> Result<(StepRecord, Option<StepNorms>, Shutdown), Failure> {
        let start = Instant::now();
        let (gradients, shutdown) = self.gradients(step)?;
        let (loss, grad_norm) = (gradients.loss(), gradients.norm());
        let recorded = (&self.inputs.options.run, step);
        let (gradients, norms) = norms::before_update(&self.model, gradients, recorded)?;
        let update = {
            let _span = info_span!("optimizer").entered();
            self.optimizers.update(&mut self.model, gradients.clip(MAX_NORM))?
        };
        let options = &self.inputs.options.run;
        let places = options.microbatches * options.mesh.world_size();
        let (tokens, seconds) =
            ((self.inputs.data.tokens() * places) as u64, start.elapsed().as_secs_f64());
        let applied = update == Update::Applied;
        let norms = norms::after_update(&self.model, norms)?;
        Ok((StepRecord { step, loss, grad_norm, tokens, seconds, applied }, norms, shutdown))
    }

    /// Computes one step's gradients: forward and backward of each microbatch, and the reductions.
    /// Also returns whether the step is the last because of a signal.
    fn gradients(&mut self, step: usize) -> Result<(Gradients, Shutdown), Failure> {
        let Inputs { options, data, decoder, signals, .. } = self.inputs;
        let (rank, microbatches) = (self.model.rank(), options.run.microbatches);
        let begin = StepOptions {
            shutdown: signals.caught().map_or(Shutdown::NotAsked, |_| Shutdown::Asked),
            ..StepOptions::microbatches(microbatches)
        };
        let mut open = self.model.begin_step(begin)?;
        let shutdown = open.shutdown();
        for microbatch in 0..microbatches {
            let sequences = data.microbatch(Place { step, microbatch, rank });
            let [tokens, labels] = sequences.tensors(&self.device)?;
            let pass = Pass::on(open.microbatch()?, &self.device)?;
            let loss = {
                let _span = info_span!("forward", microbatch).entered();
                decoder.loss(&pass, &tokens, &labels)?
            };
            // Without a label that counts the weight is 0.
            pass.backward_sum(&loss.sum, loss.count)?;
        }
        let _span = info_span!("finish").entered();
        Ok((open.finish()?, shutdown))
    }

    /// All parameters by name, or their averages if these are kept. Collective.
    fn parameters(&mut self) -> Result<BTreeMap<String, Vec<f32>>, hsdp::Error> {
        match self.optimizers.average() {
            None => self.model.full_parameters(),
            Some(average) => self.model.with_shards(average, |model| model.full_parameters()),
        }
    }
}

/// Computes the mean loss on the held-out sequences, which are dealt in blocks to the ranks.
/// Collective.
fn held_out(
    model: &mut ShardedModel,
    (inputs, device): (&Inputs, &Device),
) -> Result<Option<f64>, Failure> {
    let Inputs { data, decoder, .. } = inputs;
    let all = data.held_out();
    if all.count() == 0 {
        return Ok(None);
    }
    let _span = info_span!("evaluation").entered();
    let (rank, ranks) = (model.rank().index(), model.world().size());
    let own = all.part(all.count() * rank / ranks, all.count() * (rank + 1) / ranks);
    let batch = (data.tokens() / all.length).max(1);
    let (mut sum, mut items) = (0.0, 0);
    let mut evaluation = model.evaluation()?;
    for from in (0..own.count()).step_by(batch) {
        let [tokens, labels] = part(&own, from, batch).tensors(device)?;
        let pass = Pass::on(evaluation.batch()?, device)?;
        let loss = decoder.loss(&pass, &tokens, &labels)?;
        pass.finish()?;
        sum += f64::from(loss.sum.to_scalar::<f32>()?);
        items += loss.count;
    }
    Ok(Some(evaluation.mean(sum, items)?))
}

/// At most `count` sequences from one on.
fn part(sequences: &Sequences, from: usize, count: usize) -> Sequences {
    sequences.part(from, sequences.count().min(from + count))
}

/// The model of the folder, of which each rank reads its part; or one with random weights. Collective.
fn model(world: World, inputs: &Inputs) -> Result<ShardedModel, Failure> {
    let (spec, options) = (inputs.spec.clone(), model_options(&inputs.options.run));
    let init = inputs.recorded.init(inputs.options.seed);
    let Some(folder) = &inputs.folder else {
        return Ok(ShardedModel::new(world, spec, options, init)?);
    };
    let import = folder.model.import();
    let import = if inputs.options.lora.is_some() { import.or_init(init) } else { import };
    let telling = world.clone();
    let imported = ShardedModel::import(world, spec, options, &import);
    let Imported { model, left_over, .. } = imported.map_err(|error| match error {
        // The folder cannot be read, or is of another model, or those of two ranks differ.
        hsdp::Error::Checkpoint { .. } | hsdp::Error::Disagreement { .. } => {
            told_once(&telling, error.to_string())
        }
        error => error.into(),
    })?;
    // A folder may have changed since it was opened.
    let unexpected: Vec<String> =
        left_over.into_iter().filter(|tensor| folder.model.needs(tensor)).collect();
    if !unexpected.is_empty() {
        let what =
            format!("the folder has tensors that are not of the model: {}", unexpected.join(", "));
        return Err(told_once(&telling, what));
    }
    if model.rank().index() == 0 {
        for what in &folder.warnings {
            tracing::warn!(%what, "files of the model contradict each other");
        }
    }
    Ok(model)
}
