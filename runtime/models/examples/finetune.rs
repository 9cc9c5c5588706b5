//! Trains a decoder on a mesh of replicas x shards: one in a folder of transformers, or a small one
//! from random weights.
//!
//! ```text
//! cargo run --release --example finetune
//! cargo run --release --example finetune -- --model DIR --batches FILE.safetensors --recompute \
//!     --out run --export tuned
//! cargo run --release --example finetune -- --model DIR --data TEXT --lora 8
//! ```

#![expect(clippy::disallowed_macros, reason = "the program has a subscriber")]

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::{Parser, ValueEnum};
use hsdp::checkpoint::{Checkpointed, Content};
use hsdp::kernels::EIGHT_BIT_BLOCK;
use hsdp::memory::{self, Category};
use hsdp::prelude::*;
use hsdp::{
    Adafactor, AdafactorOptions, ByteCount, ElemCount, Ema, Error, Gradients, Lion, LionOptions,
    Muon, MuonOptions, Placement, State, Update,
};
use hsdp_candle::Pass;
use hsdp_models::data::{Data, DataError, Tokens, Windows};
use hsdp_models::decoder::{
    Decoder, DecoderConfig, Export, Lora, Pretrained, PretrainedError, Recomputation,
};
use hsdp_train::memory::{Limit, Need};
use hsdp_train::number::{count, learning_rate};
use hsdp_train::{
    EvaluationOptions, Failure, MAX_STEPS, Ranks, Report, Run, RunOptions, Setup, Training, file,
};
use serde_json::json;
use tracing::info_span;

const MAX: usize = DecoderConfig::MAX_SIZE;
/// Maximum number of bytes of a text.
const MAX_TEXT: u64 = 256 << 20;
/// Number of steps on a text.
const STEPS: usize = 1000;

/// Gradients longer than this are scaled down to it.
const MAX_NORM: f64 = 1.0;
/// Weight decay of parameters of at least two dims. Norms do not decay.
const DECAY: f64 = 0.1;
/// Factor by which the learning rate of matrices that Muon updates is above that of the others.
const MUON_RATES: f64 = 5.0;

/// Category that counts the tensors of candle in the first step, in which no checkpoint is written.
const ACTIVATIONS: Category = Category::Snapshot;

#[global_allocator]
static ALLOCATOR: hsdp_train::Allocator = hsdp_train::allocator();

/// Trains a decoder on a mesh of replicas x shards whose ranks are threads or processes
#[derive(Clone, Debug, Parser)]
#[command(name = "finetune", version)]
struct Options {
    /// Folder of transformers: config.json, whose model_type chooses the family, weights in one or
    /// several safetensors files (f32, bf16 or f16), and tokenizer.json for --data; by default a
    /// small model with random weights trains on characters
    #[arg(long, value_name = "DIR")]
    model: Option<PathBuf>,

    /// Safetensors file with input_ids (u32) and labels (i64, shifted, -100 where one does not
    /// count), [steps, sequences, length]; perhaps eval_input_ids and eval_labels,
    /// [sequences, length]. The sequences of a step are dealt in blocks: the first to the first
    /// microbatch of rank 0, the next to its second one, and so on
    #[arg(long, value_name = "FILE", requires = "model", conflicts_with = "data")]
    batches: Option<PathBuf>,

    /// UTF-8 text file to train on, of at most 256 MiB, whose last tenth is held out; by default
    /// the Markdown files of this repository
    #[arg(long, value_name = "TEXT")]
    data: Option<PathBuf>,

    #[command(flatten)]
    run: RunOptions,

    #[command(flatten)]
    evaluation: EvaluationOptions,

    /// Number of steps, at most 1000000000; by default all of --batches, or 1000
    #[arg(long, value_name = "COUNT", value_parser = count::<1, MAX_STEPS>)]
    steps: Option<usize>,

    /// Optimizer: muon updates the matrices of layers, and leaves the rest to AdamW
    #[arg(long, value_enum, default_value_t = Choice::Adamw)]
    optimizer: Choice,

    /// Learning rate, which stays as it is: 2e-3 by default, 2e-4 for lion, 1e-2 for adafactor;
    /// matrices that muon updates have five times this rate
    #[arg(long, value_name = "RATE", value_parser = learning_rate)]
    lr: Option<f64>,

    /// Keep a moving average of the weights, with this fraction of the earlier average in each
    /// step; it is evaluated at the end, and exported in place of the weights; off by default
    #[arg(long, value_name = "DECAY", value_parser = fraction)]
    ema: Option<f64>,

    /// Run each block again in the backward instead of keeping its tensors; off by default
    #[arg(long)]
    recompute: bool,

    /// Train adapters of this rank on the projections of attention, and freeze the model; off by
    /// default
    #[arg(long, value_name = "RANK", value_parser = count::<1, MAX>)]
    lora: Option<usize>,

    /// Number of sequences of a text in a microbatch
    #[arg(
        long, value_name = "COUNT", default_value_t = 4, value_parser = count::<1, MAX>,
        conflicts_with = "batches"
    )]
    batch: usize,

    /// Number of tokens in a sequence of a text
    #[arg(
        long, value_name = "LENGTH", default_value_t = 64, value_parser = count::<1, MAX>,
        conflicts_with = "batches"
    )]
    context: usize,

    /// Seed of random weights, of adapters and of the choice of sequences in a text
    #[arg(long, value_name = "NUMBER", default_value_t = 1)]
    seed: u64,

    /// Folder for the trained model, which transformers and candle read: config.json,
    /// model.safetensors in f32, and the files of --model that belong to the tokenizer, to
    /// templates of chats (chat_template.jinja, additional_chat_templates) and to generation
    /// (generation_config.json); with --lora the model as it was (on the CPU rounded to
    /// --param-dtype, if that has 16 bits), adapters.safetensors, and the folder peft with the
    /// adapters as PEFT reads them. Files of these names are replaced; other files that would be
    /// read with them are refused. The weights are those of the last step, also with --patience:
    /// --save-best keeps those of the best evaluation
    #[arg(long, value_name = "DIR")]
    export: Option<PathBuf>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Choice {
    Adamw,
    Muon,
    Lion,
    Adafactor,
    Adamw8bit,
}

/// Reads a number from 0 to below 1.
fn fraction(text: &str) -> Result<f64, String> {
    let number = text.parse().ok().filter(|number| (0.0..1.0).contains(number));
    number.ok_or_else(|| "it must be a number from 0 to below 1".to_owned())
}

fn main() -> ExitCode {
    hsdp_train::main("finetune", |options: &Options| &options.run, train)
}

fn train(options: &Options, ranks: &Ranks) -> Result<(), Failure> {
    ranks.run(
        || Inputs::read(options, ranks),
        |setup, inputs| {
            setup.compare("options", &options.shared())?;
            setup.compare("data", &inputs.data())?;
            let model = inputs.model(&setup)?;
            let rate = |default| options.lr.unwrap_or(default);
            let adamw = |new: fn(&_, _) -> AdamW| {
                let learning_rate = rate(2e-3);
                let betas = (0.9, 0.95);
                let with =
                    AdamWOptions { learning_rate, betas, weight_decay: 0.0, ..Default::default() };
                new(&model, with).group(decays, |it| AdamWOptions { weight_decay: DECAY, ..it })
            };
            match options.optimizer {
                Choice::Adamw => {
                    let adamw = adamw(AdamW::new);
                    finetune(setup, inputs, model, adamw, AdamW::step)
                }
                Choice::Adamw8bit => {
                    let adamw = adamw(AdamW::with_eight_bit_state);
                    finetune(setup, inputs, model, adamw, AdamW::step)
                }
                Choice::Lion => {
                    let with = LionOptions { learning_rate: rate(2e-4), ..Default::default() };
                    let lion = Lion::new(&model, with)
                        .group(decays, |it| LionOptions { weight_decay: DECAY, ..it });
                    finetune(setup, inputs, model, lion, Lion::step)
                }
                Choice::Adafactor => {
                    let learning_rate = rate(1e-2);
                    let with = AdafactorOptions { learning_rate, ..Default::default() };
                    let adafactor = Adafactor::new(&model, with);
                    finetune(setup, inputs, model, adafactor, Adafactor::step)
                }
                Choice::Muon => {
                    let learning_rate = MUON_RATES * rate(2e-3);
                    let with =
                        MuonOptions { learning_rate, weight_decay: DECAY, ..Default::default() };
                    let both = (Muon::new(&model, with), adamw(AdamW::new));
                    finetune(setup, inputs, model, both, |(muon, adamw), model, gradients| {
                        let others = |param: &_| !is_in_layer(param);
                        model.update_by(gradients, [(muon, &is_in_layer), (adamw, &others)])
                    })
                }
            }
        },
    )
}

/// Returns whether Muon updates a parameter: a matrix of a layer.
fn is_in_layer(param: &Param) -> bool {
    param.name.starts_with("model.layers.") && param.shape.len() == 2
}

fn decays(param: &Param) -> bool {
    param.shape.len() >= 2
}

/// Trains, and keeps an average of the weights beside the optimizer if the options ask for one.
fn finetune<O: Checkpointed>(
    setup: Setup<'_>,
    inputs: &Inputs<'_>,
    model: ShardedModel,
    optimizer: O,
    update: impl Fn(&mut O, &mut ShardedModel, Gradients) -> Result<Update, Error>,
) -> Result<Report, Failure> {
    let Some(decay) = inputs.options.ema else {
        let run = setup.start(model, optimizer, inputs.training())?;
        return make_steps(run, inputs, update, |_| None);
    };
    let both = (optimizer, Ema::new(&model, decay)?);
    let run = setup.start(model, both, inputs.training())?;
    make_steps(
        run,
        inputs,
        |(optimizer, _), model, gradients| update(optimizer, model, gradients),
        |(_, average)| Some(average),
    )
}

/// Makes the steps, evaluates the model before and after them, and exports it.
fn make_steps<O: Checkpointed>(
    mut run: Run<'_, O>,
    inputs: &Inputs<'_>,
    update: impl Fn(&mut O, &mut ShardedModel, Gradients) -> Result<Update, Error>,
    average: impl Fn(&O) -> Option<&Ema>,
) -> Result<Report, Failure> {
    let Inputs { data, decoder, .. } = inputs;
    let device = hsdp_candle::device(inputs.device)?;
    let held_out = |model: &mut ShardedModel| data.held_out_loss(decoder, model, &device);
    let evaluate = |model: &mut ShardedModel| {
        let _span = info_span!("evaluation").entered();
        (data.held_out().count() > 0).then(|| held_out(model)).transpose()
    };
    let before = evaluate(&mut run.model)?;
    let mut activations = None;
    let mut after = None;
    while run.next_step()?.is_some() {
        let counted = activations.is_none().then(|| memory::scope(ACTIVATIONS));
        let gradients = run.gradients(|pass, place| -> Result<(), hsdp_candle::Error> {
            let [tokens, labels] = data.microbatch(place).tensors(&device)?;
            let pass = Pass::on(pass, &device)?;
            let span = info_span!("forward", microbatch = place.microbatch).entered();
            let loss = decoder.loss(&pass, &tokens, &labels)?;
            drop(span);
            // Without a label that counts the weight is 0.
            pass.backward_sum(&loss.sum, loss.count).map(drop)
        })?;
        run.update(|model, optimizer| update(optimizer, model, gradients.clip(MAX_NORM)))?;
        let peak = memory::usage(run.model.rank(), ACTIVATIONS).peak;
        activations = activations.or(Some(peak));
        drop(counted);
        after = run.evaluate(|model, _| held_out(model))?;
    }
    if after.is_none() {
        after = evaluate(&mut run.model)?;
    }
    let of_average = match average(&run.optimizer) {
        Some(average) => run.model.with_shards(average, evaluate)?,
        None => None,
    };
    let mut report = run.finish()?;
    inputs.describe(&mut report, activations.unwrap_or_default());
    for (row, field, loss) in [
        ("held out, before", "eval_loss_before", before),
        ("held out, after", "eval_loss_after", after),
        ("held out, average of weights", "eval_loss_average", of_average),
    ] {
        report.field(field, loss);
        if let Some(loss) = loss {
            report.row(row, format!("{loss:.4}"));
        }
    }
    if inputs.options.export.is_none() {
        return Ok(report);
    }
    if report.was_stopped() {
        report.text("nothing is exported: a signal has ended the run");
        return Ok(report);
    }
    let parameters = match average(&run.optimizer) {
        Some(average) => run.model.with_shards(average, |model| model.full_parameters())?,
        None => run.model.full_parameters()?,
    };
    if let Some(export) = inputs.export.as_ref().filter(|_| run.model.rank().index() == 0) {
        match export.write(&parameters) {
            Ok(()) => report.text(&export.to_string()),
            Err(error) => report.fail(error),
        }
    }
    Ok(report)
}

/// The inputs of a process.
#[derive(Debug)]
struct Inputs<'a> {
    options: &'a Options,
    device: Placement,
    data: Data,
    steps: usize,
    decoder: Decoder,
    spec: ModelSpec,
    /// Folder of the model, if its weights are not random.
    folder: Option<Pretrained>,
    /// Folder to write to, in the process of rank 0.
    export: Option<Export>,
}

impl<'a> Inputs<'a> {
    /// Reads the data, `config.json` and the headers of tensors, checks that the run fits into the
    /// memory of this process, and prepares the folder of `--export`. The memory of activations is
    /// not part of the check: candle allocates it, and the run measures it.
    fn read(options: &'a Options, ranks: &Ranks) -> Result<Self, Failure> {
        let run = ranks.options();
        if options.model.is_some() && options.batches.is_none() && options.data.is_none() {
            return Err(Failure::input("--model needs --batches or --data"));
        }
        let folder = options.model.as_deref().map(Pretrained::open).transpose();
        let folder = folder.map_err(Failure::input)?;
        let read = read_data(options, run, folder.as_ref());
        let (config, data) = read.map_err(Failure::input)?;
        let context = options.context;
        let most = config.max_position_embeddings;
        if context > most && options.batches.is_none() {
            let problem = format!("--context {context}: the model reads at most {most} tokens");
            return Err(Failure::Input(problem));
        }
        let steps = match (options.steps, data.steps()) {
            (asked, None) => asked.unwrap_or(STEPS),
            (None, Some(0)) => return Err(Failure::input("--batches: the file has no steps")),
            (Some(asked), Some(there)) if asked > there => {
                let problem = format!("--steps {asked}: the file of --batches has {there}");
                return Err(Failure::Input(problem));
            }
            (asked, Some(there)) => asked.unwrap_or(there),
        };
        if options.evaluation.evaluate_every.is_some() && data.held_out().count() == 0 {
            let problem = "--evaluate-every: the file of --batches has no eval_input_ids";
            return Err(Failure::input(problem));
        }
        let decoder = decoder(config, options, run);
        let spec = options.declared(decoder.spec().map_err(Failure::input)?);
        Need::of_run(run, spec.clone(), steps)?.check(Limit::of_process())?;
        let to = options.export.as_deref().filter(|_| ranks.has_first());
        let export = to.map(|to| Export::prepare(to, folder.as_ref(), &decoder)).transpose();
        let export = export.map_err(|error| Failure::Input(format!("--export: {error}")))?;
        let device = run.device;
        Ok(Self { options, device, data, steps, decoder, spec, folder, export })
    }

    /// Returns the model of the folder, from which each rank reads its part, or one with random
    /// weights. Collective.
    fn model(&self, setup: &Setup<'_>) -> Result<ShardedModel, Failure> {
        let world = setup.world();
        let spec = self.spec.clone();
        let options = setup.model_options();
        let init = self.decoder.recorded()?.init(self.options.seed);
        let Some(folder) = &self.folder else {
            return Ok(ShardedModel::new(world, spec, options, init)?);
        };
        let model = folder.load(world, spec, options, init).map_err(|error| match error {
            // The folder cannot be read, or is of another model, or those of two ranks differ.
            PretrainedError::Load(
                error @ (Error::Checkpoint { .. } | Error::Disagreement { .. }),
            ) => setup.refused(error),
            PretrainedError::Load(error) => error.into(),
            error => setup.refused(error),
        })?;
        if setup.index().index() == 0 {
            for what in folder.warnings().iter().chain(self.data.warnings()) {
                tracing::warn!(%what, "files contradict each other");
            }
        }
        Ok(model)
    }

    /// Returns the data and the model, which are equal on all ranks, in words.
    fn data(&self) -> String {
        format!("{} for {} steps of {:?}", self.data.digest(), self.steps, self.decoder.config())
    }

    /// Returns the settings of the run.
    fn training(&self) -> Training {
        let Self { options, data, .. } = self;
        Training {
            batches: json!({
                "seed": options.seed,
                "data": format!("{:016x}", data.digest().hash()),
                "batch": options.batch,
                "context": options.context,
            }),
            content: if options.lora.is_some() { Content::Trainable } else { Content::All },
            tokens: Some(data.tokens() as u64),
            loss: match data.item() {
                "character" => "cross-entropy, nats a character",
                _ => "cross-entropy, nats a token",
            },
            evaluation: options.evaluation.clone(),
            ..Training::of_steps(self.steps)
        }
    }

    /// Adds the model, and the memory of its activations, to the report of the run.
    fn describe(&self, report: &mut Report, activations: ByteCount) {
        let options = self.options;
        let config = self.decoder.config();
        let trained: ElemCount = self.spec.units().iter().map(Unit::trainable_numel).sum();
        let trained = trained.get();
        let blocks = config.num_hidden_layers;
        let width = config.hidden_size;
        let heads = config.num_attention_heads;
        let shared = config.num_key_value_heads;
        let model =
            format!("{blocks} blocks, width {width}, {heads} heads, {shared} for keys and values");
        report.row("model", model);
        if options.lora.is_some() {
            report.row("trained", trained.to_string());
        }
        let kept = if options.recompute { "recomputed" } else { "kept" };
        report.memory(&format!("activations, {kept}"), activations);
        let optimizer = options.optimizer.to_possible_value();
        report.field("optimizer", optimizer.map(|it| it.get_name().to_owned()));
        report.field("recompute", options.recompute);
        report.field("lora", options.lora);
        report.field("trained", trained);
        report.field("peak_activation_bytes", activations.get());
    }
}

/// Reads the data, and returns it with the config of the model that reads it.
fn read_data(
    options: &Options,
    run: &RunOptions,
    folder: Option<&Pretrained>,
) -> Result<(DecoderConfig, Data), DataError> {
    let Options { batch, context, seed, .. } = *options;
    let text = || match &options.data {
        Some(path) => file::read_text(path, MAX_TEXT),
        None => {
            let repository = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
            file::read_texts(&repository, "md", MAX_TEXT)
        }
    };
    let of_text = |tokens| Data::of_text(tokens, Windows { batch, context, seed });
    let Some(folder) = folder else {
        let tokens = Tokens::characters(&text()?);
        return Ok((small(tokens.vocabulary, context), of_text(tokens)?));
    };
    let config = folder.config().clone();
    let data = match &options.batches {
        Some(path) => Data::read_batches(path, &config, run.mesh.world_size(), run.microbatches)?,
        None => of_text(Tokens::of_folder(folder, &text()?)?)?,
    };
    Ok((config, data))
}

/// Returns the config of a Llama with random weights.
fn small(vocabulary: usize, context: usize) -> DecoderConfig {
    let config = json!({
        "model_type": "llama", "vocab_size": vocabulary, "max_position_embeddings": context,
        "hidden_size": 96, "intermediate_size": 3 * 96, "num_hidden_layers": 3,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 24, "hidden_act": "silu",
        "rope_parameters": { "rope_type": "default", "rope_theta": 10_000.0 },
        "rms_norm_eps": 1e-6, "tie_word_embeddings": false, "initializer_range": 0.02,
    });
    DecoderConfig::from_json(&config.to_string()).expect("sizes of a model")
}

fn decoder(config: DecoderConfig, options: &Options, run: &RunOptions) -> Decoder {
    let decoder = Decoder::new(config).recomputing(match options.recompute {
        true => Recomputation::Blocks,
        false => Recomputation::Off,
    });
    let Some(rank) = options.lora else { return decoder };
    let decoder = decoder.with_lora(Lora::of_rank(rank));
    // The frozen model is then kept in 16 bits alone. An export has the rounded values, with which
    // its adapters were trained.
    match run.param_dtype != DType::F32 && run.device == Placement::Host {
        true => decoder.storing_frozen_in(run.param_dtype),
        false => decoder,
    }
}

impl Options {
    /// Returns the model with the state that the optimizer keeps, for the plan.
    fn declared(&self, spec: ModelSpec) -> ModelSpec {
        let block = EIGHT_BIT_BLOCK;
        let spec = match self.optimizer {
            Choice::Adamw => spec.updated_by(|_| State::Elements(2)),
            Choice::Muon => spec.updated_by(|param| match is_in_layer(param) {
                true => State::Muon,
                false => State::Elements(2),
            }),
            Choice::Lion => spec.updated_by(|_| State::Elements(1)),
            Choice::Adafactor => spec.updated_by(|_| State::Factored),
            Choice::Adamw8bit => spec.in_blocks(block).updated_by(|_| State::EightBit { block }),
        };
        if self.ema.is_some() { spec.averaged() } else { spec }
    }

    /// Returns the options that are equal on all ranks, in words. The paths of files may differ,
    /// but whether there is one decides what a rank does.
    fn shared(&self) -> String {
        let mut alike = Self { run: RunOptions::default(), ..self.clone() };
        for path in [&mut alike.model, &mut alike.batches, &mut alike.data, &mut alike.export] {
            *path = path.take().map(|_| PathBuf::new());
        }
        format!("{alike:?}")
    }
}
