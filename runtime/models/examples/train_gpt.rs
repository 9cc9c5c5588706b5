//! Trains a character-level GPT on a mesh of replicas x shards whose ranks are threads or processes.
//!
//! ```text
//! cargo run --release --example train_gpt
//! cargo run --release --example train_gpt -- --mesh 2x3 --steps 50 --out run
//! ```

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use candle_core::{Device, Tensor};
use clap::Parser;
use hsdp::prelude::*;
use hsdp::{Gradients, LearningRate, Placement, Update};
use hsdp_candle::{Pass, Plain};
use hsdp_models::gpt::{self, Draw, Gpt, GptConfig};
use hsdp_models::text::{Characters, random_windows};
use hsdp_train::memory::{Limit, Need, product};
use hsdp_train::number::{count, learning_rate};
use hsdp_train::{
    Digest, Failure, MAX_STEPS, Place, Ranks, Run, RunOptions, Setup, Training, file,
};
use serde_json::json;
use tracing::info_span;

const MAX: usize = GptConfig::MAX_SIZE;
const MAX_LAYERS: usize = GptConfig::MAX_LAYERS;
/// Maximum number of bytes of a text. A character takes 4 bytes of memory.
const MAX_TEXT: u64 = 256 << 20;
/// Maximum number of tokens of a step: every number up to it is an f64.
const MAX_TOKENS: u64 = 1 << 53;

/// Gradients longer than this are scaled down to it.
pub(crate) const MAX_NORM: f64 = 1.0;

const SAMPLE_LENGTH: usize = 240;
const SAMPLE_TEMPERATURE: f32 = 0.8;

#[global_allocator]
static ALLOCATOR: hsdp_train::Allocator = hsdp_train::allocator();

/// Trains a character-level GPT on a mesh of replicas x shards whose ranks are threads or processes
#[derive(Clone, Debug, Parser)]
#[command(name = "train_gpt", version)]
pub(crate) struct Options {
    /// UTF-8 text file to train on, of at most 256 MiB; by default the Markdown files of this
    /// repository
    #[arg(long, value_name = "FILE")]
    pub(crate) data: Option<PathBuf>,

    #[command(flatten)]
    pub(crate) run: RunOptions,

    /// Number of sequences in a microbatch, as far as memory allows
    #[arg(long, value_name = "COUNT", default_value_t = 4, value_parser = count::<1, MAX>)]
    pub(crate) batch: usize,

    /// Number of steps, at most 1000000000; each step updates the parameters once
    #[arg(long, value_name = "COUNT", default_value_t = 300, value_parser = count::<1, MAX_STEPS>)]
    pub(crate) steps: usize,

    /// Number of transformer blocks, at most 10000
    #[arg(long, value_name = "COUNT", default_value_t = 3, value_parser = count::<1, MAX_LAYERS>)]
    layers: usize,

    /// Number of elements of the residual stream, as far as memory allows; a multiple of --heads
    #[arg(long, value_name = "SIZE", default_value_t = 96, value_parser = count::<1, MAX>)]
    width: usize,

    /// Number of attention heads in a block; it divides --width
    #[arg(long, value_name = "COUNT", default_value_t = 4, value_parser = count::<1, MAX>)]
    heads: usize,

    /// Number of characters in a sequence, as far as memory allows; the text has at least one more
    #[arg(long, value_name = "LENGTH", default_value_t = 64, value_parser = count::<1, MAX>)]
    pub(crate) context: usize,

    /// Peak learning rate; it rises linearly over the first twentieth of the steps, then falls along
    /// a cosine to a tenth
    #[arg(long, value_name = "RATE", default_value_t = 3e-3, value_parser = learning_rate)]
    lr: f64,

    /// Seed of the initial parameters, the batches and the sample
    #[arg(long, value_name = "NUMBER", default_value_t = 1)]
    pub(crate) seed: u64,
}

fn main() -> ExitCode {
    hsdp_train::main("train_gpt", |options: &Options| &options.run, train)
}

fn train(options: &Options, ranks: &Ranks) -> Result<(), Failure> {
    ranks.run(
        || Inputs::read(options, ranks.options()),
        |setup, inputs| {
            let mut run = start(options, setup, inputs)?;
            let device = hsdp_candle::device(ranks.options().device)?;
            while run.next_step()?.is_some() {
                let gradients =
                    run.gradients(|pass, place| microbatch(options, inputs, &device, pass, place))?;
                run.update(|model, adamw| update(options, model, adamw, gradients))?;
            }
            let mut report = run.finish()?;
            let Inputs { gpt, text, .. } = inputs;
            let length = text.tokens().len();
            let kinds = text.vocabulary();
            report.row("text", format!("{length} characters, {kinds} different"));
            let parameters = run.model.full_parameters()?;
            if run.model.rank().index() == 0 && report.steps_made() > 0 {
                let plain = Plain::new(gpt.config().spec(), &parameters, Precision::default())?;
                let temperature = SAMPLE_TEMPERATURE;
                let seed = options.seed;
                let draw = Draw { count: SAMPLE_LENGTH, temperature, seed };
                let prompt = text.first_line(options.context);
                let sample = gpt::sample(gpt, &plain, prompt, draw)?;
                report.text(&format!("sample:\n{}", text.decode(&sample)));
            }
            Ok(report)
        },
    )
}

/// Makes the model and the optimizer, and begins the run.
pub(crate) fn start<'a>(
    options: &Options,
    setup: Setup<'a>,
    inputs: &Inputs,
) -> Result<Run<'a, AdamW>, Failure> {
    let Inputs { gpt, digest, .. } = inputs;
    let alike = Options { data: None, run: RunOptions::default(), ..options.clone() };
    setup.compare("options", &format!("{alike:?}"))?;
    setup.compare("text", &digest.to_string())?;

    let init = |param: &Param| gpt::init(param, options.seed);
    let spec = gpt.config().spec();
    let model = ShardedModel::new(setup.world(), spec, setup.model_options(), init)?;
    let adamw = AdamW::new(&model, recipe(options));
    let training = Training {
        batches: json!({
            "seed": options.seed,
            "text": format!("{:016x}", digest.hash()),
            "batch": options.batch,
        }),
        weight_hint: Some(options.tokens()),
        loss: "cross-entropy, nats a character",
        ..Training::of_steps(options.steps)
    };
    setup.start(model, adamw, training)
}

/// Computes the gradients of one microbatch: forward and backward.
pub(crate) fn microbatch(
    options: &Options,
    inputs: &Inputs,
    device: &Device,
    pass: hsdp::Pass<'_>,
    place: Place,
) -> Result<(), hsdp_candle::Error> {
    let [tokens, targets] = batch(options, &inputs.text, place, device)?;
    let pass = Pass::on(pass, device)?;
    let span = info_span!("forward", microbatch = place.microbatch).entered();
    let loss = inputs.gpt.loss(&pass, &tokens, &targets)?;
    drop(span);
    pass.backward(&loss, options.tokens()).map(drop)
}

/// Updates the parameters by the gradients of a step.
pub(crate) fn update(
    options: &Options,
    model: &mut ShardedModel,
    adamw: &mut AdamW,
    gradients: Gradients,
) -> Result<Update, hsdp::Error> {
    adamw.set_learning_rate(rate(options).at(model.applied_steps()));
    adamw.step(model, gradients.clip(MAX_NORM))
}

/// Returns the tokens of a microbatch and the token that follows each: u32, `[batch, context]`.
pub(crate) fn batch(
    options: &Options,
    text: &Characters,
    place: Place,
    device: &Device,
) -> candle_core::Result<[Tensor; 2]> {
    let Options { batch, context, seed, .. } = *options;
    let key = [place.step, place.microbatch as u64, place.rank.index() as u64];
    let [inputs, targets] = random_windows(text.tokens(), batch, context, seed, key);
    let tensor = |tokens| Tensor::from_vec(tokens, (batch, context), device);
    Ok([tensor(inputs)?, tensor(targets)?])
}

/// Returns the options of the optimizer.
pub(crate) fn recipe(options: &Options) -> AdamWOptions {
    let learning_rate = options.lr;
    AdamWOptions { learning_rate, betas: (0.9, 0.95), weight_decay: 0.1, ..Default::default() }
}

/// Returns the schedule of the learning rate.
pub(crate) fn rate(options: &Options) -> LearningRate {
    let steps = options.steps as u64;
    LearningRate::warmup_cosine(options.lr, options.lr / 10.0, steps.div_ceil(20), steps)
}

impl Options {
    /// Returns the number of tokens of a microbatch on a rank.
    pub(crate) fn tokens(&self) -> u64 {
        (self.batch * self.context) as u64
    }
}

/// The inputs of a process.
#[derive(Debug)]
pub(crate) struct Inputs {
    pub(crate) gpt: Gpt,
    pub(crate) text: Characters,
    digest: Digest,
}

impl Inputs {
    /// Reads the text, and checks that the run fits into the memory of this process.
    fn read(options: &Options, run: &RunOptions) -> Result<Self, Failure> {
        let repository = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
        let inputs = Self::new(options, &read_text(options, &repository)?)?;
        inputs.need(options, run)?.check(Limit::of_process())?;
        Ok(inputs)
    }

    /// Makes the model for a text.
    pub(crate) fn new(options: &Options, text: &str) -> Result<Self, Failure> {
        let digest = Digest::of(text.as_bytes());
        let text = Characters::of(text);
        let Options { layers, width, heads, context, .. } = *options;
        let characters = text.tokens().len();
        if characters <= context {
            return Err(Failure::Input(format!(
                "the text has {characters} characters: a context of {context} needs at least {}",
                context + 1
            )));
        }
        let config = GptConfig { vocab: text.vocabulary(), context, width, heads, layers };
        let gpt = Gpt::new(config).map_err(Failure::input)?;
        Ok(Self { gpt, text, digest })
    }

    /// Returns the memory of this process in a run.
    pub(crate) fn need(&self, options: &Options, run: &RunOptions) -> Result<Need, Failure> {
        check_tokens(options, run)?;
        let need = Need::of_run(run, self.gpt.config().spec(), options.steps)?;
        let here = run.ranks_here() as u64;
        Ok(match run.device {
            Placement::Cuda { .. } if cfg!(feature = "candle-cuda") => need,
            _ => (self.gpt.kept(options.batch, run.param_dtype).parts().into_iter())
                .fold(need, |need, (part, bytes)| need.with(part, bytes.saturating_mul(here))),
        })
    }
}

/// Reads the text of `--data`, or the Markdown files of the repository.
pub(crate) fn read_text(options: &Options, repository: &Path) -> Result<String, Failure> {
    Ok(match &options.data {
        Some(path) => file::read_text(path, MAX_TEXT)?,
        None => file::read_texts(repository, "md", MAX_TEXT)?,
    })
}

/// Checks that the tokens of a step can be counted.
fn check_tokens(options: &Options, run: &RunOptions) -> Result<(), Failure> {
    let Options { batch, context, .. } = *options;
    let microbatches = run.microbatches;
    let ranks = run.mesh.world_size();
    if product(&[batch, context, microbatches, ranks]) <= MAX_TOKENS {
        return Ok(());
    }
    Err(Failure::Input(format!(
        "a batch of {batch}, a context of {context}, {microbatches} microbatches and {ranks} \
         ranks: a step has at most {MAX_TOKENS} tokens"
    )))
}
