//! Random steps with random faults on random meshes. Exits 1 with the error that it found, or if a
//! line cannot be printed, 2 if an argument is invalid.

use std::process::ExitCode;

use clap::Parser;
use hsdp::memory::CountingAllocator;
use hsdp_comm::Between;
use hsdp_tests::soak::{Report, SoakOptions, Trial, soak};
use hsdp_train::{Failure, command_line, print};

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator::new();

/// Runs random steps with random faults on random meshes. Checks after each fault that the
/// surviving ranks hold the last committed step, bit for bit, and that no thread and no memory is
/// left behind. With `HSDP_APART=1` in the environment ranks exchange messages, as processes do.
#[derive(Debug, Parser)]
#[command(name = "soak")]
struct Arguments {
    /// Steps to commit, over all worlds.
    #[arg(long, default_value_t = 10_000)]
    steps: u64,
    /// The seed of all random choices.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Only print the random world of this seed.
    #[arg(long, value_name = "SEED", value_parser = seed)]
    show: Option<u64>,
}

fn seed(text: &str) -> Result<u64, std::num::ParseIntError> {
    match text.strip_prefix("0x") {
        Some(digits) => u64::from_str_radix(digits, 16),
        None => text.parse(),
    }
}

fn main() -> ExitCode {
    hsdp_train::program("soak", || {
        let Arguments { steps, seed, show } = command_line::read()?;
        match show {
            Some(seed) => print(Trial::of(seed, Between::default()))?,
            None => run(SoakOptions { steps, seed, between: Between::default() })?,
        }
        Ok(ExitCode::SUCCESS)
    })
}

fn run(options: SoakOptions) -> Result<(), Failure> {
    // Hundreds of panics are injected: their messages are in the errors of the other ranks.
    std::panic::set_hook(Box::new(|_| {}));
    let mut next = 0;
    let mut printed = Ok(());
    let progress = |Report { steps, worlds, .. }: &Report| {
        if *steps >= next && printed.is_ok() {
            printed = print(format_args!("{steps} steps, {worlds} worlds"));
            next = steps + 1000;
        }
    };
    let report = soak(options, progress).map_err(Failure::work)?;
    printed?;
    Ok(print(report)?)
}
