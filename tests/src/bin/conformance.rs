//! Runs conformance cases and prints one line a case, then a closing count.
//!
//! Exits 1 if a case failed or a line cannot be printed, 2 if an argument is invalid or a case
//! cannot be read.

use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Parser, ValueEnum};
use hsdp::{Offload, Placement};
use hsdp_tests::conformance::{Carrier, Case, Site, Verdict};
use hsdp_train::stdout::PrintError;
use hsdp_train::{Failure, Warnings, command_line, print};

/// Runs conformance cases: folders in the format of tests/cases/FORMAT.md.
#[derive(Debug, Parser)]
#[command(name = "conformance")]
struct Arguments {
    /// The backend of the collectives.
    #[arg(long, value_enum, default_value_t = Comm::Local)]
    comm: Comm,
    /// The device of the arithmetic.
    #[arg(long, value_enum, default_value_t = Device::Cpu)]
    device: Device,
    /// Folders with a case.json of at most 4 MiB; a file of tensors has at most 256 MiB.
    #[arg(value_name = "CASE_DIR", required = true)]
    cases: Vec<PathBuf>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Comm {
    /// Ranks are threads of this process, as many as a case needs.
    Local,
    /// Ranks are processes under MPI; NCCL carries their buffers on GPUs.
    Mpi,
    /// Ranks are threads; NCCL carries their buffers on the GPU.
    Nccl,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Device {
    /// The processor.
    Cpu,
    /// An NVIDIA GPU.
    Cuda,
}

/// The number of cases by result.
#[derive(Debug, Default)]
struct Counts {
    passed: usize,
    failed: usize,
    skipped: usize,
}

fn main() -> ExitCode {
    hsdp_train::program("conformance", || {
        let arguments: Arguments = command_line::read()?;
        let warnings = Warnings::of("conformance");
        warnings.listen().map_err(Failure::work)?;
        let site = site(&arguments).map_err(Failure::input)?;
        if let Some(rank) = process(site) {
            warnings.set_rank(rank);
        }
        let cases = arguments.cases.iter().map(|dir| Case::read(dir));
        let cases = cases.collect::<Result<Vec<_>, _>>().map_err(Failure::input)?;
        let ended = run(&cases, site);
        #[cfg(feature = "mpi")]
        hsdp_tests::conformance::leave();
        Ok(ended?)
    })
}

/// Where cases are to run, if this build can do it.
fn site(arguments: &Arguments) -> Result<Site, String> {
    let placement = placement(arguments.device)?.dealt_to(process_here()?)?;
    let carrier = match arguments.comm {
        Comm::Local => Carrier::Local,
        Comm::Nccl => nccl(placement)?,
        Comm::Mpi => mpi(placement)?,
    };
    Ok(Site { placement, carrier })
}

/// Which of the processes of this machine this is.
fn process_here() -> Result<usize, String> {
    let launched = hsdp_comm::Launched::from_env().map_err(|error| error.to_string())?;
    Ok(launched.and_then(|launched| launched.rank_here).unwrap_or(0))
}

fn placement(device: Device) -> Result<Placement, String> {
    match device {
        Device::Cpu => Ok(Placement::Host),
        Device::Cuda => match hsdp_kernels::cuda::Device::new(0) {
            Ok(device) => Ok(Placement::Cuda { ordinal: device.ordinal(), offload: Offload::None }),
            Err(error) => Err(format!("--device cuda: {error}")),
        },
    }
}

#[cfg(feature = "mpi")]
fn mpi(placement: Placement) -> Result<Carrier, String> {
    let (process, _) = hsdp_tests::conformance::join().map_err(|it| format!("--comm mpi: {it}"))?;
    let device = match placement {
        Placement::Host => None,
        Placement::Cuda { ordinal, .. } => Some(ordinal),
        other => return Err(format!("--comm mpi: it carries nothing on {other}")),
    };
    Ok(Carrier::Mpi { process: process.index(), device })
}

#[cfg(not(feature = "mpi"))]
fn mpi(_: Placement) -> Result<Carrier, String> {
    Err("--comm mpi: this build has no such collectives: add --features mpi".to_owned())
}

/// The rank of this process, if ranks are processes. The first one prints the results.
fn process(site: Site) -> Option<usize> {
    match site.carrier {
        #[cfg(feature = "mpi")]
        Carrier::Mpi { process, .. } => Some(process),
        _ => None,
    }
}

#[cfg(feature = "nccl")]
fn nccl(placement: Placement) -> Result<Carrier, String> {
    match placement {
        Placement::Cuda { ordinal, .. } => Ok(Carrier::Nccl { ordinal }),
        _ => {
            Err("--comm nccl needs --device cuda: NCCL carries only buffers on a device".to_owned())
        }
    }
}

#[cfg(not(feature = "nccl"))]
fn nccl(_: Placement) -> Result<Carrier, String> {
    Err("--comm nccl: this build has no such collectives, only local".to_owned())
}

fn run(cases: &[Case], site: Site) -> Result<ExitCode, PrintError> {
    if process(site).is_some_and(|rank| rank > 0) {
        cases.iter().for_each(|case| drop(case.run_on(site)));
        return Ok(ExitCode::SUCCESS);
    }
    let width = cases.iter().map(|case| case.name().len()).max().unwrap_or(0);
    let mut counts = Counts::default();
    for case in cases {
        let verdict = case.run_on(site);
        let word = counts.count(&verdict);
        print(format_args!("{word:<4}  {:width$}  {verdict}", case.name()))?;
    }
    let Counts { passed, failed, skipped } = counts;
    print(format_args!("{passed} passed, {failed} failed, {skipped} skipped"))?;
    Ok(if failed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

impl Counts {
    /// Counts a case and says the word for it.
    fn count(&mut self, verdict: &Verdict) -> &'static str {
        let (count, word) = match verdict {
            Verdict::Passed(_) => (&mut self.passed, "ok"),
            Verdict::Failed(_) => (&mut self.failed, "FAIL"),
            Verdict::Skipped(_) => (&mut self.skipped, "skip"),
        };
        *count += 1;
        word
    }
}
