//! `hsdp search`: searches for the fastest mesh and options of a model on a number of ranks of a
//! machine.

mod json;
mod page;
mod report;

use std::error::Error;
use std::num::{NonZeroUsize, TryFromIntError};
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::Arc;

use bytesize::ByteSize;
use clap::Args;
use clap::builder::TypedValueParser as _;
use hsdp_models::decoder::DecoderConfig;
use hsdp_sharding::{ByteCount, Offload};
use hsdp_simulator::{Found, Machine, Search, Space};
use hsdp_train::{number, print, print_json};

use crate::machine;
use crate::model::{Adapters, Model};
use crate::outcome::Outcome;
use crate::output::{self, cannot_write};
use crate::plan::optimizer::Optimizer;
use crate::simulate::{self, CONTEXT, MAX_CONTEXT};

/// Maximum number of ranks in a search, which looks at all ranks for each mesh.
const MAX_RANKS: u64 = 1 << 14;

/// Options of `hsdp search`.
#[derive(Args, Debug)]
pub(crate) struct Options {
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
    optimizer: Optimizer,

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
fn offloads(optimizer: Optimizer, machine: &Machine) -> &'static [Offload] {
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
    options: &'a Options,
    machine: Machine,
    memory: ByteCount,
    search: Search,
}

impl Searched<'_> {
    /// Returns the options of `hsdp simulate` that repeat a step on this machine: the options that
    /// choose it, and those of the search that differ from the defaults.
    fn options_of(&self, found: &Found) -> String {
        let Options { lora, context, optimizer, .. } = *self.options;
        let mut text = found.candidate.to_string();
        if let Some(rank) = lora {
            text += &format!(" --lora {rank}");
        }
        if context != CONTEXT {
            text += &format!(" --context {context}");
        }
        if optimizer != Optimizer::default() {
            text += &format!(" --optimizer {}", optimizer.name());
        }
        text
    }
}

/// Searches, and prints the best steps.
pub(crate) fn run(options: &Options) -> Result<Outcome, Box<dyn Error>> {
    let described = Model::file(&options.model);
    let inputs = [&*described, Path::new(&options.machine)];
    let html = output::check(options.html.as_ref(), &inputs)?;
    if options.json {
        output::check_beside_json(&[&html])?;
    }
    let machine = machine::find(&options.machine)?;
    // Parameters in host memory are gathered in f32, so frozen ones have their master.
    let adapters = options.lora.map(|rank| Adapters { rank, frozen_in: None });
    let model = Model::find(&options.model, adapters)?;
    model.check_context(options.context)?;
    let spec = options.optimizer.applied_to(&model.spec);
    let computation = Arc::new(model.computation()?);
    let ranks = usize::try_from(options.ranks)?;
    let memory = options.memory.map(|it| ByteCount(it.as_u64()));
    let memory = memory.unwrap_or_else(|| machine::memory_of(&machine, ranks));
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
        return Err(report::nothing_fits(&options.model, &search).into());
    };
    simulate::check_time(fastest.prediction.timing.step, &machine)?;
    let searched = Searched { options, machine, memory, search };
    if let Some(file) = &html {
        file.write_all(page::of(&searched)?).map_err(cannot_write)?;
    }
    match options.json {
        true => print_json(&json::of(&searched))?,
        false => print(report::text(&searched))?,
    }
    Ok(Outcome::Well)
}
