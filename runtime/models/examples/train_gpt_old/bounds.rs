//! The bounds of a run (`runtime/train/BOUNDS.md`). Sizes that no run can have are refused before they take memory or time.

use hsdp::{Placement, Plan};
use hsdp_models::gpt::{Gpt, GptConfig};
use hsdp_train::memory::{Limit, Need, product};

use super::options::Options;
use super::shared::failure::Failure;
use super::shared::options::RunOptions;
use super::shared::progress::StepRecord;
use super::shared::recipe;

/// The largest batch, width, number of heads and context.
pub(crate) const MAX: usize = GptConfig::MAX_SIZE;
/// The most transformer blocks, and the most units that are gathered ahead.
pub(crate) const MAX_LAYERS: usize = GptConfig::MAX_LAYERS;
/// The most tokens of a step: every number up to it is an f64.
const MAX_TOKENS: usize = 1 << 53;

/// Copies of all parameters that the unsharded twin has: parameters, moments, variables, gradients and their magnitudes.
const TWIN: usize = 8;

/// Checks that the run's memory is within that of the process, and that a step's tokens can be counted.
pub(crate) fn check(options: &Options, gpt: &Gpt) -> Result<(), Failure> {
    check_tokens(options)?;
    let plan = Plan::new(
        gpt.config().spec(),
        options.run.mesh,
        recipe::model(&options.run).plan_options(),
    );
    let need = need(options, gpt, &plan.map_err(Failure::input)?);
    need.check(Limit::of_process()).map_err(Failure::input)
}

fn check_tokens(options: &Options) -> Result<(), Failure> {
    let Options { batch, context, .. } = *options;
    let RunOptions { microbatches, mesh, .. } = options.run;
    let ranks = mesh.world_size();
    let factors = [batch, context, microbatches, ranks];
    let tokens = factors.into_iter().try_fold(1_usize, usize::checked_mul);
    tokens.filter(|tokens| *tokens <= MAX_TOKENS).map(drop).ok_or_else(|| {
        Failure::Input(format!(
            "a batch of {batch}, a context of {context}, {microbatches} microbatches and {ranks} ranks: a step has at most \
             {MAX_TOKENS} tokens"
        ))
    })
}

/// The memory of this process in a step, and at the end of the run. Memory on a device is the driver's matter.
fn need(options: &Options, gpt: &Gpt, plan: &Plan) -> Need {
    let steps = product(&[options.steps, size_of::<StepRecord>()]);
    let need = Need::default().with("a record of each step", steps);
    let need = match options.verify {
        true => need.with("the unsharded twin", product(&[TWIN, elements(plan), size_of::<f32>()])),
        false => need,
    };
    let on_all_ranks = |bytes: u64| bytes.saturating_mul(options.run.ranks_here() as u64);
    let on_host = options.run.device == Placement::Host;
    let need = match on_host {
        true => need.with("the sharded model", on_all_ranks(plan.memory().total().get())),
        false => need,
    };
    if !on_host && cfg!(feature = "candle-cuda") {
        return need;
    }
    let kept = gpt.kept(options.batch, options.run.param_dtype).parts();
    kept.into_iter().fold(need, |need, (part, bytes)| need.with(part, on_all_ranks(bytes)))
}

/// The elements of all parameters, with padding.
fn elements(plan: &Plan) -> usize {
    plan.layouts().iter().map(|layout| layout.full_len()).sum()
}
