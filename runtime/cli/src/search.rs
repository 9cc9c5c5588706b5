//! `hsdp search`: searches for the fastest mesh and options of a model on a number of ranks of a
//! machine.

mod page;

use std::error::Error;
use std::fmt::Write as _;
use std::num::{NonZeroUsize, TryFromIntError};
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::Arc;

use bytesize::ByteSize;
use clap::Args;
use clap::builder::TypedValueParser as _;
use hsdp_models::decoder::DecoderConfig;
use hsdp_sharding::{ByteCount, Offload};
use hsdp_simulator::{Found, Machine, Search, Space, StatedError};
use hsdp_train::stderr::in_one_line;
use hsdp_train::{number, print, print_json};
use serde_json::{Map, Value, json};

use crate::model::{Adapters, Model, find_machine, memory_of};
use crate::output::cannot_write;
use crate::plan::choices::PlannedOptimizer;
use crate::simulate::{CONTEXT, MAX_CONTEXT};
use crate::{CommandOutcome, output, simulate};

/// Maximum number of ranks in a search, which looks at all ranks for each mesh.
const MAX_RANKS: u64 = 1 << 14;

/// Options of `hsdp search`.
#[derive(Args, Debug)]
pub(crate) struct SearchArgs {
    /// Folder of transformers or its config.json, or another file that describes a model (PLAN.md),
    /// of at most 16 MiB; or gpt2-small, llama3-8b or llama3-70b
    #[arg(value_name = "MODEL")]
    model: String,

    /// Train adapters of this rank on the projections of attention, and freeze the model, a decoder
    /// of transformers; off by default
    #[arg(long, value_name = "RANK", value_parser = number::count::<1, { DecoderConfig::MAX_SIZE }>)]
    lora: Option<usize>,

    /// Ranks, at most 16384
    #[arg(long, value_name = "COUNT", value_parser = clap::value_parser!(u64).range(1..=MAX_RANKS))]
    ranks: u64,

    /// Machine on which the ranks compute: a file (MACHINES.md), or a100-node, a100-cluster,
    /// h100-cluster or two-core-cpu
    #[arg(long, value_name = "MACHINE")]
    machine: String,

    /// Memory that a rank may use, such as 80GiB; by default that of the machine
    #[arg(long, value_name = "BYTES")]
    memory: Option<ByteSize>,

    /// Tokens of a sequence
    #[arg(long, value_name = "TOKENS", default_value_t = CONTEXT, value_parser = clap::value_parser!(u64).range(1..=MAX_CONTEXT))]
    context: u64,

    /// Tokens of a step on all ranks, a multiple of ranks times context; or any, to compare steps
    /// of different numbers of tokens
    #[arg(long, value_name = "TOKENS")]
    batch_tokens: BatchTokens,

    /// Optimizer
    #[arg(long, value_name = "OPTIMIZER", default_value = "adamw")]
    optimizer: PlannedOptimizer,

    /// Number of steps to list, at most 1000
    #[arg(long, value_name = "COUNT", default_value = "10", value_parser = clap::value_parser!(u64).range(1..=1000).try_map(count))]
    top: NonZeroUsize,

    /// Print JSON
    #[arg(long)]
    json: bool,

    /// Also write a page with the result into this file
    #[arg(long, value_name = "FILE")]
    html: Option<PathBuf>,
}

/// Number of tokens in a step.
#[derive(Clone, Copy, Debug)]
enum BatchTokens {
    /// This number, so that all steps train alike.
    Of(u64),
    /// Several numbers.
    Any,
}

impl FromStr for BatchTokens {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text {
            "any" => Ok(Self::Any),
            text => text.parse().map(Self::Of).map_err(|_| "expected a whole number, or any"),
        }
    }
}

impl BatchTokens {
    const fn number(self) -> Option<u64> {
        match self {
            Self::Of(tokens) => Some(tokens),
            Self::Any => None,
        }
    }
}

/// Returns the values of `--offload` with which `hsdp simulate` accepts this optimizer on the
/// machine.
fn offloads(optimizer: PlannedOptimizer, machine: &Machine) -> &'static [Offload] {
    match (machine.device(), optimizer.updates_on_device()) {
        (None, _) => &[Offload::None],
        (Some(_), true) => &Offload::EVERY,
        (Some(_), false) => &[Offload::Optimizer, Offload::All],
    }
}

fn count(count: u64) -> Result<NonZeroUsize, TryFromIntError> {
    NonZeroUsize::try_from(usize::try_from(count)?)
}

/// A completed search.
struct Searched<'a> {
    options: &'a SearchArgs,
    machine: Machine,
    memory: ByteCount,
    search: Search,
}

impl Searched<'_> {
    /// Returns the options of `hsdp simulate` that repeat a step on this machine: the options that
    /// choose it, and those of the search that differ from the defaults.
    fn options_of(&self, found: &Found) -> String {
        let SearchArgs { lora, context, optimizer, .. } = *self.options;
        let mut text = found.candidate.to_string();
        if let Some(rank) = lora {
            text += &format!(" --lora {rank}");
        }
        if context != CONTEXT {
            text += &format!(" --context {context}");
        }
        if optimizer != PlannedOptimizer::default() {
            text += &format!(" --optimizer {}", optimizer.name());
        }
        text
    }
}

/// Searches, and prints the best steps.
pub(crate) fn run(options: &SearchArgs) -> Result<CommandOutcome, Box<dyn Error>> {
    let described = Model::file(&options.model);
    let inputs = [&*described, Path::new(&options.machine)];
    let html = output::check(options.html.as_ref(), &inputs)?;
    if options.json {
        output::check_beside_json(&[&html])?;
    }
    let machine = find_machine(&options.machine)?;
    // Parameters in host memory are gathered in f32, so frozen ones have their master.
    let adapters = options.lora.map(|rank| Adapters { rank, frozen_in: None });
    let model = Model::find(&options.model, adapters)?;
    model.check_context(options.context)?;
    let spec = options.optimizer.applied_to(&model.spec);
    let computation = Arc::new(model.computation()?);
    let ranks = usize::try_from(options.ranks)?;
    let memory = options.memory.map(|it| ByteCount(it.as_u64()));
    let memory = memory.unwrap_or_else(|| memory_of(&machine, ranks));
    let space = Space {
        spec: &spec,
        computation: &computation,
        machine: &machine,
        ranks,
        context: usize::try_from(options.context)?,
        memory,
        batch_tokens: options.batch_tokens.number(),
        offloads: offloads(options.optimizer, &machine),
    };
    let search = Search::of(&space, options.top)?;
    let Some(fastest) = search.best.first() else {
        return Err(nothing_fits(&options.model, &search).into());
    };
    simulate::check_time(fastest.prediction.timing.step, &machine)?;
    let searched = Searched { options, machine, memory, search };
    if let Some(file) = &html {
        file.write_all(page::of(&searched)?).map_err(cannot_write)?;
    }
    match options.json {
        true => print_json(&in_json(&searched))?,
        false => print(report(&searched))?,
    }
    Ok(CommandOutcome::Well)
}

/// Returns the whole result. Times are in seconds.
fn in_json(searched: &Searched<'_>) -> Value {
    let Searched { options, machine, memory, search } = searched;
    let unfit = search.unfit.iter().map(|(unfit, count)| (unfit.to_string(), (*count).into()));
    let cells = search.cells.iter().map(|((replicas, shards, microbatches), speed)| {
        json!({ "mesh": [replicas, shards], "microbatches": microbatches, "tokens_per_second": speed })
    });
    json!({
        "model": options.model,
        "machine": machine.name,
        "ranks": options.ranks,
        "memory": memory.get(),
        "batch_tokens": options.batch_tokens.number(),
        "candidates": search.candidates,
        "simulated": search.simulated,
        "over_budget": search.over_budget,
        "error": search.error.relative,
        "fastest": search.fastest,
        "unfit": unfit.collect::<Map<_, _>>(),
        "best": search.best.iter().map(|it| found_in_json(searched, it)).collect::<Vec<_>>(),
        "meshes": cells.collect::<Vec<_>>(),
    })
}

fn found_in_json(searched: &Searched<'_>, found: &Found) -> Value {
    let prediction = &found.prediction;
    json!({
        "ties": found.band == 0,
        "behind": distance(found, searched.search.fastest),
        "options": searched.options_of(found),
        "tokens_per_second": prediction.tokens_per_second(),
        "tokens": prediction.tokens,
        "seconds": prediction.timing.step.seconds(),
        "flops_utilisation": prediction.flops_utilisation(),
        "memory": prediction.memory.total().get(),
        "memory_on_host": prediction.memory.offloaded.total().get(),
    })
}

/// Returns the counts of candidates, and the list of the best, each with the options that choose
/// it.
fn report(searched: &Searched<'_>) -> String {
    let Searched { options, machine, memory, search, .. } = searched;
    let mut text = format!(
        "{} on {} ranks of {}, {memory} a rank: {}",
        in_one_line(&options.model),
        options.ranks,
        in_one_line(&machine.name),
        counts(search)
    );
    for (unfit, count) in &search.unfit {
        let _ = write!(text, "\n  {count} candidates: {unfit}");
    }
    let _ = write!(text, "\n{}", ties(searched));
    for (index, found) in search.best.iter().enumerate() {
        let _ = write!(text, "\n{}. {}", index + 1, line(searched, found));
    }
    text
}

/// Describes how many candidates there are, and why most are not in the list.
fn counts(search: &Search) -> String {
    let unfit = search.unfit.values().sum::<u64>();
    let Search { candidates, simulated, over_budget, best, .. } = search;
    let mut text = format!(
        "{candidates} candidates, of which {unfit} do not fit; {simulated} were simulated, and the \
         {} that fit and are not listed are slower, or tie with a listed one of their mesh and \
         need no less memory, or come later in the order of the list",
        candidates - unfit - best.len() as u64
    );
    if *over_budget > 0 {
        let _ = write!(
            text,
            ", or are among {over_budget} that a search has no time to simulate: search fewer \
             ranks, or a smaller model"
        );
    }
    text
}

/// Describes the error within which steps tie, and the numbers that are compared.
fn ties(searched: &Searched<'_>) -> String {
    let Searched { options, search, .. } = searched;
    let StatedError { relative, of } = search.error;
    let mut text = format!(
        "the fastest has {:.0} tokens/s; predictions for {of} have errors of up to {:.1} %, so steps that differ by less tie, and are in the order of their memory",
        search.fastest,
        100.0 * relative
    );
    if options.batch_tokens.number().is_none() {
        text.push_str("; steps have different numbers of tokens");
    }
    text
}

/// Describes whether a step ties with the fastest, or how many percent of the tokens a second it is
/// behind.
fn behind(found: &Found, fastest: f64) -> String {
    match found.band {
        0 => "tie".to_owned(),
        _ => format!("{:.0} % behind", 100.0 * distance(found, fastest)),
    }
}

/// Returns the part of the fastest speed that a step lacks.
fn distance(found: &Found, fastest: f64) -> f64 {
    1.0 - found.prediction.tokens_per_second() / fastest
}

/// Describes the memory of a rank, and its part in the host's memory.
fn memory_in_words(found: &Found) -> String {
    let memory = &found.prediction.memory;
    match memory.offloaded.total() {
        ByteCount(0) => memory.total().to_string(),
        host => format!("{} and {host} of the host's", memory.total()),
    }
}

fn line(searched: &Searched<'_>, found: &Found) -> String {
    let prediction = &found.prediction;
    format!(
        "{}: memory {}, {:.0} tokens/s, utilisation {:.1} %, a step of {} tokens {}\n   {}",
        behind(found, searched.search.fastest),
        memory_in_words(found),
        prediction.tokens_per_second(),
        100.0 * prediction.flops_utilisation(),
        prediction.tokens,
        prediction.timing.step,
        searched.options_of(found),
    )
}

/// Returns the error of a search in which nothing fits.
fn nothing_fits(model: &str, search: &Search) -> String {
    let reasons = search.unfit.iter().map(|(unfit, count)| format!("{count}: {unfit}"));
    let reasons: Vec<String> = reasons.collect();
    format!("{model} fits no mesh: of {} candidates {}", search.candidates, reasons.join("; "))
}
