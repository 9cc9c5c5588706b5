//! `verify gpt`: the sharded run of `train_gpt`, and beside it on rank 0 the same model without
//! shards.
//!
//! In reading order: `twin` (what is compared, and the bounds), `unsharded` (the model without
//! shards).

#[cfg(test)]
mod tests;
mod twin;
pub(crate) mod unsharded;

use std::path::Path;
use std::process::ExitCode;
use std::time::Duration;

use candle_core::Device;
use hsdp_train::memory::{Limit, product};
use hsdp_train::{Failure, Ranks, RunOptions};

use self::twin::{Sharded, Twin};
use crate::NAME;
use crate::train_gpt::{self, Inputs, Options};

/// Copies of all parameters that the twin has: parameters, moments, variables, gradients and their
/// magnitudes.
const COPIES: usize = 8;

/// The inputs of a rank.
#[derive(Clone, Debug)]
struct Job<'a> {
    options: &'a Options,
    inputs: &'a Inputs,
    /// Device on which candle computes.
    device: Device,
}

/// Trains, and compares each step.
pub(crate) fn run(options: &Options) -> Result<ExitCode, Failure> {
    if options.run.resume {
        return Err(Failure::Input("--resume: the unsharded twin begins at the first step".into()));
    }
    Ok(hsdp_train::with_ranks(NAME, &patient(&options.run), |ranks| verify(options, ranks)))
}

/// Returns the options of a run whose ranks do not warn while they wait for the twin of rank 0. It
/// has until the deadline.
fn patient(run: &RunOptions) -> RunOptions {
    RunOptions { late: Duration::from_hours(365 * 24), ..run.clone() }
}

fn verify(options: &Options, ranks: &Ranks) -> Result<(), Failure> {
    ranks.run(
        || read(options, ranks.options()),
        |setup, inputs| {
            let mut run = train_gpt::start(options, setup, inputs)?;
            let device = hsdp_candle::device(ranks.options().device)?;
            let job = Job { options, inputs, device: device.clone() };
            let mut twin = (run.model.rank().index() == 0).then(|| Twin::new(job));
            while run.next_step()?.is_some() {
                let gradients = run.gradients(|pass, place| {
                    train_gpt::microbatch(options, inputs, &device, pass, place)
                })?;
                let full = gradients.full(&run.model)?;
                if let Some(twin) = &mut twin {
                    twin.check(&Sharded::of(&gradients, &full))?;
                }
                run.update(|model, adamw| train_gpt::update(options, model, adamw, gradients))?;
                let parameters = run.model.full_parameters()?;
                if let Some(twin) = &mut twin {
                    twin.follow(parameters)?;
                }
            }
            let mut report = run.finish()?;
            if let Some(twin) = twin {
                let verified = twin.verified()?.to_string();
                report.field("verified", verified.as_str());
                report.row("verified", verified);
            }
            Ok(report)
        },
    )
}

/// Reads the text, and checks that the run and its twin fit into the memory of this process.
fn read(options: &Options, run: &RunOptions) -> Result<Inputs, Failure> {
    let repository = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let inputs = Inputs::new(options, &train_gpt::read_text(options, &repository)?)?;
    let spec = inputs.gpt.config().spec();
    let elements = spec.params().map(|(_, param)| param.numel()).sum();
    let twin = product(&[COPIES, elements, size_of::<f32>()]);
    let need = inputs.need(options, run)?.with("the unsharded twin", twin);
    need.check(Limit::of_process())?;
    Ok(inputs)
}
