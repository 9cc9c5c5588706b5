//! The time for which training waits for a save in the background, beside a plain copy of as many
//! bytes.
//!
//! ```text
//! cargo bench -p hsdp-benches --bench checkpoint
//! ```
//!
//! Each round trains a step, begins a save, waits until the save is on the disk, and copies as many
//! bytes on the same threads. The first round is reported separately: it copies to memory that the
//! system has not provided yet.
//!
//! In reading order: `options`, `measure`.

mod measure;
mod options;

use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use hsdp::ModelOptions;
use hsdp_benches::program::{self, check_threads};
use hsdp_benches::times::{least, median};
use hsdp_checkpoint::{Disk, Store};
use hsdp_train::memory::Limit;
use hsdp_train::stdout::PrintError;
use hsdp_train::{Failure, print};

use crate::measure::{Measured, Round, measure};
use crate::options::Options;

fn main() -> ExitCode {
    program::run(|options: Options| run(&options.scaled()))
}

fn run(options: &Options) -> Result<(), Failure> {
    check_threads(options.mesh)?;
    let model = ModelOptions::on(options.mesh);
    options.size().need(&model)?.check(Limit::of_process())?;
    let folder = match &options.out {
        Some(out) => tempfile::tempdir_in(out),
        None => tempfile::tempdir(),
    };
    let folder = folder.map_err(|error| Failure::work(format!("cannot make a folder: {error}")))?;
    let measured = measure(options, folder.path()).map_err(Failure::work)?;
    let newest = Store::new(folder.path(), Arc::new(Disk)).latest();
    let newest =
        newest.map_err(Failure::work)?.ok_or_else(|| Failure::work("no checkpoint is there"))?;
    if let Some(damage) = newest.verify().first() {
        return Err(Failure::work(damage));
    }
    Ok(show(options, &measured)?)
}

fn show(options: &Options, measured: &Measured) -> Result<(), PrintError> {
    let Options { mesh, units, numel, repeat, .. } = options;
    print(format_args!(
        "{units} units of {numel} parameters on {mesh}, AdamW: {} a save",
        measured.bytes
    ))?;
    let (first, later) = measured.rounds.split_at(1);
    print(format_args!("first save: {}", line(first)))?;
    print(format_args!("{repeat} more:     {}", line(later)))
}

/// The least and the median of what some rounds took, and the ratios of these.
fn line(rounds: &[Round]) -> String {
    let of = |time: fn(&Round) -> Duration| {
        let times: Vec<Duration> = rounds.iter().map(time).collect();
        [least(&times), median(&times)]
    };
    let stall = of(|round| round.stall);
    let copy = of(|round| round.copy);
    let ratio = |at: usize| stall[at].as_secs_f64() / copy[at].as_secs_f64();
    format!(
        "stall {:.1?} ({:.1?}), copy {:.1?} ({:.1?}), ratio {:.2} ({:.2}); poll {:.0?}, on the disk after {:.2?}",
        stall[0],
        stall[1],
        copy[0],
        copy[1],
        ratio(0),
        ratio(1),
        of(|round| round.poll)[1],
        of(|round| round.saved)[1],
    )
}
