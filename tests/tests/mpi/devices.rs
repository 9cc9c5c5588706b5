//! Models that lie on devices, whose ranks are processes: NCCL carries them. On the emulated
//! driver:
//!
//! ```text
//! cargo build -p hsdp-cli -p hsdp-models --features hsdp-models/mpi,hsdp-models/nccl --bin hsdp --example train_gpt
//! tests/emulator/run.sh cargo test -p hsdp-tests --features mpi,nccl --test mpi -- devices
//! ```

use std::env;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use hsdp_kernels::cuda::Device;
use nix::sys::signal::{Signal, kill};

use crate::Named;
use crate::cases;
use crate::faults::{folder, four, kill_rank_2, named_by, steps};
use crate::job::{Job, ON_TEXT, built, has, mpirun, train_gpt};
use crate::training::ended_well;

pub(crate) const TRIALS: &[Named] = &[
    ("devices::all_cases_pass_on_8_processes", all_cases_pass),
    ("devices::training_is_that_of_threads_on_a_device", || trains_like_threads(&[])),
    ("devices::so_it_is_with_bf16_parameters", || trains_like_threads(&["--param-dtype", "bf16"])),
    ("devices::a_process_is_killed", killed),
    ("devices::ranks_disagree_before_nccl_hears_of_it", disagree),
    ("devices::without_mpi_training_is_that_of_threads", trains_without_mpi),
    ("devices::without_mpi_a_process_is_killed", killed_without_mpi),
];

/// Of a machine with fewer: NCCL takes no two processes on one.
const DEVICES: usize = 8;

/// The reason that they cannot run here, if there is one.
pub(crate) fn lacks() -> Option<&'static str> {
    match Device::count() {
        Ok(_) if is_emulated() => None,
        Ok(count) if count >= DEVICES => None,
        _ => Some("no GPU for each process, and no emulated driver"),
    }
}

fn is_emulated() -> bool {
    env::var_os("HSDP_EMULATED").is_some()
}

/// The same command, whose ranks have a folder to meet in if NCCL is emulated.
fn on_devices(mut command: Command, meeting: &Path) -> Command {
    command.args(["--device", "cuda"]).env("HSDP_EMULATED_NCCL_FOLDER", meeting);
    command
}

fn all_cases_pass() -> Result<(), String> {
    let meeting = folder()?;
    cases::on_processes(8, 37, |command| on_devices(command, meeting.path())).map(drop)
}

fn trains_like_threads(arguments: &[&str]) -> Result<(), String> {
    let mut processes = mpirun();
    processes.args(["-n", "4"]).arg(train_gpt()).args(["--comm", "mpi"]);
    agrees_with_threads(processes, arguments)
}

fn trains_without_mpi() -> Result<(), String> {
    agrees_with_threads(by_the_launcher(), &[])
}

/// Four processes that find each other by the control plane.
fn by_the_launcher() -> Command {
    let mut command = Command::new(built("hsdp"));
    command.args(["launch", "-n", "4", "--comm", "nccl", "--"]).arg(train_gpt());
    command.args(["--comm", "nccl"]).env("RAYON_NUM_THREADS", "1");
    command
}

fn agrees_with_threads(mut processes: Command, arguments: &[&str]) -> Result<(), String> {
    let out = folder()?;
    let meeting = folder()?;
    let mut threads = Command::new(train_gpt());
    threads.args(["--device", "cuda"]).args(arguments).env("RAYON_NUM_THREADS", "1");
    let by_threads = ended_well(threads, &out.path().join("threads"))?;
    processes.args(arguments);
    let processes = on_devices(processes, meeting.path());
    let by_processes = ended_well(processes, &out.path().join("processes"))?;
    // The emulated NCCL adds in the order of ranks, as threads do; the real one in its own.
    let agree = by_threads == by_processes || !is_emulated();
    if by_processes.len() == 6 && agree {
        return Ok(());
    }
    Err(format!("threads {by_threads:?}\nprocesses {by_processes:?}"))
}

fn killed() -> Result<(), String> {
    let out = folder()?;
    let meeting = folder()?;
    let command = four(&["--steps", "100000"], out.path());
    kill_rank_2(on_devices(command, meeting.path()), out.path())
}

/// The launcher ends the others.
fn killed_without_mpi() -> Result<(), String> {
    let out = folder()?;
    let meeting = folder()?;
    let mut command = by_the_launcher();
    command.args(["--mesh", "2x2", "--layers", "2", "--steps", "100000"]).args(ON_TEXT);
    command.arg("--out").arg(out.path());
    let job = Job::start(on_devices(command, meeting.path()))?;
    job.until("three steps", || (steps(out.path()) >= 3).then_some(()))?;
    let processes = job.processes(4)?;
    let at = Instant::now();
    kill(processes[2], Signal::SIGKILL).map_err(|error| error.to_string())?;
    let ended = job.end()?;
    has(&ended.err, &["rank 2", "signal 9"])?;
    let took = ended.at - at;
    match ended.code {
        Some(0) | None => Err(format!("exit code {:?}: {}", ended.code, ended.err)),
        Some(_) if took > Duration::from_secs(15) => Err(format!("it took {took:?}")),
        Some(_) => Ok(()),
    }
}

fn disagree() -> Result<(), String> {
    let meeting = folder()?;
    named_by("wrong count", "ranks disagree about", |command| on_devices(command, meeting.path()))
}
