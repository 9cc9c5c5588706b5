//! The cost of ranks to each other: the CPU time of an operation against the number of ranks in its
//! group, and the time of a small exchange of all ranks.
//!
//! ```text
//! tests/emulator/run.sh cargo bench -p hsdp-benches --features nccl --bench scale -- --plot "$PWD/docs/scale.svg"
//! ```
//!
//! A step has gathers and reductions of small units, and no arithmetic. Ranks are threads that
//! share memory, the same threads with messages between them, and, with the feature `nccl`,
//! processes whose operations go by NCCL and whose exchanges go by the control plane. On the
//! emulated driver the time of NCCL itself means nothing; that of a rank's own thread in a call
//! does.
//!
//! In reading order: `options`, `steps`, `threads`, `processes` (with `rank`: such a process),
//! `report`, `plot`.

mod options;
mod plot;
#[cfg(feature = "nccl")]
mod processes;
#[cfg(feature = "nccl")]
mod rank;
mod report;
mod steps;
mod threads;

use std::process::ExitCode;

use hsdp_benches::plot::Plot;
use hsdp_benches::program;
use hsdp_comm::Between;
use hsdp_train::Failure;

use crate::options::Options;
use crate::report::Report;

fn main() -> ExitCode {
    program::run(|options: Options| run(&options.scaled()))
}

fn run(options: &Options) -> Result<(), Failure> {
    #[cfg(feature = "nccl")]
    if let Some(measured) = options.as_rank {
        return rank::run(measured, options);
    }
    options.check()?;
    let plot = Plot::check(options.plot.as_deref())?;
    let mut report = Report::default();
    for ranks in &options.ranks {
        report.threads.push(threads::operation(Between::Memory, *ranks, options)?);
        report.messages.push(threads::operation(Between::Messages, *ranks, options)?);
    }
    #[cfg(feature = "nccl")]
    processes::measure(options, &mut report)?;
    report.show(options)?;
    plot.write(|| plot::draw(&report))
}
